// SPDX-License-Identifier: Apache-2.0
#pragma once

// Counts a program's allocations, and makes them fail when a test wants that. To be included by
// one source of a test that is a separate program, since it replaces `operator new` and `delete`.

#include <cstddef>
#include <cstdlib>
#include <limits>
#include <new>

namespace support {

inline std::size_t allocations = 0;  // by anybody in this program
/// Allocations beyond this number fail.
inline std::size_t most_allocations = std::numeric_limits<std::size_t>::max();

/// While it exists, only so many more allocations succeed.
class ShortMemory {
 public:
  explicit ShortMemory(std::size_t more) noexcept { most_allocations = allocations + more; }
  ShortMemory(ShortMemory const&) = delete;
  ShortMemory& operator=(ShortMemory const&) = delete;
  ~ShortMemory() { most_allocations = std::numeric_limits<std::size_t>::max(); }
};

}  // namespace support

// Not inlined: if g++ sees only one of a pair, it warns of a mismatch.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  if (++support::allocations <= support::most_allocations) {
    if (void* const memory = std::malloc(bytes)) {  // NOLINT
      return memory;
    }
  }
  throw std::bad_alloc{};
}
[[gnu::noinline]] void operator delete(void* memory) noexcept {
  std::free(memory);  // NOLINT
}
[[gnu::noinline]] void operator delete(void* memory, std::size_t /*bytes*/) noexcept {
  std::free(memory);  // NOLINT
}
