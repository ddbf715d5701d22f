// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <iterator>
#include <map>
#include <string>

namespace spillway::detail {

[[nodiscard]] inline std::uintptr_t address_of(void const* p) noexcept {
  return reinterpret_cast<std::uintptr_t>(p);
}

/// Names a range in error messages.
[[nodiscard]] inline std::string describe_range(std::uintptr_t begin, std::size_t bytes) {
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), "[0x%jx, +%zu bytes)", std::uintmax_t{begin}, bytes);
  return text.data();
}
[[nodiscard]] inline std::string describe_range(void const* p, std::size_t bytes) {
  return describe_range(address_of(p), bytes);
}

/// Disjoint ranges of addresses, and what is known of each.
///
/// Threads  thread-compatible, except that looking up changes a cache: const calls need a lock too.
/// Cost     O(log n); O(1) for looking where the last hit was.
template <class T>
class SimRanges {
 public:
  struct Range {
    std::size_t bytes = 0;
    T value{};
  };
  using map_type = std::map<std::uintptr_t, Range>;
  using iterator = typename map_type::iterator;

  void insert(void const* p, std::size_t bytes, T value) {
    ranges_.emplace(address_of(p), Range{bytes, value});
  }

  /// The range that starts at `p`, or `end()`.
  [[nodiscard]] iterator find(void const* p) noexcept { return ranges_.find(address_of(p)); }
  [[nodiscard]] iterator end() noexcept { return ranges_.end(); }
  [[nodiscard]] iterator begin() noexcept { return ranges_.begin(); }
  [[nodiscard]] iterator lower_bound(void const* p) noexcept {
    return ranges_.lower_bound(address_of(p));
  }

  /// The range that holds address `p`, or `end()`.
  [[nodiscard]] iterator holder(void const* p) noexcept {
    auto const after = ranges_.upper_bound(address_of(p));
    if (after == ranges_.begin()) {
      return ranges_.end();
    }
    auto const it = std::prev(after);
    return address_of(p) - it->first < it->second.bytes ? it : ranges_.end();
  }

  iterator erase(iterator it) noexcept {
    hit_begin_ = hit_end_ = 0;
    return ranges_.erase(it);
  }

  /// True if every byte of `[p, p + bytes)` lies in some range; ranges may touch.
  [[nodiscard]] bool covers(void const* p, std::size_t bytes) noexcept {
    std::uintptr_t const begin = address_of(p);
    std::uintptr_t const end = begin + bytes;
    if (end < begin) {
      return false;
    }
    if (begin >= hit_begin_ && end <= hit_end_) {
      return true;
    }
    auto it = holder(p);
    if (it == ranges_.end()) {
      return false;
    }
    std::uintptr_t const first = it->first;
    std::uintptr_t last = it->first + it->second.bytes;
    for (++it; last < end && it != ranges_.end() && it->first == last; ++it) {
      last += it->second.bytes;
    }
    if (last < end) {
      return false;
    }
    hit_begin_ = first;
    hit_end_ = last;
    return true;
  }

  /// True if `[p, p + bytes)` touches no range.
  [[nodiscard]] bool is_clear(void const* p, std::size_t bytes) noexcept {
    if (holder(p) != ranges_.end()) {
      return false;
    }
    auto const next = ranges_.lower_bound(address_of(p));
    return next == ranges_.end() || next->first - address_of(p) >= bytes;
  }

  [[nodiscard]] std::size_t size() const noexcept { return ranges_.size(); }

 private:
  map_type ranges_;
  std::uintptr_t hit_begin_ = 0;
  std::uintptr_t hit_end_ = 0;
};

}  // namespace spillway::detail
