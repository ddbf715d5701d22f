// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/device_api.hpp>
#include <spillway/concepts/device_capabilities.hpp>
#include <spillway/core/error.hpp>
#include <spillway/core/fence.hpp>
#include <spillway/stream/stream_events.hpp>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <unordered_map>
#include <utility>
#include <vector>

namespace spillway {

/// Orders the work of several streams: marks points on streams, and makes one stream wait for the
/// points of another.
///
/// Marking a point is one load and no device call. Points without an event recorded between them
/// are one point, since a wait for one of them is a wait for all. An event is recorded only if
/// another stream has to wait for a point, or if `record` asks for one so that later waits are
/// exact. A wait that is known to be satisfied costs a few loads: the point has completed, or the
/// same stream has already waited for it.
///
/// Threads  thread-safe, except that a stream may be retired only when no thread uses it any more.
/// Streams  a stream that was named here must live until `retire` or the end of this object.
/// Cost     `mark`, `is_ordered`: O(1) and no device call. `wait`: O(log) and at most three device
///          calls for each ticket that is not ordered yet, beside the questions whether the two
///          streams are being captured.
template <DeviceApi Device>
class StreamOrder {
 public:
  using stream_type = typename Device::stream_type;
  using event_type = typename Device::event_type;

  static constexpr bool is_thread_safe = true;
  static constexpr std::size_t max_streams = 256;

  /// `device` is not owned and must outlive this object.
  explicit StreamOrder(Device& device) : device_{&device}, events_{device} {}
  StreamOrder(StreamOrder const&) = delete;
  StreamOrder& operator=(StreamOrder const&) = delete;

  /// Returns the index of `stream`, which is assigned at its first use. If all indices are taken,
  /// waits on the host until the work of the stream that was retired first has finished.
  ///
  /// @throws ContractViolation if more than `max_streams` - 1 streams are in use at once, and for a
  ///         handle that stands for another stream in each thread (`PerThreadStreamApi`);
  ///         DeviceError
  [[nodiscard]] StreamIndex index_of(stream_type stream) {
    bool has_waited = false;
    return index_of(stream, has_waited);
  }
  /// The same. Sets `has_waited` to true if it had to wait.
  [[nodiscard]] StreamIndex index_of(stream_type stream, bool& has_waited);

  /// Returns a ticket for all work enqueued on `stream` so far; an empty one for a stream whose
  /// work has finished when it is enqueued (`CallerStreamApi`). Makes no device call.
  [[nodiscard]] Ticket mark(StreamIndex stream) noexcept;

  /// True if work enqueued on `stream` from now on runs after `fence` without a further wait.
  ///
  /// Never asks the device, so false may only mean that the device has not been asked yet.
  [[nodiscard]] bool is_ordered(Fence const& fence, StreamIndex stream) const noexcept;

  /// Returns whether the points of `fence` can have been marked by this object: false for most
  /// fences of another one. Waiting for a fence of another object would corrupt what is known about
  /// waits.
  [[nodiscard]] bool has_marked(Fence const& fence) const noexcept {
    std::scoped_lock const lock{mutex_};
    auto const is_known = [this](Ticket ticket) {
      return ticket.is_none() || ticket.stream() == StreamIndex::every ||
             (static_cast<std::size_t>(ticket.stream()) < stream_count_ &&
              ticket.sequence() <= at(ticket.stream()).epoch.last());
    };
    return std::all_of(fence.tickets().begin(), fence.tickets().end(), is_known);
  }

  /// Makes later work on `stream` run after `fence`, whose points have been marked here.
  ///
  /// @stream  enqueues at most one event record and one wait for each ticket; does not wait
  /// @throws  DeviceError; ContractViolation for a point on a stream that is being captured into a
  ///          graph and has no event from before, and if `stream` itself is being captured and
  ///          would have to wait, since no event that is recorded here is part of a capture; waits
  ///          that were enqueued before the failure stay, which is harmless
  void wait(StreamIndex stream, Fence const& fence);

  /// Makes later work on `stream` run after everything that has been enqueued on every stream that
  /// is known here. Work that is being captured into a graph is not enqueued and not waited for.
  ///
  /// @stream, @throws  as `wait`
  void wait_for_all(StreamIndex stream);

  /// Records an event on `stream` now, so that a later wait for an earlier point waits for no work
  /// that is enqueued after this call.
  ///
  /// Under memory pressure this lets a copy start before the work that was enqueued since.
  ///
  /// @throws DeviceError; ContractViolation if `stream` is being captured into a graph
  void record(StreamIndex stream);

  /// The same for every stream that is known here, except for those that are being captured.
  ///
  /// @throws DeviceError
  void record_all();

  /// Asks the device whether everything in `fence` has finished. Does not wait. @throws DeviceError
  [[nodiscard]] bool is_complete(Fence const& fence);

  /// Waits on the host until everything in `fence` has finished. @throws DeviceError
  void synchronize(Fence const& fence);

  /// Forgets `stream` so that its owner may destroy it; points marked on it stay valid.
  ///
  /// Waits for threads that are recording an event on it at this moment, but not for the device.
  ///
  /// @throws as `record`; the stream is then still known
  void retire(stream_type stream);

 private:
  using Event = typename detail::EventPool<Device>::stream_event;

  struct Stream {
    Stream(detail::EventPool<Device>& pool, StreamIndex number) : index{number}, events{pool} {}

    StreamIndex const index;
    stream_type handle{};
    detail::StreamEpoch epoch;
    std::atomic<std::uint64_t> completed{0};
    // waited_for[x]: this stream's later work runs after every point of x up to this number.
    std::array<std::atomic<std::uint64_t>, max_streams> waited_for{};
    detail::RecordedEvents<Device> events;
    std::atomic<std::uint32_t> recorders{0};  // threads that are recording an event here
    bool is_retired = false;
    // Whether its work has finished when it is enqueued. Read without the lock.
    std::atomic<bool> is_caller{false};
  };

  /// An event that a thread is about to wait for. It is not recycled while the claim lives. A claim
  /// is empty if the point is known to have completed.
  class Claim {
   public:
    Claim() = default;
    Claim(StreamOrder& order, Stream& stream, Event* event) noexcept
        : order_{&order}, stream_{&stream}, event_{event} {}
    Claim(Claim const&) = delete;
    Claim& operator=(Claim const&) = delete;
    ~Claim() {
      if (event_ != nullptr) {
        std::scoped_lock const lock{order_->mutex_};
        stream_->events.release(event_);
      }
    }
    [[nodiscard]] explicit operator bool() const noexcept { return event_ != nullptr; }
    [[nodiscard]] Event const* operator->() const noexcept { return event_; }

   private:
    StreamOrder* order_ = nullptr;
    Stream* stream_ = nullptr;
    Event* event_ = nullptr;
  };

  /// Counts a thread as no longer recording on a stream when it is destroyed.
  class Recording {
   public:
    explicit Recording(Stream& stream) : stream_{stream} {}
    Recording(Recording const&) = delete;
    Recording& operator=(Recording const&) = delete;
    ~Recording() {
      --stream_.recorders;
      stream_.recorders.notify_all();
    }

   private:
    Stream& stream_;
  };

  [[nodiscard]] Stream& at(StreamIndex index) const noexcept {
    return *streams_[static_cast<std::size_t>(index)];
  }
  [[nodiscard]] std::uint64_t next_sequence() noexcept {
    return sequence_.fetch_add(1, std::memory_order_relaxed) + 1;
  }
  static void raise(std::atomic<std::uint64_t>& value, std::uint64_t to) noexcept;
  template <class Use>
  void for_each_stream(Ticket ticket, Use use) const;
  [[nodiscard]] std::uint64_t last_enqueued(Stream& stream);
  [[nodiscard]] Ticket vacant_point(bool& has_waited);
  [[nodiscard]] StreamIndex assign(StreamIndex index, stream_type stream);
  void synchronize_stream(Stream& stream);
  [[nodiscard]] Claim claim_event(Stream& stream, std::uint64_t sequence);
  [[nodiscard]] Claim record_event(Stream& stream);
  [[nodiscard]] bool ask_whether_complete(Stream& stream, std::uint64_t sequence);

  Device* device_;
  std::atomic<std::uint64_t> sequence_{0};
  mutable std::mutex mutex_;  // guards what follows; never held across a device call
  std::array<std::unique_ptr<Stream>, max_streams> streams_{};
  std::size_t stream_count_ = 1;  // index 0 names no stream
  std::unordered_map<stream_type, StreamIndex> index_;
  detail::EventPool<Device> events_;
};

template <DeviceApi Device>
auto StreamOrder<Device>::index_of(stream_type stream, bool& has_waited) -> StreamIndex {
  {
    std::scoped_lock const lock{mutex_};
    if (auto const found = index_.find(stream); found != index_.end()) {
      return found->second;
    }
  }
  if constexpr (PerThreadStreamApi<Device>) {
    expects(Device::is_one_stream(stream),
            "the stream handle means another stream in every thread: name a stream of its own",
            {},
            "StreamOrder");
  }
  for (;;) {
    Ticket const vacant = vacant_point(has_waited);
    std::scoped_lock const lock{mutex_};
    if (auto const found = index_.find(stream); found != index_.end()) {
      return found->second;  // another thread was faster
    }
    if (!vacant.is_none() && at(vacant.stream()).is_retired &&
        at(vacant.stream()).epoch.last() == vacant.sequence()) {
      return assign(vacant.stream(), stream);
    }
    if (stream_count_ < max_streams) {
      return assign(static_cast<StreamIndex>(stream_count_), stream);
    }
    expects(!vacant.is_none(),
            "too many streams in use at once: retire_stream() those that are not used any more",
            {},
            "StreamOrder");
  }
}

/// Gives `index` to `stream`. Called with the lock.
template <DeviceApi Device>
StreamIndex StreamOrder<Device>::assign(StreamIndex index, stream_type stream) {
  auto const number = static_cast<std::size_t>(index);
  if (number == stream_count_) {
    streams_[number] = std::make_unique<Stream>(events_, index);
  }
  index_.emplace(stream, index);
  stream_count_ = std::max(stream_count_, number + 1);
  Stream& fresh = *streams_[number];
  fresh.handle = stream;
  fresh.is_retired = false;
  if constexpr (CallerStreamApi<Device>) {
    fresh.is_caller = Device::is_caller(stream);
  }
  std::uint64_t const first = next_sequence();
  fresh.epoch.start(first);
  fresh.completed = first - 1;  // points of the stream that had this index before
  // The new stream has waited for nothing. What other streams have waited for on the old one stays
  // true: those points have completed, and sequence numbers never repeat.
  for (auto& waited : fresh.waited_for) {
    waited.store(0, std::memory_order_relaxed);
  }
  return index;
}

/// Returns the last point of a retired stream whose work has all finished, or none. If no index is
/// left, waits for such a stream. Another thread may take its index before the caller does.
template <DeviceApi Device>
Ticket StreamOrder<Device>::vacant_point(bool& has_waited) {
  std::vector<Ticket> retired;
  bool is_full = false;
  {
    std::scoped_lock const lock{mutex_};
    is_full = stream_count_ == max_streams;
    for (std::size_t i = 1; i < stream_count_; ++i) {
      if (streams_[i]->is_retired) {
        retired.emplace_back(streams_[i]->index, streams_[i]->epoch.last());
      }
    }
  }
  auto const found = std::find_if(
      retired.begin(), retired.end(), [this](Ticket ticket) { return is_complete(ticket); });
  if (found != retired.end() || retired.empty() || !is_full) {
    return found == retired.end() ? Ticket{} : *found;
  }
  auto const first = std::min_element(retired.begin(), retired.end(), [](Ticket a, Ticket b) {
    return a.sequence() < b.sequence();
  });
  has_waited = true;
  synchronize(*first);
  return *first;
}

template <DeviceApi Device>
Ticket StreamOrder<Device>::mark(StreamIndex stream) noexcept {
  Stream& marked = at(stream);
  if constexpr (CallerStreamApi<Device>) {
    if (marked.is_caller) {
      return {};
    }
  }
  return Ticket{stream, marked.epoch.mark()};
}

template <DeviceApi Device>
void StreamOrder<Device>::raise(std::atomic<std::uint64_t>& value, std::uint64_t to) noexcept {
  std::uint64_t seen = value.load(std::memory_order_relaxed);
  while (seen < to && !value.compare_exchange_weak(seen, to, std::memory_order_release)) {
  }
}

/// Calls `use(stream, sequence)` for each stream that `ticket` stands for: one, or every stream.
template <DeviceApi Device>
template <class Use>
void StreamOrder<Device>::for_each_stream(Ticket ticket, Use use) const {
  if (ticket.is_none()) {
    return;
  }
  if (ticket.stream() != StreamIndex::every) {
    use(at(ticket.stream()), ticket.sequence());
    return;
  }
  std::size_t count = 0;
  {
    std::scoped_lock const lock{mutex_};
    count = stream_count_;
  }
  for (std::size_t i = 1; i < count; ++i) {
    Stream& stream = *streams_[i];
    use(stream, std::min(ticket.sequence(), stream.epoch.last()));
  }
}

template <DeviceApi Device>
bool StreamOrder<Device>::is_ordered(Fence const& fence, StreamIndex stream) const noexcept {
  if (fence.is_empty()) {
    return true;
  }
  Stream const& waiter = at(stream);
  bool ordered = true;
  for (Ticket const ticket : fence.tickets()) {
    if (ticket.is_none()) {
      break;
    }
    if (ticket.stream() == stream) {
      continue;  // one stream's work runs in the order it was enqueued
    }
    for_each_stream(ticket, [&](Stream const& other, std::uint64_t sequence) {
      auto const at_other = static_cast<std::size_t>(other.index);
      ordered = ordered &&
                (&other == &waiter || other.completed.load(std::memory_order_acquire) >= sequence ||
                 waiter.waited_for[at_other].load(std::memory_order_acquire) >= sequence);
    });
  }
  return ordered;
}

template <DeviceApi Device>
void StreamOrder<Device>::wait(StreamIndex stream, Fence const& fence) {
  Stream& waiter = at(stream);
  for (Ticket const ticket : fence.tickets()) {
    for_each_stream(ticket, [&](Stream& other, std::uint64_t sequence) {
      if (is_ordered(Fence{Ticket{other.index, sequence}}, stream)) {
        return;
      }
      // No event of a retired stream covers points that were marked there afterwards. All that is
      // known of these is that they come after its last event.
      Claim const claim = claim_event(other, sequence);
      if (!claim) {
        raise(other.completed, sequence);
        return;
      }
      if constexpr (CapturingApi<Device>) {
        expects(!device_->is_capturing(waiter.handle),
                "a stream that is being captured into a graph would have to wait for work from "
                "outside the capture: order the streams before the capture begins",
                {},
                "StreamOrder");
      }
      device_->wait(waiter.handle, claim->handle);
      raise(waiter.waited_for[static_cast<std::size_t>(other.index)],
            std::max(claim->covers, sequence));
    });
  }
}

/// Returns the number of a point that stands for all work enqueued on `stream` so far.
template <DeviceApi Device>
std::uint64_t StreamOrder<Device>::last_enqueued(Stream& stream) {
  {
    std::scoped_lock const lock{mutex_};
    if (stream.is_retired) {
      return stream.epoch.last();
    }
    ++stream.recorders;  // the stream lives until this function has asked for its state
  }
  Recording const recording{stream};
  if constexpr (CapturingApi<Device>) {
    if (device_->is_capturing(stream.handle)) {
      return stream.epoch.last();
    }
  }
  return stream.epoch.mark();
}

template <DeviceApi Device>
void StreamOrder<Device>::wait_for_all(StreamIndex stream) {
  for_each_stream(Ticket{StreamIndex::every, 0}, [&](Stream& other, std::uint64_t /*sequence*/) {
    wait(stream, Ticket{other.index, last_enqueued(other)});
  });
}

template <DeviceApi Device>
void StreamOrder<Device>::record(StreamIndex stream) {
  Stream& recorded = at(stream);
  if constexpr (CallerStreamApi<Device>) {
    if (recorded.is_caller) {
      return;
    }
  }
  {
    std::scoped_lock const lock{mutex_};
    if (recorded.events.covers(recorded.epoch.last())) {
      return;
    }
  }
  (void)record_event(recorded);
}

template <DeviceApi Device>
void StreamOrder<Device>::record_all() {
  for_each_stream(Ticket{StreamIndex::every, 0}, [&](Stream& stream, std::uint64_t /*sequence*/) {
    try {
      record(stream.index);
    } catch (ContractViolation const&) {  // NOLINT(bugprone-empty-catch): it is being captured
    }
  });
}

template <DeviceApi Device>
bool StreamOrder<Device>::is_complete(Fence const& fence) {
  bool complete = true;
  for (Ticket const ticket : fence.tickets()) {
    for_each_stream(ticket, [&](Stream& other, std::uint64_t sequence) {
      complete = complete && (other.completed.load(std::memory_order_acquire) >= sequence ||
                              ask_whether_complete(other, sequence));
    });
  }
  return complete;
}

template <DeviceApi Device>
void StreamOrder<Device>::synchronize(Fence const& fence) {
  for (Ticket const ticket : fence.tickets()) {
    for_each_stream(ticket, [&](Stream& other, std::uint64_t sequence) {
      if (other.completed.load(std::memory_order_acquire) >= sequence) {
        return;
      }
      try {
        Claim const claim = claim_event(other, sequence);
        if (claim) {
          device_->synchronize(claim->handle);
          raise(other.completed, claim->covers);
        }
      } catch (std::bad_alloc const&) {
        synchronize_stream(other);
      }
    });
  }
}

/// Waits for all work on a stream, when there is no memory for an event. Called by a handler of
/// std::bad_alloc, which is thrown again if the stream has been retired meanwhile, or is being
/// captured.
template <DeviceApi Device>
void StreamOrder<Device>::synchronize_stream(Stream& stream) {
  {
    std::scoped_lock const lock{mutex_};
    if (stream.is_retired) {
      throw;
    }
    ++stream.recorders;
  }
  Recording const recording{stream};
  if constexpr (CapturingApi<Device>) {
    if (device_->is_capturing(stream.handle)) {
      throw;
    }
  }
  device_->synchronize(stream.handle);
}

template <DeviceApi Device>
void StreamOrder<Device>::retire(stream_type stream) {
  Stream* retired = nullptr;
  {
    std::scoped_lock const lock{mutex_};
    auto const found = index_.find(stream);
    if (found == index_.end()) {
      return;
    }
    retired = &at(found->second);
  }
  record(retired->index);
  {
    std::scoped_lock const lock{mutex_};
    index_.erase(stream);
    retired->is_retired = true;
  }
  // Other threads may still be recording on the stream, and its owner is about to destroy it.
  for (std::uint32_t left = retired->recorders; left != 0; left = retired->recorders) {
    retired->recorders.wait(left);
  }
}

/// Finds the earliest recorded event that covers `sequence`, or records one.
template <DeviceApi Device>
auto StreamOrder<Device>::claim_event(Stream& stream, std::uint64_t sequence) -> Claim {
  {
    std::scoped_lock const lock{mutex_};
    if (stream.completed.load(std::memory_order_acquire) >= sequence) {
      return {};
    }
    if (Event* const event = stream.events.try_claim(sequence)) {
      return {*this, stream, event};
    }
  }
  return record_event(stream);
}

template <DeviceApi Device>
auto StreamOrder<Device>::record_event(Stream& stream) -> Claim {
  Event* event = nullptr;
  {
    std::scoped_lock const lock{mutex_};
    if (stream.is_retired) {
      // Its last event was recorded when it was retired. It is gone only if it has completed.
      return {*this, stream, stream.events.try_claim_newest()};
    }
    event = events_.try_take();
    ++stream.recorders;
  }
  Recording const recording{stream};
  if (event == nullptr) {
    auto fresh = events_.make();
    std::scoped_lock const lock{mutex_};
    event = events_.add(std::move(fresh));
  }
  std::uint64_t covers = 0;
  try {
    if constexpr (CapturingApi<Device>) {
      expects(!device_->is_capturing(stream.handle),
              "a stream that is being captured into a graph would have to be waited for: call "
              "prepare_capture() first, and end no lease on it meanwhile",
              {},
              "StreamOrder");
    }
    // Close before recording, so that the event covers at least the points that `covers` says.
    covers = stream.epoch.close([this] { return next_sequence(); });
    device_->record(event->handle, stream.handle);
  } catch (...) {
    std::scoped_lock const lock{mutex_};
    events_.give_back(event);
    throw;
  }
  std::scoped_lock const lock{mutex_};
  stream.events.add(event, covers);
  return {*this, stream, event};
}

template <DeviceApi Device>
bool StreamOrder<Device>::ask_whether_complete(Stream& stream, std::uint64_t sequence) {
  Claim const claim = claim_event(stream, sequence);
  if (!claim) {
    return true;
  }
  if (!device_->is_complete(claim->handle)) {
    return false;
  }
  raise(stream.completed, claim->covers);
  std::scoped_lock const lock{mutex_};
  stream.events.drop(claim->covers);
  return true;
}

}  // namespace spillway
