// SPDX-License-Identifier: Apache-2.0
#include <spillway/core/error.hpp>
#include <spillway/core/types.hpp>
#include <spillway/host/host_ledger.hpp>
#include <spillway/host/slot_io.hpp>
#include <spillway/host/swap_file.hpp>
#include <spillway/testing/faulty_file_io.hpp>

#include <doctest/doctest.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <initializer_list>
#include <mutex>
#include <vector>

#include <support/pool_bench.hpp>
#include <support/temporary_folder.hpp>

TEST_SUITE("slot_io") {
  using namespace spillway;
  using spillway::testing::FaultyFileIo;
  using namespace spillway::detail;

  namespace {

  using Io = SlotIo<FaultyFileIo>;

  constexpr std::size_t piece_bytes = 1024;

  /// A file tier of which the slots lie side by side, and a chunk with a place for each.
  struct Bench {
    explicit Bench(bool is_direct = false) : file{folder.path(), is_direct, faults} {
      REQUIRE(file.try_reserve(16 << 10));
      ledger.open(HostTier::file, 16 << 10, granule_bytes);
      ledger.add_slab(HostTier::file, HostSlab{}, 16 << 10);
      for (HostSlotId& id : slots) {
        id = ledger.try_take(piece_bytes).value();
      }
      put_pattern(chunk.data(), chunk.size(), 1);
      for (SlotAccess const access : {SlotAccess::write, SlotAccess::read}) {
        io.open_queue(access, chunk);
      }
    }

    HostSlot& slot(std::size_t i) { return ledger.at(slots[i]); }

    /// The jobs of these slots, in one list and each in its place in the chunk.
    Io::Job* jobs(std::initializer_list<std::size_t> which, SlotAccess access) {
      Io::Job* first = nullptr;
      Io::Job* last = nullptr;
      for (std::size_t const i : which) {
        Io::Job& job = io.take(slot(i), access);
        ledger.for_each_piece(
            slot(i), piece_bytes, [&](HostPiece const& piece) { job.piece = piece; });
        job.chunk = chunk.data() + i * piece_bytes;
        (first == nullptr ? first : last->next) = &job;
        last = &job;
      }
      return first;
    }
    void write(std::initializer_list<std::size_t> which) {
      Io::run(jobs(which, SlotAccess::write));
    }
    void read(std::initializer_list<std::size_t> which) { Io::run(jobs(which, SlotAccess::read)); }

    /// Whether the chunk has the bytes that `write` put there, at these places.
    [[nodiscard]] bool is_back(std::initializer_list<std::size_t> which) const {
      std::vector<std::byte> expected(chunk.size());
      put_pattern(expected.data(), expected.size(), 1);
      for (std::size_t const i : which) {
        std::size_t const at = i * piece_bytes;
        if (std::memcmp(chunk.data() + at, expected.data() + at, piece_bytes) != 0) {
          return false;
        }
      }
      return true;
    }
    void wipe() { chunk.fill(std::byte{0xEE}); }

    TemporaryFolder folder;
    FaultyFileIo faults;
    SwapFile<FaultyFileIo> file;
    std::mutex mutex;
    HostLedger ledger;
    Io io{mutex, ledger, &file};
    std::array<HostSlotId, 4> slots{};
    alignas(4096) std::array<std::byte, 4 * piece_bytes> chunk{};
  };

  }  // namespace

  TEST_CASE("SlotIo: pieces that are adjacent in the file and in the chunk share a call") {
    Bench now;

    now.write({0, 1, 2, 3});
    CHECK(now.faults.calls().writes == 1);
    now.wipe();
    now.read({0, 1, 2, 3});

    CHECK(now.faults.calls().reads == 1);
    CHECK(now.is_back({0, 1, 2, 3}));
  }

  TEST_CASE("SlotIo: pieces that are not adjacent, or in another order, use separate calls") {
    Bench now;

    now.write({0, 1, 3});
    CHECK(now.faults.calls().writes == 2);
    now.write({2, 0, 1});
    CHECK(now.faults.calls().writes == 4);
    now.wipe();
    now.read({3, 2, 1, 0});

    CHECK(now.faults.calls().reads == 4);
    CHECK(now.is_back({0, 1, 2, 3}));
  }

  TEST_CASE("SlotIo: pageable pieces are copied without any file call") {
    Bench now;
    std::array<std::byte, 4 * piece_bytes> memory{};
    now.ledger.open(HostTier::pageable, memory.size(), granule_bytes);
    now.ledger.add_slab(HostTier::pageable, HostSlab{memory.data(), 0, 0}, memory.size());
    now.slots = {now.ledger.try_take(piece_bytes).value(),
                 now.ledger.try_take(piece_bytes).value()};

    now.write({0, 1});
    CHECK(std::memcmp(memory.data(), now.chunk.data(), 2 * piece_bytes) == 0);
    now.wipe();
    now.read({1, 0});

    CHECK(now.is_back({0, 1}));
    CHECK(now.faults.calls().writes + now.faults.calls().reads == 0);
  }

  TEST_CASE(
      "SlotIo: a failed shared write is repeated piece by piece; what fails again is rescued") {
    Bench now;
    now.faults.plant({.write_error = EIO,
                      .failing_from = piece_bytes,
                      .failing_to = 2 * piece_bytes,
                      .most_bytes = piece_bytes});

    now.write({0, 1, 2});

    CHECK(now.io.failed_writes() == 1);
    CHECK(now.slot(0).rescued.empty());
    REQUIRE(now.slot(1).rescued.size() == 1);
    CHECK(now.slot(1).rescued[0].bytes == piece_bytes);
    CHECK(now.ledger.stats(HostTier::file).is_failed);
    now.wipe();
    now.read({0, 1, 2});
    CHECK(now.is_back({0, 1, 2}));
    CHECK_NOTHROW(now.io.throw_if_failed(now.slot(1)));

    SUBCASE("the next successful write frees the rescued copy") {
      now.faults.plant({});
      now.write({1});
      CHECK(now.slot(1).rescued.empty());
    }
    SUBCASE("so does a successful shared write") {
      now.faults.plant({});
      now.write({0, 1, 2});
      CHECK(now.slot(1).rescued.empty());
    }
    SUBCASE("another failed write replaces it") {
      std::memset(now.chunk.data() + piece_bytes, 0x55, piece_bytes);
      now.write({1});
      CHECK(now.slot(1).rescued.size() == 1);
      now.wipe();
      now.read({1});
      CHECK(now.chunk[piece_bytes] == std::byte{0x55});
    }
  }

  TEST_CASE("SlotIo: rescued pieces are written again until one is refused") {
    Bench now;
    now.faults.plant({.write_error = ENOSPC});
    now.write({0, 1, 2});
    now.write({3});
    CHECK(now.io.write_error() == ENOSPC);
    now.faults.plant(
        {.write_error = EIO, .failing_from = piece_bytes, .failing_to = 3 * piece_bytes});

    CHECK(now.io.is_attempt_due());
    CHECK_FALSE(now.io.try_again());
    CHECK(now.io.write_error() == EIO);
    CHECK(now.io.failed_writes() == 4);
    CHECK(now.ledger.has_failed(HostTier::file));
    std::size_t rescued = 0;
    for (std::size_t i = 0; i < now.slots.size(); ++i) {
      rescued += now.slot(i).rescued.size();
      CHECK(now.slot(i).write_jobs == 0);
    }
    CHECK(rescued >= 2);
    now.wipe();
    now.read({0, 1, 2, 3});
    CHECK(now.is_back({0, 1, 2, 3}));

    now.faults.plant({});
    CHECK_FALSE(now.io.is_attempt_due());
    CHECK(now.io.is_attempt_due());
    std::size_t const writes = now.faults.calls().writes;
    CHECK(now.io.try_again());
    CHECK(now.faults.calls().writes == writes + rescued);
    CHECK_FALSE(now.ledger.has_failed(HostTier::file));
    CHECK_FALSE(now.io.is_attempt_due());
    now.wipe();
    now.read({0, 1, 2, 3});
    CHECK(now.is_back({0, 1, 2, 3}));
    CHECK(now.slot(1).rescued.empty());
  }

  TEST_CASE("SlotIo: a slot that is about to be written, or was given back, is not written again") {
    Bench now;
    now.faults.plant({.write_error = ENOSPC});
    now.write({0, 1});
    now.faults.plant({});
    Io::Job* const read = now.jobs({1}, SlotAccess::read);
    CHECK(now.ledger.give_back(now.slots[1], {}));
    Io::Job* const write = now.jobs({0}, SlotAccess::write);
    std::size_t const writes = now.faults.calls().writes;

    CHECK(now.io.try_again());  // by a unit elsewhere

    CHECK(now.faults.calls().writes == writes + 1);
    CHECK(now.slot(0).rescued.size() == 1);
    std::memset(now.chunk.data(), 0x55, piece_bytes);
    Io::run(write);
    CHECK(now.slot(0).rescued.empty());
    now.wipe();
    Io::run(read);
    CHECK(now.is_back({1}));
    now.read({0});
    CHECK(now.chunk[0] == std::byte{0x55});
  }

  TEST_CASE("SlotIo: a piece that cannot be read is lost, others are not") {
    Bench now;
    now.write({0, 1, 2});
    now.faults.plant({.read_error = EIO,
                      .failing_from = piece_bytes,
                      .failing_to = 2 * piece_bytes,
                      .most_bytes = piece_bytes});
    now.wipe();

    now.read({0, 1, 2});

    CHECK(now.io.failed_reads() == 1);
    CHECK(now.is_back({0, 2}));
    CHECK_FALSE(now.is_back({1}));
    CHECK_NOTHROW(now.io.throw_if_failed(now.slot(0)));
    CHECK_THROWS_AS(now.io.throw_if_failed(now.slot(1)), FileTierError);
  }

  TEST_CASE("SlotIo: jobs count for their slot until they have run, and are used again") {
    Bench now;
    Io::Job* const job = now.jobs({0}, SlotAccess::write);
    CHECK(now.slot(0).write_jobs == 1);

    Io::run(job);

    CHECK(now.slot(0).write_jobs == 0);
    Io::Job& next = now.io.take(now.slot(1), SlotAccess::read);
    CHECK(&next == job);
    CHECK(next.slot == &now.slot(1));
    CHECK(next.next == nullptr);
    CHECK(next.piece.bytes == 0);
    CHECK(now.slot(1).read_jobs == 1);
    now.io.give_back(next);
    CHECK(now.slot(1).read_jobs == 0);
  }

  TEST_CASE("SlotIo: a slot that was given back is written only if a read is still to come") {
    Bench now;
    Io::Job* const write = now.jobs({0}, SlotAccess::write);
    bool is_read = false;
    SUBCASE("without a read") {}
    SUBCASE("with a read") {
      is_read = true;
    }
    Io::Job* const read = is_read ? now.jobs({0}, SlotAccess::read) : nullptr;
    REQUIRE(now.ledger.give_back(now.slots[0], {}));

    Io::run(write);

    CHECK(now.faults.calls().writes == (is_read ? 1 : 0));
    if (read != nullptr) {
      now.wipe();
      Io::run(read);
      CHECK(now.is_back({0}));
    }
    std::size_t known = 0;
    now.ledger.for_each_slot([&](HostSlot const&) { ++known; });
    CHECK(known == 3);  // the slot was removed with its last job
  }
}
