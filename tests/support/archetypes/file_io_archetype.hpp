// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/file_io_api.hpp>
#include <spillway/host/posix_file_io.hpp>

#include <cstddef>
#include <cstdint>

namespace spillway::test {

/// A model of `FileIoApi` that can do what the concept asks and nothing else: it is made from a
/// number, copied, and called without `const`.
class FileIoArchetype {
 public:
  explicit FileIoArchetype(int /*unused*/) {}
  FileIoArchetype(FileIoArchetype const&) = default;
  FileIoArchetype& operator=(FileIoArchetype const&) = delete;
  ~FileIoArchetype() = default;

  int allocate(int fd, std::uint64_t offset, std::size_t bytes) noexcept {
    return PosixFileIo{}.allocate(fd, offset, bytes);
  }
  void discard(int fd, std::uint64_t offset, std::size_t bytes) noexcept {
    PosixFileIo{}.discard(fd, offset, bytes);
  }
  ssize_t write(int fd, void const* from, std::size_t bytes, std::uint64_t offset) noexcept {
    return PosixFileIo{}.write(fd, from, bytes, offset);
  }
  ssize_t read(int fd, void* to, std::size_t bytes, std::uint64_t offset) noexcept {
    return PosixFileIo{}.read(fd, to, bytes, offset);
  }
};

static_assert(FileIoApi<FileIoArchetype>);

}  // namespace spillway::test
