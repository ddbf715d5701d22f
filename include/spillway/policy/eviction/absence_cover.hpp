// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/config.hpp>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

// Chooses which blocks are away between which two uses, so that the other blocks fit and the fewest
// bytes have to cross the link.
//
// Problem   At each moment of a step some bytes are in excess of the capacity. An absence is the
//           time between two uses of a block: if it is chosen, the block is away at all of its
//           moments, and the block has to be swapped in once, for a price: its bytes, or fewer
//           where a codec makes them fewer or a recipe makes them anew. Choose absences of the
//           least total price such that at each moment those chosen are at least as large as the
//           excess.
//           This is the general caching problem (Albers, Arora and Khanna, "Page replacement for
//           general caching problems", SODA 1999). With blocks of different sizes it is NP-hard
//           (Chrobak, Woeginger, Makino and Xu, "Caching is hard, even in the fault model",
//           Algorithmica 2012).
// Greedy    If blocks were divisible, an optimal answer would be found from left to right: whenever
//           bytes are missing, take them from the absence that ends last (Belady 1966, for pages).
//           This gives a lower bound. The same sweep with whole blocks gives a first answer.
//           Where prices are not the sizes, the bound is of the lowest price of a byte, and
//           another answer is tried, of a sweep for each range of prices, the lowest first.
// Exchange  An answer is improved while it is more than 1/1024 above the bound. Absences that the
//           others make superfluous are left out, the dearest first. Single ones are exchanged for
//           the smallest that is away whenever they are needed and costs less, then for several
//           that cost less together.
// Slack     What is chosen beyond the excess is kept in a segment tree, so that leaving out or
//           exchanging one absence takes O(log n). All in all O(n log n), and a bounded number of
//           exchanges. docs/benchmarks.md says how far above the bound the answers are.
// Example   Excess {40, 40}; A is away at {0, 1} with 100 bytes, B and C with 20 each, D at {0}
//           with 90. The greedy sweep takes A, since none ends later. No single absence of at least
//           40 bytes contains both moments and is smaller; B and C together are, and take A's
//           place.

namespace spillway::detail {

/// A number for each moment, with fast addition to an interval and fast minimum of an interval: a
/// segment tree in which an addition stays at the nodes whose moments it covers entirely.
///
/// `AbsenceSet` keeps the slack of its choice in it.
///
/// Cost    O(log n) an operation; 32 bytes a moment.
/// Threads thread-compatible.
template <class = Lazily>
class BasicSlackTree {
 public:
  static constexpr std::int64_t infinite = std::numeric_limits<std::int64_t>::max() / 2;
  static constexpr std::uint32_t nowhere = ~std::uint32_t{0};

  /// The moments [first, last], both included.
  struct Interval {
    std::uint32_t first;
    std::uint32_t last;
  };

  /// Makes room for `moments`. @throws std::bad_alloc
  void reserve(std::size_t moments) {
    leaves_ = std::bit_ceil(std::max<std::size_t>(moments, 1));
    minimum_.resize(2 * leaves_);
    added_.resize(2 * leaves_);
  }

  /// Starts from `values`, as many as were reserved for.
  void assign(std::vector<std::int64_t> const& values) noexcept {
    std::fill(added_.begin(), added_.end(), 0);
    auto const first = minimum_.begin() + static_cast<std::ptrdiff_t>(leaves_);
    std::fill(std::copy(values.begin(), values.end(), first), minimum_.end(), infinite);
    for (std::size_t node = leaves_ - 1; node != 0; --node) {
      minimum_[node] = std::min(minimum_[2 * node], minimum_[2 * node + 1]);
    }
  }

  void add(Interval interval, std::int64_t value) noexcept {
    add(1, 0, leaves_ - 1, interval, value);
  }

  [[nodiscard]] std::int64_t least(Interval interval) const noexcept {
    return least(1, 0, leaves_ - 1, interval);
  }

  /// The first and the last moment of an interval with a value below `bound`, or `nowhere`.
  [[nodiscard]] std::uint32_t first_below(Interval interval, std::int64_t bound) const noexcept {
    return below(1, 0, leaves_ - 1, interval, bound, true);
  }
  [[nodiscard]] std::uint32_t last_below(Interval interval, std::int64_t bound) const noexcept {
    return below(1, 0, leaves_ - 1, interval, bound, false);
  }

 private:
  [[nodiscard]] static bool
  is_apart(std::size_t low, std::size_t high, Interval interval) noexcept {
    return high < interval.first || interval.last < low;
  }
  [[nodiscard]] static bool
  is_inside(std::size_t low, std::size_t high, Interval interval) noexcept {
    return interval.first <= low && high <= interval.last;
  }

  void add(std::size_t node,
           std::size_t low,
           std::size_t high,
           Interval interval,
           std::int64_t value) noexcept {
    if (is_apart(low, high, interval)) {
      return;
    }
    if (is_inside(low, high, interval)) {
      minimum_[node] += value;
      added_[node] += value;
      return;
    }
    std::size_t const middle = (low + high) / 2;
    add(2 * node, low, middle, interval, value);
    add(2 * node + 1, middle + 1, high, interval, value);
    minimum_[node] = std::min(minimum_[2 * node], minimum_[2 * node + 1]) + added_[node];
  }

  [[nodiscard]] std::int64_t
  least(std::size_t node, std::size_t low, std::size_t high, Interval interval) const noexcept {
    if (is_apart(low, high, interval)) {
      return infinite;
    }
    if (is_inside(low, high, interval)) {
      return minimum_[node];
    }
    std::size_t const middle = (low + high) / 2;
    return std::min(least(2 * node, low, middle, interval),
                    least(2 * node + 1, middle + 1, high, interval)) +
           added_[node];
  }

  [[nodiscard]] std::uint32_t below(std::size_t node,
                                    std::size_t low,
                                    std::size_t high,
                                    Interval interval,
                                    std::int64_t bound,
                                    bool is_first) const noexcept {
    if (is_apart(low, high, interval) || minimum_[node] >= bound) {
      return nowhere;
    }
    if (low == high) {
      return static_cast<std::uint32_t>(low);
    }
    std::size_t const middle = (low + high) / 2;
    bound -= added_[node];
    auto const in_half = [&](bool is_low) {
      return is_low ? below(2 * node, low, middle, interval, bound, is_first)
                    : below(2 * node + 1, middle + 1, high, interval, bound, is_first);
    };
    std::uint32_t const found = in_half(is_first);
    return found != nowhere ? found : in_half(!is_first);
  }

  std::size_t leaves_ = 1;
  std::vector<std::int64_t> minimum_;  // of a node's moments, including its own additions
  std::vector<std::int64_t> added_;    // to all of a node's moments
};

using SlackTree = BasicSlackTree<>;

/// The time between two uses of a block, in which it may be away.
struct Absence {
  SlackTree::Interval moments{};
  std::uint64_t bytes = 0;
  std::uint32_t tag = 0;        ///< for use by the caller only
  bool needs_swap_out = false;  ///< the host copy is not valid: the bytes cross the link both ways
  bool is_chosen = false;
  std::uint64_t spared_bytes = 0;  ///< how many of `bytes` the price does not count

  /// The cost of the block's return, in bytes over the link.
  [[nodiscard]] std::uint64_t price() const noexcept { return bytes - spared_bytes; }
  [[nodiscard]] std::int64_t signed_bytes() const noexcept {
    return static_cast<std::int64_t>(bytes);
  }
  [[nodiscard]] bool contains(std::uint32_t moment) const noexcept {
    return moments.first <= moment && moment <= moments.last;
  }
};

/// A set of absences, with a choice among them and its slack: by how much the chosen absences
/// exceed the excess at each moment.
///
/// Filled by `StepPlan`, then changed by `AbsenceCover`: `add`, `close`, `mark`, `find_slack`,
/// `toggle`.
///
/// Threads thread-unsafe.
template <class = Lazily>
class BasicAbsenceSet {
 public:
  /// Removes all absences, so that new ones may be added.
  void clear() noexcept {
    absences_.clear();
    are_priced_ = false;
  }
  /// Adds an absence. @throws std::bad_alloc
  void add(Absence absence) {
    absences_.push_back(absence);
    are_priced_ = are_priced_ || absence.spared_bytes != 0;
  }

  /// Orders the absences by their first moment; none may be added after this. @throws
  /// std::bad_alloc
  void close(std::size_t moments) {
    moments_ = moments;
    starts_.assign(moments + 1, 0);
    sorted_.resize(absences_.size());
    for (Absence const& absence : absences_) {
      ++starts_[std::size_t{absence.moments.first} + 1];
    }
    std::partial_sum(starts_.begin(), starts_.end(), starts_.begin());
    for (Absence const& absence : absences_) {
      sorted_[starts_[absence.moments.first]++] = absence;
    }
    std::swap(absences_, sorted_);
  }

  /// Chooses an absence. May be called only before `find_slack`.
  void mark(std::uint32_t absence) noexcept { absences_[absence].is_chosen = true; }

  /// Chooses none, or again what was chosen when `choice` was called. `find_slack` must follow.
  void choose_none() noexcept {
    for (Absence& absence : absences_) {
      absence.is_chosen = false;
    }
  }
  void choose(std::vector<bool> const& choice) noexcept {
    for (std::uint32_t i = 0; i < size(); ++i) {
      absences_[i].is_chosen = choice[i];
    }
  }
  /// Writes down which absences are chosen. @throws std::bad_alloc
  void choice(std::vector<bool>& choice) const {
    choice.resize(absences_.size());
    std::transform(absences_.begin(), absences_.end(), choice.begin(), [](Absence const& absence) {
      return absence.is_chosen;
    });
  }

  /// Computes the slack of the current choice over `excess`, and the orders by size and by price.
  /// The functions below need them. @throws std::bad_alloc
  void find_slack(std::vector<std::int64_t> const& excess) {
    sort_by([](Absence const& absence) { return absence.bytes; }, by_bytes_);
    if (are_priced_) {
      sort_by([](Absence const& absence) { return absence.price(); }, by_price_);
    }
    values_.assign(moments_ + 1, 0);
    for (Absence const& absence : absences_) {
      if (absence.is_chosen) {
        values_[absence.moments.first] += absence.signed_bytes();
        values_[std::size_t{absence.moments.last} + 1] -= absence.signed_bytes();
      }
    }
    values_.pop_back();
    std::partial_sum(values_.begin(), values_.end(), values_.begin());
    std::transform(values_.begin(), values_.end(), excess.begin(), values_.begin(), std::minus<>{});
    slack_.reserve(moments_);
    slack_.assign(values_);
  }

  [[nodiscard]] std::uint32_t size() const noexcept {
    return static_cast<std::uint32_t>(absences_.size());
  }
  [[nodiscard]] Absence const& operator[](std::uint32_t absence) const noexcept {
    return absences_[absence];
  }
  [[nodiscard]] auto begin() const noexcept { return absences_.begin(); }
  [[nodiscard]] auto end() const noexcept { return absences_.end(); }
  /// The absences from the smallest to the largest, and from the cheapest to the dearest; of equal
  /// ones, those without a swap-out come first.
  [[nodiscard]] std::vector<std::uint32_t> const& by_bytes() const noexcept { return by_bytes_; }
  [[nodiscard]] std::vector<std::uint32_t> const& by_price() const noexcept {
    return are_priced_ ? by_price_ : by_bytes_;
  }
  /// Whether a price differs from its absence's bytes.
  [[nodiscard]] bool are_priced() const noexcept { return are_priced_; }

  /// Chooses an absence that is not chosen, or leaves out one that is. @cost O(log n)
  void toggle(std::uint32_t absence) noexcept {
    Absence& changed = absences_[absence];
    changed.is_chosen = !changed.is_chosen;
    slack_.add(changed.moments,
               changed.is_chosen ? changed.signed_bytes() : -changed.signed_bytes());
  }

  /// Uses up slack for a block that comes back before its absence ends. The choice does not change.
  void use_slack(SlackTree::Interval moments, std::int64_t bytes) noexcept {
    slack_.add(moments, -bytes);
  }

  [[nodiscard]] SlackTree const& slack() const noexcept { return slack_; }

  /// Whether a chosen absence could be left out. @cost O(log n)
  [[nodiscard]] bool is_superfluous(std::uint32_t absence) const noexcept {
    return slack_.least(absences_[absence].moments) >= absences_[absence].signed_bytes();
  }

  [[nodiscard]] std::int64_t chosen_price() const noexcept {
    std::uint64_t total = 0;
    for (Absence const& absence : absences_) {
      total += absence.is_chosen ? absence.price() : 0;
    }
    return static_cast<std::int64_t>(total);
  }

 private:
  template <class Key>
  void sort_by(Key key_of, std::vector<std::uint32_t>& order) {
    order.resize(absences_.size());
    keys_.resize(absences_.size());
    for (std::uint32_t i = 0; i < size(); ++i) {
      keys_[i] = {2 * key_of(absences_[i]) + (absences_[i].needs_swap_out ? 1U : 0U), i};
    }
    std::sort(keys_.begin(), keys_.end());
    std::transform(
        keys_.begin(), keys_.end(), order.begin(), [](auto const& key) { return key.second; });
  }

  std::size_t moments_ = 0;
  bool are_priced_ = false;
  std::vector<Absence> absences_;
  std::vector<Absence> sorted_;
  std::vector<std::uint32_t> starts_;
  std::vector<std::pair<std::uint64_t, std::uint32_t>> keys_;
  std::vector<std::uint32_t> by_bytes_;
  std::vector<std::uint32_t> by_price_;  // used only if prices differ from bytes
  std::vector<std::int64_t> values_;
  SlackTree slack_;
};

using AbsenceSet = BasicAbsenceSet<>;

/// Chooses absences that cover all of the excess at a low total price. The comment at the head of
/// this file describes the algorithm.
///
/// Cost    O(n log n) for n moments and absences; keeps its buffers. The same input gives the same
/// answer.
/// Threads thread-unsafe.
template <class = Lazily>
class BasicAbsenceCover {
 public:
  static constexpr std::int64_t no_bound = std::numeric_limits<std::int64_t>::max();

  /// Chooses among `absences`, which must be closed, with none chosen, so that at least `excess[t]`
  /// bytes are away at each moment `t`. If all absences together do not suffice at a moment, all
  /// that contain it are chosen. If the lower bound of the price exceeds `most_price`, none is
  /// chosen.
  ///
  /// @returns whether they suffice
  /// @throws  std::bad_alloc
  bool choose(std::vector<std::int64_t> const& excess,
              AbsenceSet& absences,
              std::int64_t most_price = no_bound) {
    queue_.reserve(absences.size());
    returning_.resize(excess.size() + 1);
    std::int64_t const bound = least_if_divisible(excess, absences);
    if (bound > most_price) {
      return false;
    }
    std::int64_t const enough = bound + bound / good_enough;
    bool const is_covered = choose_greedily(excess, absences);
    improve(excess, absences, enough);
    if (absences.are_priced() && absences.chosen_price() > enough) {
      std::int64_t const first_price = absences.chosen_price();
      absences.choice(first_choice_);
      choose_by_price(excess, absences);
      improve(excess, absences, enough);
      if (first_price <= absences.chosen_price()) {
        absences.choose(first_choice_);
        absences.find_slack(excess);
      }
    }
    return is_covered;
  }

 private:
  // These bound the time of the exchanges. The largest absences come first and matter most.
  static constexpr std::size_t most_rounds = 4;
  static constexpr std::size_t most_tries = 256;
  static constexpr std::size_t most_tries_in_all = std::size_t{1} << 21U;
  static constexpr std::size_t most_fill_tries = 32;  // for each absence there is
  static constexpr std::size_t most_fills = 32;       // likewise
  static constexpr std::int64_t good_enough = 1024;   // stop at the bound plus one part in so many
  static constexpr std::uint64_t price_ranges = 8;

  struct Candidate {
    std::uint32_t last;
    std::uint32_t absence;
    std::int64_t bytes;  // not yet taken
    friend bool operator<(Candidate const& a, Candidate const& b) noexcept {
      return a.last != b.last ? a.last < b.last : a.absence < b.absence;
    }
  };

  void improve(std::vector<std::int64_t> const& excess, AbsenceSet& absences, std::int64_t enough) {
    absences.find_slack(excess);
    if (absences.chosen_price() > enough) {
      leave_out_superfluous(absences);
    }
    if (absences.chosen_price() > enough) {
      exchange_for_smaller(absences);
    }
    if (absences.chosen_price() > enough) {
      exchange_for_several(absences);
    }
    exchange_for_no_swap_out(absences);
  }

  /// Goes through the moments from left to right. Whenever bytes are missing, takes some from the
  /// absence that ends last among those that `admits` allows, as many as
  /// `take(absence, available, missing)` returns.
  ///
  /// @returns false if bytes were missing with no absence left
  template <class Admits, class Take>
  bool sweep(std::vector<std::int64_t> const& excess,
             AbsenceSet const& absences,
             Admits admits,
             Take take) noexcept {
    std::fill(returning_.begin(), returning_.end(), 0);
    queue_.clear();
    std::int64_t away = 0;
    std::uint32_t next = 0;
    bool is_covered = true;
    for (std::uint32_t t = 0; t < excess.size(); ++t) {
      away -= returning_[t];
      for (; next < absences.size() && absences[next].moments.first <= t; ++next) {
        if (admits(absences[next])) {
          queue_.push_back({absences[next].moments.last, next, absences[next].signed_bytes()});
          std::push_heap(queue_.begin(), queue_.end());
        }
      }
      while (away < excess[t] && !queue_.empty() && queue_.front().last >= t) {
        Candidate& latest = queue_.front();
        std::int64_t const taken = take(latest.absence, latest.bytes, excess[t] - away);
        away += taken;
        returning_[std::size_t{latest.last} + 1] += taken;
        latest.bytes -= taken;
        if (latest.bytes == 0) {
          std::pop_heap(queue_.begin(), queue_.end());
          queue_.pop_back();
        }
      }
      is_covered = is_covered && away >= excess[t];
    }
    return is_covered;
  }

  // Not a lambda: the type of one in a static member has no linkage, so `extern template` cannot
  // leave its definition to another source.
  struct AdmitAll {
    constexpr bool operator()(Absence const& /*absence*/) const noexcept { return true; }
  };

  /// The lower bound: the bytes that would have to be away if blocks could be divided, at the
  /// lowest price of a byte.
  [[nodiscard]] std::int64_t least_if_divisible(std::vector<std::int64_t> const& excess,
                                                AbsenceSet const& absences) noexcept {
    std::int64_t total = 0;
    sweep(excess,
          absences,
          AdmitAll{},
          [&](std::uint32_t, std::int64_t available, std::int64_t missing) noexcept {
            total += std::min(available, missing);
            return std::min(available, missing);
          });
    if (!absences.are_priced()) {
      return total;
    }
    double lowest = std::numeric_limits<double>::infinity();
    for (Absence const& absence : absences) {
      lowest = std::min(lowest,
                        static_cast<double>(absence.price()) / static_cast<double>(absence.bytes));
    }
    return total == 0 ? 0 : static_cast<std::int64_t>(lowest * static_cast<double>(total));
  }

  bool choose_greedily(std::vector<std::int64_t> const& excess, AbsenceSet& absences) noexcept {
    return sweep(excess,
                 absences,
                 AdmitAll{},
                 [&](std::uint32_t absence, std::int64_t available, std::int64_t) noexcept {
                   absences.mark(absence);
                   return available;
                 });
  }

  /// The same, with the absences whose bytes are cheapest first.
  void choose_by_price(std::vector<std::int64_t> const& excess, AbsenceSet& absences) {
    absences.choose_none();
    left_ = excess;
    for (std::uint64_t range = 0; range < price_ranges; ++range) {
      taken_.assign(excess.size() + 1, 0);
      auto const is_in_range = [&](Absence const& absence) noexcept {
        std::uint64_t const at = absence.price() * price_ranges / absence.bytes;
        return std::min(at, price_ranges - 1) == range;
      };
      sweep(left_,
            absences,
            is_in_range,
            [&](std::uint32_t absence, std::int64_t available, std::int64_t) noexcept {
              absences.mark(absence);
              taken_[absences[absence].moments.first] += available;
              taken_[std::size_t{absences[absence].moments.last} + 1] -= available;
              return available;
            });
      std::partial_sum(taken_.begin(), taken_.end(), taken_.begin());
      for (std::size_t t = 0; t < left_.size(); ++t) {
        left_[t] -= taken_[t];
      }
    }
  }

  static void leave_out_superfluous(AbsenceSet& absences) noexcept {
    auto const& order = absences.by_price();
    for (std::size_t i = order.size(); i-- != 0;) {
      if (absences[order[i]].is_chosen && absences.is_superfluous(order[i])) {
        absences.toggle(order[i]);
      }
    }
  }

  static void exchange_for_smaller(AbsenceSet& absences) noexcept {
    auto const& order = absences.by_price();
    std::size_t tries_left = most_tries_in_all;
    bool has_changed = true;
    for (std::size_t round = 0; round < most_rounds && has_changed; ++round) {
      has_changed = false;
      for (std::size_t i = order.size(); i-- != 0 && tries_left != 0;) {
        if (absences[order[i]].is_chosen && absences[order[i]].price() != 0) {
          --tries_left;
          std::uint64_t const most_price = absences[order[i]].price() - 1;
          has_changed =
              exchange(absences, order[i], most_price, tries_left, AdmitAll{}) || has_changed;
        }
      }
    }
  }

  /// Exchanges each chosen absence for several that cost less together, the dearest first.
  void exchange_for_several(AbsenceSet& absences) {
    auto const& order = absences.by_price();
    added_.reserve(absences.size());
    std::size_t tries_left = most_fill_tries * absences.size();
    std::size_t fills_left = most_fills * absences.size();
    for (std::size_t i = order.size(); i-- != 0 && tries_left != 0 && fills_left != 0;) {
      if (absences[order[i]].is_chosen && absences[order[i]].price() != 0) {
        --tries_left;
        absences.toggle(order[i]);
        if (!fill_in_for(absences, order[i], tries_left, fills_left)) {
          for (std::uint32_t const absence : added_) {
            absences.toggle(absence);
          }
          absences.toggle(order[i]);
        }
      }
    }
  }

  /// Chooses absences that cost less than `left_out` until they do in its place: from left to right
  /// the smallest that suffices at a moment, else the largest. Those that it chooses are counted
  /// apart from the tries, since one that suits at first sight takes no try. @returns false if it
  /// cannot be done
  bool fill_in_for(AbsenceSet& absences,
                   std::uint32_t left_out,
                   std::size_t& tries_left,
                   std::size_t& fills_left) {
    added_.clear();
    std::uint64_t most_price = absences[left_out].price() - 1;
    for (;;) {
      std::uint32_t const moment = absences.slack().first_below(absences[left_out].moments, 0);
      if (moment == SlackTree::nowhere) {
        return true;
      }
      auto const missing = static_cast<std::uint64_t>(-absences.slack().least({moment, moment}));
      auto const helps = [&](Absence const& other) { return other.contains(moment); };
      std::uint32_t added = find_smallest(absences, missing, most_price, tries_left, helps);
      if (added == SlackTree::nowhere) {
        added = find_largest(absences, missing - 1, most_price, tries_left, helps);
      }
      if (added == SlackTree::nowhere || fills_left == 0) {
        return false;
      }
      --fills_left;
      absences.toggle(added);
      added_.push_back(added);
      most_price -= absences[added].price();
    }
  }

  /// Exchanges absences with a swap-out for others without one that cost no more.
  static void exchange_for_no_swap_out(AbsenceSet& absences) noexcept {
    std::size_t tries_left = most_tries_in_all;
    for (std::uint32_t i = 0; i < absences.size() && tries_left != 0; ++i) {
      if (absences[i].is_chosen && absences[i].needs_swap_out) {
        --tries_left;
        exchange(absences, i, absences[i].price(), tries_left, [](Absence const& other) {
          return !other.needs_swap_out;
        });
      }
    }
  }

  /// Leaves out a chosen absence if it is superfluous. Otherwise it exchanges it for the smallest
  /// one for at most `most_price` that is away whenever it is needed. @returns whether the choice
  /// has changed
  template <class Admits>
  static bool exchange(AbsenceSet& absences,
                       std::uint32_t chosen,
                       std::uint64_t most_price,
                       std::size_t& tries_left,
                       Admits admits) noexcept {
    Absence const& absence = absences[chosen];
    std::int64_t const slack = absences.slack().least(absence.moments);
    if (slack >= absence.signed_bytes()) {
      absences.toggle(chosen);
      return true;
    }
    auto const needed = static_cast<std::uint64_t>(absence.signed_bytes() - slack);
    if (needed > most_bytes_for(absences, most_price)) {
      return false;
    }
    // Without it bytes would be missing at these moments and at some between them.
    std::uint32_t const first =
        absences.slack().first_below(absence.moments, absence.signed_bytes());
    std::uint32_t const last = absences.slack().last_below(absence.moments, absence.signed_bytes());
    std::uint32_t const other =
        find_smallest(absences, needed, most_price, tries_left, [&](Absence const& candidate) {
          return candidate.contains(first) && candidate.contains(last) && admits(candidate);
        });
    if (other == SlackTree::nowhere) {
      return false;
    }
    absences.toggle(chosen);
    absences.toggle(other);
    return true;
  }

  /// The most bytes that an absence for a price may have, or may be thought to have.
  static std::uint64_t most_bytes_for(AbsenceSet const& absences,
                                      std::uint64_t most_price) noexcept {
    return absences.are_priced() ? std::numeric_limits<std::uint64_t>::max() : most_price;
  }

  /// The first place in the order by size with at least `bytes`.
  static auto first_of_size(AbsenceSet const& absences, std::uint64_t bytes) noexcept {
    auto const& order = absences.by_bytes();
    return std::lower_bound(
        order.begin(), order.end(), bytes, [&](std::uint32_t i, std::uint64_t wanted) {
          return absences[i].bytes < wanted;
        });
  }

  /// The smallest absence of at least `least_bytes`, for at most `most_price`, that is not chosen
  /// and that `admits`, or `nowhere` if none is found in a bounded number of tries.
  template <class Admits>
  static std::uint32_t find_smallest(AbsenceSet const& absences,
                                     std::uint64_t least_bytes,
                                     std::uint64_t most_price,
                                     std::size_t& tries_left,
                                     Admits admits) noexcept {
    std::uint64_t const most_bytes = most_bytes_for(absences, most_price);
    std::size_t tries = std::min(most_tries, tries_left);
    for (auto at = first_of_size(absences, least_bytes);
         at != absences.by_bytes().end() && tries != 0 && absences[*at].bytes <= most_bytes;
         ++at, --tries, --tries_left) {
      if (!absences[*at].is_chosen && absences[*at].price() <= most_price &&
          admits(absences[*at])) {
        return *at;
      }
    }
    return SlackTree::nowhere;
  }

  /// The same for the largest one of at most `most_bytes`, for at most `most_price`.
  template <class Admits>
  static std::uint32_t find_largest(AbsenceSet const& absences,
                                    std::uint64_t most_bytes,
                                    std::uint64_t most_price,
                                    std::size_t& tries_left,
                                    Admits admits) noexcept {
    most_bytes = std::min(most_bytes, most_bytes_for(absences, most_price));
    std::size_t tries = std::min(most_tries, tries_left);
    for (auto at = first_of_size(absences, most_bytes + 1);
         at != absences.by_bytes().begin() && tries != 0;
         --tries, --tries_left) {
      --at;
      if (!absences[*at].is_chosen && absences[*at].price() <= most_price &&
          admits(absences[*at])) {
        return *at;
      }
    }
    return SlackTree::nowhere;
  }

  std::vector<Candidate> queue_;
  std::vector<std::int64_t> returning_;  // bytes whose absence ended before a moment
  std::vector<std::uint32_t> added_;     // absences chosen in place of the one left out
  // For prices that differ from bytes.
  std::vector<bool> first_choice_;
  std::vector<std::int64_t> left_;   // excess that cheaper absences do not cover
  std::vector<std::int64_t> taken_;  // what the absences of one range of prices cover
};

using AbsenceCover = BasicAbsenceCover<>;

SPILLWAY_COMPILED_PART(class BasicSlackTree<>);
SPILLWAY_COMPILED_PART(class BasicAbsenceSet<>);
SPILLWAY_COMPILED_PART(class BasicAbsenceCover<>);

}  // namespace spillway::detail
