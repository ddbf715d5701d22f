// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/device_api.hpp>
#include <spillway/concepts/device_capabilities.hpp>
#include <spillway/core/record.hpp>
#include <spillway/core/types.hpp>

#include <algorithm>
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

/// A device that notes when its copies and kernels ran, so that a trace shows how they overlap.
///
/// It is the device itself, so an allocator takes it in the place of that, and `Timeline::write`
/// takes its spans:
/// ```
/// #include <spillway/cuda.hpp>
/// #include <spillway/observe/timed_device.hpp>
/// #include <spillway/observe/timeline.hpp>
///
/// struct MyPolicies : spillway::PoliciesFor<spillway::TimedDevice<spillway::CudaApi>> {
///   using observer = spillway::Timeline;
/// };
/// ```
/// A host function before the work and one behind it, on the same stream, read the clock, which
/// takes time itself: this is for looking, not for measuring a throughput. What waits for a copy
/// engine that other streams use counts as running. What is captured into a graph is not timed.
///
/// Threads  thread-safe.
/// Memory   40 bytes a span, taken as they come, until `clear_spans`.
template <DeviceApi Device>
class TimedDevice : public Device {
 public:
  using stream_type = typename Device::stream_type;

  using Device::Device;
  TimedDevice(TimedDevice const&) = delete;
  TimedDevice& operator=(TimedDevice const&) = delete;
  ~TimedDevice() {
    std::lock_guard const lock{log_->mutex};
    log_->device = nullptr;  // functions that have not run yet note nothing
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
    if (to.empty()) {
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

  /// Calls `enqueue()` and notes when the work that it enqueues on `stream` runs: for kernels that
  /// are launched by other means than this device.
  ///
  /// @throws what `enqueue` throws
  /// @stream enqueues two host functions; does not wait
  template <std::invocable Enqueue>
  void time_kernel(stream_type stream, Enqueue enqueue) {
    timed({.kind = SpanKind::kernel}, stream, enqueue);
  }

  /// Whether work that is enqueued from now on is timed; at first it is. Not timing costs nothing.
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
    std::stable_sort(copy.begin(), copy.end(), [](DeviceSpan const& a, DeviceSpan const& b) {
      return a.start_ns < b.start_ns;
    });
    return copy;
  }
  /// Forgets what has run, so that what comes next can be looked at alone.
  void clear_spans() noexcept {
    std::lock_guard const lock{log_->mutex};
    log_->spans.clear();
  }

 private:
  struct Log {
    std::mutex mutex;
    Device const* device = nullptr;  // null: it is gone
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

  /// Runs `enqueue` between the two host functions. Work is not timed where they cannot be
  /// enqueued: what the caller asked for must not fail because it is watched.
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
          return nullptr;  // a graph would call the functions again and again
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
