// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/device_api.hpp>
#include <spillway/concepts/device_capabilities.hpp>
#include <spillway/testing/stepped_sim_api.hpp>

#include <cstddef>
#include <span>

namespace spillway::test {

using testing::SteppedSimApi;

/// A device with the calls of `DeviceApi` and no other: a stepped simulation that hides the rest.
class OneByOneArchetype : private SteppedSimApi {
 public:
  using SteppedSimApi::event_type;
  using SteppedSimApi::stream_type;

  using SteppedSimApi::clock_ns;
  using SteppedSimApi::copy;
  using SteppedSimApi::create_event;
  using SteppedSimApi::create_stream;
  using SteppedSimApi::destroy_event;
  using SteppedSimApi::destroy_stream;
  using SteppedSimApi::fill;
  using SteppedSimApi::free_pinned;
  using SteppedSimApi::is_complete;
  using SteppedSimApi::launch_host;
  using SteppedSimApi::memory_info;
  using SteppedSimApi::numa_node;
  using SteppedSimApi::record;
  using SteppedSimApi::release;
  using SteppedSimApi::synchronize;
  using SteppedSimApi::try_allocate_pinned;
  using SteppedSimApi::try_reserve;
  using SteppedSimApi::wait;

  /// For tests to look at what was enqueued.
  [[nodiscard]] SteppedSimApi& simulation() noexcept { return *this; }
};

/// The same with the one call of `BatchCopyApi`.
class BatchCopyArchetype : public OneByOneArchetype {
 public:
  void copy_batch(std::span<void* const> to,
                  std::span<void const* const> from,
                  std::span<std::size_t const> sizes,
                  CopyKind kind,
                  stream_type stream) {
    simulation().copy_batch(to, from, sizes, kind, stream);
  }
};

static_assert(DeviceApi<OneByOneArchetype> && !BatchCopyApi<OneByOneArchetype>);
static_assert(BatchCopyApi<BatchCopyArchetype>);

}  // namespace spillway::test
