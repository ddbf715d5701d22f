// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/fit_policy.hpp>
#include <spillway/core/range_table.hpp>

#include <array>
#include <bit>
#include <cstdint>

namespace spillway {

/// Free ranges in size classes of at most 1/64 difference, found through two levels of bitmaps (TLSF).
///
/// Takes the smallest of the first ranges in the request's own class, else one of the next class
/// that has any. Sizes below 128 granules have a class each, so for them the fit is exact. Large
/// blocks go to the high end of the range and small ones to the low end, which keeps blocks of one
/// kind together and the room between them in one piece.
///
/// Threads  thread-compatible.
/// Cost     O(1); `find` looks through one whole class only when no larger class has a range, and
///          `largest` looks through the topmost class.
class SegregatedFit {
 public:
  static constexpr bool is_thread_safe = false;

  void insert(RangeTable& table, std::uint32_t node) noexcept {
    link(table, node, class_of(table[node].count));
  }

  void erase(RangeTable& table, std::uint32_t node) noexcept { unlink(table, node); }

  void
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
    std::uint32_t const own = class_of(count);
    std::uint32_t node = best_of(table, heads_[own], count, looks);
    if (node == no_node) {
      node = first_above(own);
      if (node == no_node) {
        node = best_of(table, heads_[own], count, all);
      }
    }
    return {node, is_large(table, count)};
  }

  [[nodiscard]] std::uint32_t largest(RangeTable const& table) const noexcept {
    if (levels_ == 0) {
      return 0;
    }
    auto const level = static_cast<std::uint32_t>(31 - std::countl_zero(levels_));
    auto const sub = static_cast<std::uint32_t>(63 - std::countl_zero(subs_[level]));
    std::uint32_t most = 0;
    for (std::uint32_t node = heads_[level * subs + sub]; node != no_node;
         node = table[node].link_b) {
      most = table[node].count > most ? table[node].count : most;
    }
    return most;
  }

 private:
  static constexpr std::uint32_t sub_bits = 6;
  static constexpr std::uint32_t subs = 1U << sub_bits;
  static constexpr std::uint32_t levels = 32 - sub_bits + 1;
  static constexpr std::uint32_t all = ~std::uint32_t{0};
  static constexpr std::uint32_t looks = 8;  // ranges of the own class tried before the next class

  // The leading `sub_bits` + 1 bits of the size and how many follow, as one number. Smaller sizes
  // are their own class.
  static constexpr std::uint32_t class_of(std::uint32_t count) noexcept {
    auto const rest_bits =
        static_cast<std::uint32_t>(31 - std::countl_zero(count | subs)) - sub_bits;
    return rest_bits * subs + (count >> rest_bits);
  }

  // A block is large when it has more than twice the mean size of the blocks that are there.
  static bool is_large(RangeTable const& table, std::uint32_t count) noexcept {
    return std::uint64_t{count} * table.taken_ranges > 2 * table.taken_granules;
  }

  static std::uint32_t best_of(RangeTable const& table,
                               std::uint32_t node,
                               std::uint32_t count,
                               std::uint32_t most_looks) noexcept {
    std::uint32_t best = no_node;
    for (; node != no_node && most_looks != 0; node = table[node].link_b, --most_looks) {
      std::uint32_t const size = table[node].count;
      if (size >= count && (best == no_node || size < table[best].count)) {
        best = node;
        if (size == count) {
          break;
        }
      }
    }
    return best;
  }

  [[nodiscard]] std::uint32_t first_above(std::uint32_t size_class) const noexcept {
    std::uint32_t const level = size_class / subs;
    std::uint64_t const in_level = subs_[level] & (~std::uint64_t{1} << (size_class % subs));
    std::uint32_t const above = levels_ & (~std::uint32_t{1} << level);
    if ((in_level | above) == 0) {
      return no_node;
    }
    std::uint32_t const found =
        in_level != 0 ? level : static_cast<std::uint32_t>(std::countr_zero(above));
    std::uint64_t const word = in_level != 0 ? in_level : subs_[found];
    return heads_[found * subs + static_cast<std::uint32_t>(std::countr_zero(word))];
  }

  // Neither asks whether there is a neighbour: the node that is none may be written to.
  void link(RangeTable& table, std::uint32_t node, std::uint32_t size_class) noexcept {
    RangeNode& range = table[node];
    std::uint32_t const head = heads_[size_class];
    range.tag = size_class;
    range.link_a = no_node;
    range.link_b = head;
    table[head].link_a = node;
    heads_[size_class] = node;
    subs_[size_class / subs] |= std::uint64_t{1} << (size_class % subs);
    levels_ |= std::uint32_t{1} << (size_class / subs);
  }

  void unlink(RangeTable& table, std::uint32_t node) noexcept {
    RangeNode const range = table[node];
    table[range.link_b].link_a = range.link_a;
    table[range.link_a].link_b = range.link_b;
    heads_[range.tag] = range.link_a == no_node ? range.link_b : heads_[range.tag];
    std::uint32_t const level = range.tag / subs;
    std::uint64_t const is_empty = heads_[range.tag] == no_node ? 1 : 0;
    subs_[level] &= ~(is_empty << (range.tag % subs));
    std::uint32_t const is_level_empty = subs_[level] == 0 ? 1 : 0;
    levels_ &= ~(is_level_empty << level);
  }

  std::array<std::uint32_t, std::size_t{levels} * subs> heads_{};  // no_node is 0
  std::array<std::uint64_t, levels> subs_{};  // bit s of word l: class l * subs + s has a range
  std::uint32_t levels_ = 0;                  // bit l: word l is not 0
};

static_assert(FitPolicy<SegregatedFit>);

}  // namespace spillway
