// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/device_api.hpp>
#include <spillway/concepts/device_capabilities.hpp>
#include <spillway/core/config.hpp>
#include <spillway/core/error.hpp>
#include <spillway/core/fence.hpp>
#include <spillway/core/types.hpp>
#include <spillway/host/tier_memory.hpp>
#include <spillway/stream/owned_stream.hpp>
#include <spillway/stream/stream_order.hpp>

#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace spillway::detail {

/// The limits of the staging options in `HostPoolOptions`. Their product does not overflow.
inline constexpr std::size_t most_staging_bytes = 1_GiB;
inline constexpr std::size_t most_staging_chunks = 65'536;

/// Returns a worker for long host functions of a stream; null if the device needs none.
template <DeviceApi Device>
[[nodiscard]] auto make_host_worker([[maybe_unused]] Device& device,
                                    [[maybe_unused]] typename Device::stream_type stream) {
  if constexpr (HostWorkApi<Device>) {
    return device.make_host_worker(stream);
  } else {
    return nullptr;
  }
}

/// One direction of a host pool's staging: a ring of pinned chunks, and a stream for the host
/// functions that copy between them and the slower tiers.
///
/// `HostTransfers` has a lane for writes and one for reads, so that neither waits for the other.
/// Each chunk has a fence after which it may be overwritten. So a chunk can be passed to the next
/// transfer while it is still in use: the streams wait for it, not the host.
///
/// Threads  thread-safe. The constructor of `Chunk` waits only while other threads hold all chunks;
///          each holds one for the time that it takes to enqueue its uses.
template <DeviceApi Device>
class StagingLane {
  struct Piece {
    std::byte* data = nullptr;
    Fence fence;
  };

 public:
  using stream_type = typename Device::stream_type;

  /// The alignment of each chunk, and what its size is a multiple of.
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

  /// Exclusive use of one chunk while its next uses are being enqueued.
  class Chunk {
   public:
    explicit Chunk(StagingLane& lane) : lane_{&lane}, piece_{lane.take()} {}
    Chunk(Chunk const&) = delete;
    Chunk& operator=(Chunk const&) = delete;
    ~Chunk() { lane_->give_back(piece_); }

    [[nodiscard]] std::byte* data() const noexcept { return piece_.data; }
    /// The fence for which the next use has to wait. The caller adds each use as soon as it has
    /// enqueued it.
    [[nodiscard]] Fence& fence() noexcept { return piece_.fence; }

   private:
    StagingLane* lane_;
    Piece piece_;
  };

  /// The memory of all chunks.
  [[nodiscard]] std::span<std::byte> memory() const noexcept { return all_; }

  /// Makes a second stream, for functions that begin what those of `launch` finish. They do not
  /// wait and so need no worker. @throws DeviceError
  void open_begin_stream() { begin_stream_.emplace(*device_, *order_); }
  [[nodiscard]] bool has_begin_stream() const noexcept { return begin_stream_.has_value(); }
  [[nodiscard]] StreamIndex begin_index() const noexcept { return begin_stream_->index(); }
  void launch_begin(HostFunction function, void* argument) {
    device_->launch_host(begin_stream_->handle(), function, argument);
  }

  /// Enqueues a call of `function(argument)` on the lane's stream. @throws DeviceError
  void launch(HostFunction function, void* argument) {
    if constexpr (HostWorkApi<Device>) {
      worker_->launch(function, argument);
    } else {
      device_->launch_host(stream_.handle(), function, argument);
    }
  }
  [[nodiscard]] stream_type stream() const noexcept { return stream_.handle(); }
  [[nodiscard]] StreamIndex index() const noexcept { return stream_.index(); }

  /// Waits on the host until every function that was launched has returned and no chunk is in use.
  void drain_sync() {
    device_->synchronize(stream_.handle());
    if (begin_stream_) {
      device_->synchronize(begin_stream_->handle());
    }
    for (Piece const& piece : ring_) {
      std::unique_lock lock{mutex_};
      SPILLWAY_ASSERT(idle_count_ == ring_.size());
      Fence const last_use = piece.fence;
      lock.unlock();
      order_->synchronize(last_use);
    }
  }

  /// How often a thread waited for a chunk that another one held.
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
                            "There is no pinned memory to stage transfers to pageable memory or a "
                            "file; raise the limit on locked memory or lower staging_bytes."};
    }
    return memory;
  }
  /// Takes the chunk that was used longest ago, which is the first to become idle.
  [[nodiscard]] Piece take() {
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

  void give_back(Piece const& piece) noexcept {
    {
      std::scoped_lock const lock{mutex_};
      ring_[(first_ + idle_count_) % ring_.size()] = piece;
      ++idle_count_;
    }
    returned_.notify_one();
  }

  Device* device_;
  StreamOrder<Device>* order_;
  std::size_t chunk_bytes_;
  PinnedMemory<Device> memory_;
  std::span<std::byte> all_;
  OwnedStream<Device> stream_;
  std::optional<OwnedStream<Device>> begin_stream_;
  decltype(make_host_worker(std::declval<Device&>(), stream_type{})) worker_;
  mutable std::mutex mutex_;  // guards what follows; never held across a device call
  std::condition_variable returned_;
  // A ring buffer: the idle chunks are at [first_, first_ + idle_count_), modulo its size.
  std::vector<Piece> ring_;
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
      stream_{device, order},
      worker_{make_host_worker(device, stream_.handle())} {
  void* data = memory_.data();
  std::size_t space = memory_.size_bytes();
  auto* const first =
      static_cast<std::byte*>(std::align(alignment_bytes, chunk_count * chunk_bytes_, data, space));
  all_ = {first, chunk_count * chunk_bytes_};
  ring_.resize(chunk_count);
  for (std::size_t i = 0; i < chunk_count; ++i) {
    ring_[i].data = first + i * chunk_bytes_;
  }
  idle_count_ = chunk_count;
}

/// Copies between ordinary host memory and the device through pinned chunks, and waits until the
/// copy has finished.
///
/// `DeviceAllocator::copy_from_host_sync` and `copy_to_host_sync` use it. A device's own copy of
/// memory that is not page-locked would wait inside the driver. Pins one chunk for each thread that
/// copies at the same time, at first use, and keeps it.
///
/// Threads  thread-safe.
/// Streams  enqueues on the stream it is given and waits on the host for it.
template <DeviceApi Device>
class SyncCopier {
 public:
  using stream_type = typename Device::stream_type;

  static constexpr std::size_t chunk_bytes = 4_MiB;

  /// `device` is not owned and must outlive this object.
  explicit SyncCopier(Device& device) : device_{&device} {}

  /// @throws DeviceError; OutOfHostMemory if no pinned memory can be had; ContractViolation if
  ///         `stream` is being captured into a graph
  void
  copy_from_host_sync(void* device_to, void const* from, std::size_t bytes, stream_type stream) {
    for_each_chunk(bytes, stream, [&](std::byte* chunk, std::size_t offset, std::size_t length) {
      std::memcpy(chunk, static_cast<std::byte const*>(from) + offset, length);
      auto* const to = static_cast<std::byte*>(device_to) + offset;
      device_->copy(to, chunk, length, CopyKind::to_device, stream);
      device_->synchronize(stream);
    });
  }

  /// @throws as `copy_from_host_sync`
  void copy_to_host_sync(void* to, void const* device_from, std::size_t bytes, stream_type stream) {
    for_each_chunk(bytes, stream, [&](std::byte* chunk, std::size_t offset, std::size_t length) {
      auto const* const from = static_cast<std::byte const*>(device_from) + offset;
      device_->copy(chunk, from, length, CopyKind::to_host, stream);
      device_->synchronize(stream);
      std::memcpy(static_cast<std::byte*>(to) + offset, chunk, length);
    });
  }

 private:
  template <class Use>
  void for_each_chunk(std::size_t bytes,
                      stream_type stream,
                      Use use,
                      char const* call = __builtin_FUNCTION()) {
    if constexpr (CapturingApi<Device>) {
      expects(!device_->is_capturing(stream),
              "the stream is being captured into a graph, so the copy would not be made now",
              {},
              call);
    }
    PinnedMemory<Device> chunk = take();
    try {
      for (std::size_t offset = 0; offset < bytes; offset += chunk_bytes) {
        use(chunk.data(), offset, std::min(chunk_bytes, bytes - offset));
      }
    } catch (...) {
      give_back(std::move(chunk), has_finished(stream) ? idle_ : in_use_);
      throw;
    }
    give_back(std::move(chunk), idle_);
  }

  /// Waits again after a failure, for a copy that may have been enqueued before it.
  [[nodiscard]] bool has_finished(stream_type stream) noexcept {
    try {
      device_->synchronize(stream);
      return true;
    } catch (...) {
      return false;
    }
  }

  void give_back(PinnedMemory<Device> chunk, std::vector<PinnedMemory<Device>>& to) noexcept {
    std::scoped_lock const lock{mutex_};
    to.push_back(std::move(chunk));  // does not allocate: `take` has reserved the capacity
  }

  [[nodiscard]] PinnedMemory<Device> take() {
    {
      std::scoped_lock const lock{mutex_};
      if (!idle_.empty()) {
        PinnedMemory<Device> chunk = std::move(idle_.back());
        idle_.pop_back();
        return chunk;
      }
      ++chunks_;
      idle_.reserve(chunks_);
      in_use_.reserve(chunks_);
    }
    auto chunk = PinnedMemory<Device>::try_allocate(*device_, chunk_bytes, device_->numa_node());
    if (chunk.data() == nullptr) {
      throw OutOfHostMemory{chunk_bytes,
                            "There is none to copy through between ordinary memory and the device; "
                            "raise the limit on locked memory or lower pinned_bytes."};
    }
    return chunk;
  }

  Device* device_;
  std::mutex mutex_;  // guards what follows
  std::size_t chunks_ = 0;
  std::vector<PinnedMemory<Device>> idle_;
  std::vector<PinnedMemory<Device>> in_use_;  // the device may still read or write these
};

}  // namespace spillway::detail
