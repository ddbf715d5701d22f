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

  SegregatedFit() noexcept { heads_.fill(no_node); }

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
        node = best_of(table, heads_[own], count, no_node);
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
  static constexpr std::uint32_t looks = 8;  // ranges of the own class tried before the next class

  // Level 0 holds sizes below `subs`; level k the sizes from subs << (k - 1) on, in `subs` steps.
  static constexpr std::uint32_t class_of(std::uint32_t count) noexcept {
    if (count < subs) {
      return count;
    }
    auto const log = static_cast<std::uint32_t>(31 - std::countl_zero(count));
    return (log - sub_bits + 1) * subs + ((count >> (log - sub_bits)) & (subs - 1));
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
    std::uint32_t level = size_class / subs;
    std::uint32_t const sub = size_class % subs;
    std::uint64_t in_level = subs_[level] & (~std::uint64_t{1} << sub);
    if (in_level == 0) {
      std::uint32_t const above = levels_ & (~std::uint32_t{1} << level);
      if (above == 0) {
        return no_node;
      }
      level = static_cast<std::uint32_t>(std::countr_zero(above));
      in_level = subs_[level];
    }
    return heads_[level * subs + static_cast<std::uint32_t>(std::countr_zero(in_level))];
  }

  void link(RangeTable& table, std::uint32_t node, std::uint32_t size_class) noexcept {
    RangeNode& range = table[node];
    std::uint32_t const head = heads_[size_class];
    range.tag = size_class;
    range.link_a = no_node;
    range.link_b = head;
    if (head != no_node) {
      table[head].link_a = node;
    } else {
      subs_[size_class / subs] |= std::uint64_t{1} << (size_class % subs);
      levels_ |= std::uint32_t{1} << (size_class / subs);
    }
    heads_[size_class] = node;
  }

  void unlink(RangeTable& table, std::uint32_t node) noexcept {
    RangeNode const& range = table[node];
    if (range.link_b != no_node) {
      table[range.link_b].link_a = range.link_a;
    }
    if (range.link_a != no_node) {
      table[range.link_a].link_b = range.link_b;
      return;
    }
    heads_[range.tag] = range.link_b;
    if (range.link_b == no_node) {
      std::uint32_t const level = range.tag / subs;
      subs_[level] &= ~(std::uint64_t{1} << (range.tag % subs));
      if (subs_[level] == 0) {
        levels_ &= ~(std::uint32_t{1} << level);
      }
    }
  }

  std::array<std::uint32_t, std::size_t{levels} * subs> heads_;
  std::array<std::uint64_t, levels> subs_{};  // bit s of word l: class l * subs + s has a range
  std::uint32_t levels_ = 0;                  // bit l: word l is not 0
};

static_assert(FitPolicy<SegregatedFit>);

}  // namespace spillway
