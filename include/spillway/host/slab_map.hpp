// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/bits.hpp>
#include <spillway/core/config.hpp>
#include <spillway/core/fence.hpp>
#include <spillway/core/types.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <new>
#include <optional>
#include <utility>
#include <vector>

namespace spillway::detail {

/// A bitmap of the size classes that are in use, eight for each power of two. `SlabMap` finds its
/// free lists with it.
///
/// Threads  thread-compatible.
/// Cost     each search reads one to eight words.
template <class = Lazily>
class BasicSizeClasses {
  static constexpr unsigned split_bits = 3;

 public:
  static constexpr std::size_t count = size_class_count<split_bits, std::size_t>;

  /// The class of a size; a larger size is never in a smaller class.
  [[nodiscard]] static constexpr std::size_t class_of(std::size_t units) noexcept {
    return size_class_of<split_bits>(units);
  }

  void insert(std::size_t size_class) noexcept { word(size_class) |= bit(size_class); }
  void erase(std::size_t size_class) noexcept { word(size_class) &= ~bit(size_class); }

  /// The smallest class in use that is at least `from`; `count` if there is none.
  [[nodiscard]] std::size_t next(std::size_t from) const noexcept {
    return std::min(count, next_bit(words_, from));
  }

  /// The largest class in use that is less than `before`; `count` if there is none.
  [[nodiscard]] std::size_t previous(std::size_t before) const noexcept {
    return std::min(count, previous_bit(words_, before));
  }

 private:
  [[nodiscard]] std::uint64_t& word(std::size_t size_class) noexcept {
    return words_[size_class / 64];
  }
  [[nodiscard]] static constexpr std::uint64_t bit(std::size_t size_class) noexcept {
    return std::uint64_t{1} << (size_class % 64);
  }

  std::array<std::uint64_t, (count + 63) / 64> words_{};
};

using SizeClasses = BasicSizeClasses<>;

/// One contiguous piece of a chain: in which slab and where.
struct Extent {
  std::uint32_t slab = 0;
  std::size_t offset = 0;
  std::size_t bytes = 0;
};

/// Decides which bytes of which slab a host slot gets: a segregated free list on plain integers.
///
/// `HostLedger` has one for each tier. A slot gets a chain of extents. If a free range is large
/// enough, the chain is one extent of it: the best fit among the first `max_looks` ranges of the
/// request's size class, else of the next larger class that has any. Otherwise the chain is made
/// from the largest free ranges, at most `max_extents`, which a heap selects; that is possible
/// since swapped-out bytes need not be contiguous. Free neighbours coalesce at once (boundary
/// tags).
///
/// Example: free ranges of 4, 3 and 2 granules. A request of 3 takes the second; a request of 8
/// takes 4 + 3 + 1, and 1 granule of the last range stays free.
///
/// Every free range carries the fence after which its bytes may be touched. Neighbours that
/// coalesce unite their fences, and a chain carries the union of what its extents had.
///
/// Units    sizes are rounded up to the granule; offsets are multiples of it.
/// Threads  thread-compatible.
/// Cost     `try_take`: O(1) while some size class has a range that is large enough, else
///          O(free ranges).
///          `give_back`: O(extents), never allocates.
template <class = Lazily>
class BasicSlabMap {
 public:
  static constexpr std::size_t max_extents = 64;

  /// Names a taken chain by its first extent.
  enum class ChainId : std::uint32_t {};

  struct Chain {
    ChainId id{};
    std::size_t bytes = 0;  // rounded
    Fence fence;            // all earlier uses of these bytes
  };

  /// `granule` is a power of two.
  explicit BasicSlabMap(std::size_t granule = granule_bytes) : granule_{granule} {}

  /// Adds a free slab of `bytes`, a multiple of the granule. Returns its number, counted from 0.
  ///
  /// @throws std::bad_alloc, with nothing changed
  std::uint32_t add_slab(std::size_t bytes);

  /// Takes `bytes` > 0, rounded up. @returns nothing if the largest free ranges together are too
  /// small
  ///
  /// @throws std::bad_alloc, with nothing changed
  [[nodiscard]] std::optional<Chain> try_take(std::size_t bytes);

  /// Frees a chain. Its bytes may be used again after `fence`.
  void give_back(ChainId chain, Fence const& fence) noexcept;

  /// Shortens a chain to its first `bytes` > 0, rounded up. The rest may be used again after
  /// `fence`. If there is no memory for the bookkeeping, the rest stays in the chain.
  ///
  /// @returns the bytes that the chain has now
  std::size_t trim(ChainId chain, std::size_t bytes, Fence const& fence) noexcept;

  /// Removes every slab that is wholly free, and calls
  /// `visit(std::uint32_t slab, std::size_t bytes, Fence const&)` for each. The other slabs keep
  /// their numbers.
  template <class Visit>
  void remove_free_slabs(Visit visit) {
    for (std::uint32_t const head : heads_) {
      for (std::uint32_t at = head; at != none;) {
        std::uint32_t const next = nodes_[at].next_linked;
        if (Node const& node = nodes_[at];
            node.previous_in_slab == none && node.next_in_slab == none) {
          visit(node.extent.slab, node.extent.bytes, node.fence);
          reserved_bytes_ -= node.extent.bytes;
          free_bytes_ -= node.extent.bytes;
          unlink(at);
          push_vacant(at);
        }
        at = next;
      }
    }
  }

  /// Whether `try_take(bytes)` would succeed if there were one more free slab of `extra_bytes`.
  [[nodiscard]] bool can_take(std::size_t bytes, std::size_t extra_bytes = 0) const noexcept;

  /// Returns how many bytes the `most` largest free ranges lack to hold `bytes`. Rounding up
  /// `bytes` must not overflow.
  [[nodiscard]] std::size_t missing_bytes(std::size_t bytes, std::size_t most) const noexcept {
    Largest const pieces = largest();
    return missing_after(pieces, std::min(pieces.count, most), round_up(bytes, granule_));
  }

  /// Calls `visit(Extent const&)` for the extents of a chain, in the order of its bytes.
  template <class Visit>
  void for_each_extent(ChainId chain, Visit visit) const {
    for (auto at = static_cast<std::uint32_t>(chain); at != none; at = nodes_[at].next_linked) {
      visit(nodes_[at].extent);
    }
  }

  /// Calls `visit(Extent const&, Fence const&)` for every free range, in no order.
  template <class Visit>
  void for_each_free(Visit visit) const {
    for (std::uint32_t const head : heads_) {
      for (std::uint32_t at = head; at != none; at = nodes_[at].next_linked) {
        visit(nodes_[at].extent, nodes_[at].fence);
      }
    }
  }

  [[nodiscard]] std::size_t granule() const noexcept { return granule_; }
  [[nodiscard]] std::size_t reserved_bytes() const noexcept { return reserved_bytes_; }
  [[nodiscard]] std::size_t free_bytes() const noexcept { return free_bytes_; }
  [[nodiscard]] std::size_t largest_free_bytes() const noexcept {
    std::size_t found = 0;
    if (std::size_t const top = used_classes_.previous(SizeClasses::count);
        top < SizeClasses::count) {
      for (std::uint32_t at = heads_[top]; at != none; at = nodes_[at].next_linked) {
        found = std::max(found, nodes_[at].extent.bytes);
      }
    }
    return found;
  }

 private:
  static constexpr std::uint32_t none = 0xFFFFFFFF;
  static constexpr std::size_t max_looks = 16;  // ranges of one class looked at for a better fit

  struct Node {
    Extent extent;
    Fence fence;  // used by free ranges only
    std::uint32_t previous_in_slab = none;
    std::uint32_t next_in_slab = none;
    std::uint32_t previous_linked = none;  // free: previous range of its class
    std::uint32_t next_linked = none;  // free: next of its class; taken: next extent; vacant: next
    bool is_free = false;
  };

  /// The largest free ranges, sorted by falling size.
  struct Largest {
    std::array<std::uint32_t, max_extents> nodes{};
    std::size_t count = 0;
  };

  [[nodiscard]] std::size_t class_of(std::size_t bytes) const noexcept {
    return SizeClasses::class_of(bytes / granule_);
  }
  [[nodiscard]] std::uint32_t best_in_class(std::size_t size_class,
                                            std::size_t bytes) const noexcept {
    std::uint32_t best = none;
    std::size_t looks = max_looks;
    for (std::uint32_t at = heads_[size_class]; at != none && looks > 0; --looks) {
      std::size_t const size = nodes_[at].extent.bytes;
      if (size >= bytes && (best == none || size < nodes_[best].extent.bytes)) {
        best = at;
      }
      if (size == bytes) {
        break;
      }
      at = nodes_[at].next_linked;
    }
    return best;
  }

  /// Returns a free range of at least `bytes`, about the smallest one. Also returns `none` if such
  /// a range is behind many smaller ones in the list of its class; `largest` finds it then.
  [[nodiscard]] std::uint32_t find(std::size_t bytes) const noexcept {
    std::size_t const own = class_of(bytes);
    if (std::uint32_t const fit = best_in_class(own, bytes); fit != none) {
      return fit;
    }
    std::size_t const larger = used_classes_.next(own + 1);
    return larger < SizeClasses::count ? best_in_class(larger, bytes) : none;
  }

  [[nodiscard]] Largest largest() const noexcept {
    auto const is_larger = [this](std::uint32_t a, std::uint32_t b) {
      return nodes_[a].extent.bytes > nodes_[b].extent.bytes;
    };
    Largest found;
    auto const begin = found.nodes.begin();
    // A heap with the smallest range on top. Classes are added from the largest down until no class
    // can improve it.
    std::size_t size_class = used_classes_.previous(SizeClasses::count);
    for (; size_class < SizeClasses::count && found.count < max_extents;
         size_class = used_classes_.previous(size_class)) {
      for (std::uint32_t at = heads_[size_class]; at != none; at = nodes_[at].next_linked) {
        if (found.count == max_extents) {
          if (!is_larger(at, found.nodes[0])) {
            continue;
          }
          std::pop_heap(begin, begin + max_extents, is_larger);
          --found.count;
        }
        found.nodes[found.count++] = at;
        std::push_heap(begin, begin + static_cast<std::ptrdiff_t>(found.count), is_larger);
      }
    }
    std::sort_heap(begin, begin + static_cast<std::ptrdiff_t>(found.count), is_larger);
    return found;
  }

  [[nodiscard]] std::size_t
  missing_after(Largest const& pieces, std::size_t count, std::size_t wanted) const noexcept {
    for (std::size_t i = 0; i < count && wanted > 0; ++i) {
      wanted -= std::min(wanted, nodes_[pieces.nodes[i]].extent.bytes);
    }
    return wanted;
  }

  /// Makes sure that there is a vacant node, so that splitting a range cannot fail half-way.
  /// `try_take` splits at most one range.
  void provide_vacant_node() {
    if (vacant_ == none) {
      nodes_.emplace_back();
      push_vacant(static_cast<std::uint32_t>(nodes_.size() - 1));
    }
  }

  [[nodiscard]] std::uint32_t pop_vacant() noexcept {
    std::uint32_t const node = vacant_;
    vacant_ = nodes_[node].next_linked;
    return node;
  }

  void push_vacant(std::uint32_t node) noexcept {
    nodes_[node].next_linked = vacant_;
    vacant_ = node;
  }

  void link(std::uint32_t node) noexcept {
    std::size_t const size_class = class_of(nodes_[node].extent.bytes);
    std::uint32_t const next = heads_[size_class];
    nodes_[node].is_free = true;
    nodes_[node].previous_linked = none;
    nodes_[node].next_linked = next;
    if (next != none) {
      nodes_[next].previous_linked = node;
    }
    heads_[size_class] = node;
    used_classes_.insert(size_class);
  }

  void unlink(std::uint32_t node) noexcept {
    Node& gone = nodes_[node];
    if (gone.next_linked != none) {
      nodes_[gone.next_linked].previous_linked = gone.previous_linked;
    }
    if (gone.previous_linked != none) {
      nodes_[gone.previous_linked].next_linked = gone.next_linked;
    } else {
      std::size_t const size_class = class_of(gone.extent.bytes);
      heads_[size_class] = gone.next_linked;
      if (gone.next_linked == none) {
        used_classes_.erase(size_class);
      }
    }
    gone.is_free = false;
    gone.next_linked = none;
  }

  /// Takes the front of a free range; the rest stays free and keeps the fence.
  void take(std::uint32_t node, std::size_t bytes) noexcept {
    unlink(node);
    free_bytes_ -= bytes;
    if (nodes_[node].extent.bytes != bytes) {
      link(split(node, bytes));
    }
  }

  /// Splits an extent that is in no list: `node` keeps `bytes`, and the returned new node gets the
  /// rest. There must be a vacant node.
  [[nodiscard]] std::uint32_t split(std::uint32_t node, std::size_t bytes) noexcept {
    std::uint32_t const rest = pop_vacant();
    Node& taken = nodes_[node];
    nodes_[rest] = Node{};
    nodes_[rest].extent = {
        taken.extent.slab, taken.extent.offset + bytes, taken.extent.bytes - bytes};
    nodes_[rest].fence = taken.fence;
    nodes_[rest].previous_in_slab = node;
    nodes_[rest].next_in_slab = taken.next_in_slab;
    if (taken.next_in_slab != none) {
      nodes_[taken.next_in_slab].previous_in_slab = rest;
    }
    taken.next_in_slab = rest;
    taken.extent.bytes = bytes;
    return rest;
  }

  /// Joins two neighbours that are in no list, and unites their fences.
  void absorb(std::uint32_t left, std::uint32_t right) noexcept {
    Node& grown = nodes_[left];
    grown.extent.bytes += nodes_[right].extent.bytes;
    grown.fence.add(nodes_[right].fence);
    grown.next_in_slab = nodes_[right].next_in_slab;
    if (grown.next_in_slab != none) {
      nodes_[grown.next_in_slab].previous_in_slab = left;
    }
    push_vacant(right);
  }

  void free_extent(std::uint32_t node, Fence const& fence) noexcept {
    free_bytes_ += nodes_[node].extent.bytes;
    nodes_[node].fence = fence;
    if (std::uint32_t const next = nodes_[node].next_in_slab;
        next != none && nodes_[next].is_free) {
      unlink(next);
      absorb(node, next);
    }
    std::uint32_t const previous = nodes_[node].previous_in_slab;
    if (previous != none && nodes_[previous].is_free) {
      unlink(previous);
      absorb(previous, node);
      node = previous;
    }
    link(node);
  }

  std::size_t granule_;
  std::size_t reserved_bytes_ = 0;
  std::size_t free_bytes_ = 0;
  std::uint32_t slab_count_ = 0;
  std::vector<Node> nodes_;
  std::uint32_t vacant_ = none;
  SizeClasses used_classes_;
  std::array<std::uint32_t, SizeClasses::count> heads_ = [] {
    std::array<std::uint32_t, SizeClasses::count> empty{};
    empty.fill(none);
    return empty;
  }();
};

using SlabMap = BasicSlabMap<>;

template <class Lazy>
std::uint32_t BasicSlabMap<Lazy>::add_slab(std::size_t bytes) {
  SPILLWAY_ASSERT(bytes > 0 && bytes % granule_ == 0);
  provide_vacant_node();
  std::uint32_t const node = pop_vacant();
  nodes_[node] = Node{};
  nodes_[node].extent = {slab_count_, 0, bytes};
  link(node);
  reserved_bytes_ += bytes;
  free_bytes_ += bytes;
  return slab_count_++;
}

template <class Lazy>
inline auto BasicSlabMap<Lazy>::try_take(std::size_t bytes) -> std::optional<Chain> {
  if (bytes > free_bytes_) {
    return std::nullopt;  // checked before rounding up, which could overflow
  }
  std::size_t const wanted = round_up(bytes, granule_);
  provide_vacant_node();
  if (std::uint32_t const fit = find(wanted); fit != none) {
    Chain const chain{ChainId{fit}, wanted, nodes_[fit].fence};
    take(fit, wanted);
    return chain;
  }
  Largest const pieces = largest();
  if (missing_after(pieces, pieces.count, wanted) > 0) {
    return std::nullopt;
  }
  Chain chain{ChainId{pieces.nodes[0]}, wanted, {}};
  std::size_t missing = wanted;
  for (std::size_t i = 0; missing > 0; ++i) {
    std::uint32_t const node = pieces.nodes[i];
    std::size_t const part = std::min(missing, nodes_[node].extent.bytes);
    chain.fence.add(nodes_[node].fence);
    take(node, part);
    if (i > 0) {
      nodes_[pieces.nodes[i - 1]].next_linked = node;
    }
    missing -= part;
  }
  return chain;
}

template <class Lazy>
inline void BasicSlabMap<Lazy>::give_back(ChainId chain, Fence const& fence) noexcept {
  for (auto at = static_cast<std::uint32_t>(chain); at != none;) {
    SPILLWAY_ASSERT(!nodes_[at].is_free);
    std::uint32_t const next = nodes_[at].next_linked;
    free_extent(at, fence);
    at = next;
  }
}

template <class Lazy>
inline std::size_t
BasicSlabMap<Lazy>::trim(ChainId chain, std::size_t bytes, Fence const& fence) noexcept {
  std::size_t kept = 0;
  std::size_t const wanted = round_up(bytes, granule_);
  auto last = static_cast<std::uint32_t>(chain);
  for (; kept + nodes_[last].extent.bytes < wanted; last = nodes_[last].next_linked) {
    kept += nodes_[last].extent.bytes;
  }
  kept += nodes_[last].extent.bytes;
  if (std::uint32_t const next = std::exchange(nodes_[last].next_linked, none); next != none) {
    give_back(ChainId{next}, fence);
  }
  if (kept == wanted) {
    return kept;
  }
  try {
    provide_vacant_node();
  } catch (std::bad_alloc const&) {
    return kept;
  }
  free_extent(split(last, nodes_[last].extent.bytes - (kept - wanted)), fence);
  return wanted;
}

template <class Lazy>
bool BasicSlabMap<Lazy>::can_take(std::size_t bytes, std::size_t extra_bytes) const noexcept {
  if (bytes <= extra_bytes) {
    return true;
  }
  if (bytes - extra_bytes > free_bytes_) {
    return false;
  }
  Largest const pieces = largest();
  std::size_t const wanted = round_up(bytes, granule_);
  std::size_t const beside_extra = std::min(pieces.count, max_extents - 1);
  return missing_after(pieces, pieces.count, wanted) == 0 ||
         missing_after(pieces, beside_extra, wanted - extra_bytes) == 0;
}

SPILLWAY_COMPILED_PART(class BasicSizeClasses<>);
SPILLWAY_COMPILED_PART(class BasicSlabMap<>);

}  // namespace spillway::detail
