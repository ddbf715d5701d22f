// SPDX-License-Identifier: Apache-2.0
#include <spillway/core/types.hpp>
#include <spillway/device/host/host_paged_api.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <new>
#include <random>
#include <vector>

#include <support/counted_allocations.hpp>
#include <support/is_readable.hpp>

// `HostPagedApi` when there is no memory for its bookkeeping.

namespace {

using namespace spillway;

/// Addresses for so many pages, and as many pieces to map there.
struct PagedRange {
  explicit PagedRange(std::size_t count)
      : pages{count}, p{static_cast<unsigned char*>(device.reserve_address(pages * n))} {
    while (pieces.size() < pages) {
      pieces.push_back(*device.try_create_physical(n));
    }
  }
  ~PagedRange() { device.free_address(p, pages * n); }

  void map(std::size_t first, std::size_t count) {
    bool const is_mapped = device.try_map(p + first * n, n, {pieces.data(), count});
    REQUIRE(is_mapped);
  }
  void unmap(std::size_t first, std::size_t count) { device.unmap(p + first * n, count * n); }

  HostPagedApi device;
  std::size_t n = device.granularity_bytes();
  std::size_t pages;
  unsigned char* p;
  std::vector<HostPhysical> pieces;
};

}  // namespace

TEST_SUITE("host_paged_api_fault") {
  TEST_CASE("HostPagedApi: unmapping the middle of a range works without memory for bookkeeping") {
    for (std::size_t more = 0; more < 4; ++more) {
      CAPTURE(more);
      PagedRange range{8};
      range.map(0, 8);
      std::memset(range.p, 3, 8 * range.n);
      {
        support::ShortMemory const is_short{more};
        range.unmap(2, 2);
      }
      for (std::size_t page = 0; page < 8; ++page) {
        CAPTURE(page);
        bool const is_mapped = page < 2 || page >= 4;
        CHECK(support::is_readable(range.p + page * range.n) == is_mapped);
        CHECK((!is_mapped || range.p[page * range.n] == 3));
      }
      range.map(2, 2);
      CHECK(support::is_readable(range.p + 2 * range.n));
      CHECK(support::is_readable(range.p + 4 * range.n - 1));
      range.unmap(0, 8);
      for (std::size_t page = 0; page < 8; ++page) {
        CHECK_FALSE(support::is_readable(range.p + page * range.n));
      }
      range.map(0, 8);
      CHECK(support::is_readable(range.p));
      CHECK(support::is_readable(range.p + 8 * range.n - 1));
    }
  }

  TEST_CASE("HostPagedApi: spare pages are kept, although an earlier range could not be recorded") {
    // Whether a spare page is used again. At most as many pages are mapped or spare as were
    // created; beyond that the oldest spare pages are released. Some systems keep no spare pages.
    auto const is_kept = [](std::size_t more) {
      PagedRange range{24};
      range.map(0, 8);
      {
        support::ShortMemory const is_short{more};
        range.unmap(2, 2);
      }
      range.unmap(0, 8);
      range.map(0, 24);
      std::memset(range.p, 9, 24 * range.n);
      for (std::size_t const page : {8U, 9U, 10U, 11U, 12U, 13U, 14U, 0U}) {
        range.unmap(page, 1);
      }
      range.map(8, 7);  // new pages: the spare ones are apart, and seven of them are released
      range.map(0, 1);
      return range.p[0] == 9;
    };
    CHECK(is_kept(0) == is_kept(1000));
    CHECK(is_kept(1) == is_kept(1000));
  }

  TEST_CASE("HostPagedApi: ranges keep their contents while memory repeatedly runs out") {
    constexpr unsigned seed = 20262;
    MESSAGE("seed ", seed);
    std::mt19937 random{seed};
    constexpr std::size_t pages = 48;
    PagedRange range{pages};
    std::array<unsigned char, pages> held{};  // 0: not mapped
    int refused = 0;
    for (int i = 0; i < 4000; ++i) {
      std::size_t const first = random() % pages;
      std::size_t const count = 1 + random() % (pages - first);
      auto* const begin = held.begin() + first;
      auto const is_mapped = [](unsigned char byte) { return byte != 0; };
      {
        support::ShortMemory const is_short{random() % 4};
        if (std::none_of(begin, begin + count, is_mapped)) {
          try {
            range.map(first, count);
            std::fill_n(begin, count, static_cast<unsigned char>(1 + random() % 255));
          } catch (std::bad_alloc const&) {
            ++refused;
          }
          for (std::size_t page = first; held[first] != 0 && page < first + count; ++page) {
            std::memset(range.p + page * range.n, held[page], range.n);
          }
        } else if (random() % 2 == 0) {
          range.unmap(first, count);
          std::fill_n(begin, count, static_cast<unsigned char>(0));
        }
      }
      for (std::size_t page = 0; page < pages; ++page) {
        REQUIRE(support::is_readable(range.p + page * range.n) == (held[page] != 0));
        if (held[page] != 0) {
          REQUIRE(range.p[page * range.n] == held[page]);
          REQUIRE(range.p[page * range.n + range.n - 1] == held[page]);
        }
      }
    }
    CHECK(refused > 100);
  }
}
