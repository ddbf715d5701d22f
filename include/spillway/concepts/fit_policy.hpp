// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/callable_object.hpp>
#include <spillway/core/range_table.hpp>

#include <concepts>
#include <cstdint>
#include <utility>

namespace spillway {

/// A free range that fits, and which end of it to take.
struct Fit {
  std::uint32_t node = no_node;
  bool is_high_end = false;

  friend bool operator==(Fit const&, Fit const&) noexcept = default;
};

/// Chooses which free range a block gets, and at which end. Keeps an index of the free ranges.
///
/// Given `f` of type `F`, the arena's table `t` (`ct` if const), a node `n`, and granules `c`:
///
/// | expression                 | must                                            | cost          |
/// |----------------------------|-------------------------------------------------|---------------|
/// | `f.insert(t, n)`           | index node `n`, a free range with its place and | O(log n)      |
/// |                            | size                                            |               |
/// | `f.erase(t, n)`            | forget a node that is indexed and unchanged     | O(log n)      |
/// |                            | since                                           |               |
/// | `f.resize(t, n, first, c)` | give an indexed node another place and size     | O(log n)      |
/// | `f.find(ct, c)`            | name an indexed range of at least `c` granules, | O(log n)      |
/// |                            | if any                                          |               |
/// | `f.largest(ct)`            | the size of the largest indexed range, 0 if     | O(log n)      |
/// |                            | none                                            |               |
/// | `f.visit_large(ct, v)`     | call `v(n)` once for each indexed range, until  | O(log n) each |
/// |                            | it returns false. No range is more than 1/8     |               |
/// |                            | larger than one that was visited before it      |               |
///
/// No call may fail, so a model keeps its links in the nodes (`link_a`, `link_b`, `tag`). A model
/// decides; it never touches memory or a device. Thread-compatible: an arena calls it under the
/// lock of the arena's owner.
// clang-format off
template <class F>
concept FitPolicy =
    std::default_initializable<F> && std::movable<F> &&
    requires(F f, F const cf, RangeTable& t, RangeTable const& ct, std::uint32_t n, std::uint32_t c,
             detail::CallableObject<bool(std::uint32_t)> v) {
      { f.insert(t, n)       } noexcept -> std::same_as<void>;
      { f.erase(t, n)        } noexcept -> std::same_as<void>;
      { f.resize(t, n, c, c) } noexcept -> std::same_as<void>;
      { cf.find(ct, c)       } noexcept -> std::same_as<Fit>;
      { cf.largest(ct)       } noexcept -> std::same_as<std::uint32_t>;
      { cf.visit_large(ct, std::move(v)) } -> std::same_as<void>;
    };
// clang-format on

}  // namespace spillway
