// SPDX-License-Identifier: Apache-2.0
#include <spillway/core/host_mapping.hpp>
#include <spillway/core/types.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <utility>

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
}
