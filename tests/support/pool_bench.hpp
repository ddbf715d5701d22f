// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/types.hpp>
#include <spillway/device/sim/sim_api.hpp>
#include <spillway/host/host_tier.hpp>
#include <spillway/host_swap_pool.hpp>
#include <spillway/stream/stream_order.hpp>
#include <spillway/testing/faulty_file_io.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstring>
#include <utility>
#include <vector>

#include <support/temporary_folder.hpp>

/// A simulated device that remembers its streams, so that a test can step those of a pool, and its
/// pinned memory, so that a test can damage it.
template <class Sim>
class WatchedDevice : public Sim {
 public:
  using Sim::Sim;
  using typename Sim::stream_type;

  [[nodiscard]] stream_type create_stream() {
    created.push_back(Sim::create_stream());
    return created.back();
  }

  [[nodiscard]] void* try_allocate_pinned(std::size_t bytes, int numa_node) {
    pinned.push_back(static_cast<std::byte*>(Sim::try_allocate_pinned(bytes, numa_node)));
    return pinned.back();
  }

  std::vector<stream_type> created;
  std::vector<std::byte*> pinned;
};

/// A device, its stream order, and common steps of tests of a host pool.
template <class Sim>
class PoolBench {
 public:
  using device_type = WatchedDevice<Sim>;
  using stream_type = typename device_type::stream_type;
  using pool_type = spillway::HostSwapPool<device_type, spillway::testing::FaultyFileIo>;

  explicit PoolBench(spillway::SimOptions options = {},
                     spillway::testing::FaultyFileIo file_io = {})
      : io{std::move(file_io)}, device{options}, order{device} {
    stream = device.create_stream();
  }

  /// Options with small slabs and chunks and only the tiers that are given room.
  [[nodiscard]] spillway::HostPoolOptions
  options(std::size_t pinned, std::size_t pageable, std::size_t file) const {
    return {.pinned_bytes = pinned,
            .pageable_bytes = pageable,
            .file_bytes = file,
            .file = folder.path(),
            .slab_bytes = 16 << 10,
            .staging_chunks = 3,
            .staging_bytes = 4 << 10};
  }
  /// Options with this tier only.
  [[nodiscard]] spillway::HostPoolOptions options(spillway::HostTier tier,
                                                  std::size_t bytes) const {
    using spillway::HostTier;
    return options(tier == HostTier::pinned ? bytes : 0,
                   tier == HostTier::pageable ? bytes : 0,
                   tier == HostTier::file ? bytes : 0);
  }

  /// Device memory, poisoned; given back with this object.
  [[nodiscard]] std::byte* reserve(std::size_t bytes) {
    auto* const data = static_cast<std::byte*>(device.try_reserve(bytes));
    REQUIRE(data != nullptr);
    reserved_.push_back({data, bytes});
    return data;
  }

  PoolBench(PoolBench const&) = delete;
  PoolBench& operator=(PoolBench const&) = delete;
  ~PoolBench() {
    for (auto const& [data, bytes] : reserved_) {
      device.release(data, bytes);
    }
  }

  /// A slot, growing the pool if need be.
  template <class Pool>
  [[nodiscard]] static spillway::HostSlotId take(Pool& pool, std::size_t bytes) {
    auto id = pool.try_take(bytes);
    if (!id && pool.try_grow(bytes)) {
      id = pool.try_take(bytes);
    }
    REQUIRE(id.has_value());
    return *id;
  }

  TemporaryFolder folder;
  spillway::testing::FaultyFileIo io;
  device_type device;
  spillway::StreamOrder<device_type> order;
  stream_type stream{};

 private:
  struct Reserved {
    std::byte* data;
    std::size_t bytes;
  };
  std::vector<Reserved> reserved_;
};

/// Bytes that differ by seed and by place.
inline void put_pattern(std::byte* at, std::size_t bytes, unsigned seed) {
  for (std::size_t i = 0; i < bytes; ++i) {
    at[i] = static_cast<std::byte>((i * 31 + i / 251 + seed * 97U + 1) & 0xFF);
  }
}

[[nodiscard]] inline bool has_pattern(std::byte const* at, std::size_t bytes, unsigned seed) {
  std::vector<std::byte> expected(bytes);
  put_pattern(expected.data(), bytes, seed);
  return std::memcmp(at, expected.data(), bytes) == 0;
}
