// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/file_io_api.hpp>
#include <spillway/core/types.hpp>
#include <spillway/host/ring_file_io.hpp>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <memory>
#include <span>

#include <liburing.h>
#include <sys/uio.h>

namespace spillway::detail {

/// The `Ring` of `RingFileIo` for Linux: io_uring, through liburing.
///
/// The file and the memory are registered with the kernel, so that it need not look them up for
/// each request. If the kernel refuses to register the memory, since the process may not lock so
/// much, it is used unregistered.
class IoUring {
 public:
  class Opened {
   public:
    /// So many small requests keep a disk busy; large requests never become so many.
    static constexpr std::size_t depth = 128;

    Opened(int fd, std::span<std::byte> memory) noexcept : fd_{fd}, memory_{memory} {
      is_open_ = ::io_uring_queue_init(depth, &ring_, 0) == 0;
      if (!is_open_ || !has_calls()) {
        return;
      }
      is_usable_ = true;
      iovec const buffer{memory.data(), memory.size()};
      is_memory_registered_ = !memory.empty() && memory.size() <= max_registered_bytes &&
                              ::io_uring_register_buffers(&ring_, &buffer, 1) == 0;
      is_file_registered_ = ::io_uring_register_files(&ring_, &fd, 1) == 0;
    }
    Opened(Opened const&) = delete;
    Opened& operator=(Opened const&) = delete;
    ~Opened() {
      if (is_open_) {
        ::io_uring_queue_exit(&ring_);
      }
    }

    [[nodiscard]] bool is_usable() const noexcept { return is_usable_; }
    [[nodiscard]] bool push(FileTransfer& transfer) noexcept {
      io_uring_sqe* const sqe = ::io_uring_get_sqe(&ring_);
      if (sqe == nullptr) {
        return false;
      }
      auto const bytes = static_cast<unsigned>(std::min(transfer.bytes, max_registered_bytes));
      int const fd = is_file_registered_ ? 0 : fd_;
      bool const is_fixed = is_memory_registered_ && is_in_memory(transfer);
      if (transfer.is_write) {
        is_fixed ? ::io_uring_prep_write_fixed(sqe, fd, transfer.memory, bytes, transfer.offset, 0)
                 : ::io_uring_prep_write(sqe, fd, transfer.memory, bytes, transfer.offset);
      } else {
        is_fixed ? ::io_uring_prep_read_fixed(sqe, fd, transfer.memory, bytes, transfer.offset, 0)
                 : ::io_uring_prep_read(sqe, fd, transfer.memory, bytes, transfer.offset);
      }
      if (is_file_registered_) {
        sqe->flags |= IOSQE_FIXED_FILE;
      }
      ::io_uring_sqe_set_data(sqe, &transfer);
      return true;
    }
    [[nodiscard]] int submit() noexcept { return ::io_uring_submit(&ring_); }
    [[nodiscard]] int wait() noexcept {
      io_uring_cqe* cqe = nullptr;
      return ::io_uring_wait_cqe(&ring_, &cqe);
    }
    [[nodiscard]] FileTransfer* pop() noexcept {
      io_uring_cqe* cqe = nullptr;
      if (::io_uring_peek_cqe(&ring_, &cqe) != 0) {
        return nullptr;
      }
      auto* const transfer = static_cast<FileTransfer*>(::io_uring_cqe_get_data(cqe));
      transfer->result = cqe->res;
      ::io_uring_cqe_seen(&ring_, cqe);
      return transfer;
    }

   private:
    static constexpr std::size_t max_registered_bytes = 1_GiB;

    [[nodiscard]] bool has_calls() noexcept {
      io_uring_probe* const probe = ::io_uring_get_probe_ring(&ring_);
      bool const has = probe != nullptr && ::io_uring_opcode_supported(probe, IORING_OP_READ) != 0;
      ::io_uring_free_probe(probe);
      return has;
    }
    [[nodiscard]] bool is_in_memory(FileTransfer const& transfer) const noexcept {
      std::less_equal<std::byte const*> const is_not_after;
      return is_not_after(memory_.data(), transfer.memory) &&
             is_not_after(transfer.memory + transfer.bytes, memory_.data() + memory_.size());
    }

    int fd_;
    std::span<std::byte> memory_;
    io_uring ring_{};
    bool is_open_ = false;
    bool is_usable_ = false;
    bool is_memory_registered_ = false;
    bool is_file_registered_ = false;
  };

  /// Opens a ring; null if the kernel refuses, or is older than Linux 5.6. @throws std::bad_alloc
  [[nodiscard]] std::unique_ptr<Opened> try_open(int fd, std::span<std::byte> memory) const {
    auto opened = std::make_unique<Opened>(fd, memory);
    return opened->is_usable() ? std::move(opened) : nullptr;
  }
};

}  // namespace spillway::detail

namespace spillway {

/// A `FileIoApi` that hands many transfers to the kernel at once, through io_uring.
///
/// If the kernel refuses, it makes the calls of `PosixFileIo`; the names of its queues tell which.
/// Needs liburing: link `spillway::io_uring`.
using IoUringFileIo = detail::RingFileIo<detail::IoUring>;

static_assert(FileIoApi<IoUringFileIo>);

}  // namespace spillway
