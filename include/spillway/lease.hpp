// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/fence.hpp>
#include <spillway/core/types.hpp>

#include <cstddef>
#include <cstdint>
#include <utility>

namespace spillway {

namespace detail {
struct BlockRecord;
}

/// What a pager remembers of a lease it gave out.
struct LeaseRecord {
  BlockId block{};
  detail::BlockRecord* record = nullptr;  // stays where it is while the block is leased
  StreamIndex stream = StreamIndex::none;
  Access access = Access::read;
  bool is_sole = false;      // nobody else held a lease when this one was given
  std::uint32_t serial = 0;  // the block's lease counter at that moment
};

/// Holds one block on the device and in its place for as long as it lives.
///
/// Shape    the block's `size_bytes()` bytes, contiguous, aligned to 256 B.
/// Threads  thread-compatible; may be released by another thread than the one that acquired it.
/// Streams  belongs to the stream it was acquired on: enqueue all work that uses the bytes there, or
///          on streams that are joined back into it, before the lease ends.
/// Address  fixed until the lease ends, and not valid for one moment longer.
template <class P>
class Lease {
 public:
  Lease() noexcept = default;
  Lease(Lease&& other) noexcept
      : pager_{std::exchange(other.pager_, nullptr)},
        record_{other.record_},
        data_{std::exchange(other.data_, nullptr)},
        size_bytes_{std::exchange(other.size_bytes_, 0)} {}
  Lease& operator=(Lease&& other) noexcept {
    if (this != &other) {
      release();
      pager_ = std::exchange(other.pager_, nullptr);
      record_ = other.record_;
      data_ = std::exchange(other.data_, nullptr);
      size_bytes_ = std::exchange(other.size_bytes_, 0);
    }
    return *this;
  }
  ~Lease() { release(); }

  /// Ends the lease: work enqueued on its stream so far is the block's last use. No effect the second
  /// time. Does not wait.
  void release() noexcept {
    if (pager_ != nullptr) {
      std::exchange(pager_, nullptr)->release(record_);
      data_ = nullptr;
      size_bytes_ = 0;
    }
  }

  /// The device address; null once the lease has ended.
  [[nodiscard]] void* data() const noexcept { return data_; }
  [[nodiscard]] std::size_t size_bytes() const noexcept { return size_bytes_; }
  [[nodiscard]] BlockId block() const noexcept { return record_.block; }
  [[nodiscard]] Access access() const noexcept { return record_.access; }
  [[nodiscard]] explicit operator bool() const noexcept { return pager_ != nullptr; }

 private:
  friend P;
  Lease(P& pager, LeaseRecord record, void* data, std::size_t size_bytes) noexcept
      : pager_{&pager}, record_{record}, data_{data}, size_bytes_{size_bytes} {}

  P* pager_ = nullptr;  // not owned; outlives the lease
  LeaseRecord record_{};
  void* data_ = nullptr;
  std::size_t size_bytes_ = 0;
};

}  // namespace spillway
