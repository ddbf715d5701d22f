// SPDX-License-Identifier: Apache-2.0
// The records of an observer, put together, agree with the allocator's own state.
#include <spillway/core/record.hpp>
#include <spillway/device_allocator.hpp>
#include <spillway/page_arena.hpp>
#include <spillway/policy/eviction/queue_eviction.hpp>
#include <spillway/sim.hpp>
#include <spillway/swappable_buffer.hpp>
#include <spillway/testing/stepped_sim_api.hpp>

#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <random>
#include <vector>

namespace {

using namespace spillway::literals;
using spillway::Access;
using spillway::BlockId;
using spillway::Record;
using spillway::RecordKind;
using spillway::Tally;

/// Keeps all records, and where each block is according to them.
class Ledger {
 public:
  static constexpr bool is_enabled = true;

  void on_record(Record const& record) noexcept {
    ++counts_[static_cast<std::size_t>(record.kind)].count;
    counts_[static_cast<std::size_t>(record.kind)].bytes += record.bytes;
    switch (record.kind) {
    case RecordKind::allocate:
      CHECK(alive_.emplace(record.block, record.bytes).second);
      break;
    case RecordKind::deallocate:
      CHECK(alive_.erase(record.block) == 1);
      CHECK(give_up(record.block) == record.address);
      break;
    case RecordKind::make_resident:
    case RecordKind::swap_in:
    case RecordKind::prefetch:
      CHECK(resident_.emplace(record.block, record.address).second);
      break;
    case RecordKind::swap_out:
    case RecordKind::drop:
      CHECK(give_up(record.block) == record.address);
      break;
    case RecordKind::copy_out:
      CHECK(resident_.at(record.block) == record.address);
      break;
    case RecordKind::move:
      resident_.at(record.block) = record.address;
      break;
    default:
      break;
    }
  }

  [[nodiscard]] Tally tally(RecordKind kind) const {
    return counts_.at(static_cast<std::size_t>(kind));
  }
  [[nodiscard]] std::map<BlockId, void const*> const& resident() const { return resident_; }
  [[nodiscard]] std::map<BlockId, std::size_t> const& alive() const { return alive_; }

 private:
  /// The address that the block had, or null.
  void const* give_up(BlockId id) {
    auto const found = resident_.find(id);
    if (found == resident_.end()) {
      return nullptr;
    }
    void const* const address = found->second;
    resident_.erase(found);
    return address;
  }

  std::map<BlockId, void const*> resident_;
  std::map<BlockId, std::size_t> alive_;
  std::array<Tally, 16> counts_{};
};

struct Scheduled : spillway::SimPolicies {
  using device = spillway::testing::SteppedSimApi;
  using observer = Ledger;
};
struct Lru : Scheduled {
  using eviction = spillway::LruEviction;
};
struct Remapped : Lru {
  using arena = spillway::MappedPages;
};

/// Compares the ledger with the allocator's own view.
template <class Allocator>
void check_ledger(Allocator& allocator) {
  Ledger const& ledger = allocator.observer();
  std::map<BlockId, void const*> resident;
  std::map<BlockId, std::size_t> alive;
  allocator.for_each_block([&](BlockId id, spillway::detail::BlockRecord const& block) {
    alive.emplace(id, block.bytes);
    if (block.is_resident()) {
      resident.emplace(id, block.address);
    }
  });
  CHECK(ledger.alive() == alive);
  CHECK(ledger.resident() == resident);

  auto const stats = allocator.stats();
  auto const sum = [&](RecordKind a, RecordKind b) {
    return Tally{ledger.tally(a).count + ledger.tally(b).count,
                 ledger.tally(a).bytes + ledger.tally(b).bytes};
  };
  CHECK(stats.swap_outs == sum(RecordKind::swap_out, RecordKind::copy_out));
  CHECK(stats.swap_ins == sum(RecordKind::swap_in, RecordKind::prefetch));
  CHECK(stats.moves == ledger.tally(RecordKind::move));
  CHECK(stats.steps == ledger.tally(RecordKind::step).count);
  CHECK(stats.out_of_memory == ledger.tally(RecordKind::out_of_memory).count);
}

}  // namespace

TEST_SUITE("record_history") {
  TEST_CASE_TEMPLATE(
      "Observer: its records give the place of each block", Policies, Scheduled, Lru, Remapped) {
    using Allocator = spillway::DeviceAllocator<Policies>;
    constexpr std::uint32_t seed = 20261121;
    CAPTURE(seed);
    std::mt19937 random{seed};
    spillway::testing::SteppedSimApi device{
        {.capacity_bytes = 16_MiB, .granularity_bytes = 4_KiB, .check_reads = false}};
    auto const stream = device.create_stream();
    typename Allocator::Options options{.capacity_bytes = 512_KiB, .initial_bytes = 64_KiB};
    options.growth_bytes = 64_KiB;
    options.host.pinned_bytes = 4_MiB;
    options.host.slab_bytes = 1_MiB;
    Allocator allocator{device, options};
    std::vector<spillway::SwappableBuffer<Allocator>> buffers;
    for (int step = 0; step < 40; ++step) {
      allocator.begin_step();
      for (int i = 0; i < 50; ++i) {
        std::size_t const choice = buffers.empty() ? 0 : random() % buffers.size();
        try {
          switch (random() % 8) {
          case 0:
            if (buffers.size() < 40) {
              buffers.emplace_back(allocator, 4_KiB * (1 + random() % 12));
            }
            break;
          case 1:
            if (buffers.size() > 20) {
              buffers.erase(buffers.begin() + static_cast<std::ptrdiff_t>(choice));
            }
            break;
          case 2:
            if (!buffers.empty()) {
              buffers[choice].swap_out();
            }
            break;
          case 3:
            device.fail(spillway::SimCall::copy, 1 + random() % 4);
            break;
          case 4:
            (void)allocator.compact();
            break;
          default:
            if (!buffers.empty()) {
              auto const access =
                  std::array{Access::read, Access::write, Access::read_write}[random() % 3];
              (void)buffers[choice].acquire(access, stream);
            }
          }
        } catch (spillway::DeviceError const&) {  // NOLINT(bugprone-empty-catch): planted
        }
        device.run_all();
      }
      check_ledger(allocator);
    }
    CHECK(allocator.stats().swap_ins.count > 0);
    CHECK(allocator.stats().drops.count > 0);
    buffers.clear();
    (void)allocator.trim_sync();
    check_ledger(allocator);
    allocator.retire_stream(stream);
  }
}
