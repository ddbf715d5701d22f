// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/file_io_api.hpp>
#include <spillway/core/config.hpp>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/types.h>
#include <unistd.h>

namespace spillway {

/// A `FileIoApi` that makes one system call for each transfer. `finish` makes the call, on the
/// thread that runs the long host functions of a stream; `begin` does nothing.
class PosixFileIo {
 public:
  class Queue {
   public:
    explicit Queue(int fd) noexcept : fd_{fd} {}

    [[nodiscard]] bool can_begin() const noexcept { return false; }
    void begin(FileTransfer& /*transfer*/) noexcept {}
    [[nodiscard]] ssize_t finish(FileTransfer& transfer) noexcept {
      auto const at = static_cast<off_t>(transfer.offset);
      ssize_t const moved = transfer.is_write ? ::pwrite(fd_, transfer.memory, transfer.bytes, at)
                                              : ::pread(fd_, transfer.memory, transfer.bytes, at);
      return moved < 0 ? -errno : moved;
    }
    [[nodiscard]] std::string_view name() const noexcept { return "pread, pwrite"; }

   private:
    int fd_;
  };

  /// Allocates room in the file. If the file system does not support that (NFS before 4.2, 9p, many
  /// FUSE file systems), writes zeros instead. @returns 0 or an error number
  [[nodiscard]] int allocate(int fd, std::uint64_t offset, std::size_t bytes) const noexcept {
    if (exceeds_limit(offset + bytes)) {
      return EFBIG;  // checked here, since the call would end the process by SIGXFSZ
    }
    int error = EINTR;
    for (int tries = 0; tries < most_interrupts && error == EINTR; ++tries) {
      bool const is_done =
          ::fallocate(fd, 0, static_cast<off_t>(offset), static_cast<off_t>(bytes)) == 0;
      error = is_done ? 0 : errno;
    }
    return error == EOPNOTSUPP ? write_zeros(fd, offset, bytes) : error;
  }

  void discard(int fd, std::uint64_t offset, std::size_t bytes) const noexcept {
    static_cast<void>(::fallocate(fd,
                                  FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                                  static_cast<off_t>(offset),
                                  static_cast<off_t>(bytes)));
  }

  [[nodiscard]] Queue make_queue(int fd, std::span<std::byte> /*memory*/) const noexcept {
    return Queue{fd};
  }

 private:
  // An interrupted call may undo its work, so a program with a fast timer could retry for ever.
  static constexpr int most_interrupts = 100;

  [[nodiscard]] static bool exceeds_limit(std::uint64_t size_bytes) noexcept {
    rlimit limit{};
    return ::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
           size_bytes > limit.rlim_cur;
  }

  [[nodiscard]] static int write_zeros(int fd, std::uint64_t offset, std::size_t bytes) noexcept {
    alignas(4096) static constexpr std::array<std::byte, 65'536> zeros{};  // for O_DIRECT
    Queue queue{fd};
    while (bytes > 0) {
      // The cast is safe, since a transfer to the file only reads its memory.
      FileTransfer transfer{
          const_cast<std::byte*>(zeros.data()), std::min(bytes, zeros.size()), offset, true};
      ssize_t const moved = queue.finish(transfer);
      if (moved == -EINTR) {
        continue;
      }
      if (moved <= 0) {
        return moved == 0 ? EIO : static_cast<int>(-moved);
      }
      offset += static_cast<std::uint64_t>(moved);
      bytes -= static_cast<std::size_t>(moved);
    }
    return 0;
  }
};

SPILLWAY_CHECK_MODEL(FileIoApi<PosixFileIo>);

}  // namespace spillway
