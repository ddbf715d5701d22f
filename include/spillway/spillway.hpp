// SPDX-License-Identifier: Apache-2.0
#pragma once

/// All of the library that needs nothing but the standard library and POSIX.
///
/// On a GPU add cuda_policies.hpp; adapters that need a third party are in interop/ and observe/.

#include <spillway/default_policies.hpp>
#include <spillway/device/host_api.hpp>
#include <spillway/device/host_paged_api.hpp>
#include <spillway/device_allocator.hpp>
#include <spillway/interop/ballast.hpp>
#include <spillway/interop/buffer_desk.hpp>
#include <spillway/interop/dlpack.hpp>
#include <spillway/interop/install_options.hpp>
#include <spillway/interop/leased_memory.hpp>
#include <spillway/interop/limited_lookahead.hpp>
#include <spillway/interop/torch/context_book.hpp>
#include <spillway/interop/torch/private_pools.hpp>
#include <spillway/interop/torch/tensor_watch.hpp>
#include <spillway/observe/chrome_trace.hpp>
#include <spillway/observe/snapshot_json.hpp>
#include <spillway/observe/stats_json.hpp>
#include <spillway/observe/summary.hpp>
#include <spillway/observe/timeline.hpp>
#include <spillway/policy/best_fit.hpp>
#include <spillway/policy/cost_eviction.hpp>
#include <spillway/policy/fifo_eviction.hpp>
#include <spillway/policy/lru_eviction.hpp>
#include <spillway/policy/no_compaction.hpp>
#include <spillway/policy/no_prefetch.hpp>
#include <spillway/policy/null_lock.hpp>
#include <spillway/policy/remap_compaction.hpp>
#include <spillway/policy/reverse_order.hpp>
#include <spillway/policy/size_eviction.hpp>
#include <spillway/swappable_buffer.hpp>
#include <spillway/swappable_tensor.hpp>
