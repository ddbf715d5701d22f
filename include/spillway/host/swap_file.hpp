// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/file_io_api.hpp>
#include <spillway/core/error.hpp>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <string>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <stdlib.h>  // NOLINT(modernize-deprecated-headers): mkostemp is POSIX
#include <sys/stat.h>
#include <unistd.h>

namespace spillway::detail {

/// The file of the file tier: opened at construction, removed at destruction.
///
/// `TierMemory` owns it and extends it slab by slab; `SlotIo` reads and writes the slots' pieces.
///
/// Given a folder, the file has no name and vanishes even if the program is killed. Given a name,
/// the file must not exist: nobody's data is overwritten.
///
/// Threads  `write`, `read`: any number at once. `try_extend`: one at a time.
template <FileIoApi FileIo>
class SwapFile {
 public:
  /// What O_DIRECT asks of offsets, sizes and addresses.
  static constexpr std::size_t direct_alignment_bytes = 4096;

  /// @throws FileTierError naming the path and the system's reason
  SwapFile(std::string path, bool wants_direct_io, FileIo io)
      : path_{std::move(path)}, io_{std::move(io)} {
    struct stat status {};
    if (::stat(path_.c_str(), &status) == 0 && S_ISDIR(status.st_mode)) {
      open_nameless();
    } else {
      fd_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, S_IRUSR | S_IWUSR);
      is_named_ = fd_ >= 0;
    }
    if (fd_ < 0) {
      throw FileTierError{Text{"spillway: cannot open the swap file at "} + path_ + ": " +
                          std::generic_category().message(errno)};
    }
#if defined(O_DIRECT)
    if (wants_direct_io) {
      int const flags = ::fcntl(fd_, F_GETFL);
      is_direct_ = flags >= 0 && ::fcntl(fd_, F_SETFL, flags | O_DIRECT) == 0;
    }
#else
    static_cast<void>(wants_direct_io);
#endif
  }
  SwapFile(SwapFile const&) = delete;
  SwapFile& operator=(SwapFile const&) = delete;
  ~SwapFile() {
    ::close(fd_);
    if (is_named_) {
      ::unlink(path_.c_str());
    }
  }

  /// Makes room for `bytes` more at the end; false when the disk is full or refuses.
  [[nodiscard]] bool try_extend(std::size_t bytes) noexcept {
    if (io_.allocate(fd_, size_bytes_, bytes) != 0) {
      io_.discard(fd_, size_bytes_, bytes);  // what was taken before the disk was full
      return false;
    }
    size_bytes_ += bytes;
    return true;
  }

  /// Writes all of it. @returns 0, or the error number
  [[nodiscard]] int write(std::byte const* from, std::size_t bytes, std::uint64_t offset) noexcept {
    return transfer(from, bytes, offset, [&](std::byte const* at, std::size_t n, std::uint64_t to) {
      return io_.write(fd_, at, n, to);
    });
  }

  /// Reads all of it. @returns 0, or the error number; EIO where the file ends early
  [[nodiscard]] int read(std::byte* to, std::size_t bytes, std::uint64_t offset) noexcept {
    return transfer(to, bytes, offset, [&](std::byte* at, std::size_t n, std::uint64_t from) {
      return io_.read(fd_, at, n, from);
    });
  }

  [[nodiscard]] std::string const& path() const noexcept {
    return path_;
  }
  [[nodiscard]] std::uint64_t size_bytes() const noexcept {
    return size_bytes_;
  }
  [[nodiscard]] bool is_direct() const noexcept {
    return is_direct_;
  }

 private:
  void open_nameless() {
#if defined(O_TMPFILE)
    fd_ = ::open(path_.c_str(), O_RDWR | O_TMPFILE | O_EXCL | O_CLOEXEC, S_IRUSR | S_IWUSR);
    if (fd_ >= 0) {
      return;
    }
#endif
    std::string name = path_ + "/spillway-XXXXXX";
    fd_ = ::mkostemp(name.data(), O_CLOEXEC);
    if (fd_ >= 0) {
      ::unlink(name.c_str());
    }
  }

  /// Repeats `call` until everything has been done: signals interrupt, and any call may do less.
  template <class Byte, class Call>
  static int
  transfer(Byte* memory, std::size_t bytes, std::uint64_t offset, Call const& call) noexcept {
    while (bytes > 0) {
      ssize_t const done = call(memory, bytes, offset);
      if (done < 0) {
        if (errno == EINTR) {
          continue;
        }
        return errno;
      }
      if (done == 0) {
        return EIO;
      }
      memory += done;
      offset += static_cast<std::uint64_t>(done);
      bytes -= static_cast<std::size_t>(done);
    }
    return 0;
  }

  std::string path_;
  [[no_unique_address]] FileIo io_;
  int fd_ = -1;
  std::uint64_t size_bytes_ = 0;
  bool is_named_ = false;
  bool is_direct_ = false;
};

}  // namespace spillway::detail
