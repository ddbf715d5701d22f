// SPDX-License-Identifier: Apache-2.0
#include <spillway/concepts/device_capabilities.hpp>
#include <spillway/core/error.hpp>
#include <spillway/interop/framework/install_options.hpp>
#include <spillway/sim.hpp>

#include <doctest/doctest.h>

#include <chrono>
#include <cstddef>
#include <filesystem>

#include <support/small_allocator.hpp>
#include <support/temporary_folder.hpp>

using namespace spillway;
using namespace spillway::framework;
using support::SmallAllocator;

namespace {

/// A device that has the host's memory.
struct SharedSim : SimApi {
  [[nodiscard]] static bool shares_host_memory() noexcept { return true; }
};
struct SharedPolicies : SimPolicies {
  using device = SharedSim;
};
using SharedAllocator = DeviceAllocator<SharedPolicies>;
static_assert(SharedMemoryApi<SharedSim> && !SharedMemoryApi<SimApi>);

}  // namespace

TEST_SUITE("install_options") {
  TEST_CASE("InstallOptions: without a file tier, host memory has the given size") {
    InstallOptions const said{.limit = 3_MiB, .host_limit = 5_MiB, .file_bytes = 9_MiB};

    auto const options = said.for_allocator<SmallAllocator>(2_MiB);

    CHECK(options.capacity_bytes == 2_MiB);
    CHECK(options.host.pinned_bytes == 5_MiB);
    CHECK(options.host.file.empty());
    CHECK(options.host.file_bytes == 0);
    CHECK(InstallOptions{}.for_allocator<SmallAllocator>(2_MiB).host.pinned_bytes == 0);
  }

  TEST_CASE("InstallOptions: with a file tier, the default is half of the machine's memory") {
    std::size_t const machine_bytes = HostApi{}.memory_info().total_bytes;
    SimApi const device;
    InstallOptions wanted{.file_tier = "/folder", .file_bytes = 9_MiB};

    auto const unsaid = with_host_memory(device, wanted.for_allocator<SmallAllocator>(2_MiB));
    wanted.host_limit = 5_MiB;
    auto const said = with_host_memory(device, wanted.for_allocator<SmallAllocator>(2_MiB));

    CHECK(unsaid.host.pinned_bytes == machine_bytes / 2);
    CHECK(said.host.pinned_bytes == 5_MiB);
    CHECK(said.host.file == std::filesystem::path{"/folder"});
    CHECK(said.host.file_bytes == 9_MiB);
  }

  TEST_CASE("InstallOptions: a device that shares the host's memory swaps to the file only") {
    TemporaryFolder const folder;
    SharedSim device;
    auto const make = [&](InstallOptions const& wanted) {
      SharedAllocator const allocator{
          device, with_host_memory(device, wanted.for_allocator<SharedAllocator>(2_MiB))};
      return allocator.host_stats();
    };

    HostPoolStats const file = make({.file_tier = folder.path(), .file_bytes = 9_MiB});
    CHECK(file.tier(HostTier::pinned).capacity_bytes == 0);
    CHECK(file.tier(HostTier::file).capacity_bytes == 9_MiB);
    CHECK(make({}).tier(HostTier::pinned).capacity_bytes == 0);  // and there is nowhere to swap to
    CHECK_THROWS_AS((void)make({.host_limit = 1_MiB}), ContractViolation);
  }

  TEST_CASE("InstallOptions: the pager does not wait for leases") {
    auto const options = InstallOptions{}.for_allocator<SmallAllocator>(2_MiB);

    CHECK(options.paging.lease_wait == std::chrono::milliseconds{0});
  }

  TEST_CASE("InstallOptions: device memory is reserved when it is needed") {
    CHECK(InstallOptions{}.for_allocator<SmallAllocator>(2_MiB).initial_bytes == 0);
    CHECK(InstallOptions{}.for_allocator<SmallAllocator>(2_MiB).growth_bytes == 2_MiB);
    CHECK(InstallOptions{}.for_allocator<SmallAllocator>(1_GiB).growth_bytes == 16_MiB);
    CHECK(InstallOptions{}.for_allocator<SmallAllocator>(64_GiB).growth_bytes == 32_MiB);
    CHECK(InstallOptions{}.for_allocator<SmallAllocator>(0).growth_bytes == 32_MiB);
  }

  TEST_CASE("InstallOptions: all other options are the allocator's defaults") {
    auto const options = InstallOptions{}.for_allocator<SmallAllocator>(2_MiB);
    SmallAllocator::Options const usual;

    CHECK(options.bounce_bytes == usual.bounce_bytes);
    CHECK(options.host.slab_bytes == usual.host.slab_bytes);
  }
}
