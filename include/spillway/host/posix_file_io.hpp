// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/file_io_api.hpp>
#include <spillway/core/config.hpp>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include <fcntl.h>
#include <sys/types.h>
#include <unistd.h>

namespace spillway {

/// A `FileIoApi` that makes one call of the operating system for each transfer, when it is
/// finished: on the thread that runs the long host functions of a stream.
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

  [[nodiscard]] int allocate(int fd, std::uint64_t offset, std::size_t bytes) const noexcept {
    return ::posix_fallocate(fd, static_cast<off_t>(offset), static_cast<off_t>(bytes));
  }

  void discard(int fd, std::uint64_t offset, std::size_t bytes) const noexcept {
#if defined(FALLOC_FL_PUNCH_HOLE)
    static_cast<void>(::fallocate(fd,
                                  FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                                  static_cast<off_t>(offset),
                                  static_cast<off_t>(bytes)));
#else
    static_cast<void>(fd), static_cast<void>(offset), static_cast<void>(bytes);
#endif
  }

  [[nodiscard]] Queue make_queue(int fd, std::span<std::byte> /*memory*/) const noexcept {
    return Queue{fd};
  }
};

SPILLWAY_CHECK_MODEL(FileIoApi<PosixFileIo>);

}  // namespace spillway
