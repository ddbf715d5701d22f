// SPDX-License-Identifier: Apache-2.0
#include <spillway/core/error.hpp>
#include <spillway/core/fence.hpp>
#include <spillway/core/types.hpp>
#include <spillway/host/host_ledger.hpp>

#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

using namespace spillway;
using namespace spillway::detail;

namespace {

constexpr std::size_t slab_bytes = 16 * granule_bytes;

constexpr Ticket ticket(unsigned stream, unsigned sequence) {
  return {StreamIndex{static_cast<std::uint16_t>(stream)}, sequence};
}

/// A ledger with room for four slabs in each tier, and memory that stands for a slab of each.
struct Bench {
  Bench() {
    for (HostTier const tier : {HostTier::pinned, HostTier::pageable, HostTier::file}) {
      ledger.open(tier, 4 * slab_bytes, granule_bytes);
    }
  }
  void add(HostTier tier) {
    HostSlab slab;
    if (tier == HostTier::file) {
      slab.file_offset = 4096;
    } else {
      slab.memory = memory.data();
    }
    ledger.add_slab(tier, slab, slab_bytes);
  }
  HostSlot& slot(HostSlotId id) { return ledger.at(id); }

  HostLedger ledger;
  std::array<std::byte, slab_bytes> memory{};
};

}  // namespace

TEST_SUITE("host_ledger") {
  TEST_CASE("HostLedger: a slot goes to the first tier that has room and has not failed") {
    Bench now;
    now.add(HostTier::pageable);
    now.add(HostTier::file);
    auto const tier_of_next = [&](std::size_t bytes) {
      return now.slot(now.ledger.try_take(bytes).value()).tier;
    };

    CHECK(tier_of_next(granule_bytes) == HostTier::pageable);
    now.add(HostTier::pinned);
    CHECK(tier_of_next(granule_bytes) == HostTier::pinned);
    CHECK(tier_of_next(slab_bytes) == HostTier::file);
    CHECK(now.ledger.try_take(slab_bytes) == std::nullopt);
    now.ledger.fail(HostTier::pinned);
    CHECK(tier_of_next(granule_bytes) == HostTier::pageable);
    CHECK(now.ledger.stats(HostTier::pinned).is_failed);
    CHECK_FALSE(now.ledger.can_take(HostTier::pinned, 1, slab_bytes));
  }

  TEST_CASE("HostLedger: a slot for no bytes takes as much room as one for a single byte") {
    Bench now;
    now.add(HostTier::pinned);
    auto const none = now.ledger.try_take(0).value();
    auto const one = now.ledger.try_take(1).value();

    CHECK(none != one);
    CHECK(now.slot(none).bytes == now.slot(one).bytes);
    CHECK(now.ledger.stats(HostTier::pinned).used_bytes == 2 * now.slot(one).bytes);
    CHECK(now.ledger.give_back(none, Fence{}));
  }

  TEST_CASE("HostLedger: a tier grows by at least the requested bytes, up to its capacity") {
    Bench now;
    auto const growth = [&](std::size_t bytes, std::size_t least) {
      return now.ledger.growth_for(HostTier::pageable, bytes, least);
    };

    CHECK(growth(1, 0) == granule_bytes);
    CHECK(growth(1, slab_bytes) == slab_bytes);
    CHECK(growth(2 * slab_bytes + 1, slab_bytes) == 2 * slab_bytes + granule_bytes);
    CHECK(growth(4 * slab_bytes, 0) == 4 * slab_bytes);
    CHECK(growth(4 * slab_bytes + 1, 0) == 0);
    now.add(HostTier::pageable);
    CHECK(growth(1, 8 * slab_bytes) == 3 * slab_bytes);
    CHECK(growth(4 * slab_bytes, 0) == 3 * slab_bytes);  // scattered over both
    CHECK(growth(slab_bytes + 1, 0) == granule_bytes);
    CHECK(growth(std::size_t{0} - 1, 0) == 0);
    now.ledger.fail(HostTier::pageable);
    CHECK(growth(1, 0) == 0);
  }

  TEST_CASE("HostLedger: a slot consists of at most eight free ranges and a new slab") {
    Bench now;
    now.add(HostTier::pinned);
    now.add(HostTier::pinned);
    std::vector<HostSlotId> slots;
    for (int i = 0; i < 32; ++i) {
      slots.push_back(now.ledger.try_take(granule_bytes).value());
    }
    for (std::size_t i = 0; i < slots.size(); i += 2) {
      CHECK(now.ledger.give_back(slots[i], {}));
    }

    CHECK(now.ledger.growth_for(HostTier::pinned, 2 * slab_bytes, 0) ==
          2 * slab_bytes - 8 * granule_bytes);
  }

  TEST_CASE("HostLedger: slabs grow with the bytes in use") {
    HostLedger ledger;
    std::size_t const most = std::size_t{1} << 40U;
    ledger.open(HostTier::pinned, most, granule_bytes);
    auto const slab_when_used = [&](std::size_t bytes) {
      ledger.add_slab(HostTier::pinned, {}, bytes - ledger.stats(HostTier::pinned).used_bytes);
      CHECK(ledger.try_take(bytes - ledger.stats(HostTier::pinned).used_bytes).has_value());
      return ledger.slab_bytes(HostTier::pinned, 64_MiB);
    };

    CHECK(ledger.slab_bytes(HostTier::pinned, 64_MiB) == 2_MiB);
    CHECK(slab_when_used(127_MiB) == 2_MiB);
    CHECK(slab_when_used(128_MiB) == 4_MiB);
    CHECK(slab_when_used(1_GiB) == 32_MiB);
    CHECK(slab_when_used(8_GiB) == 64_MiB);
    CHECK(ledger.slab_bytes(HostTier::pinned, 1_MiB) == 1_MiB);
    CHECK(ledger.growth_ahead(64_MiB) == 64_MiB);
    ledger.add_slab(HostTier::pinned, {}, 128_MiB);  // the 64th part is free
    CHECK(ledger.growth_ahead(64_MiB) == 0);
    CHECK(ledger.try_take(128_MiB).has_value());
    CHECK(ledger.growth_ahead(64_MiB) == 64_MiB);
    ledger.set_first_tier(HostTier::pageable);
    CHECK(ledger.growth_ahead(64_MiB) == 0);
  }

  TEST_CASE("HostLedger: free_bytes counts only tiers where slots can be taken") {
    constexpr std::size_t most = std::numeric_limits<std::size_t>::max();
    HostLedger ledger;
    ledger.open(HostTier::pinned, 8_MiB, granule_bytes);
    ledger.open(HostTier::pageable, most, granule_bytes);
    ledger.open(HostTier::file, 32_MiB, granule_bytes);
    CHECK(ledger.free_bytes() == most);  // and does not wrap around
    ledger.set_first_tier(HostTier::file);
    CHECK(ledger.free_bytes() == 32_MiB);
    ledger.add_slab(HostTier::file, {}, 4_MiB);
    ledger.refuse_growth(HostTier::file);
    CHECK(ledger.free_bytes() == 4_MiB);
    CHECK(ledger.may_take(HostTier::file, 4_MiB, 0));
    CHECK_FALSE(ledger.may_take(HostTier::file, 5_MiB, 0));
    CHECK(ledger.is_growth_refused(HostTier::file));
    ledger.add_slab(HostTier::file, {}, 2_MiB);
    CHECK(ledger.free_bytes() == 32_MiB);
    CHECK(ledger.may_take(HostTier::file, 32_MiB, 0));
    CHECK_FALSE(ledger.is_growth_refused(HostTier::file));
    ledger.fail(HostTier::file);
    CHECK(ledger.free_bytes() == 0);
  }

  TEST_CASE("HostLedger: memory that was placed on a node is counted until its slab is removed") {
    Bench now;
    now.ledger.add_slab(HostTier::pageable, {now.memory.data(), 0, slab_bytes}, slab_bytes);
    auto const numa_bound = [&] { return now.ledger.stats(HostTier::pageable).numa_bound_bytes; };
    CHECK(numa_bound() == slab_bytes);

    now.ledger.remove_free_slabs(HostTier::pageable, [](HostSlab const&, Fence const&) {});

    CHECK(numa_bound() == 0);
  }

  TEST_CASE("HostLedger: pieces of a slot lie in its slabs, and end at the requested bytes") {
    Bench now;
    now.add(HostTier::pinned);
    now.add(HostTier::pinned);
    auto const first = now.ledger.try_take(10 * granule_bytes).value();
    auto const second = now.ledger.try_take(10 * granule_bytes).value();
    auto const id = now.ledger.try_take(12 * granule_bytes).value();
    std::vector<HostPiece> pieces;
    auto const pieces_of = [&](std::size_t bytes) {
      pieces.clear();
      now.ledger.for_each_piece(
          now.slot(id), bytes, [&](HostPiece const& piece) { pieces.push_back(piece); });
      return pieces.size();
    };

    CHECK(now.slot(first).tier == HostTier::pinned);
    CHECK(now.slot(second).tier == HostTier::pinned);
    REQUIRE(pieces_of(7 * granule_bytes + 3) == 2);
    CHECK(pieces[0].bytes == 6 * granule_bytes);
    CHECK(pieces[1].bytes == granule_bytes + 3);
    CHECK(pieces[0].slab != pieces[1].slab);
    CHECK(pieces[0].memory == now.memory.data() + 10 * granule_bytes);
    CHECK(pieces_of(5) == 1);
    CHECK(pieces_of(0) == 0);
  }

  TEST_CASE("HostLedger: a piece in the file has an offset and no memory") {
    Bench now;
    now.add(HostTier::file);
    auto const before = now.ledger.try_take(granule_bytes).value();
    auto const id = now.ledger.try_take(granule_bytes).value();

    now.ledger.for_each_piece(now.slot(id), 1, [&](HostPiece const& piece) {
      CHECK(piece.memory == nullptr);
      CHECK(piece.file_offset == 4096 + granule_bytes);
    });
    CHECK(now.slot(before).tier == HostTier::file);
  }

  TEST_CASE("HostLedger: a slot in use by a call cannot be given back; one with jobs stays until "
            "they end") {
    Bench now;
    now.add(HostTier::pinned);
    auto const id = now.ledger.try_take(1).value();
    HostSlot& slot = now.slot(id);
    std::size_t known = 0;
    auto const count = [&] {
      known = 0;
      now.ledger.for_each_slot([&](HostSlot const&) { ++known; });
      return known;
    };

    for (SlotAccess const access : {SlotAccess::read, SlotAccess::write}) {
      slot.begin_transfer(access);
      CHECK_FALSE(now.ledger.give_back(id, {}));
      slot.end_transfer(access, {}, false, 0);
    }
    ++slot.jobs(SlotAccess::write);
    CHECK(now.ledger.give_back(id, {}));
    CHECK(now.ledger.find(id) == nullptr);
    CHECK(count() == 1);
    CHECK(now.ledger.stats(HostTier::pinned).slot_count == 0);
    CHECK(now.ledger.stats(HostTier::pinned).used_bytes == 0);
    --slot.jobs(SlotAccess::write);
    now.ledger.forget_if_unused(slot);
    CHECK(count() == 0);
    CHECK_FALSE(now.ledger.give_back(id, {}));
    CHECK_THROWS_AS((void)now.ledger.at(id), ContractViolation);
  }

  TEST_CASE("HostLedger: bytes that a codec saved are freed once their number is known and no "
            "write runs") {
    Bench now;
    now.add(HostTier::pinned);
    CodedRoom const room{8 * granule_bytes};
    HostSlot& slot = now.slot(now.ledger.try_take(4 * granule_bytes, CodingId{1}, room).value());
    auto const bytes_after_trim = [&] {
      now.ledger.trim(slot);
      CHECK(now.ledger.stats(HostTier::pinned).used_bytes == slot.bytes);
      return slot.bytes;
    };

    CHECK(bytes_after_trim() == 8 * granule_bytes);
    slot.begin_transfer(SlotAccess::write);
    slot.stored_bytes = granule_bytes;
    CHECK(bytes_after_trim() == 8 * granule_bytes);
    ++slot.jobs(SlotAccess::write);
    slot.end_transfer(SlotAccess::write, ticket(1, 10), true, 4 * granule_bytes);
    CHECK(bytes_after_trim() == 8 * granule_bytes);
    --slot.jobs(SlotAccess::write);
    CHECK(bytes_after_trim() == granule_bytes);
  }

  TEST_CASE("HostLedger: the next owner of a range waits for all uses by the last one") {
    Bench now;
    now.add(HostTier::pinned);
    auto const id = now.ledger.try_take(slab_bytes).value();
    now.slot(id).end_transfer(SlotAccess::write, ticket(1, 10), true, slab_bytes);
    ++now.slot(id).enqueueing_reads;
    now.slot(id).end_transfer(SlotAccess::read, ticket(2, 20), true, slab_bytes);
    CHECK(now.ledger.give_back(id, ticket(3, 30)));

    HostSlot const& next = now.slot(now.ledger.try_take(slab_bytes).value());

    Fence expected{ticket(1, 10)};
    expected.add(ticket(2, 20));
    expected.add(ticket(3, 30));
    CHECK(next.fence_before(SlotAccess::write) == expected);
    std::size_t fences = 0;
    now.ledger.for_each_fence([&](Fence const& fence) { fences += fence == expected ? 1U : 0U; });
    CHECK(fences == 1);
  }

  TEST_CASE(
      "HostSlot: a write replaces the fences, a read adds to them, an empty transfer keeps them") {
    HostSlot slot;
    slot.bytes = 1000;
    slot.begin_transfer(SlotAccess::write);
    slot.end_transfer(SlotAccess::write, ticket(1, 1), true, 600);
    CHECK(slot.written_bytes == 600);
    CHECK(slot.fence_before(SlotAccess::read) == Fence{ticket(1, 1)});

    slot.begin_transfer(SlotAccess::read);
    slot.end_transfer(SlotAccess::read, ticket(2, 2), true, 600);
    CHECK(slot.fence_before(SlotAccess::read) == Fence{ticket(1, 1)});
    Fence both{ticket(1, 1)};
    both.add(ticket(2, 2));
    CHECK(slot.fence_before(SlotAccess::write) == both);

    slot.begin_transfer(SlotAccess::write);
    slot.end_transfer(SlotAccess::write, {}, false, 0);
    CHECK(slot.written_bytes == 600);
    CHECK(slot.fence_before(SlotAccess::write) == both);

    slot.begin_transfer(SlotAccess::write);
    slot.end_transfer(SlotAccess::write, ticket(3, 3), true, 0);  // failed half-way
    CHECK(slot.written_bytes == 0);
    CHECK(slot.last_uses() == Fence{ticket(3, 3)});
  }

  TEST_CASE("HostSlot: allows several reads or one write at a time, within the slot's bytes") {
    HostSlot slot;
    slot.bytes = slot.takes_bytes = 1000;
    CHECK(slot.refusal(1001, SlotAccess::write) != nullptr);
    CHECK(slot.refusal(1, SlotAccess::read) != nullptr);
    slot.written_bytes = 500;
    CHECK(slot.refusal(500, SlotAccess::read) == nullptr);
    CHECK(slot.refusal(501, SlotAccess::read) != nullptr);

    slot.begin_transfer(SlotAccess::read);
    CHECK(slot.refusal(1, SlotAccess::read) == nullptr);
    CHECK(slot.refusal(1, SlotAccess::write) != nullptr);
    slot.end_transfer(SlotAccess::read, {}, false, 0);
    CHECK(slot.refusal(1, SlotAccess::write) == nullptr);

    slot.begin_transfer(SlotAccess::write);
    CHECK(slot.refusal(1, SlotAccess::read) != nullptr);
    CHECK(slot.refusal(1, SlotAccess::write) != nullptr);
  }

  TEST_CASE("HostLedger: a loss is kept for later if its owner was not told, and reported once") {
    Bench now;
    now.add(HostTier::file);
    FileFailure const failure{.error = 5, .file_offset = 7, .bytes = 9, .is_read = true};
    auto const untold = now.ledger.try_take(1).value();
    auto const told = now.ledger.try_take(1).value();
    for (HostSlotId const id : {untold, told}) {
      now.ledger.note_failure(now.slot(id), 0, failure);
    }
    now.slot(told).is_failure_told = true;

    CHECK(now.ledger.give_back(told, {}));
    CHECK_FALSE(now.ledger.take_orphan_failure().has_value());
    CHECK(now.ledger.give_back(untold, {}));
    CHECK(now.ledger.take_orphan_failure()->bytes == 9);
    CHECK_FALSE(now.ledger.take_orphan_failure().has_value());
  }

  TEST_CASE("HostLedger: a slot that nobody owns any more keeps no loss for later") {
    Bench now;
    now.add(HostTier::file);
    FileFailure const failure{.error = 5, .bytes = 9, .is_read = true};
    auto const first = now.ledger.try_take(1).value();
    now.ledger.note_failure(now.slot(first), 0, failure);
    now.ledger.disown(now.slot(first));
    CHECK(now.ledger.take_orphan_failure().has_value());
    CHECK(now.slot(first).failure.has_value());  // blocks that are made from these bytes are told
    now.ledger.disown(now.slot(first));
    CHECK(now.ledger.give_back(first, {}));
    CHECK_FALSE(now.ledger.take_orphan_failure().has_value());

    auto const second = now.ledger.try_take(1).value();
    auto const heir = now.ledger.try_take(1).value();
    now.ledger.disown(now.slot(second));
    CHECK_FALSE(now.ledger.take_orphan_failure().has_value());
    CHECK(now.ledger.bequeath(second, heir));
    now.ledger.note_failure(now.slot(heir), 0, FileFailure{.error = 5, .bytes = 9});
    CHECK_FALSE(now.ledger.take_orphan_failure().has_value());  // of a write, which nobody has read
    now.ledger.note_failure(now.slot(heir), 0, failure);
    CHECK(now.ledger.take_orphan_failure().has_value());
    CHECK(now.slot(heir).failure.has_value());
  }

  TEST_CASE("HostLedger: a failed write of a slot that is given back is a loss if it may be read") {
    for (bool const has_failed_before : {false, true}) {  // before the slot was given back
      for (std::uint32_t const reads : {0U, 1U}) {
        CAPTURE(has_failed_before);
        CAPTURE(reads);
        Bench now;
        now.add(HostTier::file);
        FileFailure const failure{.error = 5, .bytes = 9};
        auto const id = now.ledger.try_take(1).value();
        HostSlot& slot = now.slot(id);
        slot.read_jobs = reads;
        slot.write_jobs = has_failed_before ? 0 : 1;  // so that the record stays
        if (has_failed_before) {
          now.ledger.note_failure(slot, 0, failure);
        }
        CHECK(now.ledger.give_back(id, {}));
        if (!has_failed_before) {
          now.ledger.note_failure(slot, 0, failure);
        }
        CHECK(now.ledger.take_orphan_failure().has_value() == (reads != 0));
      }
    }
  }

  TEST_CASE("HostLedger: a loss is that of the slot that has replaced the one that was read") {
    enum class Then { kept, overwritten, used_and_overwritten };
    for (Then const then : {Then::kept, Then::overwritten, Then::used_and_overwritten}) {
      CAPTURE(static_cast<int>(then));
      Bench now;
      now.add(HostTier::file);
      FileFailure const failure{.error = 5, .bytes = 9, .is_read = true};
      std::vector<HostSlotId> line;
      for (int i = 0; i < 3; ++i) {
        line.push_back(now.ledger.try_take(1).value());
      }
      HostSlot& read = now.slot(line[0]);
      HostSlot& last = now.slot(line[2]);
      ++read.jobs(SlotAccess::read);
      CHECK(now.ledger.bequeath(line[0], line[1]));
      CHECK(now.ledger.bequeath(line[1], line[2]));
      CHECK(last.has_unfinished_reads());
      CHECK(last.has_ancestors);
      if (then != Then::kept) {
        now.ledger.forget_failures(last, then == Then::used_and_overwritten);
      }

      now.ledger.note_failure(read, 0, failure);
      --read.jobs(SlotAccess::read);
      now.ledger.forget_if_unused(read);

      CHECK(last.failure.has_value() == (then == Then::kept));
      CHECK_FALSE(last.has_unfinished_reads());
      std::size_t known = 0;
      now.ledger.for_each_slot([&](HostSlot const&) { ++known; });
      CHECK(known == 1);
      CHECK(now.ledger.take_orphan_failure().has_value() == (then == Then::used_and_overwritten));
    }
  }

  TEST_CASE("HostLedger: a loss that was noted before a slot was replaced is only its heir's") {
    Bench now;
    now.add(HostTier::file);
    FileFailure const failure{.error = 5, .bytes = 9, .is_read = true};
    auto const read = now.ledger.try_take(1).value();
    auto const heir = now.ledger.try_take(1).value();
    now.ledger.note_failure(now.slot(read), 0, failure);

    CHECK(now.ledger.bequeath(read, heir));
    HostSlot& slot = now.slot(heir);
    CHECK(slot.failure.has_value());
    CHECK_FALSE(now.ledger.take_orphan_failure().has_value());

    slot.is_failure_told = true;
    now.ledger.forget_failures(slot, false);
    now.ledger.note_failure(slot, slot.version, failure);  // another one, which was not told
    CHECK(now.ledger.give_back(heir, {}));
    CHECK(now.ledger.take_orphan_failure().has_value());
  }

  TEST_CASE("HostLedger: an emptied slot keeps its record and no memory") {
    Bench now;
    now.add(HostTier::file);
    auto const id = now.ledger.try_take(1).value();
    HostSlot& slot = now.slot(id);
    ++slot.jobs(SlotAccess::read);
    CHECK(now.ledger.empty(id, {}));
    CHECK(now.ledger.stats(HostTier::file).slot_count == 0);
    CHECK(now.ledger.stats(HostTier::file).used_bytes == 0);
    CHECK(slot.refusal(1, SlotAccess::write) != nullptr);
    CHECK(slot.refusal(1, SlotAccess::read) != nullptr);
    now.ledger.trim(slot);

    CHECK(now.ledger.give_back(id, {}));
    now.ledger.note_failure(slot, 0, FileFailure{.bytes = 9, .is_read = true});
    --slot.jobs(SlotAccess::read);
    now.ledger.forget_if_unused(slot);
    CHECK(now.ledger.take_orphan_failure()->bytes == 9);
    CHECK(now.ledger.stats(HostTier::file).used_bytes == 0);
  }
}
