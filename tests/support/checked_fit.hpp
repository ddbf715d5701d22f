// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/fit_policy.hpp>
#include <spillway/core/range_table.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

namespace support {

/// An index of free ranges beside a map that says what it holds.
template <class Policy>
class CheckedFit {
 public:
  // Policies may choose differently where there are few blocks, some, or many.
  explicit CheckedFit(std::size_t taken_ranges) {
    table_.taken_ranges = taken_ranges;
    table_.taken_granules = 64 * taken_ranges;
  }

  std::uint32_t insert(std::uint32_t count) {
    if (table_.idle_nodes() == 0) {
      table_.grow();
    }
    std::uint32_t const node = table_.acquire();
    table_[node] = {};
    place(node, count);
    policy_.insert(table_, node);
    ++table_.free_ranges;
    return node;
  }
  void erase(std::uint32_t node) {
    policy_.erase(table_, node);
    sizes_.erase(node);
    table_.release(node);
    --table_.free_ranges;
  }
  void resize(std::uint32_t node, std::uint32_t count) {
    sizes_[node] = count;
    policy_.resize(table_, node, next_first_, count);
    next_first_ += 16;
  }

  [[nodiscard]] spillway::Fit find(std::uint32_t count) const {
    return policy_.find(table_, count);
  }
  [[nodiscard]] std::uint32_t largest() const { return policy_.largest(table_); }
  [[nodiscard]] std::vector<std::uint32_t> large(std::size_t most) const {
    std::vector<std::uint32_t> nodes;
    policy_.visit_large(table_, [&](std::uint32_t node) {
      nodes.push_back(node);
      return nodes.size() < most;
    });
    return nodes;
  }
  [[nodiscard]] std::map<std::uint32_t, std::uint32_t> const& sizes() const { return sizes_; }

  // What the smallest range that fits has, 0 if none does.
  [[nodiscard]] std::uint32_t best(std::uint32_t count) const {
    std::uint32_t best = 0;
    for (auto const& [node, size] : sizes_) {
      best = size >= count && (best == 0 || size < best) ? size : best;
    }
    return best;
  }

 private:
  void place(std::uint32_t node, std::uint32_t count) {
    sizes_[node] = count;
    table_[node].first = next_first_;
    table_[node].count = count;
    next_first_ += 16;
  }

  spillway::RangeTable table_;
  Policy policy_;
  std::map<std::uint32_t, std::uint32_t> sizes_;
  std::uint32_t next_first_ = 0;
};

}  // namespace support
