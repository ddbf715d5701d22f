// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/bits.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace spillway::detail {

/// An index of the free pieces of a `PageArena`: all of them, and those of each size, are listed in
/// the order in which they became free.
///
/// Units    sizes are in pages; a piece is named by a number below the constructor's `pieces`.
/// Threads  thread-compatible.
/// Cost     O(1), and for the nearest size in use O(distance / 64).
class FreePieces {
 public:
  static constexpr bool is_thread_safe = false;
  static constexpr std::uint32_t none = UINT32_MAX;

  /// For up to `pieces` pieces, each of at most `most_pages`. @throws std::bad_alloc
  FreePieces(std::size_t pieces, std::size_t most_pages)
      : nodes_(pieces), sizes_(most_pages + 1), sizes_in_use_(most_pages / 64 + 1) {}

  /// Adds a piece as the one that has become free last.
  void add(std::uint32_t piece, std::uint32_t pages) noexcept {
    nodes_[piece] = {{Links{all_.last, none}, Links{sizes_[pages].last, none}}, pages, 0};
    link(piece);
  }
  void take(std::uint32_t piece) noexcept {
    Node& node = nodes_[piece];
    unlink<by_age>(all_, node);
    unlink<by_size>(sizes_[node.pages], node);
    if (sizes_[node.pages].first == none) {
      sizes_in_use_[node.pages / 64] &= ~(std::uint64_t{1} << (node.pages % 64));
    }
    node.pages_before = std::exchange(node.pages, 0);
  }
  /// Undoes `take`: puts a piece back to its old place in the order. Pieces must be put back in the
  /// opposite order of `take`.
  void put_back(std::uint32_t piece) noexcept {
    nodes_[piece].pages = nodes_[piece].pages_before;
    link(piece);
  }

  [[nodiscard]] bool has(std::uint32_t piece) const noexcept { return nodes_[piece].pages != 0; }

  // Each of these functions returns the piece that has been free for longest among those described,
  // or `none`.

  [[nodiscard]] std::uint32_t oldest() const noexcept { return all_.first; }
  [[nodiscard]] std::uint32_t of_size(std::size_t pages) const noexcept {
    return sizes_[pages].first;
  }
  /// Among pieces of the largest size that is at most `pages`.
  [[nodiscard]] std::uint32_t at_most(std::size_t pages) const noexcept {
    return of_size_in_use(previous_bit(sizes_in_use_, pages + 1));
  }
  /// Among pieces of the smallest size that is at least `pages`.
  [[nodiscard]] std::uint32_t at_least(std::size_t pages) const noexcept {
    return of_size_in_use(next_bit(sizes_in_use_, pages));
  }

 private:
  static constexpr std::size_t by_age = 0;
  static constexpr std::size_t by_size = 1;

  struct Links {
    std::uint32_t previous = none;
    std::uint32_t next = none;
  };
  struct Node {
    std::array<Links, 2> links;
    std::uint32_t pages = 0;         // 0: not free
    std::uint32_t pages_before = 0;  // its size when it was last taken
  };
  struct List {
    std::uint32_t first = none;
    std::uint32_t last = none;
  };

  /// Among pieces of `pages` pages; `none` if `pages` is the result of a search that found no size.
  [[nodiscard]] std::uint32_t of_size_in_use(std::size_t pages) const noexcept {
    return pages < sizes_.size() ? sizes_[pages].first : none;
  }

  void link(std::uint32_t piece) noexcept {
    Node const& node = nodes_[piece];
    link<by_age>(all_, piece);
    link<by_size>(sizes_[node.pages], piece);
    sizes_in_use_[node.pages / 64] |= std::uint64_t{1} << (node.pages % 64);
  }
  /// Puts a piece between the two that its links name.
  template <std::size_t order>
  void link(List& list, std::uint32_t piece) noexcept {
    Links const links = nodes_[piece].links[order];
    (links.previous == none ? list.first : nodes_[links.previous].links[order].next) = piece;
    (links.next == none ? list.last : nodes_[links.next].links[order].previous) = piece;
  }
  template <std::size_t order>
  void unlink(List& list, Node const& node) noexcept {
    Links const links = node.links[order];
    (links.previous == none ? list.first : nodes_[links.previous].links[order].next) = links.next;
    (links.next == none ? list.last : nodes_[links.next].links[order].previous) = links.previous;
  }

  std::vector<Node> nodes_;
  std::vector<List> sizes_;  // by number of pages
  std::vector<std::uint64_t> sizes_in_use_;
  List all_;
};

}  // namespace spillway::detail
