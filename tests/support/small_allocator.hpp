// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/device_allocator.hpp>
#include <spillway/policy/eviction/queue_eviction.hpp>
#include <spillway/policy/null_policies.hpp>
#include <spillway/sim.hpp>
#include <spillway/swappable_buffer.hpp>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace support {

using namespace spillway::literals;

/// A device with real bytes and its own threads, with policies that do nothing ahead of need.
struct SmallPolicies : spillway::SimPolicies {
  using eviction = spillway::LruEviction;
  using prefetch = spillway::NoPrefetch;
};
using SmallAllocator = spillway::DeviceAllocator<SmallPolicies>;
using SmallBuffer = spillway::SwappableBuffer<SmallAllocator>;

[[nodiscard]] inline SmallAllocator::Options small_options(std::size_t capacity_bytes) {
  SmallAllocator::Options options{.capacity_bytes = capacity_bytes};
  options.bounce_bytes = 0;
  options.host.pinned_bytes = 16_MiB;
  options.host.slab_bytes = 1_MiB;
  options.paging.poison_vacated = true;
  return options;
}

/// An allocator and one stream.
struct SmallBench {
  explicit SmallBench(SmallAllocator::Options options = small_options(1_MiB),
                      spillway::SimOptions sim = {.capacity_bytes = 64_MiB})
      : device{sim}, allocator{device, options} {}
  SmallBench(SmallBench const&) = delete;
  SmallBench& operator=(SmallBench const&) = delete;
  ~SmallBench() {
    allocator.retire_stream(stream);
    device.synchronize(stream);
    device.destroy_stream(stream);
  }

  spillway::SimApi device;
  SmallAllocator allocator;
  spillway::SimApi::stream_type stream = device.create_stream();
};

/// A block whose bytes are known, to be checked after an error elsewhere.
class KnownBytes {
 public:
  KnownBytes(SmallBench& bench, std::size_t size_bytes, std::uint8_t seed)
      : bench_{bench}, buffer_{bench.allocator, size_bytes}, bytes_(size_bytes) {
    for (std::size_t i = 0; i < size_bytes; ++i) {
      bytes_[i] = static_cast<std::uint8_t>(seed + i * 7);
    }
    auto const lease = buffer_.acquire(spillway::Access::write, bench.stream);
    bench.allocator.copy_from_host_sync(lease.data(), bytes_.data(), size_bytes, bench.stream);
  }

  [[nodiscard]] bool is_intact() {
    std::vector<std::uint8_t> read(bytes_.size());
    auto const lease = buffer_.acquire(spillway::Access::read, bench_.stream);
    bench_.allocator.copy_to_host_sync(read.data(), lease.data(), read.size(), bench_.stream);
    return read == bytes_;
  }
  [[nodiscard]] SmallBuffer& buffer() noexcept { return buffer_; }

 private:
  SmallBench& bench_;
  SmallBuffer buffer_;
  std::vector<std::uint8_t> bytes_;
};

}  // namespace support

#if defined(SPILLWAY_TEST_POLICIES_COMPILED)
namespace spillway {

SPILLWAY_INSTANTIATE_ALLOCATOR(extern template, support::SmallPolicies);

}  // namespace spillway
#endif
