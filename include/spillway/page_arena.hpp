// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/arena/range_map.hpp>
#include <spillway/concepts/arena.hpp>
#include <spillway/concepts/device_capabilities.hpp>
#include <spillway/concepts/fit_policy.hpp>
#include <spillway/core/config.hpp>
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

/// The arena that maps pages: it takes device memory in pages and maps them where a block needs
/// them. Bundles of policies choose it with `MappedPages` or `StableAddresses`.
///
/// A range is address space of its own with as many pages behind it as it needs, from wherever they
/// were free: nothing is ever fragmented, and nothing moves. With `Stable` a range can be parked:
/// its pages serve others, its address is kept, and other pages come behind it when it is taken
/// back.
///
/// Taking a range is bookkeeping; `map` then does what the driver has to do. A page that was used
/// elsewhere is mapped anew only when its last use has finished, so `map` may wait on the host. A
/// range gets the pages that are still mapped at its address if they are free, and otherwise those
/// that have been free for longest, which makes that rare.
///
/// Shape    whole pages of `page_bytes()`: the device's granularity, or more if the options say so.
///          Any of them can be taken from the device later, and given back when it is free.
/// Threads  thread-compatible; `map`, `try_reserve` and `release` run without the caller's lock,
///          one call at a time.
/// Cost     O(pages of the range) for every call; `map` calls the device once for each run of pages
///          that it maps, and for each run that it unmaps. On CUDA that is one call of the driver
///          to map each page, and one to make all pages of a run accessible, or to unmap them.
///          Several pages cannot share one allocation of the driver, which maps an allocation as a
///          whole: then a free page could not serve any block.
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
    Fence vacated;  // all other fences are the pages'
    std::uint32_t const node = addresses_.take(static_cast<std::uint32_t>(count), owner, vacated);
    if (node == no_node) {
      return std::nullopt;
    }
    try {
      if (node >= ranges_.size()) {
        ranges_.resize(node + 1);
      }
      ranges_[node].pages.reserve(count);
    } catch (...) {
      addresses_.give_back(node, vacated);
      throw;
    }
    ranges_[node].vacated = vacated;
    assign_pages(node, static_cast<std::uint32_t>(count));
    return Placement{RangeId{node}, address(RangeId{node}), {}};
  }

  /// Puts the range's pages behind its address.
  ///
  /// @throws DeviceError; what was mapped stays mapped, and the range may be given back
  MappedRange map(RangeId range) {
    MappedRange result;
    auto const first = static_cast<std::uint32_t>(first_page(range));
    auto const& pages = ranges_[node_of(range)].pages;
    result.host_waits += await(ranges_[node_of(range)].vacated);
    {
      UnmappedRun unmapped{this};
      for (std::uint32_t i = 0; i < pages.size(); ++i) {
        Page& page = pages_[pages[i]];
        std::uint32_t const target = first + i;
        if (page.mapped_at == target) {
          result.fence.add(page.fence);  // used here before: the order of streams is enough
          continue;
        }
        if (page_at_[target] != no_page) {
          result.host_waits += detach(pages_[page_at_[target]], unmapped);
        }
        result.host_waits += detach(page, unmapped);
      }
    }
    for (std::uint32_t i = 0; i < pages.size();) {
      run_.clear();
      std::uint32_t const begin = i;
      for (; i < pages.size() && pages_[pages[i]].mapped_at != first + i; ++i) {
        run_.push_back(pages_[pages[i]].physical);  // its room was reserved by the constructor
      }
      if (run_.empty()) {
        ++i;
        continue;
      }
      device_->map(base_ + (first + begin) * page_bytes_, page_bytes_, run_);
      for (std::uint32_t mapped = begin; mapped < i; ++mapped) {
        pages_[pages[mapped]].mapped_at = first + mapped;
        page_at_[first + mapped] = pages[mapped];
      }
    }
    return result;
  }

  /// Changes the capacity, which is whole pages. @throws ContractViolation for less than a page,
  /// and for more than the options said
  void set_capacity(std::size_t bytes) {
    std::size_t const count = bytes / page_bytes_;
    expects(count != 0 && count <= pages_.size(),
            "an arena's capacity is at least a page, and at most what it was made with");
    capacity_pages_ = count;
  }
  /// The pages to take from the device next so that `bytes` fit.
  [[nodiscard]] Segment growth_for(std::size_t bytes) const noexcept {
    std::size_t const wanted = pages_for(bytes);
    std::size_t const left = capacity_pages_ - std::min(capacity_pages_, reserved_pages_);
    std::size_t const missing = wanted - std::min(wanted, free_count_);
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
  /// @returns false if the device is full, or if pages that `trim` handed over, and that are not
  /// released yet, leave too few @throws DeviceError, std::bad_alloc; nothing has been taken then
  [[nodiscard]] bool try_reserve(Segment& segment) {
    std::size_t const count = segment.bytes / page_bytes_;
    if (count > absent_count_) {
      return false;
    }
    try {
      arrived_.reserve(count);
      while (arrived_.size() < count) {
        auto const physical = device_->try_create_physical(page_bytes_);
        if (!physical) {
          release_arrived();
          return false;
        }
        arrived_.push_back(*physical);
      }
    } catch (...) {
      release_arrived();
      throw;
    }
    return true;
  }
  /// Makes the pages of the last `try_reserve` free.
  void add_segment(Segment const& /*segment*/) noexcept {
    for (auto const physical : arrived_) {
      std::uint32_t const index = absent_head_;
      Page& page = pages_[index];
      absent_head_ = page.next_free;
      page.physical = physical;
      link_free(index);
    }
    absent_count_ -= arrived_.size();
    reserved_pages_ += arrived_.size();
    free_count_ += arrived_.size();
    arrived_.clear();
  }
  /// Hands over free pages, those first that have been free for longest.
  [[nodiscard]] std::optional<Segment>
  trim(std::size_t bytes = std::numeric_limits<std::size_t>::max()) noexcept {
    std::size_t const count = std::min(free_count_, pages_for(bytes));
    Segment segment{nullptr, count * page_bytes_, {}};
    for (std::size_t i = 0; i < count; ++i) {
      std::uint32_t const index = free_head_;
      unlink_free(index);
      segment.fence.add(pages_[index].fence);
      pages_[index].next_free = no_page;
      (leaving_head_ == no_page ? leaving_head_ : pages_[leaving_tail_].next_free) = index;
      leaving_tail_ = index;
    }
    reserved_pages_ -= count;
    return count == 0 ? std::nullopt : std::optional{segment};
  }
  [[nodiscard]] std::size_t trimmable_bytes() const noexcept { return free_count_ * page_bytes_; }
  /// Gives the pages that `trim` handed over back to the device: of the segment that is released
  /// next, in the order of the calls of `trim`.
  void release(Segment const& segment) noexcept {
    std::size_t const count = segment.bytes / page_bytes_;
    {
      UnmappedRun unmapped{this};
      std::uint32_t index = leaving_head_;
      for (std::size_t i = 0; i < count; ++i, index = pages_[index].next_free) {
        pages_[index].fence.clear();  // the caller has waited for it
        (void)detach(pages_[index], unmapped);
      }
    }
    for (std::size_t i = 0; i < count; ++i) {
      Page& page = pages_[leaving_head_];
      device_->release_physical(page.physical);
      std::uint32_t const next = page.next_free;
      page.next_free = std::exchange(absent_head_, leaving_head_);
      leaving_head_ = next;
    }
    absent_count_ += count;
  }
  [[nodiscard]] static constexpr bool trims_anywhere() noexcept { return false; }

  /// Frees the pages and the address after `fence`.
  void give_back(RangeId range, Fence const& fence) noexcept {
    free_pages(range, fence);
    free_address(range);
  }

  /// Frees the pages after `fence` and keeps the address.
  void park(RangeId range, Fence const& fence) noexcept requires Stable {
    free_pages(range, fence);
  }
  /// The same for a range that the device vacates before `fence`.
  void park_vacated(RangeId range, Fence const& fence) noexcept requires Stable {
    Range& parked = ranges_[node_of(range)];
    for (std::uint32_t const index : parked.pages) {
      Page& page = pages_[index];
      page_at_[page.mapped_at] = no_page;
      page.mapped_at = no_page;
    }
    parked.vacated.add(fence);
    free_pages(range, fence);
  }

  /// Pages for a parked range, to be mapped before use, if enough are free.
  [[nodiscard]] std::optional<Placement> try_retake(RangeId range) noexcept requires Stable {
    std::uint32_t const count = addresses_[node_of(range)].count;
    if (count > usable_pages()) {
      return std::nullopt;
    }
    assign_pages(node_of(range), count);
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
      if (!ranges_[node].pages.empty()) {
        auto const range = RangeId{node};
        visit(RangeView{address(range),
                        ranges_[node].pages.size() * page_bytes_,
                        segment++,
                        RangeState::taken,
                        addresses_[node].owner(),
                        range});
      }
    }
  }

 private:
  static constexpr std::uint32_t no_page = UINT32_MAX;

  struct Page {
    typename Device::physical_type physical{};
    std::uint32_t mapped_at = no_page;  // page of the address space it is mapped at
    std::uint32_t next_free = no_page;
    std::uint32_t previous_free = no_page;
    bool is_free = false;
    bool is_absent = false;  // set at the end, of a page that was not taken from the device
    Fence fence;  // last uses at the place where it is mapped, or was until it was vacated
  };
  struct Range {
    std::vector<std::uint32_t> pages;
    Fence vacated;  // what has to be over before anything is mapped there
  };
  /// Neighbouring pages of the address space, which one call unmaps. Those that are added last are
  /// unmapped at the end of this object.
  class UnmappedRun {
   public:
    explicit UnmappedRun(PageArena* arena) noexcept : arena_{arena} {}
    UnmappedRun(UnmappedRun const&) = delete;
    UnmappedRun& operator=(UnmappedRun const&) = delete;
    ~UnmappedRun() { unmap(); }

    /// All work on the page has finished.
    void add(std::uint32_t page) noexcept {
      if (page + 1 == first_) {
        first_ = page;
      } else if (page != first_ + count_) {
        unmap();
        first_ = page;
      }
      ++count_;
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

  /// First the free pages that are mapped in their place, then any.
  void assign_pages(std::uint32_t node, std::uint32_t count) noexcept {
    auto& pages = ranges_[node].pages;  // its room was reserved when the range was first taken
    std::uint32_t const* const mapped = page_at_.data() + first_page(RangeId{node});
    for (std::uint32_t i = 0; i < count; ++i) {
      bool const is_in_place = mapped[i] != no_page && pages_[mapped[i]].is_free;
      pages.push_back(is_in_place ? mapped[i] : no_page);
      if (is_in_place) {
        unlink_free(mapped[i]);
      }
    }
    for (std::uint32_t& page : pages) {
      if (page == no_page) {
        page = free_head_;
        unlink_free(page);
      }
    }
  }

  void free_pages(RangeId range, Fence const& fence) noexcept {
    auto& pages = ranges_[node_of(range)].pages;
    for (std::uint32_t const index : pages) {
      pages_[index].fence.add(fence);
      link_free(index);
    }
    free_count_ += pages.size();
    pages.clear();
  }

  void free_address(RangeId range) noexcept {
    std::uint32_t const node = node_of(range);
    addresses_.give_back(node, std::exchange(ranges_[node].vacated, Fence{}));
  }
  /// Puts a page at the end of the free ones, without counting it.
  void link_free(std::uint32_t index) noexcept {
    Page& page = pages_[index];
    page.is_free = true;
    page.next_free = no_page;
    page.previous_free = free_tail_;
    (free_tail_ == no_page ? free_head_ : pages_[free_tail_].next_free) = index;
    free_tail_ = index;
  }
  void unlink_free(std::uint32_t index) noexcept {
    Page& page = pages_[index];
    (page.previous_free == no_page ? free_head_ : pages_[page.previous_free].next_free) =
        page.next_free;
    (page.next_free == no_page ? free_tail_ : pages_[page.next_free].previous_free) =
        page.previous_free;
    page.is_free = false;
    --free_count_;
  }

  /// Takes a page from where it is mapped, when its last use there has finished.
  std::uint64_t detach(Page& page, UnmappedRun& unmapped) {
    std::uint64_t const waits = await(page.fence);
    if (page.mapped_at != no_page) {
      unmapped.add(page.mapped_at);
      page_at_[page.mapped_at] = no_page;
      page.mapped_at = no_page;
    }
    return waits;
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
    std::size_t const taken = reserved_pages_ - free_count_;
    return std::min(free_count_, capacity_pages_ - std::min(capacity_pages_, taken));
  }
  void release_arrived() noexcept {
    for (auto const physical : arrived_) {
      device_->release_physical(physical);
    }
    arrived_.clear();
  }
  void release_all() noexcept {
    {
      UnmappedRun unmapped{this};
      for (std::uint32_t at = 0; at < address_pages_; ++at) {
        if (page_at_[at] != no_page) {
          unmapped.add(at);
        }
      }
    }
    for (; absent_head_ != no_page; absent_head_ = pages_[absent_head_].next_free) {
      pages_[absent_head_].is_absent = true;
    }
    for (Page const& page : pages_) {
      if (!page.is_absent) {
        device_->release_physical(page.physical);
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
  std::vector<Page> pages_;
  std::vector<Range> ranges_;           // by node
  std::vector<std::uint32_t> page_at_;  // page mapped at each page of address space
  std::uint32_t free_head_ = no_page;   // pages in the order they became free
  std::uint32_t free_tail_ = no_page;
  std::size_t free_count_ = 0;
  std::vector<typename Device::physical_type> run_;  // what one call maps
  std::uint32_t absent_head_ = no_page;              // pages that are not taken from the device
  std::size_t absent_count_ = 0;
  std::uint32_t leaving_head_ = no_page;  // pages that were handed over, in that order
  std::uint32_t leaving_tail_ = no_page;  // of meaning only while there are any
  std::size_t reserved_pages_ = 0;
  std::size_t capacity_pages_ = 0;
  std::size_t growth_pages_ = 1;
  std::vector<typename Device::physical_type> arrived_;  // between `try_reserve` and `add_segment`
};

template <VirtualMemoryApi Device, FitPolicy Fit, bool Stable>
PageArena<Device, Fit, Stable>::PageArena(Device& device,
                                          StreamOrder<Device>& order,
                                          ArenaOptions const& options,
                                          Fit fit)
    : device_{&device},
      order_{&order},
      page_bytes_{std::bit_ceil(std::max(options.page_bytes, device.granularity_bytes()))},
      addresses_{std::move(fit)} {
  std::size_t const count = options.capacity_bytes / page_bytes_;
  expects(count != 0, "a capacity of at least one page is needed");
  expects(count <= no_page / address_factor,
          "a capacity has fewer than 2^30 pages, with stable addresses 2^26: make pages larger");
  address_pages_ = static_cast<std::uint32_t>(count * address_factor);
  page_at_.assign(address_pages_, no_page);
  pages_.resize(count);
  run_.reserve(count);
  for (std::size_t page = count; page-- > 0;) {
    pages_[page].next_free = std::exchange(absent_head_, static_cast<std::uint32_t>(page));
  }
  absent_count_ = count;
  capacity_pages_ = count;
  growth_pages_ = std::max<std::size_t>(1, options.growth_bytes / page_bytes_);
  base_ = static_cast<std::byte*>(device.reserve_address(address_pages_ * page_bytes_));
  try {
    std::size_t const initial_bytes = std::min(options.initial_bytes, capacity_bytes());
    Segment initial{nullptr, rounded_bytes(initial_bytes), {}};
    if (!try_reserve(initial)) {
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

/// Chooses `PageArena` as the arena of a bundle of policies: free pages are mapped side by side
/// where a block needs them, and no byte moves.
///
/// The device must model `VirtualMemoryApi`. Every block takes whole pages (2 MiB on today's GPUs,
/// more with `page_bytes`), so this is for programs with few small blocks. A page is mapped
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
