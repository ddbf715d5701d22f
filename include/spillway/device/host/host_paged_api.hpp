// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/device_capabilities.hpp>
#include <spillway/core/config.hpp>
#include <spillway/core/error.hpp>
#include <spillway/core/host_mapping.hpp>
#include <spillway/core/types.hpp>
#include <spillway/device/host/host_api.hpp>
#include <spillway/device/host/page_mover.hpp>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <span>
#include <utility>

#include <sys/mman.h>

namespace spillway {

/// Names a piece of memory of a `HostPagedApi`. Its value is the number of bytes; a piece has no
/// other properties.
enum class HostPhysical : std::uint64_t {};

/// How a `HostPagedApi` moves memory from one address to another. `bench_virtual_memory` measures
/// both ways.
enum class HostRemap {
  /// Moves mappings, so that large pages stay whole. Mapping and unmapping a range takes 13 us for
  /// 16 KiB and 20 us for 1 MiB, and as much again for each further mapping in the range. If ranges
  /// of many sizes come and go, most soon consist of several mappings.
  mappings,
  /// Moves pages, if the system can: Linux 6.8 and later, unless a sandbox forbids `userfaultfd`;
  /// otherwise as `mappings`. Takes 5 us for 16 KiB and 38 us for 1 MiB, whatever the range
  /// consists of. An access to an address that is not mapped raises SIGBUS instead of SIGSEGV.
  pages,
};

struct HostPagedOptions {
  /// A power of two, at least as much as this. On a system whose pages are larger, the size of its
  /// pages is used instead.
  std::size_t granularity_bytes = 16_KiB;
  HostRemap remap = HostRemap::mappings;
};

/// A `HostApi` with virtual memory, for programs that keep raw pointers: a block keeps its address
/// while it is swapped out, and an access to it then raises a signal.
///
/// The system has no handles for memory, so pieces are only counted in bytes. When a range is
/// unmapped, its pages are set aside at other addresses, with whatever they contain, and moved to
/// the next range that is mapped. A new page would take ten times as long, since the system clears
/// it. Pages go back to the system when pieces are released. A forked child has pages of its own.
/// `HostRemap` says how pages are moved.
///
/// Threads  thread-safe, except that addresses are reserved by one thread at a time.
/// Streams  as `HostApi`. Mapping takes effect at the call, `vacate` in stream order.
template <class = detail::Lazily>
class BasicHostPagedApi : public HostApi {
 public:
  using HostPagedApi = BasicHostPagedApi;  // for the constructors of derived classes

  using physical_type = HostPhysical;

  // only the bytes of pieces count, and memory is moved in runs of pages
  static constexpr bool has_cheap_pieces = true;

  static constexpr std::size_t least_granularity_bytes = 16_KiB;
  static constexpr std::size_t most_granularity_bytes = 2_MiB;

  /// Returns a granularity for this capacity: as fine as possible without too many pieces.
  [[nodiscard]] static std::size_t granularity_for(std::size_t capacity_bytes) noexcept {
    return granularity_for(capacity_bytes, detail::system_page_bytes());
  }
  /// Does the same for a system with pages of this size.
  [[nodiscard]] static constexpr std::size_t granularity_for(std::size_t capacity_bytes,
                                                             std::size_t page_bytes) noexcept {
    return std::clamp(std::bit_ceil(std::min(capacity_bytes, std::size_t{1} << 62U) / 65536),
                      std::max(least_granularity_bytes, page_bytes),
                      most_granularity_bytes);
  }

  /// @throws ContractViolation unless the granularity is a power of two of at least 16 KiB
  explicit BasicHostPagedApi(HostPagedOptions options = {})
      : granularity_bytes_{std::max(options.granularity_bytes, detail::system_page_bytes())} {
    expects(std::has_single_bit(options.granularity_bytes) &&
                options.granularity_bytes >= least_granularity_bytes,
            "HostPagedOptions::granularity_bytes must be a power of two of at least 16 KiB",
            {},
            "HostPagedApi");
    if (options.remap == HostRemap::pages) {
      mover_.open();
    }
  }
  BasicHostPagedApi(BasicHostPagedApi const&) = delete;
  BasicHostPagedApi& operator=(BasicHostPagedApi const&) = delete;
  ~BasicHostPagedApi() {
    finish();  // enqueued tasks may unmap
    created_bytes_ = 0;
    free_excess();
    drop_stack();
  }

  [[nodiscard]] std::size_t granularity_bytes() const noexcept { return granularity_bytes_; }
  /// `HostRemap::pages` only if it was asked for and the system can move pages.
  [[nodiscard]] HostRemap remap() const noexcept {
    return mover_.is_open() ? HostRemap::pages : HostRemap::mappings;
  }
  /// False if an address was certainly never reserved here. Takes next to no time.
  [[nodiscard]] bool may_own(void const* p) const noexcept {
    auto const address = reinterpret_cast<std::uintptr_t>(p);
    return address >= lowest_.load(std::memory_order_relaxed) &&
           address < highest_.load(std::memory_order_relaxed);
  }

  [[nodiscard]] void* reserve_address(std::size_t bytes);
  void free_address(void* p, std::size_t bytes) noexcept;
  [[nodiscard]] std::optional<physical_type> try_create_physical(std::size_t bytes) noexcept {
    created_bytes_.fetch_add(bytes, std::memory_order_relaxed);
    return HostPhysical{bytes};
  }
  void release_physical(physical_type physical) noexcept {
    created_bytes_.fetch_sub(static_cast<std::size_t>(physical), std::memory_order_relaxed);
    std::lock_guard const guard{pages_mutex_};
    if (mapped_bytes_ + spare_bytes_ > created_bytes_ + excess_bytes) {
      free_excess();
    }
  }
  /// @throws DeviceError, std::bad_alloc; nothing of the range is mapped then
  [[nodiscard]] bool try_map(void* p, std::size_t bytes, std::span<physical_type const> pieces);
  void unmap(void* p, std::size_t bytes) noexcept;
  /// Takes half the time of `unmap` and `try_map` with `HostRemap::pages`, and as much as both
  /// otherwise.
  ///
  /// @throws DeviceError, std::bad_alloc; nothing is mapped at either place then
  void move_mapped(void* to, void* from, std::size_t bytes);

  /// Unmaps in the order of the stream: immediately after everything that was enqueued on `stream`
  /// before.
  ///
  /// @throws DeviceError for a handle that names no stream; std::bad_alloc
  void vacate(void* p, std::size_t bytes, stream_type stream) {
    auto range = std::make_unique<Range>(Range{this, p, bytes});
    enqueue_task(stream, &run_vacate, range.get());
    (void)range.release();
  }

  void before_fork() {
    if (forks() != 0) {
      pages_mutex_.unlock();  // another thread may need it for what is waited for next
    }
    HostApi::before_fork();
    pages_mutex_.lock();
  }
  void let_others_in() {
    bool const keeps_out = forks() != 0;
    if (keeps_out) {
      pages_mutex_.unlock();
    }
    HostApi::let_others_in();
    if (keeps_out) {
      pages_mutex_.lock();
    }
  }
  void after_fork_in_parent() noexcept {
    unlock_pages();
    HostApi::after_fork_in_parent();
  }
  void after_fork_in_child() noexcept {
    if (forks() == 1 && mover_.is_open()) {
      // The child has the mapped pages, but not those that were set aside.
      mover_.forget(stack_);
      mover_.reopen();
      stack_ = nullptr;
      stack_bytes_ = 0;
      spare_bytes_ = 0;
    }
    unlock_pages();
    HostApi::after_fork_in_child();
  }

 private:
  struct Range {
    BasicHostPagedApi* device = nullptr;
    void* p = nullptr;
    std::size_t bytes = 0;
  };
  static void run_vacate(void* argument) noexcept {
    std::unique_ptr<Range> const range{static_cast<Range*>(argument)};
    range->device->unmap(range->p, range->bytes);
  }

  // The address ranges that the system holds as one mapping each, by their first byte. The system
  // can only move a mapping as such.
  using Runs = std::map<std::byte*, std::size_t>;
  using Spares = std::multimap<std::size_t, std::byte*>;

  /// A range is not assembled of spare runs shorter than this: moving those saves little, and the
  /// number of mappings is limited. The system moves this much in less time than it takes to clear
  /// it.
  static constexpr std::size_t least_part_bytes = 64_KiB;
  static constexpr std::size_t most_runs = 16'384;
  /// The most bytes that may be spare beyond what was created. Needed since pieces are released one
  /// by one.
  static constexpr std::size_t excess_bytes = 1_MiB;

  /// Unlocks at the last of the calls after a fork.
  void unlock_pages() noexcept {
    if (forks() == 1) {
      pages_mutex_.unlock();
    }
  }

  // The caller of the following functions holds `pages_mutex_`.

  /// Implements `try_map` for `HostRemap::mappings`.
  void map_runs(std::byte* begin, std::size_t bytes);
  /// Moves up to `bytes` of a spare run to `p`. @returns the bytes moved; 0 if the system refuses
  std::size_t move_in(std::byte* p, std::size_t bytes);
  void map_new(std::byte* p, std::size_t bytes) {
    if (try_map_new(p, bytes)) {
      return;
    }
    free_spares();  // they are too short to be used here, and count against the process's limits
    if (!try_map_new(p, bytes)) {
      throw DeviceError{detail::Text{"HostPagedApi: cannot map memory: "} + std::strerror(errno)};
    }
  }
  /// @returns false if the system refuses, for the reason in `errno`
  [[nodiscard]] bool try_map_new(std::byte* p, std::size_t bytes);
  /// Implements `unmap` for `HostRemap::mappings`. It must not fail, so a run for whose record
  /// there is no memory is forgotten: its pages go back to the system when it is unmapped.
  void take_away(std::byte* begin, std::byte* end) noexcept;
  static void give_back(std::byte* p, std::size_t bytes) noexcept {
    drop(p, bytes);
    (void)::mprotect(p, bytes, PROT_NONE);
  }
  /// Gives pages back to the system, also those that the program has locked (`mlock`, `mlockall`).
  static void drop(std::byte* p, std::size_t bytes) noexcept {
    if (::madvise(p, bytes, MADV_DONTNEED) != 0) {
      (void)::munlock(p, bytes);
      (void)::madvise(p, bytes, MADV_DONTNEED);
    }
  }
  /// Sets the pages of a run aside. @returns false if the system refuses
  bool move_out(std::byte* p, std::size_t bytes) noexcept;
  /// Splits the run that contains `p` at `p`. If there is no memory for the record of the second
  /// part, forgets that.
  void split_at(std::byte* p) noexcept;
  /// Gives spare pages back to the system if there are more pages than were created.
  void free_excess() noexcept;
  void free_spares() noexcept {
    for (auto const& [bytes, p] : spare_) {
      ::munmap(p, bytes);
    }
    spare_.clear();
    spare_bytes_ = 0;
  }

  // The following are for `HostRemap::pages`. Spare pages lie side by side in `stack_`, and the
  // last ones are mapped next. So no page has a place of its own, and no mapping changes.

  void map_pages(std::byte* p, std::size_t bytes);
  void unmap_pages(std::byte* p, std::size_t bytes) noexcept;
  /// Moves pages that count neither as mapped nor as spare. @throws DeviceError; they are spare
  /// then, or belong to the system
  void move_pages(std::byte* to, std::byte* from, std::size_t bytes);
  /// Adds new spare pages. @throws DeviceError; nothing has been added then
  void add_spare(std::size_t bytes);
  /// Reserves addresses for so many bytes of spare pages. @returns false if the system refuses; the
  /// spare pages are then as before
  [[nodiscard]] bool reserve_stack(std::size_t bytes) noexcept;
  /// Puts new pages at addresses without pages. @returns false if the system has no memory for them
  [[nodiscard]] bool make_pages(std::byte* to, std::size_t bytes) noexcept;
  /// @returns addresses without pages; null if there are none left
  static std::byte* reserve(std::size_t bytes) noexcept {
    constexpr int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* const p = ::mmap(nullptr, bytes, PROT_NONE, flags, -1, 0);
    if (p == MAP_FAILED) {
      return nullptr;
    }
    if (!make_accessible(p, bytes)) {
      ::munmap(p, bytes);
      return nullptr;
    }
    return static_cast<std::byte*>(p);
  }
  /// Makes new addresses accessible, without pages. In a program that has locked its future memory
  /// (`mlockall`), the system would put pages there if they were not unlocked before.
  static bool make_accessible(void* p, std::size_t bytes) noexcept {
    (void)::munlock(p, bytes);
    return ::mprotect(p, bytes, PROT_READ | PROT_WRITE) == 0;
  }
  void drop_stack() noexcept {
    if (stack_ != nullptr) {
      mover_.forget(stack_);
      ::munmap(stack_, stack_bytes_);
    }
  }
  /// Prepares a new range for pages to be moved there. @throws DeviceError if the system refuses,
  /// although it has not refused before
  void watch(std::byte* p, std::size_t bytes);

#ifdef MADV_POPULATE_WRITE
  static constexpr int populate_pages = MADV_POPULATE_WRITE;
#else
  static constexpr int populate_pages = 23;  // the system may know it although its header does not
#endif

  std::size_t granularity_bytes_;
  std::atomic<std::size_t> created_bytes_{0};
  std::atomic<std::uintptr_t> lowest_{std::numeric_limits<std::uintptr_t>::max()};
  std::atomic<std::uintptr_t> highest_{0};
  std::mutex pages_mutex_;  // guards what follows
  Runs mapped_;
  Spares spare_;
  std::size_t mapped_bytes_ = 0;
  std::size_t spare_bytes_ = 0;
  detail::PageMover mover_;
  std::byte* stack_ = nullptr;
  std::size_t stack_bytes_ = 0;
};

using HostPagedApi = BasicHostPagedApi<>;

/// Aligned to the granularity, or to 2 MiB if that is more, so that the system may use large pages.
template <class Lazy>
void* BasicHostPagedApi<Lazy>::reserve_address(std::size_t bytes) {
  std::size_t const alignment = most_granularity_bytes;
  std::size_t const all = bytes + alignment;
  errno = ENOMEM;  // in case the sum has wrapped around, since the system is not called then
  void* const base =
      all < bytes
          ? MAP_FAILED
          : ::mmap(nullptr, all, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) {
    throw DeviceError{detail::Text{"HostPagedApi: cannot reserve addresses: "} +
                      std::strerror(errno)};
  }
  auto const begin = reinterpret_cast<std::uintptr_t>(base);
  std::size_t const head = round_up(begin, alignment) - begin;
  auto* const kept = static_cast<std::byte*>(base) + head;
  if (head != 0) {
    ::munmap(base, head);
  }
  if (alignment != head) {
    ::munmap(kept + bytes, alignment - head);
  }
  if (mover_.is_open()) {
    watch(kept, bytes);
  }
  auto const first = begin + head;
  lowest_ = std::min(lowest_.load(), first);
  highest_ = std::max(highest_.load(), first + bytes);
  return kept;
}

template <class Lazy>
void BasicHostPagedApi<Lazy>::free_address(void* p, std::size_t bytes) noexcept {
  {
    std::lock_guard const guard{pages_mutex_};
    auto* const begin = static_cast<std::byte*>(p);
    for (auto run = mapped_.lower_bound(begin);
         run != mapped_.end() && run->first < begin + bytes;) {
      mapped_bytes_ -= run->second;
      run = mapped_.erase(run);
    }
    mover_.forget(p);
  }
  ::munmap(p, bytes);
}

template <class Lazy>
bool BasicHostPagedApi<Lazy>::try_map(void* p,
                                      std::size_t bytes,
                                      std::span<physical_type const> pieces) {
  std::lock_guard const guard{pages_mutex_};
  auto* const begin = static_cast<std::byte*>(p);
  if (mover_.is_open()) {
    map_pages(begin, pieces.size() * bytes);
  } else {
    map_runs(begin, pieces.size() * bytes);
  }
  return true;
}

template <class Lazy>
void BasicHostPagedApi<Lazy>::map_runs(std::byte* begin, std::size_t bytes) {
  std::byte* at = begin;
  std::size_t left = bytes;
  try {
    while (std::size_t const moved = left == 0 ? 0 : move_in(at, left)) {
      at += moved;
      left -= moved;
    }
    if (left != 0) {
      map_new(at, left);
      free_excess();
    }
  } catch (...) {
    take_away(begin, at);
    throw;
  }
}

template <class Lazy>
std::size_t BasicHostPagedApi<Lazy>::move_in(std::byte* p, std::size_t bytes) {
  auto spare = spare_.lower_bound(bytes);
  if (spare == spare_.end() && !spare_.empty()) {
    --spare;
  }
  if (spare == spare_.end() || spare->first < std::min(bytes, least_part_bytes)) {
    return 0;
  }
  std::size_t const moved = std::min(bytes, spare->first);
  auto const [run, is_new] = mapped_.emplace(p, moved);
  SPILLWAY_ASSERT(is_new);
  if (::mremap(spare->second, moved, moved, MREMAP_MAYMOVE | MREMAP_FIXED, p) == MAP_FAILED) {
    mapped_.erase(run);
    return 0;
  }
  mapped_bytes_ += moved;
  spare_bytes_ -= moved;
  auto rest = spare_.extract(spare);
  if (moved != rest.key()) {
    rest.key() -= moved;
    rest.mapped() += moved;
    spare_.insert(std::move(rest));
  }
  return moved;
}

template <class Lazy>
bool BasicHostPagedApi<Lazy>::try_map_new(std::byte* p, std::size_t bytes) {
  auto const [run, is_new] = mapped_.emplace(p, bytes);
  SPILLWAY_ASSERT(is_new);
  if (::mprotect(p, bytes, PROT_READ | PROT_WRITE) != 0) {
    int const error = errno;
    give_back(p, bytes);  // the system may have changed a part of it before the failure
    mapped_.erase(run);
    errno = error;
    return false;
  }
  mapped_bytes_ += bytes;
  if (bytes >= most_granularity_bytes) {
    (void)::madvise(p, bytes, MADV_HUGEPAGE);
  }
  // One call for all pages, since faulting in each page when it is touched takes longer than
  // copying it. On a system without this call (Linux before 5.14) pages are still faulted in.
  (void)::madvise(p, bytes, populate_pages);
  return true;
}

template <class Lazy>
void BasicHostPagedApi<Lazy>::unmap(void* p, std::size_t bytes) noexcept {
  std::lock_guard const guard{pages_mutex_};
  auto* const begin = static_cast<std::byte*>(p);
  if (mover_.is_open()) {
    unmap_pages(begin, bytes);
  } else {
    take_away(begin, begin + bytes);
  }
}

template <class Lazy>
void BasicHostPagedApi<Lazy>::move_mapped(void* to, void* from, std::size_t bytes) {
  std::lock_guard const guard{pages_mutex_};
  auto* const source = static_cast<std::byte*>(from);
  auto* const target = static_cast<std::byte*>(to);
  if (mover_.is_open()) {
    mapped_bytes_ -= bytes;
    move_pages(target, source, bytes);
    mapped_bytes_ += bytes;
  } else {
    take_away(source, source + bytes);
    map_runs(target, bytes);
  }
}

template <class Lazy>
void BasicHostPagedApi<Lazy>::take_away(std::byte* begin, std::byte* end) noexcept {
  split_at(end);
  split_at(begin);
  auto const give_back_up_to = [&begin](std::byte* to) noexcept {
    if (begin != to) {  // the rest belongs to a run that was forgotten
      give_back(begin, static_cast<std::size_t>(to - begin));
    }
  };
  for (auto run = mapped_.lower_bound(begin); run != mapped_.end() && run->first < end;) {
    give_back_up_to(run->first);
    if (!move_out(run->first, run->second)) {
      give_back(run->first, run->second);
    }
    begin = run->first + run->second;
    mapped_bytes_ -= run->second;
    run = mapped_.erase(run);
  }
  give_back_up_to(end);
}

template <class Lazy>
bool BasicHostPagedApi<Lazy>::move_out([[maybe_unused]] std::byte* p,
                                       [[maybe_unused]] std::size_t bytes) noexcept {
#ifdef MREMAP_DONTUNMAP
  if (mapped_.size() + spare_.size() > most_runs) {
    return false;
  }
  try {
    auto const spare = spare_.emplace(bytes, nullptr);
    // The addresses stay reserved throughout; otherwise another thread might get them.
    void* const to = ::mremap(p, bytes, bytes, MREMAP_MAYMOVE | MREMAP_DONTUNMAP, nullptr);
    if (to == MAP_FAILED) {
      spare_.erase(spare);
      return false;
    }
    spare->second = static_cast<std::byte*>(to);
    spare_bytes_ += bytes;
  } catch (std::bad_alloc const&) {
    return false;
  }
  // Mapped anew, since the system does not join a mapping that has had pages with its neighbours.
  constexpr int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  if (::mmap(p, bytes, PROT_NONE, flags, -1, 0) == MAP_FAILED) {
    (void)::mprotect(p, bytes, PROT_NONE);
  }
  return true;
#else
  return false;
#endif
}

template <class Lazy>
void BasicHostPagedApi<Lazy>::split_at(std::byte* p) noexcept {
  auto run = mapped_.lower_bound(p);
  if (run == mapped_.begin()) {
    return;
  }
  --run;
  auto const bytes = static_cast<std::size_t>(p - run->first);
  if (bytes < run->second) {
    std::size_t const rest = run->second - bytes;
    run->second = bytes;
    try {
      mapped_.emplace(p, rest);
    } catch (std::bad_alloc const&) {
      mapped_bytes_ -= rest;
    }
  }
}

template <class Lazy>
void BasicHostPagedApi<Lazy>::free_excess() noexcept {
  std::size_t const created = created_bytes_;
  if (stack_ != nullptr && mapped_bytes_ + spare_bytes_ > created) {
    std::size_t const bytes = std::min(spare_bytes_, mapped_bytes_ + spare_bytes_ - created);
    spare_bytes_ -= bytes;
    drop(stack_ + spare_bytes_, bytes);
  }
  while (!spare_.empty() && mapped_bytes_ + spare_bytes_ > created) {
    auto spare = spare_.extract(spare_.begin());
    std::size_t const bytes = std::min(spare.key(), mapped_bytes_ + spare_bytes_ - created);
    spare.key() -= bytes;
    ::munmap(spare.mapped() + spare.key(), bytes);
    spare_bytes_ -= bytes;
    if (spare.key() != 0) {
      spare_.insert(std::move(spare));
    }
  }
}

template <class Lazy>
void BasicHostPagedApi<Lazy>::watch(std::byte* p, std::size_t bytes) {
  std::lock_guard const guard{pages_mutex_};
  if (make_accessible(p, bytes) && mover_.try_watch(p, bytes)) {
    return;
  }
  int const error = errno;
  if (mover_.watches_any()) {
    ::munmap(p, bytes);
    throw DeviceError{detail::Text{"HostPagedApi: cannot watch addresses: "} +
                      std::strerror(error)};
  }
  mover_.close();  // from now on mappings are moved
  (void)::mprotect(p, bytes, PROT_NONE);
}

template <class Lazy>
void BasicHostPagedApi<Lazy>::map_pages(std::byte* p, std::size_t bytes) {
  while (spare_bytes_ < bytes) {
    add_spare(bytes - spare_bytes_);
  }
  spare_bytes_ -= bytes;
  move_pages(p, stack_ + spare_bytes_, bytes);
  mapped_bytes_ += bytes;
  free_excess();
}

template <class Lazy>
void BasicHostPagedApi<Lazy>::move_pages(std::byte* to, std::byte* from, std::size_t bytes) {
  std::size_t const page = detail::system_page_bytes();
  for (std::size_t done = 0; (done += mover_.move(to + done, from + done, bytes - done)) != bytes;
       done += page) {
    // The contents of a page are not needed, so a page that cannot be moved is replaced by a new
    // one.
    drop(from + done, page);
    if (!make_pages(to + done, page)) {
      int const error = errno;
      drop(from + done, bytes - done);
      mapped_bytes_ += done;
      unmap_pages(to, done);
      throw DeviceError{detail::Text{"HostPagedApi: cannot map memory: "} + std::strerror(error)};
    }
  }
}

template <class Lazy>
void BasicHostPagedApi<Lazy>::unmap_pages(std::byte* p, std::size_t bytes) noexcept {
  if (!reserve_stack(spare_bytes_ + bytes)) {
    mapped_bytes_ -= bytes;
    drop(p, bytes);
    return;
  }
  std::size_t const page = detail::system_page_bytes();
  for (std::size_t done = 0; done < bytes;) {
    std::size_t const moved = mover_.move(stack_ + spare_bytes_, p + done, bytes - done);
    spare_bytes_ += moved;
    mapped_bytes_ -= moved;
    done += moved;
    if (done < bytes) {
      if (errno != ENOENT) {  // the page is there, but shared with a forked child
        mapped_bytes_ -= page;
        drop(p + done, page);
      }
      done += page;
    }
  }
}

template <class Lazy>
void BasicHostPagedApi<Lazy>::add_spare(std::size_t bytes) {
  if (!reserve_stack(spare_bytes_ + bytes) || !make_pages(stack_ + spare_bytes_, bytes)) {
    throw DeviceError{detail::Text{"HostPagedApi: cannot map memory: "} + std::strerror(errno)};
  }
  spare_bytes_ += bytes;
}

template <class Lazy>
bool BasicHostPagedApi<Lazy>::make_pages(std::byte* to, std::size_t bytes) noexcept {
  auto* const made = reserve(bytes);
  if (made == nullptr) {
    return false;
  }
  bool const are_made = ::madvise(made, bytes, populate_pages) == 0;
  std::size_t const moved = are_made ? mover_.move(to, made, bytes) : 0;
  int const error = errno;
  ::munmap(made, bytes);
  if (moved != bytes) {
    drop(to, moved);
    errno = error;
  }
  return moved == bytes;
}

template <class Lazy>
bool BasicHostPagedApi<Lazy>::reserve_stack(std::size_t bytes) noexcept {
  if (bytes <= stack_bytes_) {
    return true;
  }
  std::size_t const wanted =
      round_up(std::max({bytes, 2 * stack_bytes_, created_bytes_.load()}), most_granularity_bytes);
  std::byte* const larger = reserve(wanted);
  if (larger == nullptr) {
    return false;
  }
  // Pages that a forked child shares could not be moved any more.
  (void)::madvise(larger, wanted, MADV_DONTFORK);
  if (!mover_.try_watch(larger, wanted)) {
    ::munmap(larger, wanted);
    return false;
  }
  // pages that cannot be moved go back to the system
  spare_bytes_ = mover_.move(larger, stack_, spare_bytes_);
  drop_stack();
  stack_ = larger;
  stack_bytes_ = wanted;
  return true;
}

SPILLWAY_CHECK_MODEL(VirtualMemoryApi<HostPagedApi>);
SPILLWAY_CHECK_MODEL(VacatingApi<HostPagedApi>);

SPILLWAY_COMPILED_PART(class BasicHostPagedApi<>);

}  // namespace spillway
