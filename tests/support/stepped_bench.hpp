// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/device/sim/sim_options.hpp>
#include <spillway/device_allocator.hpp>
#include <spillway/swappable_buffer.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include <support/pattern.hpp>

namespace support {

/// An allocator on a device that is stepped by hand, and kernels that write and check blocks.
template <class Policies>
class SteppedBench {
 public:
  using Allocator = spillway::DeviceAllocator<Policies>;
  using Buffer = spillway::SwappableBuffer<Allocator>;
  using Device = typename Policies::device;

  SteppedBench(spillway::SimOptions const& device_options,
               typename Allocator::Options const& options,
               std::size_t stream_count = 1)
      : device{device_options}, allocator{device, options} {
    for (std::size_t i = 0; i < stream_count; ++i) {
      streams.push_back(device.create_stream());
    }
  }
  ~SteppedBench() {
    for (auto const each : streams) {
      allocator.retire_stream(each);
    }
  }
  SteppedBench(SteppedBench const&) = delete;
  SteppedBench& operator=(SteppedBench const&) = delete;

  [[nodiscard]] typename Device::stream_type stream() const { return streams.front(); }

  void write(Buffer& buffer, std::uint64_t seed, std::size_t on = 0) {
    auto const lease = buffer.acquire(spillway::Access::write, streams.at(on));
    kernels.write(device, streams.at(on), lease.data(), lease.size_bytes(), seed);
  }
  void check(Buffer& buffer, std::uint64_t seed, std::size_t on = 0) {
    auto const lease = buffer.acquire(spillway::Access::read, streams.at(on));
    kernels.check(device, streams.at(on), lease.data(), lease.size_bytes(), seed);
  }
  /// Changes all bytes of a block. The device throws if this is not ordered after earlier work.
  void fill(Buffer& buffer, unsigned char value, std::size_t on = 0) {
    auto const lease = buffer.acquire(spillway::Access::read_write, streams.at(on));
    device.fill(lease.data(), value, lease.size_bytes(), streams.at(on));
  }
  /// Runs everything that is enqueued; then every check must have found the bytes that were
  /// written.
  void run() {
    device.run_all();
    CHECK_MESSAGE(kernels.failures() == 0, kernels.first_failure());
  }

  PatternKernels kernels;  // before the device, whose end runs what is enqueued
  Device device;
  Allocator allocator;
  std::vector<typename Device::stream_type> streams;
};

}  // namespace support
