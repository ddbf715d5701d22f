// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/device_api.hpp>
#include <spillway/concepts/device_capabilities.hpp>
#include <spillway/core/record.hpp>
#include <spillway/core/types.hpp>
#include <spillway/observe/by_start.hpp>

#include <atomic>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <span>
#include <utility>
#include <vector>

namespace spillway {

/// A device that records when its copies and kernels ran, so that a trace shows how they overlap.
///
/// It is derived from the device, so an allocator uses it in place of that. Pass its spans to
/// `Timeline::write`:
/// ```
/// #include <spillway/cuda.hpp>
/// #include <spillway/observe/timed_device.hpp>
/// #include <spillway/observe/timeline.hpp>
///
/// struct MyPolicies : spillway::PoliciesFor<spillway::TimedDevice<spillway::CudaApi>> {
///   using observer = spillway::Timeline;
/// };
/// ```
/// Two host functions on the same stream, before the work and behind it, read the clock. They take
/// time themselves, so do not measure throughput with this class. A copy that waits for an engine
/// which other streams use counts as running. Work that is captured into a graph is not timed.
///
/// Threads  thread-safe.
/// Memory   40 bytes for each span, allocated as they come, until `clear_spans`.
template <DeviceApi Device>
class TimedDevice : public Device {
 public:
  using stream_type = typename Device::stream_type;

  using Device::Device;
  TimedDevice(TimedDevice const&) = delete;
  TimedDevice& operator=(TimedDevice const&) = delete;
  ~TimedDevice() {
    std::lock_guard const lock{log_->mutex};
    log_->device = nullptr;  // functions that have not run yet then record nothing
  }

  void copy(void* to, void const* from, std::size_t bytes, CopyKind kind, stream_type stream) {
    timed(copy_span(to, from, bytes, kind), stream, [&] {
      Device::copy(to, from, bytes, kind, stream);
    });
  }
  void copy_batch(std::span<void* const> to,
                  std::span<void const* const> from,
                  std::span<std::size_t const> sizes_bytes,
                  CopyKind kind,
                  stream_type stream) requires BatchCopyApi<Device> {
    if (to.empty() || from.empty()) {
      Device::copy_batch(to, from, sizes_bytes, kind, stream);  // refuses lists of other lengths
      return;
    }
    std::size_t bytes = 0;
    for (std::size_t const one : sizes_bytes) {
      bytes += one;
    }
    timed(copy_span(to.front(), from.front(), bytes, kind), stream, [&] {
      Device::copy_batch(to, from, sizes_bytes, kind, stream);
    });
  }
  void compute(stream_type stream, std::uint64_t duration_ns) requires KernelTimeApi<Device> {
    time_kernel(stream, [&] { Device::compute(stream, duration_ns); });
  }
  template <std::invocable Work>
  void launch(stream_type stream, Work work) requires LaunchingApi<Device> {
    time_kernel(stream, [&] { Device::launch(stream, std::move(work)); });
  }

  /// Calls `enqueue()` and records when the work that it enqueues on `stream` runs. Use it for
  /// kernels that are not launched by this device's own functions.
  ///
  /// @throws what `enqueue` throws
  /// @stream enqueues two host functions; does not wait
  template <std::invocable Enqueue>
  void time_kernel(stream_type stream, Enqueue enqueue) {
    timed({.kind = SpanKind::kernel}, stream, enqueue);
  }

  /// Sets whether to time work that is enqueued from now on; initially on. While it is off there is
  /// no overhead.
  void set_timing(bool on) noexcept { is_timing_.store(on, std::memory_order_relaxed); }

  /// Returns the work that has run since construction or `clear_spans`, in order of start.
  ///
  /// @throws std::bad_alloc
  [[nodiscard]] std::vector<DeviceSpan> spans() const {
    std::vector<DeviceSpan> copy;
    {
      std::lock_guard const lock{log_->mutex};
      copy = log_->spans;
    }
    return detail::by_start(copy);
  }
  /// Forgets all spans so far, so that later work can be looked at alone.
  void clear_spans() noexcept {
    std::lock_guard const lock{log_->mutex};
    log_->spans.clear();
  }

 private:
  struct Log {
    std::mutex mutex;
    Device const* device = nullptr;  // null if the device has been destroyed
    std::vector<DeviceSpan> spans;

    void start(DeviceSpan& span) noexcept {
      std::lock_guard const lock{mutex};
      span.start_ns = device != nullptr ? device->clock_ns() : 0;
    }
    void end(DeviceSpan& span) noexcept {
      std::lock_guard const lock{mutex};
      if (device != nullptr) {
        span.end_ns = device->clock_ns();
        try {
          spans.push_back(span);
        } catch (std::bad_alloc const&) {  // NOLINT(bugprone-empty-catch): the span is missing
        }
      }
    }
  };

  static DeviceSpan
  copy_span(void const* to, void const* from, std::size_t bytes, CopyKind kind) noexcept {
    switch (kind) {
    case CopyKind::to_host:
      return {.kind = SpanKind::copy_to_host, .bytes = bytes, .address = from};
    case CopyKind::to_device:
      return {.kind = SpanKind::copy_to_device, .bytes = bytes, .address = to};
    case CopyKind::on_device:
      break;
    }
    return {.kind = SpanKind::copy_on_device, .bytes = bytes, .address = to};
  }

  /// Runs `enqueue` between the two host functions. If these cannot be enqueued, the work is not
  /// timed: what the caller wants must not fail because of the timing.
  template <class Enqueue>
  void timed(DeviceSpan const& span, stream_type stream, Enqueue&& enqueue) {
    std::shared_ptr<DeviceSpan> const note = try_start(span, stream);
    std::forward<Enqueue>(enqueue)();
    if (note) {
      try_launch(stream, [log = log_, note] { log->end(*note); });
    }
  }

  std::shared_ptr<DeviceSpan> try_start(DeviceSpan const& span, stream_type stream) {
    if (!is_timing_.load(std::memory_order_relaxed)) {
      return nullptr;
    }
    try {
      if constexpr (CapturingApi<Device>) {
        if (Device::is_capturing(stream)) {
          return nullptr;  // a graph would call the functions at each launch
        }
      }
      auto note = std::make_shared<DeviceSpan>(span);
      return try_launch(stream, [log = log_, note] { log->start(*note); }) ? note : nullptr;
    } catch (std::exception const&) {
      return nullptr;
    }
  }

  template <class Work>
  bool try_launch(stream_type stream, Work work) noexcept {
    try {
      detail::launch_callable(static_cast<Device&>(*this), stream, std::move(work));
      return true;
    } catch (std::exception const&) {
      return false;
    }
  }

  static std::shared_ptr<Log> make_log(Device const& device) {
    auto log = std::make_shared<Log>();
    log->device = &device;
    return log;
  }

  std::shared_ptr<Log> log_ = make_log(*this);
  std::atomic<bool> is_timing_{true};
};

}  // namespace spillway
