// SPDX-License-Identifier: Apache-2.0
#include <spillway/core/types.hpp>
#include <spillway/device/host/page_mover.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstring>

#include <support/fork.hpp>
#include <support/is_readable.hpp>
#include <sys/mman.h>

namespace {

using namespace spillway;
using detail::PageMover;

constexpr std::size_t range_bytes = 64_KiB;

/// Addresses without pages.
struct Addresses {
  Addresses()
      : p{static_cast<std::byte*>(::mmap(
            nullptr, range_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))} {}
  Addresses(Addresses const&) = delete;
  Addresses& operator=(Addresses const&) = delete;
  ~Addresses() { ::munmap(p, range_bytes); }

  std::byte* p;
};

/// Two ranges that are watched, the first of which has pages. `is_open` is false where the system
/// moves no pages, and nothing can be tested.
struct MoverRig {
  MoverRig() {
    std::memset(made.p, 3, range_bytes);
    is_open = mover.open();
    if (is_open) {
      REQUIRE(mover.try_watch(first.p, range_bytes));
      REQUIRE(mover.try_watch(second.p, range_bytes));
      REQUIRE(mover.move(first.p, made.p, range_bytes) == range_bytes);
    } else {
      MESSAGE("the system moves no pages");
    }
  }

  Addresses made;
  Addresses first;
  Addresses second;
  PageMover mover;
  bool is_open = false;
};

}  // namespace

TEST_SUITE("page_mover") {
  TEST_CASE("PageMover: pages move with their contents and leave their old addresses") {
    MoverRig rig;
    if (rig.is_open) {
      CHECK(rig.mover.move(rig.second.p, rig.first.p, range_bytes) == range_bytes);
      CHECK_FALSE(support::is_readable(rig.first.p));
      CHECK(rig.second.p[0] == std::byte{3});
      CHECK(rig.second.p[range_bytes - 1] == std::byte{3});
      CHECK(rig.mover.move(rig.first.p, rig.second.p, range_bytes / 2) == range_bytes / 2);
      CHECK(support::is_readable(rig.first.p));
      CHECK_FALSE(support::is_readable(rig.first.p + range_bytes / 2));
    }
  }

  TEST_CASE("PageMover: counts pages that the system has moved without counting them") {
    MoverRig rig;
    if (rig.is_open) {
      REQUIRE(rig.mover.move(rig.second.p, rig.first.p, range_bytes / 2) == range_bytes / 2);
      REQUIRE(rig.mover.move(rig.second.p, rig.first.p, range_bytes) == range_bytes);
      CHECK_FALSE(support::is_readable(rig.first.p + range_bytes / 2));
      CHECK(rig.second.p[range_bytes - 1] == std::byte{3});
    }
  }

  TEST_CASE("PageMover: moves only the pages before the first missing or blocked one") {
    MoverRig rig;
    if (rig.is_open) {
      REQUIRE(rig.mover.move(rig.second.p + range_bytes / 2,
                             rig.first.p + range_bytes / 2,
                             range_bytes / 2) == range_bytes / 2);
      SUBCASE("blocked") {
        CHECK(rig.mover.move(rig.second.p + range_bytes / 4, rig.first.p, 3 * range_bytes / 4) ==
              range_bytes / 4);
        CHECK(support::is_readable(rig.first.p + range_bytes / 4));
        CHECK_FALSE(support::is_readable(rig.second.p));
      }
      SUBCASE("missing") {
        CHECK(rig.mover.move(rig.second.p, rig.first.p + range_bytes / 4, range_bytes / 2) ==
              range_bytes / 4);
        CHECK_FALSE(support::is_readable(rig.first.p + range_bytes / 4));
        CHECK(support::is_readable(rig.second.p));
      }
    }
  }

  TEST_CASE(
      "PageMover: does not move a page shared with a forked child; the child can move its own") {
    MoverRig rig;
    if (!rig.is_open) {
      return;
    }
    spillway::test::ForkedChild const child{[&] {
      rig.mover.reopen();
      bool const is_watched = !support::is_readable(rig.second.p);
      std::memset(rig.first.p, 4, range_bytes);  // the child's own pages from now on
      bool const is_moved = rig.mover.move(rig.second.p, rig.first.p, range_bytes) == range_bytes;
      return is_watched && is_moved && rig.second.p[0] == std::byte{4};
    }};
    CHECK(child.status() == 0);
    CHECK(rig.first.p[0] == std::byte{3});
    CHECK_FALSE(support::is_readable(rig.second.p));
    // The child has ended, so no page of the parent is shared any more.
    std::memset(rig.first.p, 5, range_bytes);
    CHECK(rig.mover.move(rig.second.p, rig.first.p, range_bytes) == range_bytes);
  }

  TEST_CASE("PageMover: watching fails if it was not opened") {
    PageMover mover;
    Addresses addresses;
    CHECK_FALSE(mover.is_open());
    CHECK_FALSE(mover.try_watch(addresses.p, range_bytes));
    CHECK_FALSE(mover.watches_any());
  }
}
