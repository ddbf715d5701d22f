// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/device_api.hpp>
#include <spillway/core/types.hpp>
#include <spillway/host/tier_memory.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <span>
#include <stdexcept>
#include <vector>

#include "bandwidth.hpp"

namespace bandwidth {

/// What a program does without this library: copies to and from pinned memory, allocated once.
///
/// One of these carries one direction. It also fills blocks with a pattern and looks for it.
template <spillway::DeviceApi Device>
class PlainCopies {
 public:
  using stream_type = typename Device::stream_type;

  /// For `bytes` in all, in at most `most_blocks` blocks if they are to be copied one by one.
  PlainCopies(Device& device, std::size_t bytes, std::size_t most_blocks = 0)
      : device_{&device},
        pinned_{spillway::detail::PinnedMemory<Device>::try_allocate(
            device, bytes, device.numa_node())},
        stream_{device.create_stream()} {
    if (pinned_.data() == nullptr) {
      throw std::bad_alloc{};
    }
    events_.reserve(most_blocks);
    for (std::size_t i = 0; i < most_blocks; ++i) {
      events_.push_back(device.create_event());
    }
    std::memset(pinned_.data(), 0, bytes);
  }
  PlainCopies(PlainCopies const&) = delete;
  PlainCopies& operator=(PlainCopies const&) = delete;
  ~PlainCopies() {
    for (auto const event : events_) {
      device_->destroy_event(event);
    }
    device_->destroy_stream(stream_);
  }

  /// One copy of `bytes` bytes.
  void enqueue_one(std::byte* memory, std::size_t bytes, spillway::CopyKind kind) {
    copy(memory, pinned_.data(), bytes, kind);
  }
  /// A copy and an event for each block.
  void enqueue_each(std::span<std::byte* const> blocks,
                    std::size_t block_bytes,
                    spillway::CopyKind kind) {
    std::byte* host = pinned_.data();
    for (std::size_t i = 0; i < blocks.size(); ++i, host += block_bytes) {
      copy(blocks[i], host, block_bytes, kind);
      device_->record(events_[i], stream_);
    }
  }
  void synchronize() { device_->synchronize(stream_); }

  /// Gives a block bytes of its own, of which `tag` says which.
  void put_sync(std::byte* block, std::size_t bytes, std::uint64_t tag, Settings const& settings) {
    put_pattern(pinned_.data(), bytes, tag, settings);
    copy(block, pinned_.data(), bytes, spillway::CopyKind::to_device);
    synchronize();
  }
  /// @throws std::runtime_error if the block does not hold what `put_sync` put there
  void
  expect_sync(std::byte* block, std::size_t bytes, std::uint64_t tag, Settings const& settings) {
    copy(block, pinned_.data(), bytes, spillway::CopyKind::to_host);
    synchronize();
    expected_.resize(bytes);
    put_pattern(expected_.data(), bytes, tag, settings);
    if (std::memcmp(expected_.data(), pinned_.data(), bytes) != 0) {
      throw std::runtime_error{"a block came back with other bytes than it went out with"};
    }
  }

 private:
  /// Words that no codec makes shorter. For a codec, float32 elements: zeros, and numbers from 1 to
  /// 2 that are the same as bfloat16.
  static void
  put_pattern(std::byte* to, std::size_t bytes, std::uint64_t seed, Settings const& settings) {
    std::uint64_t word = seed * 0x9E3779B97F4A7C15U + 1;
    if (settings.codec == CodecName::identity) {
      for (std::size_t at = 0; at < bytes; at += sizeof word) {
        word = next(word);
        std::memcpy(to + at, &word, sizeof word);
      }
      return;
    }
    for (std::size_t at = 0; at < bytes; at += sizeof(float)) {
      word = next(word);
      bool const is_zero = static_cast<double>(word >> 32U) < settings.zeros * 0x1p32;
      float const element = is_zero ? 0 : 1 + static_cast<float>(word >> 25U & 127U) / 128;
      std::memcpy(to + at, &element, sizeof element);
    }
  }

  [[nodiscard]] static constexpr std::uint64_t next(std::uint64_t word) noexcept {
    return word * 6364136223846793005U + 1442695040888963407U;
  }

  void copy(std::byte* memory, std::byte* host, std::size_t bytes, spillway::CopyKind kind) {
    bool const is_out = kind == spillway::CopyKind::to_host;
    device_->copy(is_out ? host : memory, is_out ? memory : host, bytes, kind, stream_);
  }

  Device* device_;
  spillway::detail::PinnedMemory<Device> pinned_;
  stream_type stream_;
  std::vector<typename Device::event_type> events_;
  std::vector<std::byte> expected_;
};

}  // namespace bandwidth
