// SPDX-License-Identifier: Apache-2.0
#pragma once

// Counts what a program allocates. To be included by one source of a test that is a program of its
// own, since it replaces the operators.

#include <cstddef>
#include <cstdlib>
#include <new>

namespace support {

inline std::size_t allocations = 0;  // by anybody in this program

}  // namespace support

// Not inlined: where g++ sees only one of a pair, it takes the other for a mistake.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  ++support::allocations;
  if (void* const memory = std::malloc(bytes)) {  // NOLINT
    return memory;
  }
  throw std::bad_alloc{};
}
[[gnu::noinline]] void operator delete(void* memory) noexcept {
  std::free(memory);  // NOLINT
}
[[gnu::noinline]] void operator delete(void* memory, std::size_t /*bytes*/) noexcept {
  std::free(memory);  // NOLINT
}
