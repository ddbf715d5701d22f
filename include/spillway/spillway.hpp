// SPDX-License-Identifier: Apache-2.0
#pragma once

/// All of the library that needs nothing but the standard library and POSIX.
///
/// On a GPU add cuda_policies.hpp; adapters that need a third party are in interop/ and observe/.

#include <spillway/device/host/host_api.hpp>
#include <spillway/device/host/host_paged_api.hpp>
#include <spillway/device_allocator.hpp>
#include <spillway/interop/dlpack.hpp>
#include <spillway/interop/framework/memory_limit.hpp>
#include <spillway/interop/framework/buffer_leases.hpp>
#include <spillway/interop/framework/install_options.hpp>
#include <spillway/interop/framework/limited_lookahead.hpp>
#include <spillway/interop/leased_memory.hpp>
#include <spillway/interop/torch/context_table.hpp>
#include <spillway/interop/torch/private_pools.hpp>
#include <spillway/interop/torch/tensor_observer.hpp>
#include <spillway/observe/chrome_trace.hpp>
#include <spillway/observe/snapshot_json.hpp>
#include <spillway/observe/stats_json.hpp>
#include <spillway/observe/summary.hpp>
#include <spillway/observe/timeline.hpp>
#include <spillway/page_arena.hpp>
#include <spillway/policies.hpp>
#include <spillway/policy/compaction/no_compaction.hpp>
#include <spillway/policy/eviction/cost_eviction.hpp>
#include <spillway/policy/eviction/fifo_eviction.hpp>
#include <spillway/policy/eviction/lru_eviction.hpp>
#include <spillway/policy/eviction/size_eviction.hpp>
#include <spillway/policy/fit/best_fit.hpp>
#include <spillway/policy/null_lock.hpp>
#include <spillway/policy/prefetch/no_prefetch.hpp>
#include <spillway/policy/prefetch/reverse_order.hpp>
#include <spillway/swappable_buffer.hpp>
#include <spillway/swappable_tensor.hpp>
