// SPDX-License-Identifier: Apache-2.0
#pragma once

// In an older language mode each header would give thousands of errors, and without exceptions
// dozens. Including a file that does not exist stops the compiler: a missing header is fatal,
// `#error` is not.
#if __cplusplus < 202002L
#  error "spillway needs C++20: compile with -std=c++20, in CMake link spillway::spillway"
#  define SPILLWAY_STOP <spillway needs C++20>
#  include SPILLWAY_STOP
#elif !defined(__cpp_exceptions)
#  error "spillway needs exceptions: compile without -fno-exceptions"
#  define SPILLWAY_STOP <spillway needs exceptions>
#  include SPILLWAY_STOP
#endif

#include <cstdio>
#include <cstdlib>

/// Checks an invariant of the library. Enabled unless NDEBUG is defined and SPILLWAY_CHECKED is
/// not, or is 0.
///
/// After a broken invariant memory may already be corrupt, so the check ends the program instead of
/// throwing.
#if !defined(NDEBUG) || (defined(SPILLWAY_CHECKED) && SPILLWAY_CHECKED)
#  define SPILLWAY_ASSERT(condition)                                                               \
    ((condition) ? static_cast<void>(0)                                                            \
                 : ::spillway::detail::assertion_failed(#condition, __FILE__, __LINE__))
#else
#  define SPILLWAY_ASSERT(condition) static_cast<void>(0)
#endif

/// Marks functions that device code may call as well. Empty for compilers other than CUDA's.
#if defined(__CUDACC__)
#  define SPILLWAY_HOST_DEVICE __host__ __device__
#else
#  define SPILLWAY_HOST_DEVICE
#endif

/// Checks that a class of the library is a model of its concept, if SPILLWAY_CHECK_MODELS is
/// defined, as tests/compile does. It stands at the end of the class's header. Programs do not need
/// it: the templates check what they are given, and all these checks would take an eighth of the
/// time in which <spillway/spillway.hpp> compiles.
#if defined(SPILLWAY_CHECK_MODELS)
#  define SPILLWAY_CHECK_MODEL(...) static_assert(__VA_ARGS__)
#else
#  define SPILLWAY_CHECK_MODEL(...) static_assert(true)
#endif

/// Declares an instantiation that spillway::compiled contains, so that the program does not compile
/// it again. It stands at the end of the header of a class or function that depends on no policies,
/// for example `SPILLWAY_COMPILED_PART(class BasicRangeTable<>);`. It has no effect unless
/// SPILLWAY_COMPILED is defined.
///
/// A compiler still instantiates functions that are defined inside a class, to inline them. So
/// functions that use large parts of the library, such as the allocator's constructor, are defined
/// below the class.
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
