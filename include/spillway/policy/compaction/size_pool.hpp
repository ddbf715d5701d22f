// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/config.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace spillway::detail {

/// The set of lifted blocks, by size, from which `ExchangeSearch` chooses those that fill a gap
/// best.
///
/// This is the subset sum problem, solved by branch and bound over the different sizes. The search
/// is depth first, from the largest size and with as many of each size as fit. It leaves a branch
/// if the remaining sizes are known to be too little to beat the best sum so far.
///
/// Threads  thread-compatible.
template <class = Lazily>
class BasicSizePool {
 public:
  struct Choice {
    std::uint64_t sum = 0;
    std::vector<std::uint32_t> counts;  ///< how many of each size
  };

  void clear() noexcept { sizes_.clear(); }

  /// Adds a block. @throws std::bad_alloc. @cost O(sizes)
  void add(std::uint32_t block, std::uint32_t count) {
    auto at = std::lower_bound(
        sizes_.begin(), sizes_.end(), count, [](Size const& size, std::uint32_t wanted) {
          return size.count > wanted;
        });
    if (at == sizes_.end() || at->count != count) {
      at = sizes_.insert(at, Size{count, 0, {}});
    }
    at->blocks.push_back(block);
    for (; at != sizes_.begin(); --at) {
      at->sum_from += count;
    }
    at->sum_from += count;
  }

  /// Returns blocks whose sum is at most `target` and the largest that the search has found.
  ///
  /// @param looks  how many branches may be searched; counted down
  [[nodiscard]] Choice best_for(std::uint64_t target, std::uint64_t& looks) const {
    Search search{target, 0, std::vector<std::uint32_t>(sizes_.size()), {}};
    search.best.counts.resize(sizes_.size());
    descend(search, 0, looks);
    return std::move(search.best);
  }

  /// Takes the blocks of `choice` out and calls `use(block)` for each, large ones first.
  template <class Use>
  void take(Choice const& choice, Use use) {
    std::uint64_t taken = 0;
    for (std::size_t i = sizes_.size(); i-- > 0;) {
      taken += std::uint64_t{choice.counts[i]} * sizes_[i].count;
      sizes_[i].sum_from -= taken;
    }
    for (std::size_t i = 0; i < sizes_.size(); ++i) {
      for (std::uint32_t left = choice.counts[i]; left > 0; --left) {
        use(sizes_[i].blocks.back());
        sizes_[i].blocks.pop_back();
      }
    }
  }

  template <class Use>
  void for_each(Use use) const {
    for (Size const& size : sizes_) {
      for (std::uint32_t const block : size.blocks) {
        use(block);
      }
    }
  }

 private:
  struct Size {
    std::uint32_t count;
    // The sum of the blocks of this size and of smaller ones, as far as it is known. It is exact if
    // large blocks were added first. Otherwise it may be too small, and the search then misses the
    // best sum. Or `take` has subtracted more than was known, so that it has wrapped around and is
    // very large, and the search then leaves out nothing at this size. An exact sum moved more
    // bytes on some traces and fewer on others; docs/benchmarks.md has the figures.
    std::uint64_t sum_from;
    std::vector<std::uint32_t> blocks;
  };
  struct Search {
    std::uint64_t target;
    std::uint64_t sum;
    std::vector<std::uint32_t> counts;
    Choice best;
  };

  // Searches the sizes from `i` on. @returns true if the search is over: the target is met exactly,
  // or no looks are left
  bool descend(Search& search, std::size_t i, std::uint64_t& looks) const {
    if (search.sum > search.best.sum) {
      search.best = {search.sum, search.counts};
    }
    std::uint64_t const left = search.target - search.sum;
    while (i < sizes_.size() && (sizes_[i].count > left || sizes_[i].blocks.empty())) {
      ++i;
    }
    if (left == 0 || looks == 0) {
      return true;
    }
    if (i == sizes_.size() || search.sum + std::min(sizes_[i].sum_from, left) <= search.best.sum) {
      return false;
    }
    --looks;
    std::uint32_t const size = sizes_[i].count;
    auto const most =
        static_cast<std::uint32_t>(std::min<std::uint64_t>(sizes_[i].blocks.size(), left / size));
    search.sum += std::uint64_t{most} * size;
    for (std::uint32_t n = most;; --n) {
      search.counts[i] = n;
      if (descend(search, i + 1, looks)) {
        return true;
      }
      if (n == 0) {
        return false;
      }
      search.sum -= size;
    }
  }

  std::vector<Size> sizes_;  // large ones first
};

using SizePool = BasicSizePool<>;

SPILLWAY_COMPILED_PART(class BasicSizePool<>);

}  // namespace spillway::detail
