// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/device_api.hpp>
#include <spillway/concepts/device_capabilities.hpp>
#include <spillway/device/sim/basic_sim_api.hpp>
#include <spillway/device/sim/sim_threaded.hpp>

namespace spillway {

/// A device of host memory whose streams run at once, each on a thread: the default without a GPU.
using SimApi = detail::BasicSimApi<detail::ThreadedExecutor>;

static_assert(BatchCopyApi<SimApi> && VirtualMemoryApi<SimApi>);

}  // namespace spillway
