// SPDX-License-Identifier: Apache-2.0
#include <spillway/core/record.hpp>
#include <spillway/core/stats.hpp>
#include <spillway/core/types.hpp>
#include <spillway/device/sim/model_api.hpp>
#include <spillway/pager/block_state.hpp>
#include <spillway/pager/journal.hpp>
#include <spillway/pager/monitor.hpp>
#include <spillway/sim.hpp>

#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

#include <support/pager_bench.hpp>

TEST_SUITE("pager") {
  namespace {

  using namespace spillway::literals;
  using spillway::BlockId;
  using spillway::EvictionReason;
  using spillway::ModelApi;
  using spillway::Record;
  using spillway::RecordKind;
  using spillway::Tally;
  using spillway::detail::BlockRecord;
  using support::PagerBench;
  using support::Plain;

  /// A lock that tells whether it is held.
  struct SeenLock {
    static inline bool is_taken = false;

    void lock() { is_taken = true; }
    void unlock() { is_taken = false; }
    bool try_lock() { return !std::exchange(is_taken, true); }
  };

  /// An observer that keeps the records, and whether any came while the lock was held.
  struct Listener {
    static constexpr bool is_enabled = true;

    void on_record(Record const& record) noexcept {
      records.push_back(record);
      was_locked = was_locked || SeenLock::is_taken;
    }

    std::vector<Record> records;
    bool was_locked = false;
  };

  struct Watched : spillway::SimPolicies {
    using device = ModelApi;
    using lock = SeenLock;
    using observer = Listener;
  };

  struct Bench {
    ModelApi device{{.capacity_bytes = 1_MiB}};
    spillway::detail::Monitor<SeenLock> monitor;
    spillway::detail::Journal<Watched> journal{device, monitor};
    std::array<std::byte, 2> memory{};
    BlockRecord block{.requested_bytes = 1000, .bytes = 1024, .address = memory.data()};
  };

  }  // namespace

  TEST_CASE("DeviceAllocator: sources of ranges, evictions and copies are counted exactly") {
    PagerBench<Plain> bench{128_KiB};
    PagerBench<Plain>::Buffer a{bench.allocator, 60_KiB};
    PagerBench<Plain>::Buffer b{bench.allocator, 60_KiB};
    bench.write(a, 1);
    bench.write(b, 2);
    PagerBench<Plain>::Buffer c{bench.allocator, 50_KiB};  // a is swapped out
    bench.write(c, 3);
    bench.check(a, 1);                                     // b is swapped out, a swapped in
    PagerBench<Plain>::Buffer d{bench.allocator, 40_KiB};  // c is swapped out
    auto const stats = bench.allocator.stats();
    CHECK(stats.swap_outs == spillway::Tally{3, 170_KiB});
    CHECK(stats.swap_ins == spillway::Tally{1, 60_KiB});
    CHECK(stats.evicted(spillway::EvictionReason::pressure) == spillway::Tally{3, 170_KiB});
    CHECK(stats.drops.count == 0);
    CHECK(stats.ranges_from(spillway::RangeSource::free_range) == 2);
    CHECK(stats.ranges_from(spillway::RangeSource::after_swap_out) +
              stats.ranges_from(spillway::RangeSource::after_compaction) ==
          3);
    CHECK(stats.allocated.bytes.current == 210_KiB);
    CHECK(stats.resident.bytes.current == 100_KiB);
    CHECK(stats.resident.bytes.peak <= 128_KiB);
    bench.device.run_all();
    CHECK(bench.device.calls().bytes_to_host == 170_KiB);
    CHECK(bench.device.calls().bytes_to_device == 60_KiB);
  }

  TEST_CASE("Journal: taken and released bytes balance, and the peak stays") {
    Bench bench;
    auto& journal = bench.journal;
    journal.block_added(BlockId{1}, bench.block);
    journal.block_counted(bench.block);
    journal.range_taken(bench.block);
    bench.block.leases = 1;
    journal.leases_begun(bench.block);
    CHECK(journal.stats().allocated.bytes.current == 1024);
    CHECK(journal.stats().requested_bytes.current == 1000);
    CHECK(journal.stats().resident.bytes.current == 1024);
    CHECK(journal.stats().leased.bytes.current == 1024);

    bench.block.leases = 0;
    journal.leases_ended(bench.block);
    journal.range_left(bench.block);
    journal.block_freed(BlockId{1}, bench.block);
    CHECK(journal.stats().allocated.bytes.current == 0);
    CHECK(journal.stats().requested_bytes.current == 0);
    CHECK(journal.stats().resident.bytes.current == 0);
    CHECK(journal.stats().leased.bytes.current == 0);
    CHECK(journal.stats().allocated.bytes.peak == 1024);
    CHECK(journal.stats().requested_bytes.peak == 1000);
    CHECK(journal.stats().resident.bytes.peak == 1024);
    CHECK(journal.stats().leased.bytes.peak == 1024);

    journal.reset_peaks(4096);
    CHECK(journal.stats().allocated.bytes.peak == 0);
    CHECK(journal.stats().allocated.blocks.peak == 0);
    CHECK(journal.stats().requested_bytes.peak == 0);
    CHECK(journal.stats().resident.bytes.peak == 0);
    CHECK(journal.stats().resident.blocks.peak == 0);
    CHECK(journal.stats().leased.bytes.peak == 0);
    CHECK(journal.stats().leased.blocks.peak == 0);
    CHECK(journal.stats().peak_reserved_bytes == 4096);
  }

  TEST_CASE("Journal: only bytes of blocks that have a range count as leased") {
    Bench bench;
    bench.block.leases = 2;
    bench.journal.range_taken(bench.block);
    CHECK(bench.journal.stats().leased.bytes.current == 1024);
    bench.journal.range_left(bench.block);
    CHECK(bench.journal.stats().leased.bytes.current == 0);
    CHECK(bench.journal.stats().leased.blocks.current == 0);
  }

  TEST_CASE(
      "Journal: a copy ahead of need is counted as speculative, and a lost range is not a drop") {
    Bench bench;
    auto& journal = bench.journal;
    journal.copied_out(BlockId{1}, bench.block);
    CHECK(journal.stats().swap_outs == Tally{1, 1024});
    CHECK(journal.stats().evicted(EvictionReason::speculative) == Tally{1, 1024});
    CHECK(!journal.is_under_pressure());

    journal.range_lost(BlockId{1}, bench.block);
    CHECK(journal.stats().drops == Tally{});
    journal.dropped(BlockId{1}, bench.block, false);
    CHECK(journal.stats().drops == Tally{1, 1024});
    CHECK(journal.stats().swap_outs == Tally{1, 1024});
  }

  TEST_CASE("Journal: there is pressure in the step of an eviction and in the next step") {
    for (int const steps_before : {0, 3}) {
      CAPTURE(steps_before);
      Bench bench;
      for (int i = 0; i < steps_before; ++i) {
        bench.journal.begin_step();
      }
      CHECK(!bench.journal.is_under_pressure());
      bench.journal.evicted(bench.block, EvictionReason::pressure);
      CHECK(bench.journal.is_under_pressure());
      bench.journal.begin_step();
      CHECK(bench.journal.is_under_pressure());
      bench.journal.begin_step();
      CHECK(!bench.journal.is_under_pressure());
    }
  }

  TEST_CASE("Journal: a wait is recorded with its duration, and a call that did not wait is not") {
    Bench bench;
    bench.journal.host_waited(0, 100, 900);
    CHECK(bench.journal.stats().host_waits == 0);
    CHECK(bench.journal.stats().host_wait_ns == 0);
    bench.journal.host_waited(3, 100, 900);
    CHECK(bench.journal.stats().host_waits == 3);
    CHECK(bench.journal.stats().host_wait_ns == 800);

    bench.journal.tell_observer();
    std::vector<Record> const& records = bench.journal.observer().records;
    REQUIRE(records.size() == 1);
    CHECK(records[0].kind == RecordKind::host_wait);
    CHECK(records[0].start_ns == 100);
    CHECK(records[0].end_ns == 900);
  }

  TEST_CASE("Journal: the observer is told each thing once, in order and without the lock") {
    Bench bench;
    auto& journal = bench.journal;
    BlockId const id{5};
    {
      std::lock_guard const guard{bench.monitor};
      journal.block_added(id, bench.block);
      journal.made_resident(id, bench.block);
      journal.swapped_out(id, bench.block);
      journal.swapped_in(id, bench.block, false);
      journal.swapped_in(id, bench.block, true);
      journal.moved(id, bench.block);
      journal.grown(4096, bench.memory.data() + 1, 4096);
      CHECK(journal.observer().records.empty());
    }
    journal.tell_observer();
    journal.tell_observer();

    std::vector<RecordKind> kinds;
    for (Record const& record : journal.observer().records) {
      kinds.push_back(record.kind);
      CHECK(record.start_ns == bench.device.clock_ns());
      CHECK(record.end_ns == record.start_ns);
    }
    CHECK(kinds == std::vector{RecordKind::allocate,
                               RecordKind::make_resident,
                               RecordKind::swap_out,
                               RecordKind::swap_in,
                               RecordKind::prefetch,
                               RecordKind::move,
                               RecordKind::grow});
    std::vector<Record> const& records = journal.observer().records;
    CHECK(records[0].address == nullptr);  // it has no range yet
    CHECK(records[1].address == bench.memory.data());
    CHECK(records[1].block == id);
    CHECK(records[1].bytes == 1024);
    CHECK(records.back().address == bench.memory.data() + 1);
    CHECK(!journal.observer().was_locked);
    CHECK(!SeenLock::is_taken);
    CHECK(journal.stats().swap_ins == Tally{2, 2048});
  }
}
