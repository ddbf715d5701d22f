// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/device/host/host_paged_api.hpp>
#include <spillway/device_allocator.hpp>
#include <spillway/interop/framework/buffer_leases.hpp>
#include <spillway/page_arena.hpp>
#include <spillway/sim.hpp>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <initializer_list>
#include <string>
#include <vector>

namespace spillway::test {

/// Leases of buffers in the host's memory, with helpers for common steps of tests.
struct LeasesBench {
  struct Policies : SimPolicies {
    using device = HostPagedApi;
    using arena = StableAddresses;
  };
  using Allocator = DeviceAllocator<Policies>;
  using Leases = framework::BufferLeases<Allocator>;
  using Frame = Leases::Frame;

  explicit LeasesBench(std::size_t capacity_bytes) : LeasesBench{options(capacity_bytes)} {}
  explicit LeasesBench(Allocator::Options const& options) : memory{device, options} {}

  static Allocator::Options options(std::size_t capacity_bytes) {
    Allocator::Options options;
    options.capacity_bytes = capacity_bytes;
    options.host.pinned_bytes = 64_MiB;
    options.paging.lease_wait = std::chrono::milliseconds{0};
    return options;
  }

  /// The result of an operation without operands, full of `byte`. Null if there is no room.
  unsigned char* make(std::size_t bytes, unsigned char byte) {
    Frame frame{1};
    if (!leases.try_enter(frame, {}).empty()) {
      return nullptr;
    }
    auto* const p = static_cast<unsigned char*>(leases.try_allocate(bytes, &frame));
    if (p != nullptr) {
      std::memset(p, byte, bytes);
      std::array<void*, 1> const results{p};
      leases.make_swappable(results);
    }
    leases.exit(frame);
    return p;
  }

  /// Reads the first byte of each in one operation; throws if that cannot be.
  std::vector<unsigned char> read(std::initializer_list<unsigned char*> buffers) {
    std::vector<framework::BufferUse> uses;
    for (unsigned char* const p : buffers) {
      uses.push_back({p, false});
    }
    Frame frame{1};
    if (std::string const why = leases.try_enter(frame, uses); !why.empty()) {
      throw OutOfDeviceMemory{{}, why};
    }
    std::vector<unsigned char> bytes;
    for (unsigned char* const p : buffers) {
      bytes.push_back(*p);
    }
    leases.exit(frame);
    return bytes;
  }

  HostPagedApi device{{.remap = HostRemap::pages}};  // as in TensorFlow's module
  Allocator memory;
  Leases leases{memory, HostStream::caller};
};

}  // namespace spillway::test
