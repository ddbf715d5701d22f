// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/device_api.hpp>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace support {

/// Kernels for devices of host memory. They fill ranges with a pattern and check it, in the order
/// of the stream.
///
/// A kernel uses the range that the lease gave at its launch, so a later check detects a block that
/// moves, leaves or is overwritten too early.
class PatternKernels {
 public:
  template <spillway::DeviceApi Device>
  void write(Device& device,
             typename Device::stream_type stream,
             void* address,
             std::size_t bytes,
             std::uint64_t seed) {
    device.launch_host(stream, &run_write, task(address, bytes, seed));
  }

  template <spillway::DeviceApi Device>
  void check(Device& device,
             typename Device::stream_type stream,
             void* address,
             std::size_t bytes,
             std::uint64_t seed) {
    device.launch_host(stream, &run_check, task(address, bytes, seed));
  }

  [[nodiscard]] std::uint64_t checks() const noexcept { return checks_; }
  [[nodiscard]] std::uint64_t failures() const noexcept { return failures_; }
  /// Returns the seeds of the patterns that checks did not find since the last call, one for each
  /// such check.
  [[nodiscard]] std::vector<std::uint64_t> take_failed() {
    std::scoped_lock const lock{mutex_};
    return std::exchange(failed_, {});
  }
  [[nodiscard]] std::string first_failure() const {
    std::scoped_lock const lock{mutex_};
    return first_failure_;
  }
  /// Forgets the kernels; call it only when none is in flight.
  void forget() {
    std::scoped_lock const lock{mutex_};
    tasks_.clear();
  }

 private:
  struct Task {
    PatternKernels* self;
    unsigned char* address;
    std::size_t bytes;
    std::uint64_t seed;
  };

  Task* task(void* address, std::size_t bytes, std::uint64_t seed) {
    std::scoped_lock const lock{mutex_};
    tasks_.push_back({this, static_cast<unsigned char*>(address), bytes, seed});
    return &tasks_.back();
  }

  /// Every fourth content is mostly zeros: codecs make it smaller.
  static std::uint64_t word(std::uint64_t seed, std::size_t at) noexcept {
    std::uint64_t z = (seed + 1) * 0x9E3779B97F4A7C15U + at;
    z = (z ^ (z >> 29U)) * 0xBF58476D1CE4E5B9U;
    return seed % 4 == 3 && at % 64 != 0 ? 0 : z ^ (z >> 32U);
  }

  static void run_write(void* p) noexcept {
    Task const& task = *static_cast<Task*>(p);
    for (std::size_t i = 0; i < task.bytes; i += 8) {
      std::uint64_t const value = word(task.seed, i);
      std::memcpy(task.address + i, &value, std::min<std::size_t>(8, task.bytes - i));
    }
  }

  static void run_check(void* p) noexcept {
    Task const& task = *static_cast<Task*>(p);
    ++task.self->checks_;
    for (std::size_t i = 0; i < task.bytes; i += 8) {
      std::uint64_t const value = word(task.seed, i);
      if (std::memcmp(task.address + i, &value, std::min<std::size_t>(8, task.bytes - i)) != 0) {
        task.self->note_failure(task, i);
        return;
      }
    }
  }

  void note_failure(Task const& task, std::size_t at) noexcept {
    std::scoped_lock const lock{mutex_};
    failed_.push_back(task.seed);
    if (failures_++ == 0) {
      first_failure_ = "content " + std::to_string(task.seed) + " of " +
                       std::to_string(task.bytes) + " bytes is wrong at byte " + std::to_string(at);
    }
  }

  mutable std::mutex mutex_;
  std::deque<Task> tasks_;  // a deque, so that tasks stay where streams expect them
  std::atomic<std::uint64_t> checks_{0};
  std::atomic<std::uint64_t> failures_{0};
  std::vector<std::uint64_t> failed_;
  std::string first_failure_;
};

}  // namespace support
