// SPDX-License-Identifier: Apache-2.0
#include <spillway/defrag_arena.hpp>
#include <spillway/device/sim/model_api.hpp>
#include <spillway/device/sim/sim_api.hpp>
#include <spillway/policy/compaction/sliding_compaction.hpp>
#include <spillway/policy/fit/best_fit.hpp>
#include <spillway/policy/fit/segregated_fit.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <utility>
#include <vector>

namespace {

using spillway::BestFit;
using spillway::BlockId;
using spillway::CompactionPlan;
using spillway::DefragArena;
using spillway::Fence;
using spillway::granule_bytes;
using spillway::ModelApi;
using spillway::Move;
using spillway::Placement;
using spillway::RangeId;
using spillway::RangeNode;
using spillway::RangeState;
using spillway::RangeTable;
using spillway::RangeView;
using spillway::Segment;
using spillway::SegregatedFit;
using spillway::SimApi;
using spillway::StreamIndex;
using spillway::Ticket;

bool covers(Fence const& fence, Ticket need) {
  return need.is_none() ||
         std::any_of(fence.tickets().begin(), fence.tickets().end(), [&](Ticket const ticket) {
           return (ticket.stream() == need.stream() || ticket.stream() == StreamIndex::every) &&
                  ticket.sequence() >= need.sequence();
         });
}

// What one granule of memory holds, and what must have happened before it may be touched.
struct Granule {
  std::uint64_t block = 0;  // the owner; 0: none
  std::uint32_t part = 0;   // index of the granule in the block
  std::vector<Ticket> uses;
};

// The model: an arena that keeps each granule separately, as slow as that is.
class Oracle {
 public:
  /// @param joins whether adjacent segments are one piece
  void add_segment(std::byte* base, std::size_t bytes, bool joins) {
    std::vector<Granule> granules(bytes / granule_bytes);
    if (auto const next = segments_.find(base + bytes); joins && next != segments_.end()) {
      granules.insert(granules.end(), next->second.begin(), next->second.end());
      segments_.erase(next);
    }
    auto const after = segments_.upper_bound(base);
    if (joins && after != segments_.begin()) {
      auto& [address, before] = *std::prev(after);
      if (address + before.size() * granule_bytes == base) {
        before.insert(before.end(), granules.begin(), granules.end());
        return;
      }
    }
    segments_[base] = std::move(granules);
  }
  /// @returns what was there
  std::vector<Granule> remove(std::byte* base, std::size_t bytes) {
    auto const segment = std::prev(segments_.upper_bound(base));
    auto const first = segment->second.begin() +
                       (base - segment->first) / static_cast<std::ptrdiff_t>(granule_bytes);
    auto const end = first + static_cast<std::ptrdiff_t>(bytes / granule_bytes);
    std::vector<Granule> const gone(first, end);
    if (end != segment->second.end()) {
      segments_[base + bytes] = {end, segment->second.end()};
    }
    segment->second.erase(first, segment->second.end());
    if (segment->second.empty()) {
      segments_.erase(segment);
    }
    return gone;
  }

  Granule& at(std::byte* address) {
    auto const segment = std::prev(segments_.upper_bound(address));
    auto const index = static_cast<std::size_t>(address - segment->first) / granule_bytes;
    REQUIRE(index < segment->second.size());
    return segment->second[index];
  }

  [[nodiscard]] std::size_t free_bytes_in(std::byte* address, std::size_t bytes) const {
    auto const segment = std::prev(segments_.upper_bound(address));
    auto const first = segment->second.begin() +
                       (address - segment->first) / static_cast<std::ptrdiff_t>(granule_bytes);
    return free_bytes(first, first + static_cast<std::ptrdiff_t>(bytes / granule_bytes));
  }

  [[nodiscard]] std::size_t longest_free_run() const {
    std::size_t longest = 0;
    for (auto const& [base, granules] : segments_) {
      std::size_t run = 0;
      for (Granule const& granule : granules) {
        run = granule.block == 0 ? run + 1 : 0;
        longest = std::max(longest, run);
      }
    }
    return longest * granule_bytes;
  }

  [[nodiscard]] std::size_t free_bytes() const {
    std::size_t bytes = 0;
    for (auto const& [base, granules] : segments_) {
      bytes += free_bytes(granules.begin(), granules.end());
    }
    return bytes;
  }

  [[nodiscard]] std::size_t bytes() const {
    std::size_t bytes = 0;
    for (auto const& [base, granules] : segments_) {
      bytes += granules.size() * granule_bytes;
    }
    return bytes;
  }

 private:
  using Iterator = std::vector<Granule>::const_iterator;

  static std::size_t free_bytes(Iterator first, Iterator end) {
    auto const is_free = [](Granule const& granule) { return granule.block == 0; };
    return static_cast<std::size_t>(std::count_if(first, end, is_free)) * granule_bytes;
  }

  std::map<std::byte*, std::vector<Granule>> segments_;
};

// A fit policy that checks, before each choice, that ranges know which neighbours are free.
template <class Fit>
class Watched {
 public:
  void insert(RangeTable& table, std::uint32_t node) noexcept {
    free_.insert(node);
    fit_.insert(table, node);
  }
  void erase(RangeTable& table, std::uint32_t node) noexcept {
    free_.erase(node);
    fit_.erase(table, node);
  }
  void
  resize(RangeTable& table, std::uint32_t node, std::uint32_t first, std::uint32_t count) noexcept {
    fit_.resize(table, node, first, count);
  }
  [[nodiscard]] spillway::Fit find(RangeTable const& table, std::uint32_t count) const noexcept {
    std::set<std::uint32_t> seen;
    std::size_t wrong = 0;
    for (std::uint32_t const free : free_) {
      // Around the segment, whose wall is a neighbour of its first and its last range.
      for (std::uint32_t node = free; seen.insert(node).second; node = table[node].next) {
        wrong += (free_.count(node) != 0) == (table[node].state == RangeState::free) ? 0U : 1U;
        if (table[node].state != RangeState::free) {
          bool const is_prev_free = free_.count(table[node].prev) != 0;
          bool const is_next_free = free_.count(table[node].next) != 0;
          wrong += table[node].is(RangeNode::is_prev_free) == is_prev_free ? 0U : 1U;
          wrong += table[node].is(RangeNode::is_next_free) == is_next_free ? 0U : 1U;
        }
      }
    }
    CHECK(wrong == 0);
    return fit_.find(table, count);
  }
  [[nodiscard]] std::uint32_t largest(RangeTable const& table) const noexcept {
    return fit_.largest(table);
  }
  template <class Visit>
  void visit_large(RangeTable const& table, Visit visit) const {
    fit_.visit_large(table, visit);
  }

 private:
  Fit fit_;
  std::set<std::uint32_t> free_;
};

enum class Growth : bool { by_reservations, in_place };

template <class Fit, class Device, Growth growth>
class Player {
 public:
  using Arena = DefragArena<Device, Fit>;

  Player(std::uint64_t seed, std::size_t granules, std::size_t few_ranges)
      : random_{seed},
        arena_{device_,
               {.capacity_bytes = granules * granule_bytes,
                .initial_bytes = granules / 2 * granule_bytes,
                .growth_bytes = granules / 8 * granule_bytes,
                .grows_in_place = grows_in_place,
                .few_ranges = few_ranges}} {
    arena_.for_each_range([&](RangeView const& range) {
      oracle_.add_segment(range.address, range.size_bytes, grows_in_place);
    });
  }

  ~Player() {
    for (Segment const& segment : leaving_) {
      arena_.release(segment);
    }
  }
  Player(Player const&) = delete;
  Player& operator=(Player const&) = delete;

  void play(std::size_t ops) {
    for (std::size_t op = 0; op < ops; ++op) {
      switch (below(16)) {
      case 0:
        compact();
        break;
      case 1:
        grow_or_trim(op);
        break;
      case 2:
        ask_for_window();
        break;
      default:
        take_or_give_back();
        break;
      }
      if (op % 64 == 0) {
        check();
      }
    }
  }

 private:
  static constexpr bool grows_in_place = growth == Growth::in_place;

  struct Live {
    RangeId range{};
    std::size_t bytes = 0;
    std::byte* address = nullptr;
    bool is_fixed = false;
  };
  using LiveMap = std::map<std::uint64_t, Live>;

  std::size_t below(std::size_t n) { return static_cast<std::size_t>(random_() % n); }

  std::size_t random_bytes() {
    double const most = static_cast<double>(most_bytes_) / 4;
    double const x = static_cast<double>(below(1U << 20U)) / (1U << 20U);
    return static_cast<std::size_t>(std::exp(x * std::log(most))) + 1;
  }

  Ticket mark() { return {StreamIndex{static_cast<std::uint16_t>(1 + below(6))}, ++sequence_}; }

  typename LiveMap::iterator any_live() {
    return std::next(live_.begin(), static_cast<std::ptrdiff_t>(below(live_.size())));
  }

  void take_or_give_back() {
    double const used = 1.0 - static_cast<double>(arena_.free_bytes()) /
                                  static_cast<double>(arena_.capacity_bytes());
    if (live_.empty() || static_cast<double>(below(1000)) / 1000.0 > used * 0.6) {
      take();
    } else {
      give_back(any_live());
    }
  }

  void take() {
    std::size_t const bytes = random_bytes();
    std::size_t const rounded = (bytes + granule_bytes - 1) / granule_bytes * granule_bytes;
    bool const fits = arena_.largest_free_bytes() >= rounded;
    std::uint64_t const id = ++last_id_;
    auto const placement = arena_.try_take(bytes, BlockId{id});
    REQUIRE(placement.has_value() == fits);
    if (!placement) {
      return;
    }
    Live const block{placement->range, rounded, placement->address, below(8) == 0};
    REQUIRE(arena_.size_bytes(block.range) == rounded);
    REQUIRE(arena_.owner(block.range) == BlockId{id});
    write(id, block, [&](Granule const& granule) {
      REQUIRE(granule.block == 0);
      for (Ticket const use : granule.uses) {
        REQUIRE(covers(placement->fence, use));
      }
    });
    live_[id] = block;
  }

  template <class Check>
  void write(std::uint64_t id, Live const& block, Check check_granule) {
    for (std::size_t at = 0; at < block.bytes; at += granule_bytes) {
      Granule& granule = oracle_.at(block.address + at);
      check_granule(granule);
      granule = {id, static_cast<std::uint32_t>(at / granule_bytes), {}};
    }
  }

  void give_back(typename LiveMap::iterator block) {
    Fence fence;
    Ticket const first = mark();
    fence.add(first);
    Ticket const second = below(3) == 0 ? mark() : Ticket{};
    fence.add(second);
    arena_.give_back(block->second.range, fence);
    if (auto const left = moving_.find(block->first); left != moving_.end()) {
      left->second = {first, second};  // stays where it is until the commit
    } else {
      free(block->second, {first, second});
    }
    live_.erase(block);
  }

  void free(Live const& block, std::vector<Ticket> const& uses) {
    for (std::size_t at = 0; at < block.bytes; at += granule_bytes) {
      oracle_.at(block.address + at) = {0, 0, uses};
    }
  }

  void compact() {
    auto const can_move = [&](BlockId id) {
      auto const block = live_.find(static_cast<std::uint64_t>(id));
      REQUIRE(block != live_.end());
      return !block->second.is_fixed;
    };
    std::size_t const wanted = 1 + below(std::max<std::size_t>(1, arena_.reserved_bytes()));
    std::size_t const budget =
        below(4) == 0 ? arena_.capacity_bytes() / 16 : arena_.capacity_bytes();
    bool const is_pass = below(4) == 0;
    bool const is_slide = !is_pass && below(8) == 0;
    auto plan = is_slide  ? arena_.plan_slide(can_move)
                : is_pass ? arena_.plan_pass(budget, can_move)
                          : arena_.plan_compaction(wanted, budget, can_move);
    if (!plan) {
      return;
    }
    plans_ += plan->moves.empty() ? 0U : 1U;
    REQUIRE((is_slide || plan->cost_bytes <= budget));
    REQUIRE(plan->makes_bytes >= (is_slide  ? granule_bytes
                                  : is_pass ? arena_.largest_free_bytes()
                                            : wanted));
    arena_.begin_moves(*plan);
    moving_.clear();
    std::map<std::uint64_t, Live> old;
    for (Move const& move : plan->moves) {
      auto const id = static_cast<std::uint64_t>(move.owner);
      moving_[id] = {};
      old[id] = live_.at(id);
      REQUIRE(arena_.is_moving(move.range));
    }
    std::size_t const makes_bytes = plan->makes_bytes;
    bool const is_quiet = below(2) == 0;
    for (std::size_t i = is_quiet ? 0 : below(8); i > 0; --i) {
      take_or_give_back();  // what other threads do while the lock is not held
    }
    check_blocks();

    std::size_t const done = below(4) == 0 ? below(plan->moves.size() + 1) : plan->moves.size();
    Ticket const moved = mark();
    std::size_t cost = 0;
    for (std::size_t i = 0; i < plan->moves.size(); ++i) {
      Move const& move = plan->moves[i];
      cost += move.bytes;
      if (i < done) {
        copy(move, old.at(static_cast<std::uint64_t>(move.owner)), moved);
      }
    }
    REQUIRE(cost == plan->cost_bytes);
    arena_.commit_moves(*plan, done, moved);
    for (auto const& [id, uses] : moving_) {
      if (auto const block = live_.find(id); block != live_.end()) {
        block->second.address = old.at(id).address;
      } else {
        std::vector<Ticket> both = uses;
        both.push_back(moved);
        free(old.at(id), both);
      }
    }
    moving_.clear();
    check();
    if (is_quiet && done == plan->moves.size()) {
      REQUIRE(arena_.largest_free_bytes() >= std::min(makes_bytes, arena_.free_bytes()));
    }
  }

  // Granule by granule, as a device would; the destination must be free or the block's own.
  void copy(Move const& move, Live& block, Ticket moved) {
    REQUIRE(move.from == block.address);
    REQUIRE(move.bytes == block.bytes);
    auto const id = static_cast<std::uint64_t>(move.owner);
    std::vector<Granule> bytes;
    for (std::size_t at = 0; at < move.bytes; at += granule_bytes) {
      Granule& from = oracle_.at(move.from + at);
      REQUIRE(from.block == id);
      REQUIRE(from.part == at / granule_bytes);
      bytes.push_back(std::exchange(from, {0, 0, {moved}}));
    }
    for (std::size_t at = 0; at < move.bytes; at += granule_bytes) {
      Granule& to = oracle_.at(move.to + at);
      REQUIRE(to.block == 0);
      for (Ticket const use : to.uses) {
        REQUIRE((use == moved || covers(move.fence, use)));
      }
      to = bytes[at / granule_bytes];
      to.uses = {};
    }
    block.address = move.to;
  }

  void grow_or_trim(std::size_t op) {
    if (op % 8 == 0) {
      if (auto const segment = arena_.trim(below(4) * 64 * granule_bytes)) {
        auto* const base = static_cast<std::byte*>(segment->address);
        for (Granule const& granule : oracle_.remove(base, segment->bytes)) {
          REQUIRE(granule.block == 0);
          for (Ticket const use : granule.uses) {
            REQUIRE(covers(segment->fence, use));
          }
        }
        leaving_.push_back(*segment);
      }
    }
    if (!leaving_.empty() && below(2) == 0) {  // the device may take its time
      arena_.release(leaving_.front());
      leaving_.pop_front();
    }
    if (op % 16 == 0) {
      std::size_t const sixteenth = most_bytes_ / 16;
      arena_.set_capacity(below(2) == 0 ? most_bytes_ : sixteenth * (4 + below(12)));
    }
    if (Segment segment = arena_.growth_for(random_bytes()); segment.bytes != 0) {
      REQUIRE(arena_.reserved_bytes() + segment.bytes <= arena_.capacity_bytes());
      bool const is_clear =
          std::none_of(leaving_.begin(), leaving_.end(), [&](Segment const& left) {
            auto* const begin = static_cast<std::byte*>(segment.address);
            auto* const from = static_cast<std::byte*>(left.address);
            return grows_in_place && begin < from + left.bytes && from < begin + segment.bytes;
          });
      refusals_ += is_clear ? 0U : 1U;
      REQUIRE(arena_.try_reserve(segment) == is_clear);
      if (!is_clear) {
        return;
      }
      arena_.add_segment(segment);
      oracle_.add_segment(static_cast<std::byte*>(segment.address), segment.bytes, grows_in_place);
    }
  }

  void ask_for_window() {
    std::size_t const bytes = random_bytes();
    auto const price = [&](BlockId id) -> std::optional<std::uint64_t> {
      auto const block = live_.find(static_cast<std::uint64_t>(id));
      if (block == live_.end() || block->second.is_fixed) {
        return std::nullopt;
      }
      return block->second.bytes * (1 + static_cast<std::uint64_t>(id) % 5);
    };
    auto const window = arena_.cheapest_window(bytes, price);
    // The slow way: from each range on, until the window is large enough.
    std::vector<RangeView> ranges;
    arena_.for_each_range([&](RangeView const& range) { ranges.push_back(range); });
    std::optional<std::uint64_t> cheapest;
    for (std::size_t i = 0; i < ranges.size(); ++i) {
      std::size_t room = 0;
      std::uint64_t cost = 0;
      for (std::size_t j = i; j < ranges.size() && ranges[j].segment == ranges[i].segment; ++j) {
        if (ranges[j].state != RangeState::free) {
          auto const mine = price(ranges[j].owner);
          if (!mine) {
            break;
          }
          cost += *mine;
        }
        room += ranges[j].size_bytes;
        if (room >= bytes) {
          cheapest = std::min(cheapest.value_or(cost), cost);
          break;
        }
      }
    }
    REQUIRE(window.has_value() == cheapest.has_value());
    if (window) {
      REQUIRE(window->cost == *cheapest);
      REQUIRE(window->bytes >= bytes);
      std::uint64_t sum = 0;
      for (BlockId const id : window->owners) {
        sum += *price(id);
      }
      REQUIRE(sum == window->cost);
    }
  }

  void check_blocks() {
    for (auto const& [id, block] : live_) {
      REQUIRE(arena_.address(block.range) == block.address);
      REQUIRE(arena_.owner(block.range) == BlockId{id});
      REQUIRE(arena_.size_bytes(block.range) == block.bytes);
    }
  }

  void check() {
    check_blocks();
    std::size_t const taken = oracle_.bytes() - oracle_.free_bytes();
    std::size_t const left = arena_.capacity_bytes() - std::min(arena_.capacity_bytes(), taken);
    REQUIRE(arena_.free_bytes() == std::min(left, oracle_.free_bytes()));
    REQUIRE(arena_.largest_free_bytes() == std::min(left, oracle_.longest_free_run()));
    std::size_t blocks = 0;
    std::size_t gaps = 0;
    std::size_t reserved = 0;
    std::optional<RangeView> last;
    arena_.for_each_range([&](RangeView const& range) {
      if (last && last->segment == range.segment) {
        REQUIRE(last->address + last->size_bytes == range.address);
        bool const are_both_free =
            last->state == RangeState::free && range.state == RangeState::free;
        REQUIRE(!are_both_free);
      }
      bool const is_free = range.state == RangeState::free;
      bool const is_block = range.state == RangeState::taken;
      REQUIRE(is_free != is_block);
      REQUIRE(oracle_.free_bytes_in(range.address, range.size_bytes) ==
              (is_free ? range.size_bytes : 0));
      gaps += is_free ? 1 : 0;
      blocks += is_block ? 1 : 0;
      reserved += range.size_bytes;
      last = range;
    });
    auto const stats = arena_.stats();
    REQUIRE(blocks == live_.size());
    REQUIRE(stats.taken_ranges == blocks);
    REQUIRE(stats.free_ranges == gaps);
    REQUIRE(stats.reserved_bytes == reserved);
    REQUIRE(stats.taken_bytes == taken);
  }

  static Device make_device() {
    if constexpr (grows_in_place) {
      return Device{{.capacity_bytes = 64 << 20, .granularity_bytes = 16 * granule_bytes}};
    } else {
      return Device{};
    }
  }

  std::mt19937_64 random_;
  Device device_ = make_device();
  Arena arena_;
  std::size_t most_bytes_ = arena_.capacity_bytes();
  Oracle oracle_;
  LiveMap live_;
  std::deque<Segment> leaving_;                          // handed over and not released yet
  std::map<std::uint64_t, std::vector<Ticket>> moving_;  // and what a block that left waits for
  std::uint64_t last_id_ = 0;
  std::uint64_t sequence_ = 0;

 public:
  std::size_t plans_ = 0;
  std::size_t refusals_ = 0;  // of memory that was handed over and not released yet
};

constexpr std::size_t any_number = 1U << 20U;

/// With more than `few_ranges` ranges, room is looked for among some of them first.
template <class Fit, Growth growth = Growth::by_reservations, class Device = ModelApi>
void play_all(std::size_t ops, std::size_t few_ranges) {
  std::uint64_t seed = 1;
  std::size_t refusals = 0;
  for (std::size_t const granules : {64U, 256U, 1024U, 2048U}) {
    MESSAGE("seed ", seed, ", granules ", granules);
    CAPTURE(seed);
    Player<Fit, Device, growth> player{seed++, granules, few_ranges};
    player.play(ops);
    CHECK(player.plans_ > ops / 500);
    refusals += player.refusals_;
  }
  CHECK((refusals != 0) == (growth == Growth::in_place));
}

}  // namespace

TEST_SUITE("arena") {
  TEST_CASE("DefragArena: agrees with a model of single granules, segregated fit") {
    play_all<SegregatedFit>(45'000, any_number);
  }
  TEST_CASE("DefragArena: agrees with a model of single granules, best fit") {
    play_all<BestFit>(45'000, any_number);
  }
  TEST_CASE("DefragArena: agrees with the model when part of the arena is searched first") {
    play_all<SegregatedFit>(20'000, 8);
    play_all<BestFit>(20'000, 8);
  }
  TEST_CASE("DefragArena: agrees with the model when the arena grows and shrinks in place") {
    play_all<SegregatedFit, Growth::in_place, SimApi>(20'000, any_number);
    play_all<BestFit, Growth::in_place>(20'000, any_number);
    play_all<SegregatedFit, Growth::in_place>(20'000, 8);
    play_all<Watched<BestFit>, Growth::in_place, SimApi>(3000, 8);
  }
  TEST_CASE("DefragArena: ranges always record correctly which neighbours are free") {
    play_all<Watched<SegregatedFit>>(5000, any_number);
    play_all<Watched<SegregatedFit>, Growth::in_place>(5000, any_number);
  }
}
