// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/types.hpp>
#include <spillway/device_allocator.hpp>
#include <spillway/host/host_tier.hpp>
#include <spillway/policy/codec/as_bfloat16.hpp>
#include <spillway/policy/codec/zero_bitmap.hpp>

#include <array>
#include <cstddef>
#include <vector>

#include "bandwidth.hpp"

namespace bandwidth {

/// Two sets of blocks of an allocator, swapped out and in one by one by its own calls.
template <class Policies>
class ThroughAllocator {
 public:
  using Device = typename Policies::device;

  ThroughAllocator(Device& device,
                   spillway::HostPoolOptions const& options,
                   std::size_t block_bytes,
                   std::size_t count,
                   CodecName codec)
      : device_{&device},
        stream_{device.create_stream()},
        allocator_{device,
                   {.capacity_bytes = 2 * count * block_bytes + 1_MiB,
                    .bounce_bytes = 0,
                    .host = options,
                    .paging = {.prefetching = false, .early_swap_out = false}}} {
    for (auto& set : blocks_) {
      for (std::size_t i = 0; i < count; ++i) {
        set.push_back(allocator_.allocate(block_bytes));
        set_codec(set.back(), codec);
      }
    }
  }
  ThroughAllocator(ThroughAllocator const&) = delete;
  ThroughAllocator& operator=(ThroughAllocator const&) = delete;
  ~ThroughAllocator() {
    for (auto const& set : blocks_) {
      for (spillway::BlockId const id : set) {
        allocator_.abandon(id);
      }
    }
    allocator_.retire_stream(stream_);
    device_->destroy_stream(stream_);
  }

  void enqueue_out(std::size_t set) {
    for (spillway::BlockId const id : blocks_[set]) {
      allocator_.swap_out(id);
    }
  }
  void enqueue_in(std::size_t set) {
    for (spillway::BlockId const id : blocks_[set]) {
      allocator_.swap_in(id);
    }
  }
  void synchronize(std::size_t /*set*/) { allocator_.synchronize(); }
  /// Brings the set in and makes its host copies stale, so that it has to be copied out.
  void prepare_out(std::size_t set) {
    for_each_block(set, [](std::size_t /*i*/, std::byte* /*block*/) {});
    allocator_.synchronize();
  }
  void prepare_in(std::size_t set) {
    enqueue_out(set);
    allocator_.synchronize();
  }
  void wipe_sync(std::size_t /*set*/) {}  // the blocks have left
  [[nodiscard]] spillway::HostPoolStats stats() const { return allocator_.host_stats(); }

  template <class Use>
  void for_each_block(std::size_t set, Use use) {
    for (std::size_t i = 0; i < blocks_[set].size(); ++i) {
      auto const lease = allocator_.acquire(blocks_[set][i], spillway::Access::read_write, stream_);
      use(i, static_cast<std::byte*>(lease.data()));
    }
  }

 private:
  void set_codec(spillway::BlockId id, CodecName codec) {
    if (codec == CodecName::zero_bitmap) {
      allocator_.template set_codec<spillway::ZeroBitmap>(id);
    } else if (codec == CodecName::bfloat16) {
      allocator_.template set_codec<spillway::AsBfloat16>(id);
    }
  }

  Device* device_;
  typename Device::stream_type stream_;
  spillway::DeviceAllocator<Policies> allocator_;
  std::array<std::vector<spillway::BlockId>, 2> blocks_;
};

}  // namespace bandwidth
