// SPDX-License-Identifier: Apache-2.0
#include <spillway/core/types.hpp>
#include <spillway/host/slab_map.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <random>
#include <utility>
#include <vector>

using namespace spillway;
using namespace spillway::detail;

namespace {

// True if work ordered after `fence` is ordered after `ticket`.
bool covers(Fence const& fence, Ticket ticket) {
  return ticket.is_none() ||
         std::any_of(fence.tickets().begin(), fence.tickets().end(), [&](Ticket mine) {
           return (mine.stream() == ticket.stream() || mine.stream() == StreamIndex::every) &&
                  mine.sequence() >= ticket.sequence();
         });
}

/// What a slab map should do, granule by granule.
class Oracle {
 public:
  struct Granule {
    bool is_taken = false;
    Ticket last_use;
  };

  void add_slab(std::size_t granules) { slabs_.emplace_back(granules); }

  [[nodiscard]] Granule& at(Extent const& extent, std::size_t i) {
    return slabs_.at(extent.slab).at(extent.offset / granule_bytes + i);
  }

  /// Sizes of the free ranges in granules, falling.
  [[nodiscard]] std::vector<std::size_t> free_ranges() const {
    std::vector<std::size_t> ranges;
    for (auto const& slab : slabs_) {
      std::size_t run = 0;
      for (auto const& granule : slab) {
        if (!granule.is_taken) {
          ++run;
        } else if (run > 0) {
          ranges.push_back(std::exchange(run, 0));
        }
      }
      if (run > 0) {
        ranges.push_back(run);
      }
    }
    std::sort(ranges.begin(), ranges.end(), std::greater{});
    return ranges;
  }

 private:
  std::vector<std::vector<Granule>> slabs_;
};

struct Live {
  SlabMap::Chain chain;
  std::size_t granules;
};

void run_model(std::uint64_t seed, std::size_t slabs, std::size_t most_granules, int steps) {
  CAPTURE(seed);
  std::mt19937_64 random{seed};
  auto const below = [&](std::size_t n) { return static_cast<std::size_t>(random() % n); };
  SlabMap map;
  Oracle oracle;
  for (std::size_t i = 0; i < slabs; ++i) {
    std::size_t const granules = 1 + below(200);
    map.add_slab(granules * granule_bytes);
    oracle.add_slab(granules);
  }
  std::vector<Live> live;
  std::uint64_t sequence = 0;
  std::size_t refused = 0;
  std::size_t scattered = 0;

  for (int step = 0; step < steps; ++step) {
    if (live.empty() || below(100) < 55) {
      std::size_t const granules = 1 + below(below(8) == 0 ? most_granules : 16);
      auto ranges = oracle.free_ranges();
      ranges.resize(std::min(ranges.size(), SlabMap::max_extents));
      std::size_t room = 0;
      for (std::size_t const range : ranges) {
        room += range;
      }
      std::size_t const bytes = granules * granule_bytes - below(granule_bytes);
      REQUIRE(map.can_take(bytes) == (room >= granules));

      auto const chain = map.try_take(bytes);

      REQUIRE(chain.has_value() == (room >= granules));
      if (!chain) {
        ++refused;
        continue;
      }
      std::size_t pieces = 0;
      std::size_t taken = 0;
      map.for_each_extent(chain->id, [&](Extent const& extent) {
        ++pieces;
        for (std::size_t i = 0; i < extent.bytes / granule_bytes; ++i, ++taken) {
          Oracle::Granule& granule = oracle.at(extent, i);
          REQUIRE_FALSE(granule.is_taken);
          REQUIRE(covers(chain->fence, granule.last_use));
          granule.is_taken = true;
        }
      });
      REQUIRE(taken == granules);
      REQUIRE(pieces <= SlabMap::max_extents);
      REQUIRE((pieces == 1) == (!ranges.empty() && ranges.front() >= granules));
      scattered += pieces > 1 ? 1 : 0;
      live.push_back({*chain, granules});
    } else if (below(4) == 0) {
      Live& shrunk = live[below(live.size())];
      Ticket const use{StreamIndex{static_cast<std::uint16_t>(1 + below(5))}, ++sequence};
      std::size_t const bytes = 1 + below(shrunk.granules * granule_bytes);
      std::size_t const kept = (bytes + granule_bytes - 1) / granule_bytes;
      std::size_t at = 0;
      map.for_each_extent(shrunk.chain.id, [&](Extent const& extent) {
        for (std::size_t i = 0; i < extent.bytes / granule_bytes; ++i) {
          if (at++ >= kept) {
            oracle.at(extent, i) = {false, use};
          }
        }
      });
      REQUIRE(map.trim(shrunk.chain.id, bytes, Fence{use}) == kept * granule_bytes);
      shrunk.granules = kept;
      std::size_t left = 0;
      map.for_each_extent(shrunk.chain.id,
                          [&](Extent const& extent) { left += extent.bytes / granule_bytes; });
      REQUIRE(left == kept);
    } else {
      std::swap(live[below(live.size())], live.back());
      Ticket const use{StreamIndex{static_cast<std::uint16_t>(1 + below(5))}, ++sequence};
      map.for_each_extent(live.back().chain.id, [&](Extent const& extent) {
        for (std::size_t i = 0; i < extent.bytes / granule_bytes; ++i) {
          oracle.at(extent, i) = {false, use};
        }
      });
      map.give_back(live.back().chain.id, Fence{use});
      live.pop_back();
    }
    auto const ranges = oracle.free_ranges();
    std::size_t count = 0;
    std::size_t free = 0;
    map.for_each_free([&](Extent const& extent, Fence const&) {
      ++count;
      free += extent.bytes;
    });
    REQUIRE(count == ranges.size());
    REQUIRE(map.free_bytes() == free);
    REQUIRE(map.largest_free_bytes() == (ranges.empty() ? 0 : ranges.front() * granule_bytes));
  }
  CHECK(refused > 0);
  CHECK(scattered > 0);
}

}  // namespace

TEST_SUITE("slab_map_model") {
  TEST_CASE("SlabMap: agrees with a map of single granules, in one slab") {
    for (std::uint64_t seed = 1; seed <= 8; ++seed) {
      run_model(seed, 1, 60, 2'000);
    }
  }

  TEST_CASE("SlabMap: agrees with a map of single granules, in many slabs") {
    for (std::uint64_t seed = 100; seed < 106; ++seed) {
      run_model(seed, 12, 700, 3'000);
    }
  }
}
