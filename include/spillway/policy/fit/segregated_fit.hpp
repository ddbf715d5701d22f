// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/fit_policy.hpp>
#include <spillway/core/bits.hpp>
#include <spillway/core/config.hpp>
#include <spillway/core/range_table.hpp>

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace spillway {

/// The default fit policy, a segregated fit: free ranges are in lists by size class, whose sizes
/// differ by at most 1/64, and two levels of bitmaps find a class that is not empty (TLSF).
///
/// It takes the newest range of the request's own class if that fits, else one of the next class
/// that has any: nearly the best fit. Sizes below 128 granules have a class each, so for them the
/// fit is exact. Large blocks go to the high end of the range and small ones to the low end, which
/// keeps blocks of one kind together and the room between them in one piece.
///
/// If there are few blocks and few free ranges, as with some large tensors in a tight arena, each
/// choice counts. It then looks at all ranges and takes an exact fit if there is one, else the
/// outer end of one of the outermost ranges, so that the free bytes stay close together.
///
/// Threads  thread-compatible.
/// Cost     O(1); `find` looks through one whole class only when no larger class has a range, and
///          `largest` looks through the topmost class.
class SegregatedFit {
 public:
  static constexpr bool is_thread_safe = false;

  [[gnu::always_inline]] void insert(RangeTable& table, std::uint32_t node) noexcept {
    link(table, node, class_of(table[node].count));
  }

  [[gnu::always_inline]] void erase(RangeTable& table, std::uint32_t node) noexcept {
    unlink(table, node);
  }

  [[gnu::always_inline]] void
  resize(RangeTable& table, std::uint32_t node, std::uint32_t first, std::uint32_t count) noexcept {
    RangeNode& range = table[node];
    range.first = first;
    range.count = count;
    std::uint32_t const size_class = class_of(count);
    if (size_class != range.tag) {
      unlink(table, node);
      link(table, node, size_class);
    }
  }

  [[nodiscard]] Fit find(RangeTable const& table, std::uint32_t count) const noexcept {
    if (table.free_ranges <= few_free && table.taken_ranges <= few_taken) {
      return find_among_few(table, count);
    }
    std::uint32_t const own = class_of(count);
    std::uint32_t const head = heads_[own];
    if (table[head].count >= count) {  // `no_node` has 0 granules
      return {head, is_large(table, count)};
    }
    std::uint32_t const level = own / subs;
    std::uint64_t word = subs_[level] & (~std::uint64_t{1} << (own % subs));
    std::uint32_t found = level;
    if (word == 0) {
      std::uint64_t const above = levels_ & (~std::uint64_t{1} << level);
      if (above == 0) {
        return {first_in(table, head, count), is_large(table, count)};
      }
      found = static_cast<std::uint32_t>(std::countr_zero(above));
      word = subs_[found];
    }
    return {heads_[found * subs + static_cast<std::uint32_t>(std::countr_zero(word))],
            is_large(table, count)};
  }

  [[nodiscard]] std::uint32_t largest(RangeTable const& table) const noexcept {
    if (levels_ == 0) {
      return 0;
    }
    std::uint32_t const level = highest_bit(levels_);
    std::uint32_t const sub = highest_bit(subs_[level]);
    std::uint32_t most = 0;
    for (std::uint32_t node = heads_[level * subs + sub]; node != no_node;
         node = table[node].link_b) {
      most = table[node].count > most ? table[node].count : most;
    }
    return most;
  }

  template <class Visit>
  void visit_large(RangeTable const& table, Visit visit) const {
    for (std::uint64_t left = levels_; left != 0;) {
      std::uint32_t const level = highest_bit(left);
      left ^= std::uint64_t{1} << level;
      for (std::uint64_t bits = subs_[level]; bits != 0;) {
        std::uint32_t const sub = highest_bit(bits);
        bits ^= std::uint64_t{1} << sub;
        for (std::uint32_t node = heads_[level * subs + sub]; node != no_node;
             node = table[node].link_b) {
          if (!visit(node)) {
            return;
          }
        }
      }
    }
  }

 private:
  static constexpr std::uint32_t sub_bits = 6;
  static constexpr std::uint32_t subs = 1U << sub_bits;
  static constexpr std::uint32_t levels = detail::size_class_count<sub_bits, std::uint32_t> / subs;
  static constexpr std::size_t few_free = 8;
  static constexpr std::size_t few_taken = 256;

  static constexpr std::uint32_t class_of(std::uint32_t count) noexcept {
    return detail::size_class_of<sub_bits>(count);
  }

  static std::uint32_t highest_bit(std::uint64_t word) noexcept {
    return static_cast<std::uint32_t>(63 - std::countl_zero(word));
  }

  // Whether a block of `count` granules is more than twice as large as the mean block.
  static bool is_large(RangeTable const& table, std::uint32_t count) noexcept {
    return std::uint64_t{count} * table.taken_ranges > 2 * table.taken_granules;
  }

  [[gnu::noinline]] static std::uint32_t
  first_in(RangeTable const& table, std::uint32_t node, std::uint32_t count) noexcept {
    while (node != no_node && table[node].count < count) {
      node = table[node].link_b;
    }
    return node;
  }

  [[nodiscard, gnu::noinline]] Fit find_among_few(RangeTable const& table,
                                                  std::uint32_t count) const noexcept {
    std::uint32_t lowest = no_node;
    std::uint32_t highest = no_node;
    std::uint32_t best = no_node;
    visit_large(table, [&](std::uint32_t node) {
      RangeNode const& range = table[node];
      if (lowest == no_node || range.first < table[lowest].first) {
        lowest = node;
      }
      if (highest == no_node || range.first > table[highest].first) {
        highest = node;
      }
      if (range.count >= count && (best == no_node || range.count < table[best].count)) {
        best = node;
      }
      return true;
    });
    if (best == no_node || table[best].count == count || lowest == highest) {
      return {best, is_large(table, count)};
    }
    bool const fits_lowest = table[lowest].count >= count;
    bool const fits_highest = table[highest].count >= count;
    if (fits_lowest && (!fits_highest || table[lowest].count < table[highest].count)) {
      return {lowest, false};
    }
    return fits_highest ? Fit{highest, true} : Fit{best, is_large(table, count)};
  }

  // `link` and `unlink` do not check for a missing neighbour, since `no_node` may be written to.
  [[gnu::always_inline]] void
  link(RangeTable& table, std::uint32_t node, std::uint32_t size_class) noexcept {
    RangeNode& range = table[node];
    std::uint32_t const head = heads_[size_class];
    range.tag = size_class;
    range.link_a = no_node;
    range.link_b = head;
    table[head].link_a = node;
    heads_[size_class] = node;
    subs_[size_class / subs] |= std::uint64_t{1} << (size_class % subs);
    levels_ |= std::uint64_t{1} << (size_class / subs);
  }

  // Whether the class is empty now is hard to predict, so the bit is computed without a branch.
  [[gnu::always_inline]] void unlink(RangeTable& table, std::uint32_t node) noexcept {
    std::uint32_t const before = table[node].link_a;
    std::uint32_t const after = table[node].link_b;
    std::uint32_t const size_class = table[node].tag;
    table[after].link_a = before;
    std::uint32_t& link = before == no_node ? heads_[size_class] : table[before].link_b;
    link = after;
    std::uint32_t const level = size_class / subs;
    std::uint64_t const is_empty = (before | after) == no_node ? 1 : 0;
    std::uint64_t const word = subs_[level] & ~(is_empty << (size_class % subs));
    subs_[level] = word;
    if (word == 0) {
      levels_ &= ~(std::uint64_t{1} << level);
    }
  }

  std::array<std::uint32_t, std::size_t{levels} * subs> heads_{};  // no_node is 0
  std::array<std::uint64_t, levels> subs_{};  // bit s of word l: class l * subs + s has a range
  std::uint64_t levels_ = 0;                  // bit l: word l is not 0
};

SPILLWAY_CHECK_MODEL(FitPolicy<SegregatedFit>);

}  // namespace spillway
