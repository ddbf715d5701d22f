// SPDX-License-Identifier: Apache-2.0
#include <spillway/core/host_mapping.hpp>
#include <spillway/core/types.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>

#include <support/temporary_folder.hpp>
#include <unistd.h>

using namespace spillway;
using namespace spillway::detail;

TEST_SUITE("host_mapping") {
  TEST_CASE("HostMapping: memory starts at zero and is writable to its end") {
    HostMapping const mapping = HostMapping::try_map(1_MiB + 1, -1);
    REQUIRE(mapping.data() != nullptr);

    CHECK(mapping.size_bytes() == 1_MiB + 1);
    CHECK(mapping.data()[1_MiB] == std::byte{0});
    mapping.data()[0] = std::byte{1};
    mapping.data()[1_MiB] = std::byte{2};
    CHECK_FALSE(mapping.is_bound());
  }

  TEST_CASE("HostMapping: a request that the system cannot satisfy gives an empty mapping") {
    HostMapping const mapping = HostMapping::try_map(std::size_t{1} << 62U, -1);

    CHECK(mapping.data() == nullptr);
  }

  TEST_CASE("HostMapping: a NUMA node that does not exist is not an error") {
    for (int const node : {1023, 1024, 1 << 30}) {
      HostMapping const mapping = HostMapping::try_map(4096, node);

      REQUIRE(mapping.data() != nullptr);
      CHECK_FALSE(mapping.is_bound());
    }
  }

  TEST_CASE("HostMapping: a move transfers the memory") {
    HostMapping first = HostMapping::try_map(4096, -1);
    std::byte* const data = first.data();

    HostMapping second{std::move(first)};
    HostMapping third;
    third = std::move(second);

    CHECK(third.data() == data);
    CHECK(third.size_bytes() == 4096);
  }

  TEST_CASE("HostMemory: the least limit of the control groups counts") {
    struct Case {
      std::string groups;
      std::string file;
      std::string limit;
      bool counts;
    };
    std::string const v1 = "sys/fs/cgroup/memory/";
    std::string const v2 = "sys/fs/cgroup/";
    for (auto const& [groups, file, limit, counts] :
         {Case{"0::/app/job\n", v2 + "app/job/memory.max", "1048576\n", true},
          Case{"0::/app/job\n", v2 + "app/memory.max", "1048576\n", true},
          Case{"0::/app/job", v2 + "memory.max", "1048576", true},
          Case{"0::/\n", v2 + "memory.max", "1048576\n", true},
          Case{"0::/app\n", v2 + "other/memory.max", "1048576\n", false},
          Case{"0::/app\n", v2 + "app/memory.max", "max\n", false},
          Case{"0::/app\n", v2 + "app/memory.max", "", false},
          Case{"0::/app\n", v2 + "app/memory.max", "99999999999999999999999\n", false},
          Case{"4:cpu,memory:/a\n1:cpu:/b\n", v1 + "a/memory.limit_in_bytes", "1048576\n", true},
          Case{"4:memory:/host/a\n", v1 + "memory.limit_in_bytes", "1048576\n", true},
          Case{"4:memory:/a\n", v1 + "memory.limit_in_bytes", "9223372036854771712\n", false},
          Case{"4:memoryless:/a\n", v1 + "a/memory.limit_in_bytes", "1048576\n", false},
          Case{"no group", v2 + "memory.max", "1048576\n", false}}) {
      CAPTURE(groups);
      CAPTURE(file);
      CAPTURE(limit);
      TemporaryFolder const folder;
      auto const write = [&](std::string const& name, std::string const& text) {
        auto const path = folder.path() / name;
        std::filesystem::create_directories(path.parent_path());
        std::ofstream{path} << text;
      };
      write("proc/self/cgroup", groups);
      write(file, limit);
      auto const machine_bytes = static_cast<std::size_t>(::sysconf(_SC_PHYS_PAGES)) *
                                 static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
      CHECK(HostMemory::usable_bytes(folder.path().string()) == (counts ? 1_MiB : machine_bytes));
      CHECK(HostMemory::usable_bytes((folder.path() / "none").string()) == machine_bytes);
    }
    CHECK(HostMemory::usable_bytes() > 0);
  }
}
