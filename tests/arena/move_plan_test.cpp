// SPDX-License-Identifier: Apache-2.0
#include <spillway/arena/move_plan.hpp>
#include <spillway/core/range.hpp>
#include <spillway/device/host/host_api.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

namespace {

using spillway::Bounce;
using spillway::CopyKind;
using spillway::enqueue_move;
using spillway::HostApi;
using spillway::HostStream;
using spillway::Move;
using spillway::detail::MoveCopies;

/// Makes each copy at once, refuses those that overlap themselves and, when told to, the n-th.
struct CopyWatch : HostApi {
  void
  copy(void* to, void const* from, std::size_t bytes, CopyKind /*kind*/, HostStream /*stream*/) {
    auto* const out = static_cast<std::byte*>(to);
    auto const* const in = static_cast<std::byte const*>(from);
    overlaps += out < in + bytes && in < out + bytes ? 1U : 0U;
    if (++copies == refused) {
      throw spillway::DeviceError{"refused"};
    }
    std::copy_n(in, bytes, out);
  }

  std::size_t copies = 0;
  std::size_t overlaps = 0;
  std::size_t refused = 0;
};

/// Memory whose bytes tell where they were.
std::vector<std::byte> numbered(std::size_t bytes, std::uint64_t seed) {
  std::mt19937_64 random{seed};
  std::vector<std::byte> memory(bytes);
  std::generate(memory.begin(), memory.end(), [&] { return static_cast<std::byte>(random()); });
  return memory;
}

}  // namespace

TEST_SUITE("move_plan") {
  TEST_CASE("enqueue_move: the block arrives whole, by no copy that overlaps itself") {
    constexpr std::uint64_t seed = 71;
    MESSAGE("seed ", seed);
    std::mt19937_64 random{seed};
    for (int i = 0; i < 500; ++i) {
      CAPTURE(i);
      std::vector<std::byte> memory = numbered(4096, seed);
      std::vector<std::byte> scratch(i % 3 == 0 ? 0 : 256);
      Move move;
      move.bytes = 1 + random() % 2048;
      move.from = memory.data() + random() % (memory.size() - move.bytes);
      // Half of the blocks move by less than their length.
      std::size_t const reach = random() % 2 == 0 ? std::min<std::size_t>(move.bytes, 64) : 2048;
      std::size_t const at = static_cast<std::size_t>(move.from - memory.data());
      std::size_t const low = at - std::min(at, reach);
      std::size_t const high = std::min(memory.size() - move.bytes, at + reach);
      move.to = memory.data() + low + random() % (high - low + 1);
      std::vector<std::byte> const block(move.from, move.from + move.bytes);
      CopyWatch device;
      Bounce const bounce{scratch.data(), scratch.size()};
      std::size_t const copies = enqueue_move(device, move, HostStream::caller, bounce);
      REQUIRE(std::equal(block.begin(), block.end(), move.to));
      REQUIRE(device.overlaps == 0);
      REQUIRE(device.copies == copies);
      REQUIRE(copies == MoveCopies::of(move, bounce).count);
    }
  }

  TEST_CASE("enqueue_move: a short slide goes through scratch, if there is some") {
    std::vector<std::byte> memory = numbered(4096, 1);
    std::vector<std::byte> scratch(512);
    Move move;
    move.bytes = 2048;
    move.from = memory.data() + 16;
    move.to = memory.data();
    CHECK(MoveCopies::of(move, {}).count == 128);
    CHECK(MoveCopies::of(move, {scratch.data(), scratch.size()}).count == 8);
    move.to = memory.data() + 16 + 128;  // sixteen pieces are not too many
    CHECK_FALSE(MoveCopies::of(move, {scratch.data(), scratch.size()}).is_bounced);
  }

  TEST_CASE("enqueue_move: when the device refuses a copy, the block is back where it was") {
    for (std::size_t refused = 1; refused <= 10; ++refused) {
      for (bool const is_up : {false, true}) {
        CAPTURE(refused);
        std::vector<std::byte> memory = numbered(4096, 2);
        Move move;
        move.bytes = 1000;
        move.from = memory.data() + 1000;
        move.to = is_up ? move.from + 100 : move.from - 100;
        std::vector<std::byte> const block(move.from, move.from + move.bytes);
        CopyWatch device;
        device.refused = refused;
        REQUIRE_THROWS_AS((void)enqueue_move(device, move, HostStream::caller),
                          spillway::DeviceError);
        REQUIRE(std::equal(block.begin(), block.end(), move.from));
      }
    }
  }
}
