// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>

#include <sys/types.h>

namespace spillway {

/// The system calls that the file tier makes on an open file.
///
/// A parameter of `HostSwapPool`, so that tests can make the calls fail. The default is
/// `PosixFileIo`.
///
/// Given `io` of type `F`, file descriptor `fd`, memory `p`, `n` bytes, `offset` in the file:
///
/// | expression                   | must                                                          |
/// |------------------------------|---------------------------------------------------------------|
/// | `io.allocate(fd, offset, n)` | make sure that later writes there find room; 0 or an error    |
/// | `io.discard(fd, offset, n)`  | give that room back, as far as the file system can            |
/// | `io.write(fd, p, n, offset)` | as `pwrite`: bytes written, or -1 with `errno`                |
/// | `io.read(fd, p, n, offset)`  | as `pread`: bytes read, 0 at the end, or -1 with `errno`      |
///
/// Reads and writes may do fewer bytes than `n`.
///
/// Copies of a model stand for the same thing. Thread-safe.
// clang-format off
template <class F>
concept FileIoApi =
    std::copy_constructible<F> &&
    requires(F io, int fd, void* p, void const* q, std::size_t n, std::uint64_t offset) {
      { io.allocate(fd, offset, n) } noexcept -> std::same_as<int>;
      { io.discard(fd, offset, n)  } noexcept -> std::same_as<void>;
      { io.write(fd, q, n, offset) } noexcept -> std::same_as<ssize_t>;
      { io.read(fd, p, n, offset)  } noexcept -> std::same_as<ssize_t>;
    };
// clang-format on

}  // namespace spillway
