// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/batch_copy_api.hpp>
#include <spillway/concepts/device_api.hpp>
#include <spillway/concepts/virtual_memory_api.hpp>
#include <spillway/device/sim/basic_sim_api.hpp>
#include <spillway/device/sim/model_api.hpp>
#include <spillway/testing/stepped_sim_api.hpp>
#include <spillway/device/sim/sim_threaded.hpp>

namespace spillway {

/// A device of host memory whose streams run at once, each on a thread: the default without a GPU.
using SimApi = detail::BasicSimApi<detail::ThreadedExecutor>;

/// The same, but nothing runs until it is told to: for tests of order.
using SteppedSimApi = detail::BasicSimApi<detail::SteppedExecutor>;

/// A device without bytes, on a virtual clock: for planning at any scale.
using ModelApi = detail::BasicSimApi<detail::ModelExecutor>;

static_assert(BatchCopyApi<SimApi> && VirtualMemoryApi<SimApi>);
static_assert(BatchCopyApi<SteppedSimApi> && VirtualMemoryApi<SteppedSimApi>);
static_assert(BatchCopyApi<ModelApi> && VirtualMemoryApi<ModelApi>);

}  // namespace spillway
