// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <type_traits>

#include <sys/types.h>

namespace spillway {

/// One read or write of the swap file. The object must stay at its address until `finish` has
/// returned.
struct FileTransfer {
  enum class State : std::uint8_t { idle, waiting, in_flight, done };

  std::byte* memory = nullptr;  ///< a write only reads it
  std::size_t bytes = 0;
  std::uint64_t offset = 0;  ///< in the file
  bool is_write = false;
  FileTransfer* next = nullptr;  ///< transfer to begin together with it; then used by the queue
  State state = State::idle;     ///< used by the queue
  ssize_t result = 0;            ///< used by the queue
};

/// A queue of transfers of one file.
///
/// Given `q` of type `Q` and a transfer `t`:
///
/// | expression      | must                                                                       |
/// |-----------------|----------------------------------------------------------------------------|
/// | `q.can_begin()` | tell whether `begin` starts transfers; not any more once that has failed   |
/// | `q.begin(t)`    | start `t`, and all that follow it by `next`, now or as others end, and     |
/// |                 | wait for nothing. A model may do nothing here                              |
/// | `q.finish(t)`   | start `t` unless it has begun, and wait for its end. Returns the bytes     |
/// |                 | moved, which may be fewer than asked for, 0 at the end of the file, or     |
/// |                 | minus the error number                                                     |
/// | `q.name()`      | name the calls that it makes, for statistics                               |
///
/// Any thread may call `begin` while one thread is in `finish`. Every transfer that was begun must
/// be finished before the queue is destroyed.
// clang-format off
template <class Q>
concept FileQueueApi =
    std::move_constructible<Q> &&
    requires(Q q, FileTransfer& t) {
      { q.can_begin() } noexcept -> std::same_as<bool>;
      { q.begin(t)    } noexcept -> std::same_as<void>;
      { q.finish(t)   } noexcept -> std::same_as<ssize_t>;
      { q.name()      } noexcept -> std::same_as<std::string_view>;
    };
// clang-format on

/// A queue that can also transfer directly between the file and the memory of a device `D`, without
/// a copy on the host.
///
/// Given a device `d`, a stream `s` of it, and a transfer `t` whose `memory` is an address on `d`:
///
/// | expression               | must                                                              |
/// |--------------------------|-------------------------------------------------------------------|
/// | `q.reaches_device()`     | tell whether this file may be reached so. Called first by the     |
/// |                          | thread that makes the queue                                       |
/// | `q.try_enqueue(d, t, s)` | enqueue `t` alone, which stays where it is until later work on    |
/// |                          | `s` runs. That finds in `t.result` the bytes moved, which are all |
/// |                          | of them unless the file ends, or minus the error number. Return   |
/// |                          | false if the file cannot be reached so after all: it is not asked |
/// |                          | again. May throw `DeviceError`. Nothing is enqueued then          |
///
/// Thread-safe.
// clang-format off
template <class Q, class D>
concept DeviceFileQueueApi =
    FileQueueApi<Q> &&
    requires(Q q, D& d, FileTransfer& t, typename D::stream_type s) {
      { q.reaches_device()     } noexcept -> std::same_as<bool>;
      { q.try_enqueue(d, t, s) }          -> std::same_as<bool>;
    };
// clang-format on

/// The system calls that the file tier makes on an open file.
///
/// A parameter of `HostSwapPool`, so that tests can make the calls fail. `IoUringFileIo` hands many
/// transfers to the kernel at once, `PosixFileIo` makes one call after the other, and the queues of
/// `CuFileIo` reach the memory of GPUs (`DeviceFileQueueApi`).
///
/// Given `io` of type `F`, file descriptor `fd`, `n` bytes, `offset` in the file, and `memory`, a
/// span of bytes:
///
/// | expression                   | must                                                          |
/// |------------------------------|---------------------------------------------------------------|
/// | `io.allocate(fd, offset, n)` | make sure that later writes there find room; 0 or an error    |
/// | `io.discard(fd, offset, n)`  | give that room back, as far as the file system can. Also      |
/// |                              | called when `allocate` has just failed, for its range, a part |
/// |                              | of which may have got room                                    |
/// | `io.make_queue(fd, memory)`  | return a new `FileQueueApi` for this file. Most transfers are |
/// |                              | to and from `memory`, which it may register with the kernel   |
///
/// Copies of a model are interchangeable. Thread-safe.
// clang-format off
template <class F>
concept FileIoApi =
    std::copy_constructible<F> &&
    requires(F io, int fd, std::size_t n, std::uint64_t offset, std::span<std::byte> memory) {
      { io.allocate(fd, offset, n) } noexcept -> std::same_as<int>;
      { io.discard(fd, offset, n)  } noexcept -> std::same_as<void>;
      { io.make_queue(fd, memory)  }          -> FileQueueApi;
      requires std::is_object_v<decltype(io.make_queue(fd, memory))>;  // and no reference to one
    };
// clang-format on

}  // namespace spillway
