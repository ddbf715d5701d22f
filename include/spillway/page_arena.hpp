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

/// The arena that maps pages: it takes device memory in whole pages and maps it to the addresses at
/// which a block needs it. Bundles of policies choose it with `MappedPages` or `StableAddresses`.
///
/// Each range has addresses of its own, to which as many pages are mapped as it needs. Any free
/// pages will do, so there is no external fragmentation and no bytes have to be moved. With
/// `Stable` a range can be parked: its address is kept while other ranges use its pages, and other
/// pages are mapped to it when it is retaken.
///
/// The arena takes memory from the device in pieces of one or more pages. A piece is one allocation
/// of the device and can be mapped only as a whole. Mapping takes a driver about the same time for
/// a large piece as for a small one, so the arena tries to have pieces of the sizes of its ranges.
/// A range gets, in this order of preference:
///
/// 1. the free pieces that are still mapped at its address, if they cover it: no device call;
/// 2. a free piece of its size, which is mapped to it;
/// 3. whichever takes less time according to `Cost`: several free pieces that add up to its size,
///    or a new piece made from other free pieces. Those are released to the device, and what they
///    have beyond the size of the new piece becomes new pieces, too. If n other pieces of the new
///    size exist, up to n more of it are made, so that a full device is soon divided into small
///    blocks.
///
/// When a program leases blocks of the same sizes in turn, each lease thus soon costs one call to
/// unmap and one call to map. Making a new piece does not change the reserved bytes, but between
/// release and creation the device has them. If another program takes them meanwhile, `map` reports
/// that (`MappedRange::is_refused`): the arena then has less reserved, no other range has changed,
/// and the caller looks for memory anew. On a device where the number of pieces does not matter
/// (`CheapPiecesApi`) every piece is one page, and none is released to make another.
///
/// Taking a range makes no device call; `map` makes them. A piece that was used elsewhere can be
/// unmapped only when its last use has finished, so `map` may wait on the host. Among pieces of one
/// size, those that have been free for longest are used first, which makes such waits rare.
///
/// Shape    ranges are whole pages of `page_bytes()`: the device's granularity, or more if the
///          options say so. The arena grows by one piece at a time, of as many pages as are needed,
///          and can give back any piece that is free.
/// Threads  thread-compatible. `map`, `try_reserve` and `release` may be called without the
///          caller's lock, one at a time, while no range is taken.
/// Cost     O(pages of the range) for every call; `map` calls the device once for each run of
///          pieces of one size that it maps, for each run that it unmaps, or moves where the device
///          can (`RemappingApi`), and for each piece that it creates or releases.
template <VirtualMemoryApi Device, FitPolicy Fit, bool Stable>
class PageArena {
 public:
  using device_type = Device;

  static constexpr bool is_thread_safe = false;
  /// Bytes of address space that are reserved for each byte of memory. Parked ranges need more.
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
  /// Releases all memory to the device. All work that uses the memory must have finished.
  ~PageArena() { release_all(); }

  [[nodiscard]] std::size_t page_bytes() const noexcept { return page_bytes_; }
  [[nodiscard]] std::size_t rounded_bytes(std::size_t bytes) const noexcept {
    return round_up(bytes, page_bytes_);
  }

  /// Takes a range of `bytes`, rounded up to pages, for block `owner`. It must be mapped by `map`
  /// before it is used.
  ///
  /// @returns nothing if too few pages are free
  /// @throws ContractViolation for 0 bytes; std::bad_alloc; nothing has changed then
  [[nodiscard]] std::optional<Placement> try_take(std::size_t bytes, BlockId owner) {
    expects(bytes != 0, "a range has at least one byte");
    std::size_t const count = pages_for(bytes);
    if (count > usable_pages()) {
      return std::nullopt;
    }
    Fence vacated;  // for the addresses only: each piece has the fence of its own last uses
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

  /// Maps the range's pages to its address. Making a new piece can fail, if the device has given
  /// the memory of the old ones to another program meanwhile, and so can mapping pieces, if the
  /// device has no memory for its page tables: the result then has `is_refused` set, the memory of
  /// those pieces is no longer reserved, and the caller must give back or park the range. May wait
  /// on the host.
  ///
  /// @throws DeviceError; what was mapped stays mapped, and the caller must give back or park the
  ///         range
  [[nodiscard]] MappedRange map(RangeId id) {
    Range& range = ranges_[node_of(id)];
    auto const first = static_cast<std::uint32_t>(first_page(id));
    MappedRange result;
    range.has_failed = true;  // reset at the end of this function
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
        run_.push_back(piece.physical);  // does not allocate: the constructor reserved the capacity
      }
      if (run_.empty()) {
        at += pages;
        ++i;
        continue;
      }
      if (!device_->try_map(base_ + at * page_bytes_, pages * page_bytes_, run_)) {
        for (std::size_t unmapped = begin; unmapped < i; ++unmapped) {
          release_memory(range.pieces[unmapped]);
        }
        result.is_refused = true;
        return result;
      }
      for (std::size_t mapped = begin; mapped < i; ++mapped, at += pages) {
        pieces_[range.pieces[mapped]].mapped_at = at;
        std::fill_n(piece_at_.begin() + at, pages, range.pieces[mapped]);
      }
    }
    range.has_failed = false;
    return result;
  }

  /// Changes the capacity, rounded down to whole pages. @throws ContractViolation for less than a
  /// page, and for more than `ArenaOptions::capacity_bytes`
  void set_capacity(std::size_t bytes) {
    std::size_t const count = bytes / page_bytes_;
    expects(count != 0 && count <= most_pages_,
            "the capacity must be at least a page, and at most what the arena was made with");
    capacity_pages_ = count;
  }
  /// Returns the segment to reserve next so that `bytes` fit; a segment of 0 bytes if enough pages
  /// are free or the capacity does not allow more.
  [[nodiscard]] Segment growth_for(std::size_t bytes) const noexcept {
    std::size_t const wanted = pages_for(bytes);
    std::size_t const left = capacity_pages_ - std::min(capacity_pages_, reserved_pages_);
    std::size_t const missing = wanted - std::min(wanted, free_pages_);
    return {nullptr,
            missing == 0 ? 0 : std::min(left, std::max(missing, growth_pages_)) * page_bytes_,
            {}};
  }
  /// Returns the largest `n` for which `try_take` would find a range if the arena grew by at most
  /// `growth_bytes`.
  [[nodiscard]] std::size_t largest_bytes_after_growth(std::size_t growth_bytes) const noexcept {
    std::size_t const left = capacity_pages_ - std::min(capacity_pages_, reserved_pages_);
    return (usable_pages() + std::min(left, growth_bytes / page_bytes_)) * page_bytes_;
  }
  /// Takes a segment from the device, as one piece.
  ///
  /// @returns false if the device is full, or if pages that `trim` has handed over and that are not
  ///          released yet still count, so that too few are left
  /// @throws DeviceError, std::bad_alloc; nothing has been taken then
  [[nodiscard]] bool try_reserve(Segment& segment) {
    return try_reserve(segment.bytes / page_bytes_, most_pages_);
  }
  /// Adds the pieces of the last `try_reserve` to the free ones.
  void add_segment(Segment const& /*segment*/) noexcept {
    for (std::uint32_t const piece : arrived_) {
      reserved_pages_ += pieces_[piece].pages;
      free_pages_ += pieces_[piece].pages;
      absent_pages_ -= pieces_[piece].pages;
      free_.add(piece, pieces_[piece].pages);
    }
    arrived_.clear();
  }
  /// Takes free pieces of at least `bytes` in all out of the arena, so that the caller can
  /// `release` them once the fence has passed. Prefers the pieces that have been free for longest,
  /// among those that are not larger than what is still wanted.
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
  /// Releases to the device the pieces that a call of `trim` handed over, after its fence has
  /// passed. Segments must be released in the order in which `trim` returned them.
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

  /// Frees the pages and the address of a range. Both may be used again after `fence`.
  void give_back(RangeId range, Fence const& fence) noexcept {
    free_pieces(range, fence);
    free_address(range);
  }

  /// Frees the pages of a range, which may be used again after `fence`, and keeps its address.
  void park(RangeId range, Fence const& fence) noexcept requires Stable {
    free_pieces(range, fence);
  }
  /// The same for a range that the device unmaps in stream order before `fence` (`VacatingApi`).
  void park_vacated(RangeId range, Fence const& fence) noexcept requires Stable {
    Range& parked = ranges_[node_of(range)];
    for (std::uint32_t const piece : parked.pieces) {
      forget_place(pieces_[piece]);
    }
    parked.vacated.add(fence);
    free_pieces(range, fence);
  }

  /// Gives a parked range pages again. It must be mapped by `map` before it is used.
  ///
  /// @returns nothing if too few pages are free
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
  /// Returns 1: all ranges lie in one reservation.
  [[nodiscard]] static std::size_t reservation(RangeId /*range*/) noexcept { return 1; }
  [[nodiscard]] std::size_t capacity_bytes() const noexcept {
    return capacity_pages_ * page_bytes_;
  }
  [[nodiscard]] std::size_t reserved_bytes() const noexcept {
    return reserved_pages_ * page_bytes_;
  }
  [[nodiscard]] std::size_t free_bytes() const noexcept { return usable_pages() * page_bytes_; }
  /// Returns `free_bytes()`, since any free pages make one range.
  [[nodiscard]] std::size_t largest_free_bytes() const noexcept { return free_bytes(); }

  /// Calls `visit(RangeView)` for every range that has pages. Each has a segment number of its own.
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
  /// Whether a piece can have more than one page.
  static constexpr bool has_large_pieces = !CheapPiecesApi<Device>;
  /// The largest power of two, so that a larger number of `page_bytes` can be rounded as well: no
  /// capacity has such a page.
  static constexpr std::size_t most_page_bytes = ~(std::numeric_limits<std::size_t>::max() >> 1U);
  /// The size of the pieces that the constructor takes, when the sizes of ranges are not yet known.
  static constexpr std::size_t initial_piece_bytes = 128_MiB;

  /// How long the device calls for one piece take, in microseconds, measured on an H200 with
  /// CUDA 13. Only their ratios matter. `release` was not measured separately.
  struct Cost {
    static constexpr std::uint64_t map = 33;  // of which 32 make the piece accessible
    static constexpr std::uint64_t unmap = 21;
    static constexpr std::uint64_t release = 16;
    static constexpr std::uint64_t create = 16;
    static constexpr std::size_t bytes_per_us = 2_MiB;  // added to `create`, by size
    /// The cost in later leases of having one more piece. It is a part of the cost of remapping it,
    /// since the piece may stay mapped or have just the size that another range needs. With a
    /// quarter, random leases of blocks of many sizes were cheapest.
    static constexpr std::uint64_t later = (map + unmap) / 4;
  };

  /// One allocation of the device, which exists or is to be created by the next `map`.
  struct Piece {
    typename Device::physical_type physical{};
    std::uint32_t pages = 0;            // 0: this record is unused
    std::uint32_t mapped_at = no_page;  // first page of the address space that it is mapped to
    std::uint32_t next = no_piece;      // next unused record, or next piece handed over by `trim`
    bool is_there = false;              // false: it is in `awaited_`, or the record is unused
    Fence fence;  // last uses at the place where it is mapped, or was until it was vacated
  };
  struct Range {
    std::vector<std::uint32_t> pieces;  // in the order of their addresses
    Fence vacated;                      // must pass before anything is mapped there
    bool has_failed = false;            // `map` began and did not succeed
  };
  /// A part of a range for which pieces are being chosen: a piece, or pages that have no piece yet.
  struct Part {
    std::uint32_t piece = no_piece;
    std::uint32_t pages = 0;
    bool is_in_place = false;
  };
  /// Collects neighbouring pages of the address space, so that one call unmaps them. The destructor
  /// unmaps those that are left.
  class UnmappedRun {
   public:
    explicit UnmappedRun(PageArena* arena) noexcept : arena_{arena} {}
    UnmappedRun(UnmappedRun const&) = delete;
    UnmappedRun& operator=(UnmappedRun const&) = delete;
    ~UnmappedRun() { unmap(); }

    /// Adds pages. All work on them must have finished.
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
  /// Rounds `bytes` up to pages without overflow, whatever their number is.
  [[nodiscard]] std::size_t pages_for(std::size_t bytes) const noexcept {
    return bytes / page_bytes_ + (bytes % page_bytes_ != 0);
  }
  [[nodiscard]] std::size_t first_page(RangeId range) const noexcept {
    return addresses_[node_of(range)].first - first_address_;
  }

  /// Returns the most pieces that exist at one time. Existing pieces, and those that are to be made
  /// from them, have at least one page each.
  [[nodiscard]] std::size_t most_records() const {
    expects(most_pages_ != 0, "capacity_bytes must be at least one page", {}, "PageArena");
    expects(most_pages_ <= no_page / address_factor,
            "a capacity has fewer than 2^30 pages, with stable addresses 2^26: make pages larger",
            {},
            "PageArena");
    expects(most_pages_ <= std::numeric_limits<std::size_t>::max() / address_factor / page_bytes_,
            "capacity_bytes is too large: there are not enough addresses for it",
            {},
            "PageArena");
    return has_large_pieces ? 2 * most_pages_ : most_pages_;
  }

  // Choosing pieces. Chosen pieces are no longer free at once. What has to be released or created
  // is only noted, and done by the next `map`.

  /// Chooses the pieces of a range. Enough pages must be free.
  void assign_pieces(std::uint32_t node, std::uint32_t count) noexcept {
    Range& range = ranges_[node];  // `try_take` has reserved capacity for its pieces
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
        std::uint32_t piece = free_.at_most(part.pages);  // left over from what another part was
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
  /// Chooses one piece for the whole range, if that takes less time than the parts as they are.
  /// @returns `no_piece` if not
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

  /// Divides the range into parts, and takes the free pieces that are already mapped at its
  /// addresses. @returns whether these are all that the range needs
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
  /// Takes free pieces for the parts that have none, each time the largest that is not too large.
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
  /// The cost of taking `pages` from a larger free piece, without that of the piece they become.
  [[nodiscard]] std::uint64_t cost_of_taking(std::uint32_t pages) const noexcept {
    std::uint32_t const piece = free_.at_least(pages);
    if (piece == no_piece) {
      return Cost::unmap + Cost::release;  // an estimate: several pieces are needed
    }
    std::uint32_t const rest = pieces_[piece].pages - pages;
    return cost_of_dissolving(piece) + (rest == 0 ? 0 : cost_of_creating(rest) + Cost::later);
  }
  /// The cost of the parts as they are. Parts without a piece are cut from larger pieces.
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
  /// The cost of merging the pieces of all parts into one.
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
  /// The cost of cutting one piece from a larger one. What is mapped at the range has to be
  /// unmapped.
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

  /// Makes a piece of `pages` pages from `dissolved` pages of dissolved pieces and, if these are
  /// too few, from free pieces.
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
  /// Makes the record of a piece that the next `map` will create.
  [[nodiscard]] std::uint32_t await_piece(std::uint32_t pages) noexcept {
    std::uint32_t const piece = new_piece(pages);
    awaited_.push_back(piece);
    return piece;
  }
  /// Marks a taken piece to be released by the next `map`.
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
  /// Releases a piece that is not mapped, if it exists, and frees its record.
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
  /// Gives the memory of a piece that is not mapped back to the device; the piece is awaited then.
  void release_memory(std::uint32_t index) noexcept {
    Piece& piece = pieces_[index];
    device_->release_physical(piece.physical);
    piece.is_there = false;
    awaited_.push_back(index);
  }
  /// Creates the awaited pieces. @returns false if the device has refused some; these stay awaited
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
  /// Removes awaited free pieces that the device has refused from the reservation.
  void drop_refused() noexcept {
    if (!released_.empty()) {
      return;  // the pieces have not been tried yet
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

  /// Unmaps the range's pieces from where they were used before, what else is mapped at the range,
  /// and the pieces that are to be released. @returns how often the host had to wait
  std::uint64_t unmap_for(Range const& range, std::uint32_t at, Fence& last_uses) {
    std::uint64_t waits = 0;
    UnmappedRun unmapped{this};
    for (std::uint32_t const index : range.pieces) {
      Piece& piece = pieces_[index];
      if (piece.mapped_at == at) {
        last_uses.add(piece.fence);  // stays mapped, so stream order suffices
      } else {
        for (std::uint32_t page = at; page < at + piece.pages; ++page) {
          if (piece_at_[page] != no_piece) {
            waits += detach(pieces_[piece_at_[page]], unmapped);
          }
        }
        if constexpr (RemappingApi<Device>) {
          waits += await(piece.fence);  // `move_run` remaps it
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
  /// Unmaps a piece after waiting for its last use. @returns how often the host had to wait
  std::uint64_t detach(Piece& piece, UnmappedRun& unmapped) {
    std::uint64_t const waits = await(piece.fence);
    if (piece.mapped_at != no_page) {
      unmapped.add(piece.mapped_at, piece.pages);
      forget_place(piece);
    }
    return waits;
  }
  /// Remaps pieces of a range, from its `i`-th on, that are mapped side by side elsewhere, to page
  /// `at` and the following ones: as many as one call can move. Each is one page. @returns how many
  ///
  /// They are not mapped inside the range: free pieces that are stay in their place.
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

  /// Returns how many free pages the capacity allows to take.
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
  std::vector<std::uint32_t> pieces_of_;  // by number of pages: how many pieces have that size
  std::vector<Range> ranges_;             // by node
  std::vector<std::uint32_t> piece_at_;   // piece mapped at each page of address space
  std::uint32_t unused_head_ = no_piece;
  std::vector<std::uint32_t> released_;    // pieces that the next `map` releases
  std::vector<std::uint32_t> awaited_;     // pieces that it creates, in that order
  std::vector<std::uint32_t> arrived_;     // between `try_reserve` and `add_segment`
  std::uint32_t leaving_head_ = no_piece;  // pieces that `trim` handed over, in that order
  std::uint32_t leaving_tail_ = no_piece;  // valid only while there are any
  std::size_t free_pages_ = 0;
  std::size_t absent_pages_ = 0;  // neither reserved nor handed over by `trim`
  std::size_t reserved_pages_ = 0;
  std::size_t capacity_pages_ = 0;
  std::size_t growth_pages_ = 1;
  // Members to reuse their memory:
  std::vector<typename Device::physical_type> run_;  // the pieces that one call maps
  std::vector<Part> parts_;                          // of the range for which pieces are chosen
  std::vector<Part> filled_;
  std::vector<std::uint32_t> tried_;  // pieces taken for that range, in that order
};

template <VirtualMemoryApi Device, FitPolicy Fit, bool Stable>
PageArena<Device, Fit, Stable>::PageArena(Device& device,
                                          StreamOrder<Device>& order,
                                          ArenaOptions const& options,
                                          Fit fit)
    : device_{&device},
      order_{&order},
      page_bytes_{std::bit_ceil(
          std::clamp(options.page_bytes, device.granularity_bytes(), most_page_bytes))},
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
          detail::Text{"The device has "} + info.free_bytes +
              " bytes free: lower capacity_bytes, or initial_bytes to reserve the rest later."};
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

/// Chooses `PageArena` as the arena of a bundle of policies: free memory is mapped to the addresses
/// at which a block needs it, and no bytes are moved.
///
/// The device must model `VirtualMemoryApi`. Every block takes whole pages (2 MiB on today's GPUs,
/// more with `page_bytes`), so it suits programs that have few small blocks. Memory is mapped
/// elsewhere only after its last use has finished, for which the host may have to wait. The
/// technique is that of GMLake ("virtual memory stitching", ASPLOS 2024) and of PyTorch's
/// expandable segments. The bundle's `compaction` is not used.
struct MappedPages {
  template <class Policies>
  using type = PageArena<typename Policies::device, typename Policies::fit, false>;
};

/// Chooses `PageArena` as `MappedPages` does, and lets a block keep its address for life. While the
/// block is swapped out, its address must not be accessed.
///
/// It suits programs that store raw pointers: a pointer may be used whenever its block is leased.
struct StableAddresses {
  template <class Policies>
  using type = PageArena<typename Policies::device, typename Policies::fit, true>;
};

}  // namespace spillway
