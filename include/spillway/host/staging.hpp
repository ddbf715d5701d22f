// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/device_api.hpp>
#include <spillway/core/config.hpp>
#include <spillway/core/error.hpp>
#include <spillway/core/fence.hpp>
#include <spillway/core/types.hpp>
#include <spillway/host/pinned_memory.hpp>
#include <spillway/stream/owned_stream.hpp>
#include <spillway/stream/stream_order.hpp>

#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace spillway::detail {

/// One direction of traffic between the device and memory that it cannot reach: a stream for host
/// functions, and a ring of pinned chunks.
///
/// Each chunk carries the fence after which it may be overwritten, so a chunk is handed on while it is
/// still in use and the streams, not the host, wait for it.
///
/// Threads  thread-safe. `Chunk` waits only while other threads hold every chunk, which they do while
///          they enqueue two calls.
template <DeviceApi Device>
class StagingLane {
  struct Piece {
    std::byte* data = nullptr;
    Fence fence;
  };

 public:
  using stream_type = typename Device::stream_type;

  /// What the first byte of every chunk is aligned to, and its size a multiple of.
  static constexpr std::size_t alignment_bytes = 4096;

  [[nodiscard]] static constexpr std::size_t chunk_bytes_for(std::size_t bytes) noexcept {
    return round_up(bytes, alignment_bytes);
  }

  /// Reserves `chunk_count` > 0 chunks.
  ///
  /// @throws OutOfHostMemory where there is no pinned memory for them; DeviceError
  StagingLane(Device& device,
              StreamOrder<Device>& order,
              std::size_t chunk_count,
              std::size_t chunk_bytes,
              int numa_node);
  StagingLane(StagingLane const&) = delete;
  StagingLane& operator=(StagingLane const&) = delete;

  /// Sole use of one chunk while its next use is being enqueued.
  class Chunk {
   public:
    explicit Chunk(StagingLane& lane) : lane_{&lane}, piece_{lane.take()} {}
    Chunk(Chunk const&) = delete;
    Chunk& operator=(Chunk const&) = delete;
    ~Chunk() { lane_->give_back(piece_); }

    [[nodiscard]] std::byte* data() const noexcept { return piece_.data; }
    /// What the next use comes after; add each enqueued use to it as soon as it is enqueued.
    [[nodiscard]] Fence& fence() noexcept { return piece_.fence; }

   private:
    StagingLane* lane_;
    Piece piece_;
  };

  [[nodiscard]] stream_type stream() const noexcept { return stream_.handle(); }
  [[nodiscard]] StreamIndex index() const noexcept { return stream_.index(); }

  /// Waits on the host until every enqueued host function has returned and no chunk is in use.
  void drain_sync();

  /// How often a thread waited for another one's chunk.
  [[nodiscard]] std::uint64_t waits() const {
    std::scoped_lock const lock{mutex_};
    return waits_;
  }

 private:
  /// @throws OutOfHostMemory
  static PinnedMemory<Device> pinned_memory(Device& device, std::size_t bytes, int numa_node) {
    auto memory = PinnedMemory<Device>::try_allocate(device, bytes + alignment_bytes, numa_node);
    if (memory.data() == nullptr) {
      throw OutOfHostMemory{bytes,
                            0,
                            "There is no pinned memory to stage transfers to pageable memory or a "
                            "file; raise the limit on locked memory or lower staging_bytes."};
    }
    return memory;
  }
  [[nodiscard]] Piece take();
  void give_back(Piece const& piece) noexcept;

  Device* device_;
  StreamOrder<Device>* order_;
  std::size_t chunk_bytes_;
  PinnedMemory<Device> memory_;
  OwnedStream<Device> stream_;
  mutable std::mutex mutex_;  // guards what follows; never held across a device call
  std::condition_variable returned_;
  std::vector<Piece>
      ring_;  // the idle chunks lie at [first_, first_ + idle_count_), round and round
  std::size_t first_ = 0;
  std::size_t idle_count_ = 0;
  std::uint64_t waits_ = 0;
};

template <DeviceApi Device>
StagingLane<Device>::StagingLane(Device& device,
                                 StreamOrder<Device>& order,
                                 std::size_t chunk_count,
                                 std::size_t chunk_bytes,
                                 int numa_node)
    : device_{&device},
      order_{&order},
      chunk_bytes_{chunk_bytes_for(chunk_bytes)},
      memory_{pinned_memory(device, chunk_count * chunk_bytes_, numa_node)},
      stream_{device, order} {
  void* data = memory_.data();
  std::size_t space = memory_.size_bytes();
  auto* const first =
      static_cast<std::byte*>(std::align(alignment_bytes, chunk_count * chunk_bytes_, data, space));
  ring_.resize(chunk_count);
  for (std::size_t i = 0; i < chunk_count; ++i) {
    ring_[i].data = first + i * chunk_bytes_;
  }
  idle_count_ = chunk_count;
}

template <DeviceApi Device>
void StagingLane<Device>::drain_sync() {
  device_->synchronize(stream_.handle());
  std::vector<Piece> idle;
  {
    std::scoped_lock const lock{mutex_};
    SPILLWAY_ASSERT(idle_count_ == ring_.size());
    idle = ring_;
  }
  for (Piece const& piece : idle) {
    order_->synchronize(piece.fence);
  }
}

/// The chunk that was handed on longest ago: it is idle first.
template <DeviceApi Device>
auto StagingLane<Device>::take() -> Piece {
  std::unique_lock lock{mutex_};
  if (idle_count_ == 0) {
    ++waits_;
    returned_.wait(lock, [this] { return idle_count_ > 0; });
  }
  Piece const piece = ring_[first_];
  first_ = (first_ + 1) % ring_.size();
  --idle_count_;
  return piece;
}

template <DeviceApi Device>
void StagingLane<Device>::give_back(Piece const& piece) noexcept {
  {
    std::scoped_lock const lock{mutex_};
    ring_[(first_ + idle_count_) % ring_.size()] = piece;
    ++idle_count_;
  }
  returned_.notify_one();
}

}  // namespace spillway::detail
