// SPDX-License-Identifier: Apache-2.0
#pragma once

// A compiler in an older mode would answer each header with thousands of errors. The file that does
// not exist stops it: a missing header is fatal, `#error` is not.
#if __cplusplus < 202002L
#  error "spillway needs C++20: compile with -std=c++20, in CMake link spillway::spillway"
#  define SPILLWAY_STOP <spillway needs C++20>
#  include SPILLWAY_STOP
#endif

#include <cstdio>
#include <cstdlib>

/// Checks what the library promises itself. On unless NDEBUG is defined and SPILLWAY_CHECKED is
/// not.
///
/// A broken invariant means memory may already be corrupt, so it ends the program instead of
/// throwing.
#if !defined(NDEBUG) || defined(SPILLWAY_CHECKED)
#  define SPILLWAY_ASSERT(condition)                                                               \
    ((condition) ? static_cast<void>(0)                                                            \
                 : ::spillway::detail::assertion_failed(#condition, __FILE__, __LINE__))
#else
#  define SPILLWAY_ASSERT(condition) static_cast<void>(0)
#endif

/// Marks what kernels may call too; nothing where no CUDA compiler reads it.
#if defined(__CUDACC__)
#  define SPILLWAY_HOST_DEVICE __host__ __device__
#else
#  define SPILLWAY_HOST_DEVICE
#endif

/// Before the default classes in sim.hpp and cuda.hpp, with SPILLWAY_COMPILED: a program declares
/// them, since spillway::compiled holds them; the sources of spillway::compiled define them.
#if defined(SPILLWAY_COMPILING)
#  define SPILLWAY_INSTANTIATE template
#else
#  define SPILLWAY_INSTANTIATE extern template
#endif

namespace spillway::detail {

[[noreturn]] inline void assertion_failed(char const* condition, char const* file, int line) {
  std::fprintf(stderr, "%s:%d: spillway invariant broken: %s\n", file, line, condition);
  std::abort();
}

}  // namespace spillway::detail
