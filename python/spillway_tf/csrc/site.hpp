// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/prefetch_policy.hpp>
#include <spillway/interop/framework/buffer_leases.hpp>
#include <spillway/interop/framework/install_options.hpp>
#include <spillway/interop/tensorflow.hpp>
#include <spillway/policy/prefetch/schedule_lookahead.hpp>

#include <cstddef>
#include <utility>

namespace spillway_tf {

using spillway::framework::InstallOptions;

/// The objects of which a process has one each, except for the allocator that TensorFlow sees. They
/// are never destroyed, since tensors may outlive everything else.
template <class Site>
struct SiteState {
  using Allocator = typename Site::allocator_type;
  using stream_type = typename Allocator::stream_type;

  typename Allocator::device_type device;
  stream_type stream;
  Allocator memory;
  std::size_t most_bytes;  // the highest limit that can be set
  spillway::framework::BufferLeases<Allocator> leases;
  spillway::tensorflow::StepDetector steps;

  /// Support is off at first, as `install` promises, even if that fails after this.
  ///
  /// @param device_argument  argument of the device's constructor
  template <class DeviceArgument>
  SiteState(DeviceArgument device_argument,
            stream_type the_stream,
            typename Allocator::Options options,
            std::size_t lookahead_ops)
      : device{device_argument},
        stream{the_stream},
        memory{device, fitted(lookahead_ops, std::move(options))},
        most_bytes{memory.stats().capacity_bytes},
        leases{memory, stream} {
    leases.enable(false);
  }

  [[nodiscard]] std::size_t limit() const { return memory.stats().capacity_bytes; }

 private:
  [[nodiscard]] typename Allocator::Options fitted(std::size_t lookahead_ops,
                                                   typename Allocator::Options options) const {
    options = spillway::framework::with_host_memory(device, std::move(options));
    options.prefetch = spillway::ScheduleLookahead{{.lookahead_ops = lookahead_ops}};
    return options;
  }
};

}  // namespace spillway_tf
