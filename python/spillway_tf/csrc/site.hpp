// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/prefetch_policy.hpp>
#include <spillway/core/types.hpp>
#include <spillway/interop/framework/buffer_leases.hpp>
#include <spillway/interop/framework/install_options.hpp>
#include <spillway/interop/framework/memory_limit.hpp>
#include <spillway/interop/tensorflow.hpp>

#include <atomic>
#include <cstddef>
#include <limits>
#include <memory>
#include <utility>

namespace spillway_tf {

using spillway::framework::InstallOptions;

/// The objects that exist once in a process, except for the allocator that TensorFlow sees. They
/// are never destroyed, since tensors outlive everything else.
template <class Site>
struct SiteState {
  using Allocator = typename Site::allocator_type;
  using stream_type = typename Allocator::stream_type;

  typename Allocator::device_type device;
  stream_type stream;
  spillway::framework::SharedLimit limit;
  spillway::framework::LimitedLookahead prefetch;
  Allocator memory;
  spillway::framework::BufferLeases<Allocator> leases;
  spillway::framework::LimitReservation<Allocator> reservation{memory};
  spillway::tensorflow::StepDetector steps;

  /// @param device_argument  what the device is made with
  template <class DeviceArgument>
  SiteState(DeviceArgument device_argument,
            stream_type the_stream,
            typename Allocator::Options options,
            std::size_t lookahead_ops)
      : device{device_argument},
        stream{the_stream},
        limit{std::make_shared<std::atomic<std::size_t>>(options.capacity_bytes)},
        prefetch{{.lookahead_ops = lookahead_ops,
                  .max_inflight_bytes = std::numeric_limits<std::size_t>::max()},
                 limit},
        memory{device, with(prefetch, std::move(options))},
        leases{memory, stream} {}

  /// Lowers the limit below the capacity that was reserved, or raises it again.
  ///
  /// @throws OutOfDeviceMemory if what is in use does not fit
  void set_limit(std::size_t bytes) {
    *limit = bytes;
    leases.set_limit(bytes);
    reservation.set_limit(bytes, stream, [this] {
      return leases.is_enabled() && !leases.is_under_pressure() && (leases.start_reclaim(), true);
    });
    leases.reset_peaks();  // they would count the reservation, too
  }

 private:
  [[nodiscard]] static typename Allocator::Options
  with(spillway::framework::LimitedLookahead const& prefetch, typename Allocator::Options options) {
    options.prefetch = prefetch;
    return options;
  }
};

}  // namespace spillway_tf
