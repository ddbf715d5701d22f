// SPDX-License-Identifier: Apache-2.0
#include <spillway/device/sim/sim_backing.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <random>

using namespace spillway;
using spillway::detail::SimHostBacking;

namespace {

constexpr SimOptions options{.granularity_bytes = 64_KiB, .poison_byte = 0xAB};

}  // namespace

TEST_SUITE("sim_backing") {
  TEST_CASE("SimHostBacking: address ranges are aligned to any granularity") {
    for (std::size_t const granularity : {4_KiB, 64_KiB, 2_MiB, 32_MiB}) {
      CAPTURE(granularity);
      SimOptions const coarse{.granularity_bytes = granularity};
      SimHostBacking backing{coarse};
      void* const first = backing.reserve_address(granularity);
      void* const second = backing.reserve_address(3 * granularity);
      CHECK(reinterpret_cast<std::uintptr_t>(first) % granularity == 0);
      CHECK(reinterpret_cast<std::uintptr_t>(second) % granularity == 0);
      backing.free_address(first, granularity);
      backing.free_address(second, 3 * granularity);
    }
  }

  TEST_CASE("SimHostBacking: reserving too many addresses is an error with a reason") {
    SimHostBacking backing{options};
    errno = 0;
    CHECK_THROWS_WITH_AS((void)backing.reserve_address(std::numeric_limits<std::size_t>::max()),
                         doctest::Contains(std::strerror(ENOMEM)),
                         DeviceError);
  }

  TEST_CASE("SimHostBacking: a granularity that is no multiple of the page size is refused") {
    SimOptions const fine{.granularity_bytes = 512};
    CHECK_THROWS_AS(SimHostBacking{fine}, ContractViolation);
  }

  TEST_CASE("SimHostBacking: physical memory is poisoned when it is created, new or reused") {
    SimHostBacking backing{options};
    auto* const p = static_cast<unsigned char*>(backing.reserve_address(64_KiB));
    for (int round = 0; round < 2; ++round) {
      std::uint64_t const offset = backing.create_physical(64_KiB);
      CHECK(offset == 0);
      backing.map(p, offset, 64_KiB);
      CHECK(std::count(p, p + 64_KiB, 0xAB) == 64_KiB);
      std::fill_n(p, 64_KiB, static_cast<unsigned char>(1));
      backing.unmap(p, 64_KiB);
      backing.release_physical(offset, 64_KiB);
    }
    backing.free_address(p, 64_KiB);
  }

  TEST_CASE("SimHostBacking: adjacent released pieces can serve a larger request") {
    SimHostBacking backing{options};
    std::uint64_t const a = backing.create_physical(64_KiB);
    std::uint64_t const b = backing.create_physical(64_KiB);
    std::uint64_t const c = backing.create_physical(64_KiB);
    std::uint64_t const d = backing.create_physical(64_KiB);
    SUBCASE("released in order") {
      backing.release_physical(a, 64_KiB);
      backing.release_physical(b, 64_KiB);
      backing.release_physical(c, 64_KiB);
    }
    SUBCASE("released in reverse order") {
      backing.release_physical(c, 64_KiB);
      backing.release_physical(b, 64_KiB);
      backing.release_physical(a, 64_KiB);
    }
    SUBCASE("the middle one released last") {
      backing.release_physical(a, 64_KiB);
      backing.release_physical(c, 64_KiB);
      backing.release_physical(b, 64_KiB);
    }
    CHECK(backing.create_physical(64_KiB) == a);
    CHECK(backing.create_physical(128_KiB) == b);
    CHECK(backing.create_physical(64_KiB) > d);
  }

  TEST_CASE("SimHostBacking: no two pieces of physical memory overlap") {
    SimOptions const dry{.poison = false};
    SimHostBacking backing{dry};
    std::mt19937_64 random{3};
    INFO("seed 3");
    std::map<std::uint64_t, std::size_t> live;
    for (int i = 0; i < 3000; ++i) {
      if (live.size() < 20 || random() % 2 == 0) {
        std::size_t const bytes = 64_KiB * (1 + random() % 8);
        auto const [it, is_new] = live.emplace(backing.create_physical(bytes), bytes);
        REQUIRE(is_new);
        REQUIRE((it == live.begin() || std::prev(it)->first + std::prev(it)->second <= it->first));
        REQUIRE((std::next(it) == live.end() || it->first + bytes <= std::next(it)->first));
      } else {
        auto const it =
            std::next(live.begin(), static_cast<std::ptrdiff_t>(random() % live.size()));
        backing.release_physical(it->first, it->second);
        live.erase(it);
      }
    }
  }
}
