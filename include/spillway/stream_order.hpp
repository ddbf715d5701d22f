// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/device_api.hpp>
#include <spillway/core/error.hpp>
#include <spillway/core/fence.hpp>
#include <spillway/core/types.hpp>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace spillway {

/// Keeps the order of work on streams: marks points, and makes one stream wait for another's points.
///
/// Marking is two atomic operations and no device call. An event is recorded only when some other
/// stream has to wait for a point, or when `record` asks for one so that later waits are exact. A
/// wait that is known to be satisfied, because the point has completed or because the same stream
/// already waited for it, costs a few loads.
///
/// Threads  thread-safe, except that a stream may be retired only when nobody uses it any more.
/// Streams  a stream that was named here must live until `retire` or the end of this object.
/// Cost     `mark`, `is_ordered`: O(1). `wait`: O(recorded events of one stream), at most 64.
template <DeviceApi Device>
class StreamOrder {
 public:
  using stream_type = typename Device::stream_type;
  using event_type = typename Device::event_type;

  static constexpr bool is_thread_safe = true;
  static constexpr std::size_t max_streams = 256;

  /// `device` is not owned and must outlive this object.
  explicit StreamOrder(Device& device) : device_{&device} {}
  StreamOrder(StreamOrder const&) = delete;
  StreamOrder& operator=(StreamOrder const&) = delete;
  ~StreamOrder();

  /// The index of `stream`, given out at its first use.
  ///
  /// @throws ContractViolation when more than `max_streams` - 1 streams are in use at once
  [[nodiscard]] StreamIndex index_of(stream_type stream);

  /// A ticket for all work enqueued on `stream` so far. No device call.
  [[nodiscard]] Ticket mark(StreamIndex stream) noexcept;

  /// True if work enqueued on `stream` from now on runs after `fence` without a further wait.
  ///
  /// Never asks the device, so false may only mean that nobody has looked yet.
  [[nodiscard]] bool is_ordered(Fence const& fence, StreamIndex stream) const noexcept;

  /// Makes later work on `stream` run after `fence`.
  ///
  /// @stream  enqueues at most one event record and one wait for each ticket; does not wait
  /// @throws  DeviceError; the waits enqueued before the failure stay, which is harmless
  void wait(StreamIndex stream, Fence const& fence);

  /// Records an event on `stream` now, so that a later wait for an earlier point is no later than this.
  ///
  /// Under memory pressure this is what lets a copy start before the work that was enqueued since.
  void record(StreamIndex stream);

  /// Asks the device whether everything in `fence` has finished. Does not wait.
  [[nodiscard]] bool is_complete(Fence const& fence);

  /// Waits on the host until everything in `fence` has finished.
  void synchronize(Fence const& fence);

  /// Forgets `stream` so that its owner may destroy it; points marked on it stay valid.
  void retire(stream_type stream);

 private:
  static constexpr std::size_t max_recorded = 32;

  struct EventSlot {
    event_type event{};
    std::uint64_t covers = 0;  // every ticket of the stream up to this sequence number
    std::uint32_t users = 0;   // threads between looking it up and having enqueued their wait
    bool is_retired = false;   // recycled when the last user has gone
  };

  struct Stream {
    stream_type handle{};
    std::atomic<std::uint64_t> last_mark{0};
    std::atomic<std::uint64_t> completed{0};
    // waited_for[x]: this stream's later work runs after every point of x up to this number.
    std::array<std::atomic<std::uint64_t>, max_streams> waited_for{};
    std::deque<EventSlot*> recorded;  // oldest first
    bool is_retired = false;
  };

  static std::size_t at(StreamIndex index) noexcept { return static_cast<std::size_t>(index); }

  [[nodiscard]] bool is_ordered(Ticket ticket, StreamIndex stream) const noexcept;
  template <class Use>
  void for_each_unordered(Fence const& fence, StreamIndex stream, Use use);
  [[nodiscard]] EventSlot* acquire_event(StreamIndex stream, std::uint64_t sequence);
  [[nodiscard]] EventSlot* record_event(StreamIndex stream);
  void release_event(EventSlot* slot) noexcept;
  void poll(Stream& stream);
  void drop_front(Stream& stream) noexcept;

  Device* device_;
  std::atomic<std::uint64_t> sequence_{0};
  mutable std::mutex mutex_;  // guards what follows; never held across a device call
  std::array<std::unique_ptr<Stream>, max_streams> streams_{};
  std::unordered_map<stream_type, StreamIndex> index_;
  std::vector<std::unique_ptr<EventSlot>> slots_;
  std::vector<EventSlot*> idle_;
};

}  // namespace spillway
