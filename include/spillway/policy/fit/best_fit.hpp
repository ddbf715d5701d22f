// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/fit_policy.hpp>
#include <spillway/core/bits.hpp>
#include <spillway/core/config.hpp>
#include <spillway/core/range_table.hpp>

#include <cstdint>
#include <utility>

namespace spillway {

/// Chooses the smallest free range that fits, and the lowest address among equals. The free ranges
/// are in a treap, ordered by size and address.
///
/// Threads  thread-compatible.
/// Cost     O(log n) expected; the tree's shape depends on the nodes' numbers alone.
class BestFit {
 public:
  static constexpr bool is_thread_safe = false;

  void insert(RangeTable& table, std::uint32_t node) noexcept {
    Key const key = key_of(table, node);
    std::uint32_t const weight = weight_of(node);
    table[node].tag = weight;
    std::uint32_t* at = &root_;
    while (*at != no_node && table[*at].tag >= weight) {
      at = &child(table, *at, key < key_of(table, *at));
    }
    split(table, *at, key, table[node].link_a, table[node].link_b);
    *at = node;
  }

  void erase(RangeTable& table, std::uint32_t node) noexcept {
    Key const key = key_of(table, node);
    std::uint32_t* at = &root_;
    while (*at != node) {
      at = &child(table, *at, key < key_of(table, *at));
    }
    join(table, table[node].link_a, table[node].link_b, *at);
  }

  void
  resize(RangeTable& table, std::uint32_t node, std::uint32_t first, std::uint32_t count) noexcept {
    erase(table, node);
    table[node].first = first;
    table[node].count = count;
    insert(table, node);
  }

  [[nodiscard]] Fit find(RangeTable const& table, std::uint32_t count) const noexcept {
    std::uint32_t best = no_node;
    for (std::uint32_t node = root_; node != no_node;) {
      if (table[node].count >= count) {
        best = node;
        node = table[node].link_a;
      } else {
        node = table[node].link_b;
      }
    }
    return {best, false};
  }

  [[nodiscard]] std::uint32_t largest(RangeTable const& table) const noexcept {
    std::uint32_t most = 0;
    for (std::uint32_t node = root_; node != no_node; node = table[node].link_b) {
      most = table[node].count;
    }
    return most;
  }

  template <class Visit>
  void visit_large(RangeTable const& table, Visit visit) const {
    visit_from(table, root_, visit);
  }

 private:
  using Key = std::pair<std::uint32_t, std::uint32_t>;  // size, then address

  static Key key_of(RangeTable const& table, std::uint32_t node) noexcept {
    return {table[node].count, table[node].first};
  }

  // A fixed function of the node's number is as good as a random number, since sizes and addresses
  // do not depend on it.
  static std::uint32_t weight_of(std::uint32_t node) noexcept {
    return static_cast<std::uint32_t>(detail::mix_bits(node) >> 32U);
  }

  static std::uint32_t& child(RangeTable& table, std::uint32_t node, bool is_left) noexcept {
    return is_left ? table[node].link_a : table[node].link_b;
  }

  // @returns false when `visit` has seen enough
  template <class Visit>
  static bool visit_from(RangeTable const& table, std::uint32_t node, Visit& visit) {
    return node == no_node || (visit_from(table, table[node].link_b, visit) && visit(node) &&
                               visit_from(table, table[node].link_a, visit));
  }

  // Splits `tree`: nodes below `key` go to `left`, the others to `right`.
  static void split(RangeTable& table,
                    std::uint32_t tree,
                    Key const& key,
                    std::uint32_t& left,
                    std::uint32_t& right) noexcept {
    std::uint32_t* low = &left;
    std::uint32_t* high = &right;
    while (tree != no_node) {
      if (key_of(table, tree) < key) {
        *low = tree;
        low = &table[tree].link_b;
        tree = *low;
      } else {
        *high = tree;
        high = &table[tree].link_a;
        tree = *high;
      }
    }
    *low = no_node;
    *high = no_node;
  }

  // Joins two trees. Precondition: every node of `left` is below every node of `right`.
  static void
  join(RangeTable& table, std::uint32_t left, std::uint32_t right, std::uint32_t& into) noexcept {
    std::uint32_t* at = &into;
    while (left != no_node && right != no_node) {
      if (table[left].tag >= table[right].tag) {
        *at = left;
        at = &table[left].link_b;
        left = *at;
      } else {
        *at = right;
        at = &table[right].link_a;
        right = *at;
      }
    }
    *at = left != no_node ? left : right;
  }

  std::uint32_t root_ = no_node;
};

SPILLWAY_CHECK_MODEL(FitPolicy<BestFit>);

}  // namespace spillway
