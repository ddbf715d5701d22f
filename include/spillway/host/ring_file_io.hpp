// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/file_io_api.hpp>
#include <spillway/core/types.hpp>
#include <spillway/host/posix_file_io.hpp>

#include <cerrno>
#include <chrono>
#include <cstddef>
#include <memory>
#include <mutex>
#include <span>
#include <string_view>
#include <thread>
#include <utility>

#include <sys/types.h>

namespace spillway::detail {

/// A `FileIoApi` that hands many transfers to the kernel at once, through a ring of requests in
/// shared memory. If the kernel refuses the ring, it makes the calls of `PosixFileIo`.
///
/// `Ring` is `IoUring`, or a test's. Given `ring` of type `Ring`, `fd` and `memory`,
/// `ring.try_open(fd, memory)` gives a `std::unique_ptr`, null where the kernel refuses, to an
/// object `r` with:
///
/// | expression    | must                                                                         |
/// |---------------|------------------------------------------------------------------------------|
/// | `r.depth`     | be the most transfers that the kernel may have at once                       |
/// | `r.push(t)`   | enter a transfer; false if the ring is full                                  |
/// | `r.submit()`  | hand to the kernel what was entered, in order; how many, or minus an error   |
/// | `r.wait()`    | wait until a transfer has ended, while others push; 0 or minus an error      |
/// | `r.pop()`     | a transfer that has ended, with its result, or null                          |
///
/// Failure  if the ring fails, the transfers that the kernel has not taken yet, and all later ones,
///          are made by `PosixFileIo`. Transfers that it has taken are waited for, since the kernel
///          still uses their memory.
template <class Ring>
class RingFileIo : public PosixFileIo {
 public:
  RingFileIo() = default;
  explicit RingFileIo(Ring ring) : ring_{std::move(ring)} {}

  class Queue {
   public:
    Queue(Ring& ring, int fd, std::span<std::byte> memory) : plain_{fd} {
      if (auto opened = ring.try_open(fd, memory)) {
        shared_ = std::make_unique<Shared>(std::move(opened));
      }
    }

    [[nodiscard]] bool can_begin() const noexcept {
      return shared_ != nullptr && shared_->can_begin();
    }
    [[nodiscard]] std::string_view name() const noexcept {
      return shared_ != nullptr ? shared_->name() : plain_.name();
    }
    void begin(FileTransfer& transfer) noexcept {
      if (shared_ != nullptr) {
        shared_->begin(transfer);
      }
    }
    [[nodiscard]] ssize_t finish(FileTransfer& transfer) noexcept {
      if (shared_ != nullptr && shared_->finish(transfer)) {
        return transfer.result;
      }
      return plain_.finish(transfer);
    }

   private:
    using Opened = decltype(std::declval<Ring&>().try_open(0, std::span<std::byte>{}));
    using State = FileTransfer::State;

    class Shared {
     public:
      explicit Shared(Opened ring) noexcept : ring_{std::move(ring)} {}

      [[nodiscard]] bool can_begin() noexcept {
        std::scoped_lock const lock{mutex_};
        return !has_failed_;
      }
      [[nodiscard]] std::string_view name() noexcept {
        std::scoped_lock const lock{mutex_};
        return has_failed_ ? "pread, pwrite, since io_uring failed" : "io_uring";
      }

      void begin(FileTransfer& transfer) noexcept {
        std::scoped_lock const lock{mutex_};
        enter(transfer);
      }

      /// Waits for the end of a transfer. @returns whether the ring has made it
      [[nodiscard]] bool finish(FileTransfer& transfer) noexcept {
        std::unique_lock lock{mutex_};
        if (transfer.state == State::idle) {
          transfer.next = nullptr;
          enter(transfer);
        }
        while (transfer.state == State::waiting || transfer.state == State::in_flight) {
          wait(lock);
          while (FileTransfer* const ended = ring_->pop()) {
            ended->state = State::done;
            --in_flight_;
            in_flight_bytes_ -= ended->bytes;
          }
          submit();
        }
        bool const is_done = transfer.state == State::done;
        transfer.state = State::idle;
        return is_done && transfer.result != -EAGAIN && transfer.result != -ECANCELED;
      }

     private:
      void enter(FileTransfer& first) noexcept {
        if (has_failed_) {
          return;
        }
        (first_ == nullptr ? first_ : last_->next) = &first;
        for (last_ = &first; last_->next != nullptr; last_ = last_->next) {
          last_->state = State::waiting;
        }
        last_->state = State::waiting;
        submit();
      }

      /// Hands to the kernel as many of the waiting transfers as the ring has room for.
      void submit() noexcept {
        if (has_failed_) {
          return;
        }
        FileTransfer* next = first_;
        for (std::size_t i = 0; i < entered_; ++i) {
          next = next->next;
        }
        while (next != nullptr && has_room(next->bytes) && ring_->push(*next)) {
          ++entered_;
          in_flight_bytes_ += next->bytes;
          next = next->next;
        }
        if (entered_ == 0) {
          return;
        }
        int const taken = ring_->submit();
        if (taken < 0 && !is_passing(taken)) {
          fail();
          return;
        }
        refusals_ = taken > 0 ? 0 : refusals_;
        for (int i = 0; i < taken; ++i) {
          first_->state = State::in_flight;
          first_ = first_->next;
          ++in_flight_;
          --entered_;
        }
      }

      /// Waits without the lock until any transfer in flight has ended. Only sleeps for a short
      /// time if none is in flight, because the kernel takes none, or if waiting fails. A kernel
      /// that takes none for too long is not asked any more.
      void wait(std::unique_lock<std::mutex>& lock) noexcept {
        bool const can_wait = in_flight_ > 0 && !has_failed_;
        lock.unlock();
        int const error = can_wait ? ring_->wait() : 0;
        if (!can_wait) {
          std::this_thread::sleep_for(std::chrono::microseconds{100});
        }
        lock.lock();
        bool const is_refused = in_flight_ == 0 && ++refusals_ == most_refusals;
        if (is_refused || (error < 0 && !is_passing(error))) {
          fail();
        }
      }

      /// Gives up the ring: transfers that the kernel has not taken are left to their callers.
      void fail() noexcept {
        has_failed_ = true;
        for (; first_ != nullptr; first_ = first_->next) {
          first_->state = State::idle;
        }
      }

      [[nodiscard]] bool has_room(std::size_t bytes) const noexcept {
        std::size_t const requests = in_flight_ + entered_;
        return requests < ring_->depth &&
               (requests == 0 || in_flight_bytes_ + bytes <= max_in_flight_bytes);
      }

      static bool is_passing(int error) noexcept {
        return error == -EINTR || error == -EAGAIN || error == -EBUSY;
      }

      // Enough to keep a fast disk busy. A disk serves its requests in turns, so with many more all
      // of them would end late, and the first chunk could not be reused for long.
      static constexpr std::size_t max_in_flight_bytes = 8_MiB;
      // So often in a row the kernel may take nothing while nothing is in flight: for about 0.1 s.
      static constexpr std::size_t most_refusals = 1000;

      std::mutex mutex_;  // guards all but `ring_->wait()`
      Opened ring_;
      FileTransfer* first_ = nullptr;  // list of those that the kernel has not taken, in order
      FileTransfer* last_ = nullptr;
      std::size_t entered_ = 0;  // how many of the list's first transfers are in the ring
      std::size_t in_flight_ = 0;
      std::size_t in_flight_bytes_ = 0;  // bytes of transfers in flight or entered
      std::size_t refusals_ = 0;         // waits in a row with nothing in flight
      bool has_failed_ = false;
    };

    PosixFileIo::Queue plain_;
    std::unique_ptr<Shared> shared_;  // null where the kernel refused the ring
  };

  /// @throws std::bad_alloc
  [[nodiscard]] Queue make_queue(int fd, std::span<std::byte> memory) {
    return Queue{ring_, fd, memory};
  }

 private:
  [[no_unique_address]] Ring ring_;
};

}  // namespace spillway::detail
