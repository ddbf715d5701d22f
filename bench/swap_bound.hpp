// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <queue>
#include <span>
#include <utility>
#include <vector>

#include "residency_model.hpp"

namespace spillway::bench {

/// A lower bound of the bytes that a run must swap in, for any eviction policy. It is computed from
/// the time in which each block is alive, and from its absences.
///
/// A block appears with its first use and disappears after its last one, which holds for weights,
/// too. Swapping it in after an absence costs its size. The first step is for warming up, and is
/// not counted.
class SwapBound {
 public:
  explicit SwapBound(std::span<Step const> steps) {
    struct Life {
      std::size_t first;
      std::size_t last;
      std::uint64_t bytes;
    };
    std::map<std::pair<std::size_t, std::uint32_t>, Life> lives;
    std::size_t now = 0;
    for (std::size_t s = 0; s < steps.size(); ++s) {
      counted_from_ = s == 1 ? now : counted_from_;
      for (auto const& operation : steps[s]) {
        std::uint64_t bytes = 0;
        for (Operand const& operand : operation) {
          bytes += operand.bytes;
          auto const key = std::pair{operand.is_weight ? ~std::size_t{0} : s, operand.block};
          auto const [at, is_new] = lives.try_emplace(key, Life{now, now, operand.bytes});
          Life& life = at->second;
          if (now > life.last + 1) {
            absences_.push_back({life.last + 1, now - 1, operand.bytes});
          }
          life.last = now;
        }
        working_set_bytes_ = std::max(working_set_bytes_, bytes);
        ++now;
      }
    }
    std::vector<std::uint64_t> born(now);
    std::vector<std::uint64_t> gone(now + 1);
    for (auto const& [key, life] : lives) {
      born[life.first] += life.bytes;
      gone[life.last + 1] += life.bytes;
    }
    std::uint64_t bytes = 0;
    for (std::size_t t = 0; t < now; ++t) {
      bytes = bytes + born[t] - gone[t];
      alive_bytes_.push_back(bytes);
      peak_bytes_ = std::max(peak_bytes_, bytes);
    }
    std::sort(absences_.begin(), absences_.end(), [](Absence const& a, Absence const& b) {
      return a.first < b.first;
    });
  }

  /// The most bytes alive at once.
  [[nodiscard]] std::uint64_t peak_bytes() const noexcept { return peak_bytes_; }
  /// The most bytes that one operation uses.
  [[nodiscard]] std::uint64_t working_set_bytes() const noexcept { return working_set_bytes_; }

  /// Returns the fewest bytes that must be swapped in after the first step, if blocks are
  /// divisible; nothing if the capacity is too small. Since every byte costs the same, it is
  /// optimal to evict what is needed last; the result is the optimum of the linear program.
  [[nodiscard]] std::optional<std::uint64_t> least_swap_in(std::uint64_t capacity_bytes) const {
    std::priority_queue<std::pair<std::size_t, std::uint64_t>>
        open;  // end of the absence, bytes that are not taken yet
    // bytes that return at each operation
    std::vector<std::uint64_t> back(alive_bytes_.size() + 1);
    std::uint64_t away = 0;
    std::uint64_t cost = 0;
    auto const take = [&](std::size_t last, std::uint64_t bytes) {
      away += bytes;
      back[last + 1] += bytes;
    };
    auto absence = absences_.begin();
    for (std::size_t t = 0; t < alive_bytes_.size(); ++t) {
      away -= back[t];
      for (; absence != absences_.end() && absence->first == t; ++absence) {
        if (absence->last + 1 < counted_from_) {
          // costs nothing, since it is back before counting starts
          take(absence->last, absence->bytes);
        } else {
          open.emplace(absence->last, absence->bytes);
        }
      }
      while (alive_bytes_[t] > capacity_bytes + away) {
        if (open.empty() || open.top().first < t) {
          return std::nullopt;
        }
        auto const [last, bytes] = open.top();
        open.pop();
        std::uint64_t const taken = std::min(bytes, alive_bytes_[t] - capacity_bytes - away);
        take(last, taken);
        cost += taken;
        if (taken < bytes) {
          open.emplace(last, bytes - taken);
        }
      }
    }
    return cost;
  }

 private:
  struct Absence {
    std::size_t first;
    std::size_t last;
    std::uint64_t bytes;
  };

  std::vector<Absence> absences_;
  std::vector<std::uint64_t> alive_bytes_;  // bytes alive at each operation
  std::uint64_t peak_bytes_ = 0;
  std::uint64_t working_set_bytes_ = 0;
  std::size_t counted_from_ = 0;
};

}  // namespace spillway::bench
