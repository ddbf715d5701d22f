// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/device_api.hpp>
#include <spillway/host/host_tier.hpp>
#include <spillway/host/system_file_io.hpp>
#include <spillway/host_swap_pool.hpp>
#include <spillway/pager/copy_streams.hpp>
#include <spillway/stream/stream_order.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <new>
#include <random>
#include <vector>

#include "bandwidth.hpp"
#include "device_blocks.hpp"

namespace bandwidth {

/// Two sets of blocks, one on its way out and one on its way in, through a host pool and the
/// copy streams of a pager: what a pager does with the blocks that it swaps out and in.
template <spillway::DeviceApi Device>
class ThroughStreams {
 public:
  ThroughStreams(Device& device,
                 spillway::HostPoolOptions const& options,
                 std::size_t block_bytes,
                 std::array<DeviceBlocks<Device> const*, 2> sets,
                 Layout layout,
                 std::uint64_t seed)
      : device_{&device},
        order_{device},
        pool_{device, order_, options},
        streams_{device, order_, pool_} {
    for (std::size_t set = 0; set < sets.size(); ++set) {
      for (std::byte* const block : sets[set]->blocks()) {
        auto slot = pool_.try_take(block_bytes);
        if (!slot && pool_.try_grow(block_bytes)) {
          slot = pool_.try_take(block_bytes);
        }
        if (!slot) {
          throw std::bad_alloc{};
        }
        requests_[set].push_back(
            {.slot = *slot, .device = block, .bytes = block_bytes, .reservation = set + 1});
      }
      if (layout == Layout::apart) {
        std::shuffle(requests_[set].begin(), requests_[set].end(), std::mt19937_64{seed + 2});
      }
    }
  }

  void enqueue_out(std::size_t set) { streams_.swap_out(requests_[set]); }
  void enqueue_in(std::size_t set) { streams_.swap_in(requests_[set]); }
  void synchronize(std::size_t set) {
    order_.synchronize(requests_[set].back().done.device_done);
    order_.synchronize(requests_[set].back().done.host_done);
  }
  /// Makes the set ready to go out, or to come in. It is.
  void prepare_out(std::size_t /*set*/) {}
  void prepare_in(std::size_t /*set*/) {}
  [[nodiscard]] spillway::HostPoolStats stats() const { return pool_.stats(); }

  /// Calls `use(position, address)` for each block of a set.
  template <class Use>
  void for_each_block(std::size_t set, Use use) {
    for (std::size_t i = 0; i < requests_[set].size(); ++i) {
      use(i, requests_[set][i].device);
    }
  }
  /// What stays on the device must not be taken for what came back.
  void wipe_sync(std::size_t set) {
    for (spillway::TransferRequest const& r : requests_[set]) {
      device_->fill(r.device, 0xD5, r.bytes, streams_.moves().handle());
    }
    device_->synchronize(streams_.moves().handle());
  }

 private:
  Device* device_;
  spillway::StreamOrder<Device> order_;
  spillway::HostSwapPool<Device> pool_;
  spillway::detail::CopyStreams<Device, spillway::SystemFileIo> streams_;
  std::array<std::vector<spillway::TransferRequest>, 2> requests_;
};

}  // namespace bandwidth
