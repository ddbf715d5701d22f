// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/prefetch_policy.hpp>
#include <spillway/core/types.hpp>
#include <spillway/device/host_api.hpp>
#include <spillway/interop/ballast.hpp>
#include <spillway/interop/buffer_desk.hpp>
#include <spillway/interop/limited_lookahead.hpp>
#include <spillway/interop/tensorflow.hpp>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <limits>
#include <memory>
#include <string>
#include <utility>

namespace spillway_tf {

/// What `install` is told.
struct InstallOptions {
  std::size_t limit = 0;  // 0: most of what there is
  std::size_t host_limit = 0;
  std::string file_tier;
  std::size_t file_bytes = 0;
  std::size_t least_bytes = 0;
};

/// All that exists once in a process, but for the allocator that TensorFlow sees. Never destroyed:
/// tensors outlive everything else.
template <class Site>
struct SiteState {
  using Allocator = typename Site::allocator_type;
  using stream_type = typename Allocator::stream_type;

  typename Allocator::device_type device;
  stream_type stream;
  spillway::SharedLimit limit;
  Allocator memory;
  spillway::BufferDesk<Allocator> desk;
  spillway::Ballast<Allocator> ballast{memory};
  spillway::tensor_flow::StepWatch steps;

  /// @param device_argument  what the device is made with
  template <class DeviceArgument>
  SiteState(DeviceArgument device_argument,
            stream_type the_stream,
            typename Allocator::Options options,
            std::size_t lookahead_ops)
      : device{device_argument},
        stream{the_stream},
        limit{std::make_shared<std::atomic<std::size_t>>(options.capacity_bytes)},
        memory{device, with_prefetch(std::move(options), lookahead_ops, limit)},
        desk{memory, stream} {}

  [[nodiscard]] static typename Allocator::Options options(InstallOptions const& wanted,
                                                           std::size_t capacity_bytes) {
    typename Allocator::Options options;
    options.capacity_bytes = capacity_bytes;
    options.paging.lease_wait = std::chrono::milliseconds{0};
    options.host.pinned_bytes = wanted.host_limit;
    if (!wanted.file_tier.empty()) {
      options.host.file = wanted.file_tier;
      options.host.file_bytes = wanted.file_bytes;
      if (wanted.host_limit == 0) {
        options.host.pinned_bytes = spillway::HostApi{}.memory_info().total_bytes / 2;
      }
    }
    return options;
  }

  /// Lowers the limit below the capacity that was reserved, or raises it again.
  ///
  /// @throws OutOfDeviceMemory if what is in use does not fit
  void set_limit(std::size_t bytes) {
    *limit = bytes;
    desk.set_limit(bytes);
    ballast.set_limit(bytes, stream, [this] {
      return desk.is_enabled() && !desk.is_under_pressure() && (desk.relieve(), true);
    });
    desk.reset_peaks();  // they counted what is no tensor otherwise
  }

 private:
  [[nodiscard]] static typename Allocator::Options
  with_prefetch(typename Allocator::Options options,
                std::size_t lookahead_ops,
                spillway::SharedLimit const& limit) {
    options.prefetch = spillway::LimitedLookahead{
        spillway::PrefetchOptions{.lookahead_ops = lookahead_ops,
                                  .max_inflight_bytes = std::numeric_limits<std::size_t>::max()},
        limit};
    return options;
  }
};

}  // namespace spillway_tf
