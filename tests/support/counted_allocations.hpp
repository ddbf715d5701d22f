// SPDX-License-Identifier: Apache-2.0
#pragma once

// Counts a program's allocations, and makes them fail when a test wants that. To be included by
// one source of a test that is a separate program, since it replaces `operator new` and `delete`.

#include <cstddef>
#include <cstdlib>
#include <limits>
#include <new>
#include <utility>

namespace support {

inline std::size_t allocations = 0;  // by anybody in this program
/// Allocations beyond this number fail.
inline std::size_t most_allocations = std::numeric_limits<std::size_t>::max();
/// How many more allocations fail.
inline std::size_t failures_left = 0;

/// Counts an allocation. @returns whether it succeeds
inline bool may_allocate() noexcept {
  if (++allocations <= most_allocations || failures_left == 0) {
    return true;
  }
  --failures_left;
  return false;
}

/// While it exists, only so many more allocations succeed, until so many have failed.
class ShortMemory {
 public:
  explicit ShortMemory(std::size_t more,
                       std::size_t failures = std::numeric_limits<std::size_t>::max()) noexcept {
    most_allocations = allocations + more;
    failures_left = failures;
  }
  ShortMemory(ShortMemory const&) = delete;
  ShortMemory& operator=(ShortMemory const&) = delete;
  ~ShortMemory() { most_allocations = std::numeric_limits<std::size_t>::max(); }
};

/// While it exists, all allocations succeed and none is counted.
class AmpleMemory {
 public:
  AmpleMemory() noexcept = default;
  AmpleMemory(AmpleMemory const&) = delete;
  AmpleMemory& operator=(AmpleMemory const&) = delete;
  ~AmpleMemory() {
    allocations = before_;
    most_allocations = most_before_;
  }

 private:
  std::size_t before_ = allocations;
  std::size_t most_before_ =
      std::exchange(most_allocations, std::numeric_limits<std::size_t>::max());
};

}  // namespace support

// Not inlined: if g++ sees only one of a pair, it warns of a mismatch.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  if (support::may_allocate()) {
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
