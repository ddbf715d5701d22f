// SPDX-License-Identifier: Apache-2.0
#include <spillway/interop/framework/install_options.hpp>

#include <doctest/doctest.h>

#include <chrono>
#include <cstddef>
#include <filesystem>

#include <support/small_allocator.hpp>

using namespace spillway;
using namespace spillway::framework;
using support::SmallAllocator;

TEST_SUITE("install_options") {
  TEST_CASE("InstallOptions: without a file tier, host memory is as much as was said") {
    InstallOptions const said{.limit = 3_MiB, .host_limit = 5_MiB, .file_bytes = 9_MiB};

    auto const options = said.for_allocator<SmallAllocator>(2_MiB);

    CHECK(options.capacity_bytes == 2_MiB);
    CHECK(options.host.pinned_bytes == 5_MiB);
    CHECK(options.host.file.empty());
    CHECK(options.host.file_bytes == 0);
    CHECK(InstallOptions{}.for_allocator<SmallAllocator>(2_MiB).host.pinned_bytes == 0);
  }

  TEST_CASE("InstallOptions: with a file tier, host memory is half of the machine's if not said") {
    std::size_t const machine_bytes = HostApi{}.memory_info().total_bytes;
    InstallOptions wanted{.file_tier = "/folder", .file_bytes = 9_MiB};

    auto const unsaid = wanted.for_allocator<SmallAllocator>(2_MiB);
    wanted.host_limit = 5_MiB;
    auto const said = wanted.for_allocator<SmallAllocator>(2_MiB);

    CHECK(unsaid.host.pinned_bytes == machine_bytes / 2);
    CHECK(said.host.pinned_bytes == 5_MiB);
    CHECK(said.host.file == std::filesystem::path{"/folder"});
    CHECK(said.host.file_bytes == 9_MiB);
  }

  TEST_CASE("InstallOptions: the pager does not wait for leases") {
    auto const options = InstallOptions{}.for_allocator<SmallAllocator>(2_MiB);

    CHECK(options.paging.lease_wait == std::chrono::milliseconds{0});
  }

  TEST_CASE("InstallOptions: memory is taken from the device when it is needed") {
    CHECK(InstallOptions{}.for_allocator<SmallAllocator>(2_MiB).initial_bytes == 0);
    CHECK(InstallOptions{}.for_allocator<SmallAllocator>(2_MiB).growth_bytes == 2_MiB);
    CHECK(InstallOptions{}.for_allocator<SmallAllocator>(1_GiB).growth_bytes == 16_MiB);
    CHECK(InstallOptions{}.for_allocator<SmallAllocator>(64_GiB).growth_bytes == 32_MiB);
    CHECK(InstallOptions{}.for_allocator<SmallAllocator>(0).growth_bytes == 32_MiB);
  }

  TEST_CASE("InstallOptions: the rest is as the allocator has it") {
    auto const options = InstallOptions{}.for_allocator<SmallAllocator>(2_MiB);
    SmallAllocator::Options const usual;

    CHECK(options.bounce_bytes == usual.bounce_bytes);
    CHECK(options.host.slab_bytes == usual.host.slab_bytes);
  }
}
