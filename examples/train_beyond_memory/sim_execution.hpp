// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <thrust/system/cpp/execution_policy.h>

#include <utility>

#include "multiply.hpp"

namespace beyond {

/// Runs Thrust on the simulated device: the thread of the stream runs it on the host, in order.
struct SimExecution {
  using tiling = HostTiling;

  /// Enqueues `work(policy)` on `stream`. Does not wait.
  template <class Device, class Work>
  static void launch(Device& device, typename Device::stream_type stream, Work work) {
    device.launch(stream, [work = std::move(work)] { work(thrust::cpp::par); });
  }
};

}  // namespace beyond
