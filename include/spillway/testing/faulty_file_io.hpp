// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/device_capabilities.hpp>
#include <spillway/concepts/file_io_api.hpp>
#include <spillway/core/config.hpp>
#include <spillway/host/posix_file_io.hpp>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <string_view>
#include <utility>

#include <sys/types.h>

namespace spillway::testing {

/// The system's file calls (`FileIoApi`), with faults that a test can set while the file is in use.
/// Pass a copy to a file tier and keep one: copies share their faults.
///
/// Threads  thread-safe.
class FaultyFileIo {
 public:
  struct Faults {
    int allocate_error = 0;
    int write_error = 0;
    int read_error = 0;
    /// The errors occur only at offsets in [failing_from, failing_to)
    std::uint64_t failing_from = 0;
    std::uint64_t failing_to = ~std::uint64_t{0};
    /// Most bytes that one call transfers, to test short counts
    std::size_t most_bytes = ~std::size_t{0};
    unsigned interrupt_every = 0;  ///< each nth call fails with EINTR; 0: none
    bool is_truncated = false;     ///< reads find the end of the file too early
    /// Most requests that `try_enqueue` accepts altogether
    std::size_t most_enqueued = ~std::size_t{0};
  };
  struct Calls {
    std::size_t discards = 0;
    std::size_t writes = 0;
    std::size_t reads = 0;
  };

  FaultyFileIo() = default;
  /// @param can_begin  whether its queues can begin requests: they make a call when it is begun, so
  ///                   that a test notices one that is made too early, and report its end when it
  ///                   is finished
  explicit FaultyFileIo(bool can_begin) : can_begin_{can_begin} {}
  /// Returns one whose queues can access device memory, for devices that are simulated in host
  /// memory.
  [[nodiscard]] static FaultyFileIo reaching_device() {
    FaultyFileIo io;
    io.shared_->reaches_device = true;
    return io;
  }

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
    return shared_->faults.allocate_error != 0 ? shared_->faults.allocate_error
                                               : PosixFileIo{}.allocate(fd, offset, bytes);
  }
  void discard(int fd, std::uint64_t offset, std::size_t bytes) const noexcept {
    std::scoped_lock const lock{shared_->mutex};
    ++shared_->calls.discards;
    PosixFileIo{}.discard(fd, offset, bytes);
  }

 private:
  struct Shared;
  struct Enqueued {
    Shared* shared;
    int fd;
    FileTransfer* transfer;
  };
  struct Shared {
    std::mutex mutex;
    bool reaches_device = false;
    std::deque<Enqueued> enqueued;
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

    [[nodiscard]] ssize_t call(int fd, FileTransfer transfer) noexcept {
      Faults const now = next_call(transfer.is_write);
      int const planted = transfer.is_write ? now.write_error : now.read_error;
      if (now.interrupt_every != 0) {
        return -EINTR;
      }
      if (planted != 0 && transfer.offset >= now.failing_from && transfer.offset < now.failing_to) {
        return -planted;
      }
      if (now.is_truncated && !transfer.is_write) {
        return 0;
      }
      transfer.bytes = std::min(transfer.bytes, now.most_bytes);
      return PosixFileIo::Queue{fd}.finish(transfer);
    }
    [[nodiscard]] ssize_t call_to_end(int fd, FileTransfer transfer) noexcept {
      ssize_t sum = 0;
      while (transfer.bytes > 0) {
        ssize_t const moved = call(fd, transfer);
        if (moved == -EINTR) {
          continue;
        }
        if (moved <= 0) {
          return moved < 0 ? moved : sum;
        }
        sum += moved;
        transfer.memory += moved;
        transfer.offset += static_cast<std::uint64_t>(moved);
        transfer.bytes -= static_cast<std::size_t>(moved);
      }
      return sum;
    }
  };

 public:
  class Queue {
   public:
    [[nodiscard]] bool can_begin() const noexcept { return can_begin_; }
    [[nodiscard]] std::string_view name() const noexcept { return "faulty"; }
    void begin(FileTransfer& first) noexcept {
      for (FileTransfer* each = &first; can_begin_ && each != nullptr; each = each->next) {
        each->result = shared_->call(fd_, *each);
        each->state = FileTransfer::State::done;
      }
    }
    [[nodiscard]] ssize_t finish(FileTransfer& transfer) noexcept {
      bool const has_begun =
          std::exchange(transfer.state, FileTransfer::State::idle) == FileTransfer::State::done;
      return has_begun ? transfer.result : shared_->call(fd_, transfer);
    }

    [[nodiscard]] bool reaches_device() const noexcept { return shared_->reaches_device; }
    template <AddressableApi Device>
    [[nodiscard]] bool
    try_enqueue(Device& device, FileTransfer& transfer, typename Device::stream_type stream) {
      Enqueued* const argument = [&] {
        std::scoped_lock const lock{shared_->mutex};
        return shared_->enqueued.size() >= shared_->faults.most_enqueued
                   ? nullptr
                   : &shared_->enqueued.emplace_back(Enqueued{shared_.get(), fd_, &transfer});
      }();
      if (argument == nullptr) {
        return false;
      }
      device.launch_host(
          stream,
          [](void* p) noexcept {
            Enqueued const& one = *static_cast<Enqueued*>(p);
            one.transfer->result = one.shared->call_to_end(one.fd, *one.transfer);
          },
          argument);
      return true;
    }

   private:
    friend FaultyFileIo;
    Queue(std::shared_ptr<Shared> shared, int fd, bool can_begin)
        : shared_{std::move(shared)}, fd_{fd}, can_begin_{can_begin} {}

    std::shared_ptr<Shared> shared_;
    int fd_;
    bool can_begin_;
  };

  [[nodiscard]] Queue make_queue(int fd, std::span<std::byte> /*memory*/) const {
    return Queue{shared_, fd, can_begin_};
  }

 private:
  bool can_begin_ = false;
  std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
};

SPILLWAY_CHECK_MODEL(FileIoApi<FaultyFileIo>);

}  // namespace spillway::testing
