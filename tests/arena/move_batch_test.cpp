// SPDX-License-Identifier: Apache-2.0
#include <spillway/arena/move_batch.hpp>
#include <spillway/core/error.hpp>
#include <spillway/core/range.hpp>
#include <spillway/device/host/host_api.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <new>
#include <numeric>
#include <random>
#include <span>
#include <vector>

TEST_SUITE("move_batch") {
  namespace {

  using spillway::Bounce;
  using spillway::CopyKind;
  using spillway::HostApi;
  using spillway::HostStream;
  using spillway::Move;
  using spillway::detail::MergedMove;
  using spillway::detail::MoveCopies;

  /// Makes each copy at once, counts copies whose source and target overlap, and refuses the chosen
  /// ones.
  struct CopyWatch : HostApi {
    void
    copy(void* to, void const* from, std::size_t bytes, CopyKind /*kind*/, HostStream /*stream*/) {
      ++calls;
      run(to, from, bytes);
    }

    std::size_t calls = 0;   // of the device
    std::size_t copies = 0;  // including those in batches
    std::size_t overlaps = 0;
    std::size_t first_refused = 0;  // which copies are refused, counted from 1
    std::size_t last_refused = 0;
    bool lacks_memory = false;  // for the queue of a stream: refuses by std::bad_alloc

   protected:
    void run(void* to, void const* from, std::size_t bytes) {
      auto* const out = static_cast<std::byte*>(to);
      auto const* const in = static_cast<std::byte const*>(from);
      overlaps += out < in + bytes && in < out + bytes ? 1U : 0U;
      ++copies;
      if (copies >= first_refused && copies <= last_refused) {
        if (lacks_memory) {
          throw std::bad_alloc{};
        }
        throw spillway::DeviceError{"refused"};
      }
      std::copy_n(in, bytes, out);
    }
  };

  /// Takes batches and runs their copies in any order.
  struct BatchWatch : CopyWatch {
    void copy_batch(std::span<void* const> to,
                    std::span<void const* const> from,
                    std::span<std::size_t const> sizes,
                    CopyKind /*kind*/,
                    HostStream /*stream*/) {
      ++calls;
      std::vector<std::size_t> order(to.size());
      std::iota(order.begin(), order.end(), std::size_t{0});
      std::shuffle(order.begin(), order.end(), random);
      for (std::size_t const i : order) {
        run(to[i], from[i], sizes[i]);
      }
    }

    std::mt19937_64 random{7};
  };

  /// Random bytes, so that misplaced bytes are detected.
  std::vector<std::byte> numbered(std::size_t bytes, std::uint64_t seed) {
    std::mt19937_64 random{seed};
    std::vector<std::byte> memory(bytes);
    std::generate(memory.begin(), memory.end(), [&] { return static_cast<std::byte>(random()); });
    return memory;
  }

  /// @returns the number of finished moves
  template <class Device>
  std::size_t enqueue(Device& device, std::span<Move const> moves, Bounce bounce = {}) {
    std::size_t done = 0;
    spillway::enqueue_moves(
        device, moves, HostStream::caller, bounce, done, [](std::size_t /*move*/) {});
    return done;
  }

  MergedMove merged(Move const& move) {
    return {.to = move.to, .from = move.from, .bytes = move.bytes};
  }

  /// Blocks in memory, the moves of a valid plan, and the last place of each block.
  struct Layout {
    struct Block {
      std::size_t at = 0;
      std::size_t bytes = 0;
      std::size_t source = 0;  // its first place
    };

    std::vector<std::byte> memory;
    std::vector<Block> blocks;
    std::vector<Move> moves;
    std::vector<std::byte> const before = memory;

    explicit Layout(std::size_t bytes, std::uint64_t seed = 1) : memory(numbered(bytes, seed)) {}

    void add(std::size_t at, std::size_t bytes) { blocks.push_back({at, bytes, at}); }
    /// `count` blocks, each `stride` bytes after the one before.
    void add_row(std::size_t at, std::size_t count, std::size_t bytes, std::size_t stride) {
      for (std::size_t i = 0; i < count; ++i) {
        add(at + i * stride, bytes);
      }
    }
    void move(std::size_t block, std::size_t to) {
      Block& moved = blocks[block];
      Move made;
      made.from = memory.data() + moved.at;
      made.to = memory.data() + to;
      made.bytes = moved.bytes;
      moves.push_back(made);
      moved.at = to;
    }
    /// Moves all blocks by the same distance, beginning with the one next to free room.
    void slide(bool is_up, std::size_t distance) {
      for (std::size_t i = 0; i < blocks.size(); ++i) {
        std::size_t const block = is_up ? blocks.size() - 1 - i : i;
        std::size_t const at = blocks[block].at;
        move(block, is_up ? at + distance : at - distance);
      }
    }
    [[nodiscard]] bool is_free(std::size_t at, std::size_t bytes, std::size_t except) const {
      for (std::size_t i = 0; i < blocks.size(); ++i) {
        if (i != except && blocks[i].at < at + bytes && at < blocks[i].at + blocks[i].bytes) {
          return false;
        }
      }
      return at + bytes <= memory.size();
    }
    /// Whether each block's bytes are where `places` says.
    [[nodiscard]] bool is_whole(std::vector<std::size_t> const& places) const {
      for (std::size_t i = 0; i < blocks.size(); ++i) {
        auto const first = before.begin() + static_cast<std::ptrdiff_t>(blocks[i].source);
        auto const there = memory.begin() + static_cast<std::ptrdiff_t>(places[i]);
        if (!std::equal(first, first + static_cast<std::ptrdiff_t>(blocks[i].bytes), there)) {
          return false;
        }
      }
      return true;
    }
    /// Where each block is after the first `done` moves.
    [[nodiscard]] std::vector<std::size_t> places_after(std::size_t done) const {
      std::vector<std::size_t> places;
      for (Block const& block : blocks) {
        places.push_back(block.source);
      }
      for (Move const& move : std::span{moves}.first(done)) {
        auto const from = static_cast<std::size_t>(move.from - memory.data());
        *std::find(places.begin(), places.end(), from) =
            static_cast<std::size_t>(move.to - memory.data());
      }
      return places;
    }
  };

  /// Enqueues all moves of a plan. Afterwards each block must be whole in its last place, and no
  /// copy may overlap itself.
  void enqueue_all(BatchWatch& device, Layout const& layout, Bounce bounce = {}) {
    REQUIRE(enqueue(device, layout.moves, bounce) == layout.moves.size());
    REQUIRE(device.overlaps == 0);
    REQUIRE(layout.is_whole(layout.places_after(layout.moves.size())));
  }

  /// A layout of small blocks and gaps, and random moves of blocks to places that are free at that
  /// time.
  Layout random_layout(std::mt19937_64& random) {
    Layout layout{4096, random()};
    std::size_t at = 0;
    auto const up_to = [&](std::size_t most) { return std::size_t{random() % (most + 1)}; };
    for (bool const is_dense = up_to(1) == 0; at < 3500;) {
      std::size_t const bytes = is_dense ? 16 : 1 + up_to(200);
      layout.add(at, bytes);
      at += bytes + (up_to(3) == 0 ? up_to(100) : 0);
    }
    std::size_t const wanted = 1 + up_to(60);
    if (up_to(2) != 0) {  // a slide, down or up
      bool const is_up = up_to(1) == 0;
      std::size_t limit = is_up ? layout.memory.size() : 0;
      for (std::size_t i = 0; i < layout.blocks.size(); ++i) {
        std::size_t const block = is_up ? layout.blocks.size() - 1 - i : i;
        std::size_t const bytes = layout.blocks[block].bytes;
        layout.move(block, is_up ? limit - bytes : limit);
        limit = is_up ? limit - bytes : limit + bytes;
      }
      return layout;
    }
    for (std::size_t tries = 0; tries < 4000 && layout.moves.size() < wanted; ++tries) {
      std::size_t const block = up_to(layout.blocks.size() - 1);
      std::size_t const to = up_to(layout.memory.size() - layout.blocks[block].bytes);
      if (layout.is_free(to, layout.blocks[block].bytes, block)) {
        layout.move(block, to);
      }
    }
    return layout;
  }

  /// Slides a block on a device that refuses copies by throwing a `Refusal`, and checks that the
  /// block is where it was unless it is lost. @returns whether it is lost
  template <class Refusal>
  bool is_lost_when_refused(CopyWatch& device) {
    Layout layout{2000};
    layout.add(500, 400);
    layout.slide(false, 150);
    try {
      (void)enqueue(device, layout.moves);
    } catch (spillway::BlockLost const&) {
      return true;
    } catch (Refusal const&) {
      CHECK(layout.is_whole(layout.places_after(0)));
    }
    return false;
  }

  }  // namespace

  TEST_CASE("enqueue_moves: a block arrives whole, and no copy overlaps itself") {
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
      REQUIRE(enqueue(device, {&move, 1}, bounce) == 1);
      REQUIRE(std::equal(block.begin(), block.end(), move.to));
      REQUIRE(device.overlaps == 0);
      REQUIRE(device.copies == MoveCopies::of(merged(move), bounce).count);
    }
  }

  TEST_CASE("MoveCopies: a short slide goes through scratch if scratch is available") {
    std::vector<std::byte> memory = numbered(4096, 1);
    std::vector<std::byte> scratch(512);
    Bounce const bounce{scratch.data(), scratch.size()};
    MergedMove move{.to = memory.data(), .from = memory.data() + 16, .bytes = 2048};
    CHECK(MoveCopies::of(move, {}).count == 128);
    CHECK(MoveCopies::of(move, bounce).count == 8);
    move.to = memory.data() + 16 + 256;  // scratch would not save any copy
    CHECK_FALSE(MoveCopies::of(move, bounce).is_bounced);
  }

  TEST_CASE(
      "MoveCopies: scratch is used where its second copy takes less time than the calls saved") {
    // Through scratch, 16 MiB are 32 MiB in two calls. A call costs as much as 4 MiB, so six pieces
    // of 16 MiB together take the same time.
    auto* const from = reinterpret_cast<std::byte*>(  // NOLINT(performance-no-int-to-ptr)
        std::uintptr_t{1} << 32U);
    constexpr std::size_t bytes = 16U << 20U;
    Bounce const bounce{from - bytes, bytes};
    for (std::size_t const pieces : {2U, 6U, 7U, 12U}) {
      CAPTURE(pieces);
      std::size_t const distance = (bytes + pieces - 1) / pieces;
      MoveCopies const copies =
          MoveCopies::of({.to = from - distance, .from = from, .bytes = bytes}, bounce);
      CHECK(copies.is_bounced == (pieces > 6));
      CHECK(copies.count == (pieces > 6 ? 2 : pieces));
    }
  }

  TEST_CASE("enqueue_moves: copying back is retried up to seven times before the block is lost") {
    for (std::size_t const refusals : {7U, 8U}) {
      CAPTURE(refusals);
      CopyWatch device;
      device.first_refused = 2;  // on the way to its new place
      device.last_refused = 2 + refusals;
      CHECK(is_lost_when_refused<spillway::DeviceError>(device) == (refusals == 8));
    }
  }

  TEST_CASE("enqueue_moves: if the device refuses a copy, the block is back at its old address") {
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
        device.first_refused = device.last_refused = refused;
        REQUIRE_THROWS_AS((void)enqueue(device, {&move, 1}), spillway::DeviceError);
        REQUIRE(std::equal(block.begin(), block.end(), move.from));
      }
    }
  }

  TEST_CASE("enqueue_moves: if the device lacks memory for a copy, blocks are as after a refusal") {
    for (std::size_t const refusals : {1U, 8U, 9U}) {
      for (std::size_t first_refused = 1; first_refused <= 3; ++first_refused) {
        CAPTURE(refusals);
        CAPTURE(first_refused);
        CopyWatch device;
        device.first_refused = first_refused;
        device.last_refused = first_refused + refusals - 1;
        device.lacks_memory = true;
        CHECK(is_lost_when_refused<std::bad_alloc>(device) ==
              (refusals == 9 && first_refused != 1));
      }
    }
  }

  TEST_CASE(
      "enqueue_moves: 8192 neighbours that move by the same distance need only a few copies") {
    constexpr std::size_t blocks = 8192;
    constexpr std::size_t block_bytes = 256;
    constexpr std::size_t distance = blocks * block_bytes / 4;
    for (bool const is_up : {false, true}) {
      CAPTURE(is_up);
      Layout layout{blocks * block_bytes + distance};
      layout.add_row(is_up ? 0 : distance, blocks, block_bytes, block_bytes);
      layout.slide(is_up, distance);
      BatchWatch device;
      enqueue_all(device, layout);
      CHECK(device.calls == 4);
    }
  }

  TEST_CASE("enqueue_moves: moves by their own length do not overlap themselves") {
    Layout layout{400};
    layout.add(100, 100);
    layout.add(300, 50);
    layout.move(0, 0);
    layout.move(1, 250);
    BatchWatch device;
    enqueue_all(device, layout);
    CHECK(device.calls == 1);
  }

  TEST_CASE("enqueue_moves: moves that do not overlap are one batch") {
    constexpr std::size_t blocks = 8192;
    Layout layout{3 * blocks * 16};
    layout.add_row(16, blocks, 16, 32);  // a gap between each two
    for (std::size_t i = 0; i < blocks; ++i) {
      layout.move(i, (2 * blocks + i) * 16);  // the gaps close, so the distances differ
    }
    BatchWatch device;
    enqueue_all(device, layout);
    CHECK(device.calls == 1);
    CHECK(device.copies == blocks);
  }

  TEST_CASE(
      "enqueue_moves: blocks that slide over gaps are moved in batches that double in length") {
    constexpr std::size_t blocks = 512;
    Layout layout{2 * blocks * 16};
    layout.add_row(16, blocks, 16, 32);
    for (std::size_t i = 0; i < blocks; ++i) {
      layout.move(i, i * 16);
    }
    BatchWatch device;
    enqueue_all(device, layout);
    CHECK(device.calls == 10);
    CHECK(device.copies == blocks);
  }

  TEST_CASE(
      "enqueue_moves: the first of very many moves are enqueued before the last are examined") {
    constexpr std::size_t at_once = spillway::detail::moves_at_once;
    constexpr std::size_t blocks = 2 * at_once + 5;
    Layout layout{3 * blocks * 2};
    layout.add_row(1, blocks, 1, 2);
    for (std::size_t i = 0; i < blocks; ++i) {
      layout.move(i, 2 * blocks + 2 * i);
    }
    BatchWatch device;
    std::size_t done = 0;
    std::size_t most_ahead = 0;
    spillway::enqueue_moves(
        device, layout.moves, HostStream::caller, {}, done, [&](std::size_t move) {
          most_ahead = std::max(most_ahead, move + 1 - device.copies);
        });
    CHECK(done == blocks);
    CHECK(device.calls == 3);
    CHECK(most_ahead == at_once);
    CHECK(layout.is_whole(layout.places_after(blocks)));
  }

  TEST_CASE("enqueue_moves: no copy crosses from one reservation into another") {
    Layout layout{4096};
    layout.add(1024, 512);
    layout.add(1536, 512);
    layout.move(0, 0);
    layout.move(1, 512);
    BatchWatch joined;
    (void)enqueue(joined, layout.moves);
    CHECK(joined.copies == 1);

    layout.moves[1].to_segment = 1;
    BatchWatch apart;
    (void)enqueue(apart, layout.moves);
    CHECK(apart.calls == 1);
    CHECK(apart.copies == 2);
  }

  TEST_CASE("enqueue_moves: two moves of one block are not merged") {
    Layout layout{1024};
    layout.add(0, 100);
    layout.move(0, 100);
    layout.move(0, 200);
    BatchWatch device;
    enqueue_all(device, layout);
    CHECK(device.calls == 2);
    CHECK(layout.is_whole({200}));
  }

  TEST_CASE("enqueue_moves: any valid plan leaves each block whole at its destination") {
    constexpr std::uint64_t seed = 20;
    MESSAGE("seed ", seed);
    std::mt19937_64 random{seed};
    for (int i = 0; i < 1000; ++i) {
      CAPTURE(i);
      Layout layout = random_layout(random);
      std::vector<std::byte> scratch(random() % 2 == 0 ? 0 : 128);
      BatchWatch device;
      enqueue_all(device, layout, {scratch.data(), scratch.size()});
    }
  }

  TEST_CASE("enqueue_moves: after a refused copy each block is whole at its old or new address") {
    constexpr std::uint64_t seed = 21;
    MESSAGE("seed ", seed);
    std::mt19937_64 random{seed};
    std::size_t refusals = 0;
    for (int i = 0; i < 1000; ++i) {
      CAPTURE(i);
      Layout layout = random_layout(random);
      std::vector<std::byte> scratch(random() % 2 == 0 ? 0 : 128);
      BatchWatch device;
      device.first_refused = device.last_refused = 1 + random() % (2 * layout.moves.size());
      std::size_t done = 0;
      try {
        spillway::enqueue_moves(device,
                                layout.moves,
                                HostStream::caller,
                                {scratch.data(), scratch.size()},
                                done,
                                [](std::size_t /*move*/) {});
      } catch (spillway::DeviceError const&) {
        ++refusals;
      }
      REQUIRE(layout.is_whole(layout.places_after(done)));
    }
    CHECK(refusals > 100);
  }

  TEST_CASE("enqueue_moves: if a slide of neighbours fails, at most one block is lost, and the "
            "error names it") {
    // Eight blocks of 100 bytes slide by 150: copied in pieces of 150, from the side that they move
    // to.
    for (bool const is_up : {false, true}) {
      for (std::size_t first_refused = 2; first_refused <= 6; ++first_refused) {
        CAPTURE(is_up);
        CAPTURE(first_refused);
        Layout layout{2000};
        layout.add_row(500, 8, 100, 100);
        layout.slide(is_up, 150);
        CopyWatch device;
        device.first_refused = first_refused;
        device.last_refused = 100;
        std::size_t done = 0;
        bool is_lost = false;
        auto const before = [](std::size_t /*move*/) {};
        try {
          spillway::enqueue_moves(device, layout.moves, HostStream::caller, {}, done, before);
        } catch (spillway::BlockLost const&) {
          is_lost = true;
        } catch (spillway::DeviceError const&) {
        }
        std::size_t const moved_bytes = (first_refused - 1) * 150;
        CHECK(done == moved_bytes / 100);
        CHECK(is_lost == (moved_bytes % 100 != 0));
        std::vector<std::size_t> const places = layout.places_after(done);
        if (is_lost) {  // compares the others
          layout.blocks[is_up ? 7 - done : done].bytes = 0;
        }
        CHECK(layout.is_whole(places));
      }
    }
  }
}
