// SPDX-License-Identifier: Apache-2.0
#pragma once

// In an older language mode each header would give thousands of errors. Including a file that does
// not exist stops the compiler: a missing header is fatal, `#error` is not.
#if __cplusplus < 202002L
#  error "spillway needs C++20: compile with -std=c++20, in CMake link spillway::spillway"
#  define SPILLWAY_STOP <spillway needs C++20>
#  include SPILLWAY_STOP
#endif

#include <cstdio>
#include <cstdlib>

/// Checks an invariant of the library. Enabled unless NDEBUG is defined and SPILLWAY_CHECKED is
/// not.
///
/// After a broken invariant memory may already be corrupt, so the check ends the program instead of
/// throwing.
#if !defined(NDEBUG) || defined(SPILLWAY_CHECKED)
#  define SPILLWAY_ASSERT(condition)                                                               \
    ((condition) ? static_cast<void>(0)                                                            \
                 : ::spillway::detail::assertion_failed(#condition, __FILE__, __LINE__))
#else
#  define SPILLWAY_ASSERT(condition) static_cast<void>(0)
#endif

/// Marks functions that kernels may call, too. Empty for compilers other than CUDA's.
#if defined(__CUDACC__)
#  define SPILLWAY_HOST_DEVICE __host__ __device__
#else
#  define SPILLWAY_HOST_DEVICE
#endif

/// Stands before each class that sim.hpp and cuda.hpp instantiate if SPILLWAY_COMPILED is defined.
/// It only declares them for a program, because spillway::compiled contains them, and defines them
/// in the sources of spillway::compiled.
///
/// A compiler still instantiates what is defined inside a class, to inline it. Functions that lead
/// to large parts of the library, such as the allocator's constructor, are defined below the class.
#if defined(SPILLWAY_COMPILING)
#  define SPILLWAY_INSTANTIATE template
#else
#  define SPILLWAY_INSTANTIATE extern template
#endif

namespace spillway::detail {

/// The default argument of a class template that has no other parameter. Such a class is a template
/// so that its functions are compiled only where they are used: those of a plain class are compiled
/// in each source that includes the header.
using Lazily = void;

[[noreturn]] inline void assertion_failed(char const* condition, char const* file, int line) {
  std::fprintf(stderr, "%s:%d: spillway invariant broken: %s\n", file, line, condition);
  std::abort();
}

}  // namespace spillway::detail
