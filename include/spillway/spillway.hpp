// SPDX-License-Identifier: Apache-2.0
#pragma once

/// All public headers that need nothing but the standard library and POSIX.
///
/// Not included: cuda.hpp, which programs for a GPU include; the header of `ModelApi`, a device for
/// planning; testing/, for those who write their own devices and policies; the adapters in interop/
/// that need a third-party library.

#include <spillway/defrag_arena.hpp>
#include <spillway/device/host/host_api.hpp>
#include <spillway/device/host/host_paged_api.hpp>
#include <spillway/device/sim/sim_api.hpp>
#include <spillway/device_allocator.hpp>
#include <spillway/device_share.hpp>
#include <spillway/host_swap_pool.hpp>
#include <spillway/interop/dlpack.hpp>
#include <spillway/interop/leased_memory.hpp>
#include <spillway/lease.hpp>
#include <spillway/observe/snapshot.hpp>
#include <spillway/observe/stats_json.hpp>
#include <spillway/observe/summary.hpp>
#include <spillway/observe/timed_device.hpp>
#include <spillway/observe/timeline.hpp>
#include <spillway/page_arena.hpp>
#include <spillway/policies.hpp>
#include <spillway/policy/codec/as_bfloat16.hpp>
#include <spillway/policy/codec/byte_planes.hpp>
#include <spillway/policy/codec/identity.hpp>
#include <spillway/policy/codec/zero_bitmap.hpp>
#include <spillway/policy/eviction/queue_eviction.hpp>
#include <spillway/policy/eviction/ranked_eviction.hpp>
#include <spillway/policy/fit/best_fit.hpp>
#include <spillway/policy/null_policies.hpp>
#include <spillway/policy/prefetch/reverse_order.hpp>
#include <spillway/sim.hpp>
#include <spillway/stream.hpp>
#include <spillway/stream_prefetcher.hpp>
#include <spillway/swappable_buffer.hpp>
#include <spillway/swappable_tensor.hpp>
