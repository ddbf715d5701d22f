// SPDX-License-Identifier: Apache-2.0
#include <spillway/core/fence.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <random>

namespace {

using namespace spillway;

Ticket on(unsigned stream, std::uint64_t sequence) {
  return {StreamIndex{static_cast<std::uint16_t>(stream)}, sequence};
}

/// Whether waiting for `fence` includes waiting for `ticket`.
bool covers(Fence const& fence, Ticket ticket) {
  return std::any_of(fence.tickets().begin(), fence.tickets().end(), [&](Ticket mine) {
    return (mine.stream() == ticket.stream() || mine.stream() == StreamIndex::every) &&
           mine.sequence() >= ticket.sequence();
  });
}

}  // namespace

TEST_SUITE("fence") {
  TEST_CASE("Ticket: returns its stream and its number, up to the largest values") {
    CHECK(Ticket{}.is_none());
    Ticket const last = on(255, (std::uint64_t{1} << 48U) - 1);
    CHECK(last.stream() == StreamIndex{255});
    CHECK(last.sequence() == (std::uint64_t{1} << 48U) - 1);
    CHECK(Ticket::everything().stream() == StreamIndex::every);
    CHECK(Ticket::everything().sequence() == last.sequence());
  }

  TEST_CASE("Fence: keeps only the latest ticket of each stream") {
    Fence fence{on(3, 7)};
    fence.add(on(3, 5));
    fence.add(Ticket{});
    CHECK(fence == Fence{on(3, 7)});
    fence.add(on(3, 9));
    CHECK(fence == Fence{on(3, 9)});
    fence.clear();
    CHECK(fence.is_empty());
  }

  TEST_CASE("Fence: always covers the tickets added; with at most four streams it covers no more") {
    constexpr std::uint64_t seed = 71;
    MESSAGE("seed ", seed);
    std::mt19937_64 random{seed};
    for (int round = 0; round < 2000; ++round) {
      CAPTURE(round);
      unsigned const streams = 1 + static_cast<unsigned>(random() % 7);
      Fence fence;
      Fence other;
      std::map<StreamIndex, std::uint64_t> added;
      for (std::size_t i = random() % 12; i-- > 0;) {
        Ticket const ticket = on(1 + static_cast<unsigned>(random() % streams), 1 + random() % 100);
        (random() % 2 == 0 ? fence : other).add(ticket);
        added[ticket.stream()] = std::max(added[ticket.stream()], ticket.sequence());
      }
      fence.add(other);
      std::uint64_t latest = 0;
      for (auto const& [stream, sequence] : added) {
        REQUIRE(covers(fence, Ticket{stream, sequence}));
        latest = std::max(latest, sequence);
      }
      bool has_ended = false;
      for (Ticket const ticket : fence.tickets()) {
        REQUIRE((!has_ended || ticket.is_none()));  // empty ones come last
        has_ended = ticket.is_none();
        if (!ticket.is_none()) {
          REQUIRE(ticket.sequence() <= latest);
          REQUIRE((added.size() > Fence::max_tickets || ticket.stream() != StreamIndex::every));
        }
      }
      REQUIRE(fence.is_empty() == added.empty());
    }
  }
}
