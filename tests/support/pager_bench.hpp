// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/error.hpp>
#include <spillway/core/types.hpp>
#include <spillway/page_arena.hpp>
#include <spillway/policy/eviction/queue_eviction.hpp>
#include <spillway/policy/eviction/schedule_eviction.hpp>
#include <spillway/policy/null_policies.hpp>
#include <spillway/policy/prefetch/schedule_lookahead.hpp>
#include <spillway/sim.hpp>
#include <spillway/testing/stepped_sim_api.hpp>

#include <cstddef>
#include <cstdint>

#include <support/stepped_bench.hpp>

namespace support {

using namespace spillway::literals;

/// A stepped device that can refuse all copies after a given number.
class StubbornDevice : public spillway::testing::SteppedSimApi {
 public:
  using spillway::testing::SteppedSimApi::SteppedSimApi;

  void
  copy(void* to, void const* from, std::size_t bytes, spillway::CopyKind kind, stream_type stream) {
    if (copies_left == 0) {
      throw spillway::DeviceError{"no more copies"};
    }
    --copies_left;
    spillway::testing::SteppedSimApi::copy(to, from, bytes, kind, stream);
  }

  std::size_t copies_left = SIZE_MAX;
};

/// Nothing happens ahead of need.
struct Plain : spillway::SimPolicies {
  using device = StubbornDevice;
  using eviction = spillway::LruEviction;
  using prefetch = spillway::NoPrefetch;
};
struct Remapping : Plain {
  using arena = spillway::MappedPages;
};
struct Stable : Plain {
  using arena = spillway::StableAddresses;
};
// In a short loop, room for prefetching is large compared with the bytes that must be away.
struct RoomyEviction : spillway::ScheduleEviction {
  RoomyEviction() : ScheduleEviction{spillway::detail::PlanOptions{.most_extra_for_next = 0.5}} {}
};
struct Scheduled : Plain {
  using eviction = RoomyEviction;
  using prefetch = spillway::ScheduleLookahead;
};

/// An allocator on that device, with a given capacity and a given size of the pinned pool.
template <class Policies>
struct PagerBench : SteppedBench<Policies> {
  using Allocator = typename SteppedBench<Policies>::Allocator;

  explicit PagerBench(std::size_t capacity_bytes, std::size_t pinned_bytes = 64_MiB)
      : SteppedBench<Policies>{{.capacity_bytes = 64_MiB, .granularity_bytes = 4_KiB},
                               options(capacity_bytes, pinned_bytes)} {}

  static typename Allocator::Options options(std::size_t capacity_bytes, std::size_t pinned_bytes) {
    typename Allocator::Options options{.capacity_bytes = capacity_bytes};
    options.bounce_bytes = 16_KiB;
    options.host.pinned_bytes = pinned_bytes;
    options.host.initial_pinned_bytes = pinned_bytes;
    return options;
  }
};

}  // namespace support
