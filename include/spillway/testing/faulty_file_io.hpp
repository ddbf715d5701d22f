// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/file_io_api.hpp>
#include <spillway/host/posix_file_io.hpp>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string_view>
#include <utility>

#include <sys/types.h>

namespace spillway::testing {

/// The system's file calls (`FileIoApi`), with faults that a test plants while the file is in use.
/// Give one to a file tier and keep a copy: copies share their faults.
///
/// Threads  thread-safe.
class FaultyFileIo {
 public:
  struct Faults {
    int allocate_error = 0;
    int write_error = 0;
    int read_error = 0;
    std::uint64_t failing_from = 0;  ///< only at offsets in [from, to)
    std::uint64_t failing_to = ~std::uint64_t{0};
    std::size_t most_bytes = ~std::size_t{0};  ///< of one call: short counts
    unsigned interrupt_every = 0;              ///< each nth call fails with EINTR; 0: none
    bool is_truncated = false;                 ///< reads find the end of the file
  };
  struct Calls {
    std::size_t allocates = 0;
    std::size_t discards = 0;
    std::size_t writes = 0;
    std::size_t reads = 0;
  };

  FaultyFileIo() = default;
  /// Queues that begin make a call when it is begun, so that a test sees one that comes too early,
  /// and tell of its end when it is finished.
  explicit FaultyFileIo(bool can_begin) : can_begin_{can_begin} {}

  void plant(Faults const& faults) const {
    std::scoped_lock const lock{shared_->mutex};
    shared_->faults = faults;
  }
  [[nodiscard]] Calls calls() const {
    std::scoped_lock const lock{shared_->mutex};
    return shared_->calls;
  }

  [[nodiscard]] int allocate(int fd, std::uint64_t offset, std::size_t bytes) const noexcept {
    std::scoped_lock const lock{shared_->mutex};
    ++shared_->calls.allocates;
    return shared_->faults.allocate_error != 0 ? shared_->faults.allocate_error
                                               : PosixFileIo{}.allocate(fd, offset, bytes);
  }
  void discard(int fd, std::uint64_t offset, std::size_t bytes) const noexcept {
    std::scoped_lock const lock{shared_->mutex};
    ++shared_->calls.discards;
    PosixFileIo{}.discard(fd, offset, bytes);
  }

 private:
  struct Shared {
    std::mutex mutex;
    Faults faults;
    Calls calls;
    unsigned since_interrupt = 0;

    [[nodiscard]] Faults next_call(bool is_write) noexcept {
      std::scoped_lock const lock{mutex};
      ++(is_write ? calls.writes : calls.reads);
      Faults now = faults;
      if (now.interrupt_every != 0 && ++since_interrupt % now.interrupt_every != 0) {
        now.interrupt_every = 0;
      }
      return now;
    }
  };

 public:
  class Queue {
   public:
    [[nodiscard]] bool can_begin() const noexcept { return can_begin_; }
    [[nodiscard]] std::string_view name() const noexcept { return "faulty"; }
    void begin(FileTransfer& first) noexcept {
      for (FileTransfer* each = &first; can_begin_ && each != nullptr; each = each->next) {
        each->result = call(*each);
        each->state = FileTransfer::State::done;
      }
    }
    [[nodiscard]] ssize_t finish(FileTransfer& transfer) noexcept {
      bool const has_begun =
          std::exchange(transfer.state, FileTransfer::State::idle) == FileTransfer::State::done;
      return has_begun ? transfer.result : call(transfer);
    }

   private:
    friend FaultyFileIo;
    Queue(std::shared_ptr<Shared> shared, int fd, bool can_begin)
        : shared_{std::move(shared)}, plain_{fd}, can_begin_{can_begin} {}

    [[nodiscard]] ssize_t call(FileTransfer transfer) noexcept {
      Faults const faults = shared_->next_call(transfer.is_write);
      int const planted = transfer.is_write ? faults.write_error : faults.read_error;
      if (faults.interrupt_every != 0) {
        return -EINTR;
      }
      if (planted != 0 && transfer.offset >= faults.failing_from &&
          transfer.offset < faults.failing_to) {
        return -planted;
      }
      if (faults.is_truncated && !transfer.is_write) {
        return 0;
      }
      transfer.bytes = std::min(transfer.bytes, faults.most_bytes);
      return plain_.finish(transfer);
    }

    std::shared_ptr<Shared> shared_;
    PosixFileIo::Queue plain_;
    bool can_begin_;
  };

  [[nodiscard]] Queue make_queue(int fd, std::span<std::byte> /*memory*/) const {
    return Queue{shared_, fd, can_begin_};
  }

 private:
  bool can_begin_ = false;
  std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
};

static_assert(FileIoApi<FaultyFileIo>);

}  // namespace spillway::testing
