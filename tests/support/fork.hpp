// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace spillway::test {

#if defined(__SANITIZE_ADDRESS__)
#  define SPILLWAY_HAS_ADDRESS_SANITIZER 1
#elif defined(__has_feature)
#  if __has_feature(address_sanitizer)
#    define SPILLWAY_HAS_ADDRESS_SANITIZER 1
#  endif
#endif

/// Whether a forked child may allocate memory although another thread of its parent was allocating
/// when the parent forked. The C library's allocator takes its own locks before a fork.
/// AddressSanitizer's of LLVM 14 does not, so that such a child waits for ever: with it, tests fork
/// while no other thread works.
#if defined(SPILLWAY_HAS_ADDRESS_SANITIZER)
inline constexpr bool children_may_allocate = false;
#else
inline constexpr bool children_may_allocate = true;
#endif

}  // namespace spillway::test
