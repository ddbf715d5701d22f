// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace spillway {

/// A lock that does nothing, for allocators that only one thread uses.
class NullLock {
 public:
  void lock() noexcept {}
  void unlock() noexcept {}
  [[nodiscard]] bool try_lock() noexcept { return true; }
};

}  // namespace spillway
