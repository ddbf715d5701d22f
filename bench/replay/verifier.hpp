// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/device_api.hpp>
#include <spillway/core/types.hpp>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <mutex>
#include <new>
#include <string>

namespace replay {

/// Fills buffers with a pattern of their own and checks it, in stream order and on any device:
/// bytes go through a pinned chunk that the stream's host functions write and read.
template <spillway::DeviceApi Device>
class Verifier {
 public:
  using stream_type = typename Device::stream_type;

  Verifier(Device& device, stream_type stream)
      : device_{device},
        stream_{stream},
        chunk_{static_cast<unsigned char*>(device.try_allocate_pinned(chunk_bytes, -1))} {
    if (chunk_ == nullptr) {
      throw std::bad_alloc{};
    }
  }
  Verifier(Verifier const&) = delete;
  Verifier& operator=(Verifier const&) = delete;
  /// Waits, since functions that the stream has yet to call use this object: a replay may end by an
  /// error.
  ~Verifier() {
    try {
      device_.synchronize(stream_);
    } catch (...) {  // NOLINT(bugprone-empty-catch): a device that has failed runs nothing more
    }
    device_.free_pinned(chunk_, chunk_bytes);
  }

  void fill(void* address, std::size_t bytes, std::uint64_t seed) {
    for_each_chunk(bytes, [&](std::size_t offset, std::size_t length) {
      launch(&Task::fill, seed, offset, length);
      device_.copy(static_cast<std::byte*>(address) + offset,
                   chunk_,
                   length,
                   spillway::CopyKind::to_device,
                   stream_);
    });
  }

  void check(void const* address, std::size_t bytes, std::uint64_t seed) {
    for_each_chunk(bytes, [&](std::size_t offset, std::size_t length) {
      device_.copy(chunk_,
                   static_cast<std::byte const*>(address) + offset,
                   length,
                   spillway::CopyKind::to_host,
                   stream_);
      launch(&Task::check, seed, offset, length);
    });
  }

  /// Waits for everything and forgets the tasks.
  void finish() {
    device_.synchronize(stream_);
    tasks_.clear();
  }

  [[nodiscard]] std::uint64_t verified_bytes() const noexcept { return verified_; }
  [[nodiscard]] std::uint64_t corrupt_bytes() const noexcept { return corrupt_; }
  [[nodiscard]] std::string first_corruption() const {
    std::scoped_lock const lock{mutex_};
    return first_;
  }

 private:
  static constexpr std::size_t chunk_bytes = std::size_t{1} << 20U;
  static constexpr std::size_t most_tasks = 4096;

  struct Task {
    Verifier* self;
    std::uint64_t seed;
    std::size_t offset;
    std::size_t length;

    static void fill(void* p) noexcept {
      Task const& task = *static_cast<Task*>(p);
      for (std::size_t i = 0; i < task.length; i += sizeof(std::uint64_t)) {
        std::uint64_t const word = pattern(task.seed, task.offset + i);
        std::memcpy(task.self->chunk_ + i, &word, std::min(sizeof word, task.length - i));
      }
    }

    static void check(void* p) noexcept {
      Task const& task = *static_cast<Task*>(p);
      task.self->verified_ += task.length;
      for (std::size_t i = 0; i < task.length; i += sizeof(std::uint64_t)) {
        std::uint64_t const word = pattern(task.seed, task.offset + i);
        std::size_t const length = std::min(sizeof word, task.length - i);
        if (std::memcmp(task.self->chunk_ + i, &word, length) != 0) {
          task.self->note_corruption(task.seed, task.offset + i, length);
        }
      }
    }
  };

  static std::uint64_t pattern(std::uint64_t seed, std::uint64_t offset) noexcept {
    std::uint64_t z = seed * 0x9E3779B97F4A7C15U + offset;
    z = (z ^ (z >> 30U)) * 0xBF58476D1CE4E5B9U;
    z = (z ^ (z >> 27U)) * 0x94D049BB133111EBU;
    return z ^ (z >> 31U);
  }

  void note_corruption(std::uint64_t seed, std::size_t offset, std::size_t length) noexcept {
    std::scoped_lock const lock{mutex_};
    corrupt_ += length;
    if (first_.empty()) {
      first_ = "buffer with seed " + std::to_string(seed) + " at byte " + std::to_string(offset);
    }
  }

  void launch(spillway::HostFunction function,
              std::uint64_t seed,
              std::size_t offset,
              std::size_t length) {
    if (tasks_.size() == most_tasks) {
      finish();
    }
    tasks_.push_back({this, seed, offset, length});
    device_.launch_host(stream_, function, &tasks_.back());
  }

  template <class Use>
  static void for_each_chunk(std::size_t bytes, Use use) {
    for (std::size_t offset = 0; offset < bytes; offset += chunk_bytes) {
      use(offset, std::min(chunk_bytes, bytes - offset));
    }
  }

  Device& device_;
  stream_type stream_;
  unsigned char* chunk_;
  std::deque<Task> tasks_;  // a deque, so that tasks stay where streams expect them
  std::atomic<std::uint64_t> verified_{0};
  std::atomic<std::uint64_t> corrupt_{0};
  mutable std::mutex mutex_;
  std::string first_;
};

}  // namespace replay
