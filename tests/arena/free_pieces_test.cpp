// SPDX-License-Identifier: Apache-2.0
#include <spillway/arena/free_pieces.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <random>
#include <vector>

TEST_SUITE("free_pieces") {
  using spillway::detail::FreePieces;

  TEST_CASE("FreePieces: agrees with a list in the order of age") {
    constexpr unsigned seed = 20264;
    MESSAGE("seed ", seed);
    std::mt19937 random{seed};
    constexpr std::uint32_t pieces = 40;
    constexpr std::uint32_t most_pages = 200;
    struct Piece {
      std::uint32_t piece = 0;
      std::uint32_t pages = 0;
    };
    FreePieces free{pieces, most_pages};
    std::vector<Piece> list;  // the oldest first
    auto const first_of = [&](std::uint32_t pages) {
      auto const found = std::find_if(
          list.begin(), list.end(), [pages](Piece const& one) { return one.pages == pages; });
      return found == list.end() ? FreePieces::none : found->piece;
    };
    auto const nearest = [&](std::uint32_t pages, int step) {
      for (; pages <= most_pages && pages != 0; pages += static_cast<std::uint32_t>(step)) {
        if (std::uint32_t const piece = first_of(pages); piece != FreePieces::none) {
          return piece;
        }
      }
      return FreePieces::none;
    };
    auto const any = [&] { return list[random() % list.size()].piece; };
    auto const erase = [&](std::uint32_t piece) {
      std::erase_if(list, [piece](Piece const& one) { return one.piece == piece; });
    };
    for (int i = 0; i < 20'000; ++i) {
      std::uint32_t const piece = static_cast<std::uint32_t>(random()) % pieces;
      switch (random() % 3) {
      case 0:
        if (!free.has(piece)) {
          // A few sizes that occur often, those at the ends of words among them.
          std::uint32_t const sizes[] = {1,
                                         63,
                                         64,
                                         65,
                                         128,
                                         most_pages,
                                         1 + static_cast<std::uint32_t>(random()) % most_pages};
          std::uint32_t const pages = sizes[random() % std::size(sizes)];
          free.add(piece, pages);
          list.push_back({piece, pages});
        }
        break;
      case 1:
        if (!list.empty()) {
          std::uint32_t const gone = any();
          free.take(gone);
          erase(gone);
        }
        break;
      default: {
        std::vector<std::uint32_t> tried;  // and put back, which must change nothing
        std::vector<Piece> const before = list;
        for (std::size_t n = random() % 8; n != 0 && !list.empty(); --n) {
          tried.push_back(any());
          free.take(tried.back());
          erase(tried.back());
        }
        for (; !tried.empty(); tried.pop_back()) {
          free.put_back(tried.back());
        }
        list = before;
        break;
      }
      }
      std::uint32_t const asked = 1 + static_cast<std::uint32_t>(random()) % most_pages;
      REQUIRE(free.oldest() == (list.empty() ? FreePieces::none : list.front().piece));
      REQUIRE(free.of_size(asked) == first_of(asked));
      REQUIRE(free.at_most(asked) == nearest(asked, -1));
      REQUIRE(free.at_least(asked) == nearest(asked, 1));
      for (std::uint32_t one = 0; one < pieces; ++one) {
        REQUIRE(free.has(one) == std::any_of(list.begin(), list.end(), [one](Piece const& entry) {
                  return entry.piece == one;
                }));
      }
    }
  }
}
