// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/callable_object.hpp>
#include <spillway/core/fence.hpp>
#include <spillway/core/range.hpp>
#include <spillway/core/types.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

namespace spillway {

/// Options of an arena: how much memory it takes from its device, and when.
struct ArenaOptions {
  /// The most that it ever reserves, without the bounce range; below 1 TiB. `set_capacity` can
  /// lower it.
  std::size_t capacity_bytes = 0;
  /// How much is reserved at construction, by default all of the capacity. An arena that cannot
  /// grow always reserves all of it.
  std::size_t initial_bytes = std::numeric_limits<std::size_t>::max();
  /// The least by which the arena grows. An arena that grows in place takes memory in pieces of
  /// this size, unless `page_bytes` is given, and gives back whole pieces. Larger pieces need fewer
  /// device calls; smaller ones can be given back even if only little is free between blocks that
  /// cannot move.
  std::size_t growth_bytes = 2_MiB;
  /// Whether the arena has one range of addresses into which memory is mapped as it is needed, in
  /// place of several reservations. Then all of its memory is contiguous or can be made so, and
  /// free memory can be given back wherever it is. The device must model `VirtualMemoryApi`.
  bool grows_in_place = false;
  /// For an arena that maps pages: the page size, rounded up to a power of two and at least the
  /// device's granularity; every block takes whole pages. For an arena that grows in place: the
  /// size of a piece, rounded up to the granularity; 0 means `growth_bytes`, at least 2 MiB. A
  /// piece is created, mapped and released by one device call, so larger pieces cost less for large
  /// blocks.
  std::size_t page_bytes = 0;
  /// The size of the bounce range, which is reserved in addition to the capacity, for moves that
  /// overlap themselves; 0 for none. Without it such moves may take more copies.
  std::size_t bounce_bytes = 4_MiB;
  /// If the arena has up to this many ranges, a search for contiguous room looks at all of them; if
  /// it has more, the search begins with some of them.
  std::size_t few_ranges = 16'384;
  /// How many bytes the device moves in the time in which the host looks at one range. With it a
  /// search ends when it has taken as long as the moves of the best plan found so far. 0: searches
  /// have no such limit.
  double bytes_per_look = 0;
};

/// Divides device memory into ranges. The concepts below state what an arena may offer beyond this.
///
/// Given `a` of type `A` (`ca` if const), `n` bytes, a block's id `b`, a taken range `r` and a
/// fence `f`:
///
/// | expression                | must                                                           |
/// |---------------------------|----------------------------------------------------------------|
/// | `A::device_type`          | the device that the memory is on                               |
/// | `A(device, options)`      | reserve what `ArenaOptions` say; neither argument is owned. An |
/// |                           | arena that fits or moves by policies may take them after these |
/// |                           | arguments: a fit policy, or that and a compaction policy       |
/// | `a.try_take(n, b)`        | a `Placement` of at least `n` bytes for block `b`, nothing if  |
/// |                           | none fits; throw `std::bad_alloc` with nothing changed         |
/// | `a.give_back(r, f)`       | free the range; the next user of its bytes waits for `f` first |
/// | `ca.rounded_bytes(n)`     | the bytes that a block of `n` bytes takes up                   |
/// | `ca.address(r)`           | where the range is now                                         |
/// | `ca.reservation(r)`       | the number of the device reservation that the range lies in    |
/// | `ca.capacity_bytes()`     | the most that may be taken, and reserved from now on           |
/// | `a.set_capacity(n)`       | change that, to at most what the options said; what is taken   |
/// |                           | or reserved already stays                                      |
/// | `ca.reserved_bytes()`     | the bytes that are reserved now                                |
/// | `ca.free_bytes()`         | the reserved bytes that may still be taken                     |
/// | `ca.largest_free_bytes()` | the largest `n` for which `try_take` finds a range             |
/// | `ca.for_each_range(v)`    | call `v` with the `RangeView` of each range                    |
///
/// Thread-compatible: an arena is called under its owner's lock. It therefore calls neither the
/// device nor the user, except in its constructor and destructor.
// clang-format off
template <class A>
concept Arena =
    requires(A a, A const ca, std::size_t n, BlockId b, RangeId r, Fence const& f,
             detail::CallableObject<void(RangeView const&)> v) {
      typename A::device_type;
      { a.try_take(n, b)        }          -> std::same_as<std::optional<Placement>>;
      { a.give_back(r, f)       } noexcept -> std::same_as<void>;
      { ca.rounded_bytes(n)     } noexcept -> std::same_as<std::size_t>;
      { ca.address(r)           } noexcept -> std::same_as<std::byte*>;
      { ca.reservation(r)       } noexcept -> std::same_as<std::size_t>;
      { ca.capacity_bytes()     } noexcept -> std::same_as<std::size_t>;
      { a.set_capacity(n)       }          -> std::same_as<void>;
      { ca.reserved_bytes()     } noexcept -> std::same_as<std::size_t>;
      { ca.free_bytes()         } noexcept -> std::same_as<std::size_t>;
      { ca.largest_free_bytes() } noexcept -> std::same_as<std::size_t>;
      { ca.for_each_range(v)    }          -> std::same_as<void>;
      { ca.for_each_range(std::move(v)) }  -> std::same_as<void>;
    };

/// An arena that takes memory from the device when it is needed, and gives it back when it is not.
///
/// | expression                         | must                                                   |
/// |------------------------------------|--------------------------------------------------------|
/// | `ca.growth_for(n)`                 | a `Segment` to reserve next so that `n` bytes fit, one |
/// |                                    | of 0 bytes if the capacity does not allow it           |
/// | `ca.largest_bytes_after_growth(n)` | `largest_free_bytes` after a growth by at most `n`     |
/// |                                    | bytes that the capacity allows                         |
/// | `a.try_reserve(s)`                 | take that from the device; false if the device is      |
/// |                                    | full, and perhaps while something that `trim` gave up  |
/// |                                    | is not released; a throw takes nothing                 |
/// | `a.add_segment(s)`                 | make its bytes free; a throw leaves them with the      |
/// |                                    | caller                                                 |
/// | `a.trim(n)`                        | give up free memory that can be released to the        |
/// |                                    | device, if there is some: about `n` bytes, or the      |
/// |                                    | least that goes at once                                |
/// | `ca.trimmable_bytes()`             | the bytes that `trim` can give up                      |
/// | `a.release(s)`                     | release to the device what left, after its fence, in   |
/// |                                    | the order in which it left; or what was reserved and   |
/// |                                    | could not be added                                     |
/// | `ca.trims_anywhere()`              | whether free bytes in the midst of others can be given |
/// |                                    | up, too                                                |
///
/// `try_reserve` and `release` call the device, without the lock. One call at a time is made of
/// these, `trim` and `add_segment`.
template <class A>
concept GrowingArena =
    Arena<A> && requires(A a, A const ca, std::size_t n, Segment& s) {
      { ca.growth_for(n)                 } noexcept -> std::same_as<Segment>;
      { ca.largest_bytes_after_growth(n) } noexcept -> std::same_as<std::size_t>;
      { a.try_reserve(s)                 }          -> std::same_as<bool>;
      { a.add_segment(s)                 }          -> std::same_as<void>;
      { a.trim(n)                        } noexcept -> std::same_as<std::optional<Segment>>;
      { ca.trimmable_bytes()             } noexcept -> std::same_as<std::size_t>;
      { a.release(s)                     } noexcept -> std::same_as<void>;
      { ca.trims_anywhere()              } noexcept -> std::same_as<bool>;
    };

/// An arena whose free bytes may lie apart, and that plans how to have them in one piece: by moving
/// blocks inside the device, or by evicting neighbours.
///
/// Given a plan `p` of type `A::plan_type`, a predicate `m(id)` that says which blocks may move, a
/// function `c(id)` that says what evicting a block costs (an optional number: nothing if it may
/// not leave), and a number `w` of ranges to look at (`all_ranges` for all):
///
/// | expression                           | must                                                  |
/// |--------------------------------------|-------------------------------------------------------|
/// | `p.moves`                            | `Move`s in the order they run in; a block may be      |
/// |                                      | moved more than once                                  |
/// | `p.cost_bytes`, `p.makes_bytes`      | the sum of the moves; the free range that they make   |
/// | `p.bounce`, `p.fence`                | scratch for moves that overlap themselves, and its    |
/// |                                      | last uses                                             |
/// | `a.plan_compaction(n, budget, m, w)` | a plan that makes a free range of `n` bytes by moving |
/// |                                      | at most `budget`, if one is found; a plan without     |
/// |                                      | moves if a range fits already                         |
/// | `a.plan_pass(budget, m)`             | a plan for about the largest free range that moving   |
/// |                                      | `budget` bytes can make                               |
/// | `a.plan_slide(m)`                    | a plan that moves all blocks as far down as they go   |
/// | `a.begin_moves(p)`                   | claim what the plan needs, or throw and change        |
/// |                                      | nothing; blocks keep their addresses                  |
/// | `a.commit_moves(p, done, f)`         | put the first `done` blocks where they went and undo  |
/// |                                      | the rest; `f` covers all that was enqueued            |
/// | `a.cheapest_window(n, c, w)`         | the neighbours that cost least to evict for a free    |
/// |                                      | range of `n` bytes                                    |
/// | `ca.few_ranges()`                    | how many ranges are searched as a whole               |
/// | `ca.first_search(few)`               | the `w` to begin a search with if up to `few` ranges  |
/// |                                      | may be looked at                                      |
/// | `ca.wider_search(w)`                 | the `w` of the next search, after `w` has failed;     |
/// |                                      | `all_ranges` comes last                               |
/// | `ca.spare_bytes(few)`                | how much may be free beyond `n` before a search is    |
/// |                                      | worth its time                                        |
///
/// A plan is begun in the critical section that made it, and committed once. In between, the caller
/// makes its stream wait for `p.fence` and calls `enqueue_moves`; before each move the stream waits
/// for the fence of the move and for the block's last uses.
template <class A>
concept MovingArena =
    Arena<A> &&
    requires(A a, A const ca, typename A::plan_type& p, std::size_t n, std::size_t w,
             Fence const& f, detail::CallableObject<bool(BlockId)> m,
             detail::CallableObject<std::optional<std::uint64_t>(BlockId)> c) {
      { p.moves                        } -> std::same_as<std::vector<Move>&>;
      { p.cost_bytes                   } -> std::same_as<std::size_t&>;
      { p.makes_bytes                  } -> std::same_as<std::size_t&>;
      { p.bounce                       } -> std::same_as<Bounce&>;
      { p.fence                        } -> std::same_as<Fence&>;
      { a.plan_compaction(n, n, std::move(m), w) }
                                       -> std::same_as<std::optional<typename A::plan_type>>;
      { a.plan_pass(n, std::move(m))   } -> std::same_as<std::optional<typename A::plan_type>>;
      { a.plan_slide(std::move(m))     } -> std::same_as<std::optional<typename A::plan_type>>;
      { a.begin_moves(p)               } -> std::same_as<void>;
      { a.commit_moves(p, n, f)        } noexcept -> std::same_as<void>;
      { a.cheapest_window(n, c, w)     } -> std::same_as<std::optional<EvictionWindow>>;
      { ca.few_ranges()                } noexcept -> std::same_as<std::size_t>;
      { ca.first_search(n)             } noexcept -> std::same_as<std::size_t>;
      { ca.wider_search(w)             } noexcept -> std::same_as<std::size_t>;
      { ca.spare_bytes(n)              } noexcept -> std::same_as<std::size_t>;
    };

/// An arena that maps memory to a range only when the range is to be used.
///
/// | expression                  | must                                                           |
/// |-----------------------------|----------------------------------------------------------------|
/// | `A(device, order, options)` | take a `StreamOrder` of the device, in place of the            |
/// |                             | constructor above                                              |
/// | `a.map(r)`                  | put memory behind range `r`, which was just taken; may wait on |
/// |                             | the host. If it throws, or the result says that the device has |
/// |                             | refused memory, the range stays taken, and is to be given back |
/// |                             | or parked. What was refused is then neither free nor reserved  |
///
/// `map` is called without the lock, one call at a time, while no other thread takes ranges; the
/// `MappedRange` that it returns says what the first user of the range waits for.
template <class A>
concept MappingArena =
    Arena<A> && requires(A a, RangeId r) {
      { a.map(r) } -> std::same_as<MappedRange>;
    };

/// A mapping arena where a block can keep its address while other blocks use its memory. The range
/// of such a block is parked.
///
/// | expression             | must                                                             |
/// |------------------------|------------------------------------------------------------------|
/// | `a.park(r, f)`         | free the memory behind `r` after fence `f` and keep the address  |
/// | `a.park_vacated(r, f)` | the same if the device takes the memory away before `f`          |
/// |                        | (`VacatingApi`)                                                  |
/// | `a.try_retake(r)`      | memory for a parked range, to be mapped before use, if enough is |
/// |                        | free                                                             |
/// | `a.release(r)`         | free the address of a parked range                               |
template <class A>
concept StableAddressArena =
    MappingArena<A> && requires(A a, RangeId r, Fence const& f) {
      { a.park(r, f)         } noexcept -> std::same_as<void>;
      { a.park_vacated(r, f) } noexcept -> std::same_as<void>;
      { a.try_retake(r)      } noexcept -> std::same_as<std::optional<Placement>>;
      { a.release(r)         } noexcept -> std::same_as<void>;
    };
// clang-format on

/// The type of the arena of a bundle of policies. The bundle's alias `arena` names a class with a
/// member template `type`, which gets the bundle as its argument: so a bundle that derives from
/// another and changes the device gets an arena on that device. `MovableBlocks`, `MappedPages` and
/// `StableAddresses` are such classes.
template <class Policies>
using ArenaOf = typename Policies::arena::template type<Policies>;

}  // namespace spillway
