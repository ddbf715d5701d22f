// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/device_allocator.hpp>
#include <spillway/observe/timeline.hpp>
#include <spillway/policy/eviction/queue_eviction.hpp>
#include <spillway/policy/null_policies.hpp>
#include <spillway/sim.hpp>
#include <spillway/swappable_buffer.hpp>
#include <spillway/testing/stepped_sim_api.hpp>

#include <cstddef>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include <support/stepped_policies.hpp>

namespace support {

using namespace spillway::literals;

/// The defaults on a stepped device, watched by a timeline.
struct Watched : SteppedPolicies {
  using observer = spillway::Timeline;
};
/// The same without anything that happens ahead of need.
struct WatchedOnDemand : Watched {
  using eviction = spillway::LruEviction;
  using prefetch = spillway::NoPrefetch;
};

/// Random buffers on an allocator that has room for about half of them.
template <class Policies>
class WatchedProgram {
 public:
  using Allocator = spillway::DeviceAllocator<Policies>;
  using Buffer = spillway::SwappableBuffer<Allocator>;

  explicit WatchedProgram(std::uint64_t seed) : random_{seed}, allocator{device, options()} {}
  WatchedProgram(WatchedProgram const&) = delete;
  WatchedProgram& operator=(WatchedProgram const&) = delete;
  ~WatchedProgram() {
    buffers.clear();
    allocator.retire_stream(stream_);
  }

  void run(std::size_t operations) {
    for (std::size_t i = 0; i < operations; ++i) {
      step();
    }
  }

  /// One operation. Some buffers are overwritten while they are swapped out, and some are made and
  /// freed without contents.
  void step() {
    if (buffers.size() < 8 || (buffers.size() < 48 && draw(5) == 0)) {
      buffers.emplace_back(allocator, 1 + draw(64_KiB));
      if (draw(4) != 0) {
        (void)buffers.back().acquire(spillway::Access::write, stream_);
      }
      return;
    }
    Buffer& buffer = buffers[draw(buffers.size())];
    switch (draw(16)) {
    case 0:
    case 1:
      std::swap(buffer, buffers.back());
      buffers.pop_back();
      break;
    case 2:
      buffer.swap_out();
      break;
    case 3:
      buffer.swap_in();
      break;
    case 4:
      allocator.compact();
      break;
    case 5:
      allocator.begin_step();
      break;
    case 6:
    case 7:
      (void)buffer.acquire(spillway::Access::read_write, stream_);
      break;
    case 8:
      (void)buffer.acquire(spillway::Access::write, stream_);
      break;
    default:
      (void)buffer.acquire(spillway::Access::read, stream_);
      break;
    }
  }

  std::size_t draw(std::size_t below) { return random_() % below; }

 private:
  static typename Allocator::Options options() {
    typename Allocator::Options options{.capacity_bytes = 768_KiB};
    options.initial_bytes = 256_KiB;
    options.growth_bytes = 128_KiB;
    options.bounce_bytes = 0;
    options.host.pinned_bytes = 64_MiB;
    return options;
  }

  std::mt19937_64 random_;

 public:
  spillway::testing::SteppedSimApi device{{.capacity_bytes = 64_MiB, .check_reads = false}};
  Allocator allocator;
  std::vector<Buffer> buffers;

 private:
  spillway::testing::SteppedSimApi::stream_type stream_ = device.create_stream();
};

}  // namespace support

#if defined(SPILLWAY_TEST_POLICIES_COMPILED)
namespace spillway {

SPILLWAY_INSTANTIATE_ALLOCATOR(extern template, support::Watched);
SPILLWAY_INSTANTIATE_ALLOCATOR(extern template, support::WatchedOnDemand);

}  // namespace spillway
#endif
