// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/arena/free_pieces.hpp>
#include <spillway/arena/range_map.hpp>
#include <spillway/concepts/arena.hpp>
#include <spillway/concepts/device_capabilities.hpp>
#include <spillway/concepts/fit_policy.hpp>
#include <spillway/core/error.hpp>
#include <spillway/core/fence.hpp>
#include <spillway/core/range.hpp>
#include <spillway/core/types.hpp>
#include <spillway/stream/stream_order.hpp>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

namespace spillway {

/// The arena that maps pages: it takes device memory in whole pages and maps it where a block needs
/// it. Bundles of policies choose it with `MappedPages` or `StableAddresses`.
///
/// A range is address space of its own with as many pages behind it as it needs, from wherever they
/// were free: any free pages make one range, and no byte moves. With `Stable` a range can be
/// parked: its pages serve others, its address is kept, and other pages come behind it when it is
/// taken back.
///
/// Memory comes in pieces, each one allocation of the device: a driver takes about as long to map a
/// large piece as a small one, and maps a piece only as a whole. So the pieces follow the sizes of
/// the ranges. A range gets, in this order:
///
/// 1. what is still mapped at its address, if that is free and all that it needs: no call at all;
/// 2. a free piece of its size, mapped anew;
/// 3. what takes least time by the table `Cost`: several free pieces that add up to its size, or a
///    new piece that is made of others. These are released to the device, and what they have beyond
///    the range's size is made pieces, too. If there are n other pieces of that size, up to n more
///    are cut with it, so that small blocks cut a full device in a few steps.
///
/// So leases in turn of blocks of the same sizes soon cost one call to unmap and one to map each.
/// The bytes that are reserved stay the same, but between release and creation the device has them.
/// If others take them meanwhile, `map` has nothing to map: the arena has that much less reserved,
/// no other range has changed, and its owner looks for memory anew. On a device to which pieces are
/// all one (`CheapPiecesApi`) every piece is one page, and none is ever released for another.
///
/// Taking a range is bookkeeping; `map` then does what the driver has to do. A piece that was used
/// elsewhere is unmapped only when its last use has finished, so `map` may wait on the host. Of the
/// pieces of a size those come first that have been free for longest, which makes that rare.
///
/// Shape    whole pages of `page_bytes()`: the device's granularity, or more if the options say so.
///          As many as are needed are taken from the device later, as one piece, and any piece can
///          be given back when it is free.
/// Threads  thread-compatible; `map`, `try_reserve` and `release` run without the caller's lock,
///          one call at a time, and no range is taken meanwhile.
/// Cost     O(pages of the range) for every call; `map` calls the device once for each run of
///          pieces of one size that it maps, for each run that it unmaps, or moves where the device
///          can (`RemappingApi`), and for each piece that it creates or releases.
template <VirtualMemoryApi Device, FitPolicy Fit, bool Stable>
class PageArena {
 public:
  using device_type = Device;

  static constexpr bool is_thread_safe = false;
  /// Address space for each byte of memory: parked ranges need it.
  static constexpr std::size_t address_factor = Stable ? 64 : 4;

  /// Takes `options.initial_bytes` from the device, in pages. `device` and `order` are not owned
  /// and must outlive the arena.
  ///
  /// @throws OutOfDeviceMemory, DeviceError, ContractViolation for a capacity below one page, or of
  ///         so many pages that their addresses cannot be numbered
  PageArena(Device& device,
            StreamOrder<Device>& order,
            ArenaOptions const& options,
            Fit fit = Fit());
  PageArena(PageArena const&) = delete;
  PageArena& operator=(PageArena const&) = delete;
  /// All work on the memory must be over.
  ~PageArena() { release_all(); }

  [[nodiscard]] std::size_t page_bytes() const noexcept { return page_bytes_; }
  [[nodiscard]] std::size_t rounded_bytes(std::size_t bytes) const noexcept {
    return round_up(bytes, page_bytes_);
  }

  /// A range of `bytes` for `owner`, to be mapped before use, if enough pages are free.
  [[nodiscard]] std::optional<Placement> try_take(std::size_t bytes, BlockId owner) {
    expects(bytes != 0, "a range has at least one byte");
    std::size_t const count = pages_for(bytes);
    if (count > usable_pages()) {
      return std::nullopt;
    }
    Fence vacated;  // all other fences are the pieces'
    std::uint32_t const node = addresses_.take(static_cast<std::uint32_t>(count), owner, vacated);
    if (node == no_node) {
      return std::nullopt;
    }
    try {
      if (node >= ranges_.size()) {
        ranges_.resize(node + 1);
      }
      ranges_[node].pieces.reserve(count);
    } catch (...) {
      addresses_.give_back(node, vacated);
      throw;
    }
    ranges_[node].vacated = vacated;
    assign_pieces(node, static_cast<std::uint32_t>(count));
    return Placement{RangeId{node}, address(RangeId{node}), {}};
  }

  /// Puts the range's pages behind its address. The device may refuse memory that the arena has
  /// released to it: the range is then to be given back or parked, and that memory is reserved no
  /// more.
  ///
  /// @throws DeviceError; what was mapped stays mapped, and the range is to be given back or parked
  [[nodiscard]] MappedRange map(RangeId id) {
    Range& range = ranges_[node_of(id)];
    auto const first = static_cast<std::uint32_t>(first_page(id));
    MappedRange result;
    range.has_failed = true;  // until the end
    result.host_waits += await(range.vacated);
    result.host_waits += unmap_for(range, first, result.fence);
    for (std::uint32_t const piece : released_) {
      give_up(piece);
    }
    released_.clear();
    result.is_refused = !try_create();
    if (result.is_refused) {
      return result;
    }
    std::uint32_t at = first;
    for (std::size_t i = 0; i < range.pieces.size();) {
      if constexpr (RemappingApi<Device>) {
        if (std::uint32_t const count = move_run(range, i, at); count != 0) {
          at += count;
          i += count;
          continue;
        }
      }
      std::uint32_t const pages = pieces_[range.pieces[i]].pages;
      run_.clear();
      std::size_t const begin = i;
      for (; i < range.pieces.size(); ++i) {
        Piece const& piece = pieces_[range.pieces[i]];
        if (piece.mapped_at != no_page || piece.pages != pages) {
          break;
        }
        run_.push_back(piece.physical);  // its room was reserved by the constructor
      }
      if (run_.empty()) {
        at += pages;
        ++i;
        continue;
      }
      device_->map(base_ + at * page_bytes_, pages * page_bytes_, run_);
      for (std::size_t mapped = begin; mapped < i; ++mapped, at += pages) {
        pieces_[range.pieces[mapped]].mapped_at = at;
        std::fill_n(piece_at_.begin() + at, pages, range.pieces[mapped]);
      }
    }
    range.has_failed = false;
    return result;
  }

  /// Changes the capacity, which is whole pages. @throws ContractViolation for less than a page,
  /// and for more than the options said
  void set_capacity(std::size_t bytes) {
    std::size_t const count = bytes / page_bytes_;
    expects(count != 0 && count <= most_pages_,
            "an arena's capacity is at least a page, and at most what it was made with");
    capacity_pages_ = count;
  }
  /// The pages to take from the device next so that `bytes` fit.
  [[nodiscard]] Segment growth_for(std::size_t bytes) const noexcept {
    std::size_t const wanted = pages_for(bytes);
    std::size_t const left = capacity_pages_ - std::min(capacity_pages_, reserved_pages_);
    std::size_t const missing = wanted - std::min(wanted, free_pages_);
    return {nullptr,
            missing == 0 ? 0 : std::min(left, std::max(missing, growth_pages_)) * page_bytes_,
            {}};
  }
  /// The largest `n` for which `try_take` finds a range after the arena has grown by at most
  /// `growth_bytes`.
  [[nodiscard]] std::size_t largest_bytes_after_growth(std::size_t growth_bytes) const noexcept {
    std::size_t const left = capacity_pages_ - std::min(capacity_pages_, reserved_pages_);
    return (usable_pages() + std::min(left, growth_bytes / page_bytes_)) * page_bytes_;
  }
  /// Takes a segment from the device, as one piece. @returns false if the device is full, or if
  /// pages that `trim` handed over, and that are not released yet, leave too few
  ///
  /// @throws DeviceError, std::bad_alloc; nothing has been taken then
  [[nodiscard]] bool try_reserve(Segment& segment) {
    return try_reserve(segment.bytes / page_bytes_, most_pages_);
  }
  /// Makes the pieces of the last `try_reserve` free.
  void add_segment(Segment const& /*segment*/) noexcept {
    for (std::uint32_t const piece : arrived_) {
      reserved_pages_ += pieces_[piece].pages;
      free_pages_ += pieces_[piece].pages;
      absent_pages_ -= pieces_[piece].pages;
      free_.add(piece, pieces_[piece].pages);
    }
    arrived_.clear();
  }
  /// Hands over free pieces that have at least `bytes`, those first that have been free for longest
  /// as far as they are no larger than what is left to hand over.
  [[nodiscard]] std::optional<Segment>
  trim(std::size_t bytes = std::numeric_limits<std::size_t>::max()) noexcept {
    std::size_t const wanted = std::min(free_pages_, pages_for(bytes));
    std::size_t count = 0;
    Segment segment;
    while (count < wanted) {
      std::uint32_t const piece = piece_to_trim(wanted - count);
      free_.take(piece);
      count += pieces_[piece].pages;
      segment.fence.add(pieces_[piece].fence);
      pieces_[piece].next = no_piece;
      (leaving_head_ == no_piece ? leaving_head_ : pieces_[leaving_tail_].next) = piece;
      leaving_tail_ = piece;
    }
    segment.bytes = count * page_bytes_;
    reserved_pages_ -= count;
    free_pages_ -= count;
    return count == 0 ? std::nullopt : std::optional{segment};
  }
  [[nodiscard]] std::size_t trimmable_bytes() const noexcept { return free_pages_ * page_bytes_; }
  /// Gives the pieces that `trim` handed over back to the device: of the segment that is released
  /// next, in the order of the calls of `trim`.
  void release(Segment const& segment) noexcept {
    std::size_t const count = segment.bytes / page_bytes_;
    {
      UnmappedRun unmapped{this};
      std::uint32_t index = leaving_head_;
      for (std::size_t pages = 0; pages < count; index = pieces_[index].next) {
        pages += pieces_[index].pages;
        pieces_[index].fence.clear();  // the caller has waited for it
        (void)detach(pieces_[index], unmapped);
      }
    }
    for (std::size_t pages = 0; pages < count;) {
      std::uint32_t const index = std::exchange(leaving_head_, pieces_[leaving_head_].next);
      pages += pieces_[index].pages;
      give_up(index);
    }
    absent_pages_ += count;
  }
  [[nodiscard]] static constexpr bool trims_anywhere() noexcept { return false; }

  /// Frees the pages and the address after `fence`.
  void give_back(RangeId range, Fence const& fence) noexcept {
    free_pieces(range, fence);
    free_address(range);
  }

  /// Frees the pages after `fence` and keeps the address.
  void park(RangeId range, Fence const& fence) noexcept requires Stable {
    free_pieces(range, fence);
  }
  /// The same for a range that the device vacates before `fence`.
  void park_vacated(RangeId range, Fence const& fence) noexcept requires Stable {
    Range& parked = ranges_[node_of(range)];
    for (std::uint32_t const piece : parked.pieces) {
      forget_place(pieces_[piece]);
    }
    parked.vacated.add(fence);
    free_pieces(range, fence);
  }

  /// Pages for a parked range, to be mapped before use, if enough are free.
  [[nodiscard]] std::optional<Placement> try_retake(RangeId range) noexcept requires Stable {
    std::uint32_t const count = addresses_[node_of(range)].count;
    if (count > usable_pages()) {
      return std::nullopt;
    }
    assign_pieces(node_of(range), count);
    return Placement{range, address(range), {}};
  }

  /// Frees the address of a parked range.
  void release(RangeId range) noexcept requires Stable { free_address(range); }

  [[nodiscard]] std::byte* address(RangeId range) const noexcept {
    return base_ + first_page(range) * page_bytes_;
  }
  /// All ranges lie in one.
  [[nodiscard]] static std::size_t reservation(RangeId /*range*/) noexcept { return 1; }
  [[nodiscard]] std::size_t capacity_bytes() const noexcept {
    return capacity_pages_ * page_bytes_;
  }
  [[nodiscard]] std::size_t reserved_bytes() const noexcept {
    return reserved_pages_ * page_bytes_;
  }
  [[nodiscard]] std::size_t free_bytes() const noexcept { return usable_pages() * page_bytes_; }
  /// Any free pages make one range.
  [[nodiscard]] std::size_t largest_free_bytes() const noexcept { return free_bytes(); }

  /// Calls `visit(RangeView)` for every range that has pages, each a segment of its own.
  template <class Visit>
  void for_each_range(Visit visit) const {
    std::size_t segment = 0;
    for (std::uint32_t node = 0; node < ranges_.size(); ++node) {
      if (!ranges_[node].pieces.empty()) {
        auto const range = RangeId{node};
        visit(RangeView{address(range),
                        addresses_[node].count * page_bytes_,
                        segment++,
                        RangeState::taken,
                        addresses_[node].owner(),
                        range});
      }
    }
  }

 private:
  static constexpr std::uint32_t no_page = UINT32_MAX;
  static constexpr std::uint32_t no_piece = detail::FreePieces::none;
  /// Pieces that one allocation makes and that calls of the device treat one by one.
  static constexpr bool has_large_pieces = !CheapPiecesApi<Device>;
  /// The size of the pieces that the constructor takes, which does not know what ranges need.
  static constexpr std::size_t initial_piece_bytes = 128_MiB;

  /// What the calls of the device for one piece take, in microseconds: on an H200, with CUDA 13.
  /// Only how they compare matters. `release` was not measured by itself.
  struct Cost {
    static constexpr std::uint64_t map = 33;  // of which 32 make the piece accessible
    static constexpr std::uint64_t unmap = 21;
    static constexpr std::uint64_t release = 16;
    static constexpr std::uint64_t create = 16;
    static constexpr std::size_t bytes_per_us = 2_MiB;  // more for a large piece to create
    /// Of one more piece in later leases. A part of what it takes to map it once more, since it may
    /// stay where it is, or be just what another range needs: with this part, random leases of
    /// blocks of many sizes cost least.
    static constexpr std::uint64_t later = (map + unmap) / 4;
  };

  /// One allocation of the device, whether it is there already or about to be.
  struct Piece {
    typename Device::physical_type physical{};
    std::uint32_t pages = 0;            // 0: the record is in no use
    std::uint32_t mapped_at = no_page;  // first page of the address space it is mapped at
    std::uint32_t next = no_piece;      // of the records in no use, or of the pieces that leave
    bool is_there = false;              // else it is in `awaited_`, or in no use
    Fence fence;  // last uses at the place where it is mapped, or was until it was vacated
  };
  struct Range {
    std::vector<std::uint32_t> pieces;  // in the order of their addresses
    Fence vacated;                      // what has to be over before anything is mapped there
    bool has_failed = false;            // `map` began and did not come to its end
  };
  /// A part of a range for which pieces are chosen: a piece, or as many pages that have none.
  struct Part {
    std::uint32_t piece = no_piece;
    std::uint32_t pages = 0;
    bool is_in_place = false;
  };
  /// Neighbouring pages of the address space, which one call unmaps. Those that are added last are
  /// unmapped at the end of this object.
  class UnmappedRun {
   public:
    explicit UnmappedRun(PageArena* arena) noexcept : arena_{arena} {}
    UnmappedRun(UnmappedRun const&) = delete;
    UnmappedRun& operator=(UnmappedRun const&) = delete;
    ~UnmappedRun() { unmap(); }

    /// All work on the pages has finished.
    void add(std::uint32_t first, std::uint32_t count) noexcept {
      if (first + count == first_) {
        first_ = first;
      } else if (first != first_ + count_) {
        unmap();
        first_ = first;
      }
      count_ += count;
    }

   private:
    void unmap() noexcept {
      if (count_ != 0) {
        std::size_t const page_bytes = arena_->page_bytes_;
        arena_->device_->unmap(arena_->base_ + first_ * page_bytes, count_ * page_bytes);
        count_ = 0;
      }
    }

    PageArena* arena_;
    std::uint32_t first_ = 0;
    std::uint32_t count_ = 0;
  };

  static std::uint32_t node_of(RangeId range) noexcept { return static_cast<std::uint32_t>(range); }
  /// How many pages hold `bytes`, whatever they are: to round them up might wrap around.
  [[nodiscard]] std::size_t pages_for(std::size_t bytes) const noexcept {
    return bytes / page_bytes_ + (bytes % page_bytes_ != 0);
  }
  [[nodiscard]] std::size_t first_page(RangeId range) const noexcept {
    return addresses_[node_of(range)].first - first_address_;
  }

  /// How many pieces there are at most at one time: those that are there, and those that others of
  /// them become, have a page each at least.
  [[nodiscard]] std::size_t most_records() const {
    expects(most_pages_ != 0, "a capacity of at least one page is needed");
    expects(most_pages_ <= no_page / address_factor,
            "a capacity has fewer than 2^30 pages, with stable addresses 2^26: make pages larger");
    return has_large_pieces ? 2 * most_pages_ : most_pages_;
  }

  // Choosing pieces. What is chosen is taken from the free ones at once; what has to be released or
  // created for it is noted, and the next `map` does it.

  /// Chooses the pieces behind a range, for which enough pages are free.
  void assign_pieces(std::uint32_t node, std::uint32_t count) noexcept {
    Range& range = ranges_[node];  // room for its pieces was reserved when it was first taken
    range.has_failed = false;
    free_pages_ -= count;
    tried_.clear();
    parts_.clear();
    if (!try_mapped(static_cast<std::uint32_t>(first_page(RangeId{node})), count)) {
      if (std::uint32_t const piece = choose_one_piece(count); piece != no_piece) {
        range.pieces.push_back(piece);
        return;
      }
    }
    for (Part part : parts_) {
      if (part.piece != no_piece) {
        range.pieces.push_back(part.piece);
        continue;
      }
      while (part.pages != 0) {
        std::uint32_t piece = free_.at_most(part.pages);  // of what was cut for another part
        if (piece == no_piece) {
          piece = make_piece(part.pages, 0);
        } else {
          free_.take(piece);
        }
        part.pages -= pieces_[piece].pages;
        range.pieces.push_back(piece);
      }
    }
  }
  /// Chooses one piece for the whole range. @returns none if the parts take less time as they are
  std::uint32_t choose_one_piece(std::uint32_t count) noexcept {
    if (std::uint32_t const piece = free_.of_size(count); piece != no_piece) {
      put_back_tried();
      free_.take(piece);
      return piece;
    }
    fill_parts();
    if constexpr (has_large_pieces) {
      std::uint64_t const mixed_cost = cost_of_mixture();
      std::uint64_t const merged_cost = cost_of_merging(count);
      std::uint64_t const cut_cost = cost_of_cutting(count);
      if (cut_cost < std::min(mixed_cost, merged_cost)) {
        put_back_tried();
        return make_piece(count, 0);
      }
      if (merged_cost < mixed_cost) {
        std::uint32_t pages = 0;
        for (std::uint32_t const piece : tried_) {
          pages += pieces_[piece].pages;
          dissolve(piece);
        }
        return make_piece(count, pages);
      }
    }
    return no_piece;
  }

  void try_piece(std::uint32_t piece) noexcept {
    free_.take(piece);
    tried_.push_back(piece);
  }
  void put_back_tried() noexcept {
    for (; !tried_.empty(); tried_.pop_back()) {
      free_.put_back(tried_.back());
    }
  }

  /// Tries the free pieces that are mapped in their place. @returns whether they are all
  bool try_mapped(std::uint32_t first, std::uint32_t count) noexcept {
    bool are_all = true;
    for (std::uint32_t page = 0; page < count;) {
      std::uint32_t const piece = piece_at_[first + page];
      bool const is_in_place = piece != no_piece && free_.has(piece) &&
                               pieces_[piece].mapped_at == first + page &&
                               pieces_[piece].pages <= count - page;
      if (is_in_place) {
        parts_.push_back({piece, pieces_[piece].pages, true});
        try_piece(piece);
      } else {
        are_all = false;
        if (parts_.empty() || parts_.back().piece != no_piece) {
          parts_.push_back({});
        }
        ++parts_.back().pages;
      }
      page += is_in_place ? parts_.back().pages : 1;
    }
    return are_all;
  }
  /// Tries free pieces for the parts that have none, the largest first that is not too large. What
  /// is left of such a part is smaller than every other free piece was then.
  void fill_parts() noexcept {
    filled_.clear();
    for (Part part : parts_) {
      while (part.piece == no_piece && part.pages != 0) {
        std::uint32_t const piece = free_.at_most(part.pages);
        if (piece == no_piece) {
          break;
        }
        filled_.push_back({piece, pieces_[piece].pages, false});
        part.pages -= pieces_[piece].pages;
        try_piece(piece);
      }
      if (part.pages != 0) {
        filled_.push_back(part);
      }
    }
    std::swap(parts_, filled_);
  }

  [[nodiscard]] std::uint64_t cost_of_unmapping(std::uint32_t piece) const noexcept {
    return pieces_[piece].mapped_at == no_page ? 0 : Cost::unmap;
  }
  [[nodiscard]] std::uint64_t cost_of_dissolving(std::uint32_t piece) const noexcept {
    return cost_of_unmapping(piece) + Cost::release;
  }
  [[nodiscard]] std::uint64_t cost_of_creating(std::size_t pages) const noexcept {
    return Cost::create + pages * page_bytes_ / Cost::bytes_per_us;
  }
  /// Of `pages` that are taken from a larger free piece, but not of what they become.
  [[nodiscard]] std::uint64_t cost_of_taking(std::uint32_t pages) const noexcept {
    std::uint32_t const piece = free_.at_least(pages);
    if (piece == no_piece) {
      return Cost::unmap + Cost::release;  // of several
    }
    std::uint32_t const rest = pieces_[piece].pages - pages;
    return cost_of_dissolving(piece) + (rest == 0 ? 0 : cost_of_creating(rest) + Cost::later);
  }
  /// Of the parts as they are, where those without a piece are cut from larger ones.
  [[nodiscard]] std::uint64_t cost_of_mixture() const noexcept {
    std::uint64_t cost = 0;
    for (Part const& part : parts_) {
      cost += Cost::later;
      if (part.piece == no_piece) {
        cost += cost_of_taking(part.pages) + cost_of_creating(part.pages) + Cost::map;
      } else if (!part.is_in_place) {
        cost += cost_of_unmapping(part.piece) + Cost::map;
      }
    }
    return cost;
  }
  /// Of one piece in place of the parts'.
  [[nodiscard]] std::uint64_t cost_of_merging(std::uint32_t count) const noexcept {
    std::uint64_t cost = cost_of_creating(count) + Cost::map + Cost::later;
    std::uint32_t missing = 0;
    for (Part const& part : parts_) {
      if (part.piece == no_piece) {
        missing += part.pages;
      } else {
        cost += cost_of_dissolving(part.piece);
      }
    }
    return cost + (missing == 0 ? 0 : cost_of_taking(missing));
  }
  /// Of one piece that is cut from a larger one; what is mapped in its place has to leave.
  [[nodiscard]] std::uint64_t cost_of_cutting(std::uint32_t count) const noexcept {
    if (free_.at_least(count) == no_piece) {
      return std::numeric_limits<std::uint64_t>::max();
    }
    std::uint64_t cost = cost_of_taking(count) + cost_of_creating(count) + Cost::map + Cost::later;
    for (Part const& part : parts_) {
      cost += part.is_in_place ? Cost::unmap : 0;
    }
    return cost;
  }

  /// A piece of `pages` pages, made of `dissolved` pages that others had and of free pieces.
  [[nodiscard]] std::uint32_t make_piece(std::uint32_t pages, std::uint32_t dissolved) noexcept {
    while (dissolved < pages) {
      std::uint32_t piece = free_.at_least(pages - dissolved);
      if (piece == no_piece) {
        piece = free_.at_most(pages - dissolved);
      }
      free_.take(piece);
      dissolved += pieces_[piece].pages;
      dissolve(piece);
    }
    std::uint32_t const others = pieces_of_[pages];
    std::uint32_t const made = await_piece(pages);
    std::uint32_t rest = dissolved - pages;
    for (std::uint32_t same = std::min(others, rest / pages); same != 0; --same) {
      free_.add(await_piece(pages), pages);
      rest -= pages;
    }
    if (rest != 0) {
      free_.add(await_piece(rest), rest);
    }
    return made;
  }
  /// A piece that the next `map` creates.
  [[nodiscard]] std::uint32_t await_piece(std::uint32_t pages) noexcept {
    std::uint32_t const piece = new_piece(pages);
    awaited_.push_back(piece);
    return piece;
  }
  /// Lets the next `map` release a piece, which is taken.
  void dissolve(std::uint32_t piece) noexcept {
    if (pieces_[piece].is_there) {
      released_.push_back(piece);
    } else {
      give_up(piece);
    }
  }

  // Pieces and their records.

  [[nodiscard]] std::uint32_t new_piece(std::uint32_t pages) noexcept {
    std::uint32_t const index = unused_head_;
    Piece& piece = pieces_[index];
    unused_head_ = std::exchange(piece.next, no_piece);
    piece.pages = pages;
    ++pieces_of_[pages];
    return index;
  }
  /// Releases a piece, which is mapped nowhere, if it is there, and forgets it.
  void give_up(std::uint32_t index) noexcept {
    Piece& piece = pieces_[index];
    if (piece.is_there) {
      device_->release_physical(piece.physical);
    } else {
      std::erase(awaited_, index);
    }
    --pieces_of_[piece.pages];
    piece = Piece{};
    piece.next = std::exchange(unused_head_, index);
  }
  /// @returns false if the device has refused to create pieces that are awaited: they still are
  [[nodiscard]] bool try_create() {
    try {
      for (std::uint32_t const index : awaited_) {
        Piece& piece = pieces_[index];
        if (auto const physical = device_->try_create_physical(piece.pages * page_bytes_)) {
          piece.physical = *physical;
          piece.is_there = true;
        }
      }
    } catch (...) {
      forget_created();
      throw;
    }
    forget_created();
    return awaited_.empty();
  }
  void forget_created() noexcept {
    std::erase_if(awaited_, [&](std::uint32_t piece) { return pieces_[piece].is_there; });
  }

  void free_pieces(RangeId id, Fence const& fence) noexcept {
    Range& range = ranges_[node_of(id)];
    for (std::uint32_t const piece : range.pieces) {
      pieces_[piece].fence.add(fence);
      free_pages_ += pieces_[piece].pages;
      free_.add(piece, pieces_[piece].pages);
    }
    range.pieces.clear();
    if (std::exchange(range.has_failed, false)) {
      drop_refused();
    }
  }
  /// Ends the reservation of free pages that could not be created anew.
  void drop_refused() noexcept {
    if (!released_.empty()) {
      return;  // not tried yet
    }
    for (std::size_t i = awaited_.size(); i-- > 0;) {
      std::uint32_t const piece = awaited_[i];
      if (free_.has(piece)) {
        std::size_t const pages = pieces_[piece].pages;
        free_.take(piece);
        free_pages_ -= pages;
        reserved_pages_ -= pages;
        absent_pages_ += pages;
        give_up(piece);
      }
    }
  }
  [[nodiscard]] std::uint32_t piece_to_trim(std::size_t wanted_pages) const noexcept {
    std::uint32_t const oldest = free_.oldest();
    if (pieces_[oldest].pages <= wanted_pages) {
      return oldest;
    }
    std::uint32_t const smaller = free_.at_most(wanted_pages);
    return smaller != no_piece ? smaller : free_.at_least(wanted_pages);
  }

  void free_address(RangeId range) noexcept {
    std::uint32_t const node = node_of(range);
    addresses_.give_back(node, std::exchange(ranges_[node].vacated, Fence{}));
  }

  /// Unmaps what the range's pieces need to be mapped in their places, and what is to be released.
  /// @returns how often the host had to wait
  std::uint64_t unmap_for(Range const& range, std::uint32_t at, Fence& last_uses) {
    std::uint64_t waits = 0;
    UnmappedRun unmapped{this};
    for (std::uint32_t const index : range.pieces) {
      Piece& piece = pieces_[index];
      if (piece.mapped_at == at) {
        last_uses.add(piece.fence);  // used here before: the order of streams is enough
      } else {
        for (std::uint32_t page = at; page < at + piece.pages; ++page) {
          if (piece_at_[page] != no_piece) {
            waits += detach(pieces_[piece_at_[page]], unmapped);
          }
        }
        if constexpr (RemappingApi<Device>) {
          waits += await(piece.fence);  // `move_run` takes it from there
        } else {
          waits += detach(piece, unmapped);
        }
      }
      at += piece.pages;
    }
    for (std::uint32_t const index : released_) {
      waits += detach(pieces_[index], unmapped);
    }
    return waits;
  }
  /// Takes a piece from where it is mapped, when its last use there has finished.
  std::uint64_t detach(Piece& piece, UnmappedRun& unmapped) {
    std::uint64_t const waits = await(piece.fence);
    if (piece.mapped_at != no_page) {
      unmapped.add(piece.mapped_at, piece.pages);
      forget_place(piece);
    }
    return waits;
  }
  /// Takes pieces of a range, from its `i`-th on, from where they are mapped side by side to page
  /// `at` and those behind it: as many as one call moves. @returns how many; each is a page
  ///
  /// Where they are is not in the range: what is mapped there and free is used in its place.
  std::uint32_t
  move_run(Range const& range, std::size_t i, std::uint32_t at) requires RemappingApi<Device> {
    std::uint32_t const from = pieces_[range.pieces[i]].mapped_at;
    if (from == no_page || from == at) {
      return 0;
    }
    std::uint32_t count = 0;
    for (; i + count < range.pieces.size(); ++count) {
      Piece& piece = pieces_[range.pieces[i + count]];
      if (piece.mapped_at != from + count) {
        break;
      }
      forget_place(piece);
    }
    device_->move_mapped(base_ + at * page_bytes_, base_ + from * page_bytes_, count * page_bytes_);
    for (std::uint32_t moved = 0; moved < count; ++moved) {
      pieces_[range.pieces[i + moved]].mapped_at = at + moved;
      piece_at_[at + moved] = range.pieces[i + moved];
    }
    return count;
  }
  void forget_place(Piece& piece) noexcept {
    std::fill_n(piece_at_.begin() + piece.mapped_at, piece.pages, no_piece);
    piece.mapped_at = no_page;
  }

  std::uint64_t await(Fence& fence) {
    if (fence.is_empty()) {
      return 0;
    }
    bool const must_wait = !order_->is_complete(fence);
    if (must_wait) {
      order_->synchronize(fence);
    }
    fence.clear();
    return must_wait ? 1 : 0;
  }

  /// The free pages that the capacity allows to be taken.
  [[nodiscard]] std::size_t usable_pages() const noexcept {
    std::size_t const taken = reserved_pages_ - free_pages_;
    return std::min(free_pages_, capacity_pages_ - std::min(capacity_pages_, taken));
  }
  /// Takes `count` pages from the device, in pieces of at most `piece_pages`.
  [[nodiscard]] bool try_reserve(std::size_t count, std::size_t piece_pages) {
    if (count > absent_pages_) {
      return false;
    }
    std::size_t const most = has_large_pieces ? piece_pages : 1;
    try {
      for (std::size_t pages = 0; count != 0; count -= pages) {
        pages = std::min(count, most);
        auto const physical = device_->try_create_physical(pages * page_bytes_);
        if (!physical) {
          release_arrived();
          return false;
        }
        std::uint32_t const piece = new_piece(static_cast<std::uint32_t>(pages));
        pieces_[piece].physical = *physical;
        pieces_[piece].is_there = true;
        arrived_.push_back(piece);
      }
    } catch (...) {
      release_arrived();
      throw;
    }
    return true;
  }
  void release_arrived() noexcept {
    for (std::uint32_t const piece : arrived_) {
      give_up(piece);
    }
    arrived_.clear();
  }
  void release_all() noexcept {
    {
      UnmappedRun unmapped{this};
      for (std::uint32_t at = 0; at < address_pages_; ++at) {
        if (piece_at_[at] != no_piece && pieces_[piece_at_[at]].mapped_at == at) {
          unmapped.add(at, pieces_[piece_at_[at]].pages);
        }
      }
    }
    for (Piece const& piece : pieces_) {
      if (piece.is_there) {
        device_->release_physical(piece.physical);
      }
    }
    device_->free_address(base_, address_pages_ * page_bytes_);
  }

  Device* device_;
  StreamOrder<Device>* order_;
  std::size_t page_bytes_;
  std::byte* base_ = nullptr;
  std::uint32_t address_pages_ = 0;
  std::uint32_t first_address_ = 0;  // where the map's only segment begins
  detail::RangeMap<Fit> addresses_;  // in pages
  std::size_t most_pages_;           // what the constructor's options allow
  std::vector<Piece> pieces_;
  detail::FreePieces free_;
  std::vector<std::uint32_t> pieces_of_;  // how many there are of each number of pages
  std::vector<Range> ranges_;             // by node
  std::vector<std::uint32_t> piece_at_;   // piece mapped at each page of address space
  std::uint32_t unused_head_ = no_piece;
  std::vector<std::uint32_t> released_;    // pieces that the next `map` releases
  std::vector<std::uint32_t> awaited_;     // pieces that it creates, in that order
  std::vector<std::uint32_t> arrived_;     // between `try_reserve` and `add_segment`
  std::uint32_t leaving_head_ = no_piece;  // pieces that were handed over, in that order
  std::uint32_t leaving_tail_ = no_piece;  // of meaning only while there are any
  std::size_t free_pages_ = 0;
  std::size_t absent_pages_ = 0;  // not reserved, nor about to leave
  std::size_t reserved_pages_ = 0;
  std::size_t capacity_pages_ = 0;
  std::size_t growth_pages_ = 1;
  // Members to reuse their memory:
  std::vector<typename Device::physical_type> run_;  // what one call maps
  std::vector<Part> parts_;                          // of the range for which pieces are chosen
  std::vector<Part> filled_;
  std::vector<std::uint32_t> tried_;  // pieces that are taken for it, in that order
};

template <VirtualMemoryApi Device, FitPolicy Fit, bool Stable>
PageArena<Device, Fit, Stable>::PageArena(Device& device,
                                          StreamOrder<Device>& order,
                                          ArenaOptions const& options,
                                          Fit fit)
    : device_{&device},
      order_{&order},
      page_bytes_{std::bit_ceil(std::max(options.page_bytes, device.granularity_bytes()))},
      addresses_{std::move(fit)},
      most_pages_{options.capacity_bytes / page_bytes_},
      pieces_(most_records()),
      free_{pieces_.size(), most_pages_},
      pieces_of_(most_pages_ + 1) {
  address_pages_ = static_cast<std::uint32_t>(most_pages_ * address_factor);
  piece_at_.assign(address_pages_, no_piece);
  for (auto* const list : {&released_, &awaited_, &arrived_, &tried_}) {
    list->reserve(pieces_.size());
  }
  run_.reserve(most_pages_);
  parts_.reserve(most_pages_);
  filled_.reserve(most_pages_);
  for (std::size_t piece = pieces_.size(); piece-- > 0;) {
    pieces_[piece].next = std::exchange(unused_head_, static_cast<std::uint32_t>(piece));
  }
  absent_pages_ = most_pages_;
  capacity_pages_ = most_pages_;
  growth_pages_ = std::max<std::size_t>(1, options.growth_bytes / page_bytes_);
  base_ = static_cast<std::byte*>(device.reserve_address(address_pages_ * page_bytes_));
  try {
    std::size_t const initial_bytes = std::min(options.initial_bytes, capacity_bytes());
    Segment const initial{nullptr, rounded_bytes(initial_bytes), {}};
    if (!try_reserve(initial.bytes / page_bytes_,
                     std::max<std::size_t>(1, initial_piece_bytes / page_bytes_))) {
      MemoryInfo const info = device.memory_info();
      throw OutOfDeviceMemory{
          {.requested_bytes = initial.bytes,
           .capacity_bytes = options.capacity_bytes,
           .free_bytes = info.free_bytes,
           .largest_free_bytes = info.free_bytes},
          "The device has less memory free than that: lower capacity_bytes or initial_bytes."};
    }
    add_segment(initial);
    addresses_.add_segment(base_, address_pages_);
    Fence none;
    std::uint32_t const all = addresses_.take(address_pages_, BlockId{}, none);
    first_address_ = addresses_[all].first;
    addresses_.give_back(all, {});
  } catch (...) {
    release_all();
    throw;
  }
}

/// Chooses `PageArena` as the arena of a bundle of policies: free memory is mapped where a block
/// needs it, and no byte moves.
///
/// The device must model `VirtualMemoryApi`. Every block takes whole pages (2 MiB on today's GPUs,
/// more with `page_bytes`), so this is for programs with few small blocks. Memory is mapped
/// elsewhere only after its last use has finished, which may mean a wait on the host. The technique
/// is that of GMLake ("virtual memory stitching", ASPLOS 2024) and of PyTorch's expandable
/// segments. The bundle's `compaction` is not asked.
struct MappedPages {
  template <class Policies>
  using type = PageArena<typename Policies::device, typename Policies::fit, false>;
};

/// Chooses `PageArena` as `MappedPages` does, and lets a block keep its address for life: while the
/// block is swapped out nothing is mapped there.
///
/// This is for programs that hold raw pointers: a pointer may be used whenever its block is leased.
struct StableAddresses {
  template <class Policies>
  using type = PageArena<typename Policies::device, typename Policies::fit, true>;
};

}  // namespace spillway
