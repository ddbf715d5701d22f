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

/// Checks that a class of the library is a model of its concept, at the end of the class's header,
/// where SPILLWAY_CHECK_MODELS is defined: tests/compile defines it. Programs need no check of what
/// they do not use, and it would be an eighth of the time that <spillway/spillway.hpp> takes. What
/// they use is checked by the templates that take it.
#if defined(SPILLWAY_CHECK_MODELS)
#  define SPILLWAY_CHECK_MODEL(...) static_assert(__VA_ARGS__)
#else
#  define SPILLWAY_CHECK_MODEL(...) static_assert(true)
#endif

/// Stands after a class or function that depends on no policies, at the end of its header, e.g.
/// `SPILLWAY_COMPILED_PART(class BasicRangeTable<>);`. In a program that defines SPILLWAY_COMPILED
/// it only declares the instantiation that spillway::compiled contains; elsewhere it does nothing.
///
/// A compiler still instantiates what is defined inside a class, to inline it. Functions that lead
/// to large parts of the library, such as the allocator's constructor, are defined below the class.
#if !defined(SPILLWAY_COMPILED)
#  define SPILLWAY_COMPILED_PART(...) static_assert(true)
#elif defined(SPILLWAY_COMPILING_PARTS)
#  define SPILLWAY_COMPILED_PART(...) template __VA_ARGS__
#else
#  define SPILLWAY_COMPILED_PART(...) extern template __VA_ARGS__
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
