// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/file_io_api.hpp>

#include <cstddef>
#include <cstdint>

#include <fcntl.h>
#include <sys/types.h>
#include <unistd.h>

namespace spillway {

/// The default `FileIoApi` of a host pool: the operating system's calls, unchanged.
class PosixFileIo {
 public:
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

  [[nodiscard]] ssize_t
  write(int fd, void const* from, std::size_t bytes, std::uint64_t offset) const noexcept {
    return ::pwrite(fd, from, bytes, static_cast<off_t>(offset));
  }

  [[nodiscard]] ssize_t
  read(int fd, void* to, std::size_t bytes, std::uint64_t offset) const noexcept {
    return ::pread(fd, to, bytes, static_cast<off_t>(offset));
  }
};

static_assert(FileIoApi<PosixFileIo>);

}  // namespace spillway
