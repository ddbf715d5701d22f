// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/config.hpp>
#include <spillway/core/host_mapping.hpp>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <new>
#include <utility>
#include <vector>

#if __has_include(<linux/userfaultfd.h>)
#  include <fcntl.h>
#  include <linux/userfaultfd.h>
#  include <sys/ioctl.h>
#  include <sys/mman.h>
#  include <sys/syscall.h>
#  include <unistd.h>
#  if defined(SYS_userfaultfd) && defined(UFFDIO_REGISTER)
#    define SPILLWAY_HAS_USERFAULTFD 1
#  endif
#endif

namespace spillway::detail {

/// Moves pages of the process from one address to another without changing its mappings, with
/// `userfaultfd` of Linux 6.8. Moving 16 KiB takes 2 us; moving a mapping takes 6 us, and more if
/// there are many.
///
/// Pages can be moved only between ranges that are *watched*. In a watched range, an access to an
/// address without a page raises SIGBUS, and a system call that is given such an address fails with
/// EFAULT.
///
/// It needs no privilege, since faults in the kernel's own code are not handled. If the system has
/// no such calls, or a sandbox forbids them, `is_open()` is false.
///
/// Threads  `move` is thread-safe; the others by one thread at a time.
class PageMover {
 public:
  static constexpr bool is_thread_safe = false;

  PageMover() = default;
  PageMover(PageMover const&) = delete;
  PageMover& operator=(PageMover const&) = delete;
  ~PageMover() { close(); }

  [[nodiscard]] bool is_open() const noexcept { return descriptor_ >= 0; }

#if defined(SPILLWAY_HAS_USERFAULTFD)
  /// @returns whether the system can move pages
  bool open() noexcept {
    descriptor_ = static_cast<int>(::syscall(SYS_userfaultfd, O_CLOEXEC | only_user_mode));
    if (is_open()) {
      uffdio_api wanted{};
      wanted.api = UFFD_API;
      wanted.features = UFFD_FEATURE_SIGBUS | can_move;
      if (::ioctl(descriptor_, UFFDIO_API, &wanted) != 0) {
        close();
      }
    }
    return is_open();
  }
  void close() noexcept {
    if (is_open()) {
      ::close(std::exchange(descriptor_, -1));
    }
  }
  /// Watches a range of private, anonymous memory that is readable and writable, and that has no
  /// pages yet. @returns false if the system refuses
  [[nodiscard]] bool try_watch(void* p, std::size_t bytes) noexcept {
    try {
      watched_.push_back({p, bytes});
    } catch (std::bad_alloc const&) {
      return false;
    }
    bool const is_watched = do_watch(watched_.back());
    if (!is_watched) {
      watched_.pop_back();
    }
    return is_watched;
  }
  [[nodiscard]] bool watches_any() const noexcept {
    return !watched_.empty();
  }
  /// To be called when a watched range is unmapped.
  void forget(void const* p) noexcept {
    std::erase_if(watched_, [&](Watched const& range) { return range.p == p; });
  }
  /// Moves pages to addresses without pages. Stops at the first page that is missing or cannot be
  /// moved, such as one that a forked child shares. @returns the bytes moved
  ///
  /// Linux 6.18 does not count the pages that it moves after it has waited for another part of the
  /// kernel, such as compaction of physical memory. It then finds the first of these at its new
  /// address, and reports EEXIST. Such pages are recognised by being there and no longer here.
  ///
  /// If the program has locked memory (`mlock`, `mlockall`), the watched ranges are unlocked: the
  /// system refuses, with EINVAL, to move pages between a locked range and one that is not locked.
  [[nodiscard]] std::size_t move(std::byte* to, std::byte* from, std::size_t bytes) const noexcept {
    std::size_t moved = 0;
    bool is_unlocked = false;
    while (moved < bytes) {
      Move order{reinterpret_cast<std::uintptr_t>(to + moved),
                 reinterpret_cast<std::uintptr_t>(from + moved),
                 bytes - moved,
                 0,
                 0};
      bool const is_done = ::ioctl(descriptor_, move_pages, &order) == 0;
      bool const is_interrupted = !is_done && errno == EAGAIN;
      if (order.moved > 0) {
        moved += static_cast<std::size_t>(order.moved);
      } else if (!is_done && errno == EEXIST && is_missing(from + moved)) {
        moved += system_page_bytes();
      } else if (!is_done && errno == EINVAL && !is_unlocked) {
        unlock();
        is_unlocked = true;
      } else if (!is_interrupted) {
        break;
      }
    }
    return moved;
  }
  /// To be called in a forked child, whose ranges are not watched: the descriptor belongs to the
  /// parent. If the system refuses, makes the ranges inaccessible; otherwise addresses without
  /// pages would read as zeros.
  void reopen() noexcept {
    close();
    bool is_watched = open();
    for (Watched const& range : watched_) {
      is_watched = is_watched && do_watch(range);
    }
    if (!is_watched) {
      close();
      for (Watched const& range : watched_) {
        (void)::mprotect(range.p, range.bytes, PROT_NONE);
      }
    }
  }

 private:
  struct Watched {
    void* p = nullptr;
    std::size_t bytes = 0;
  };
  // As in <linux/userfaultfd.h> of Linux 6.8; the installed header may be older.
  struct Move {
    std::uint64_t to;
    std::uint64_t from;
    std::uint64_t bytes;
    std::uint64_t mode;
    std::int64_t moved;
  };
  static constexpr auto move_pages = _IOWR(UFFDIO, 0x05, Move);
  static constexpr std::uint64_t can_move = std::uint64_t{1} << 16U;
  static constexpr int only_user_mode = 1;

  [[nodiscard]] static bool is_missing(std::byte* p) noexcept {
    unsigned char is_there = 1;
    return ::mincore(p, system_page_bytes(), &is_there) == 0 && (is_there & 1U) == 0;
  }
  void unlock() const noexcept {
    for (Watched const& range : watched_) {
      (void)::munlock(range.p, range.bytes);
    }
  }
  [[nodiscard]] bool do_watch(Watched const& range) const noexcept {
    uffdio_register wanted{};
    wanted.range = {reinterpret_cast<std::uintptr_t>(range.p), range.bytes};
    wanted.mode = UFFDIO_REGISTER_MODE_MISSING;
    return ::ioctl(descriptor_, UFFDIO_REGISTER, &wanted) == 0;
  }

  std::vector<Watched> watched_;
#else
  bool open() noexcept {
    return false;
  }
  void close() noexcept {}
  [[nodiscard]] bool try_watch(void* /*p*/, std::size_t /*bytes*/) noexcept {
    return false;
  }
  [[nodiscard]] bool watches_any() const noexcept {
    return false;
  }
  void forget(void const* /*p*/) noexcept {}
  [[nodiscard]] std::size_t
  move(std::byte* /*to*/, std::byte* /*from*/, std::size_t /*bytes*/) const noexcept {
    return 0;
  }
  void reopen() noexcept {}

 private:
#endif
  int descriptor_ = -1;
};

}  // namespace spillway::detail
