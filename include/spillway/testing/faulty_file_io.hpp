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

  [[nodiscard]] ssize_t
  write(int fd, void const* from, std::size_t bytes, std::uint64_t offset) const noexcept {
    Faults const faults = next_call(&Calls::writes);
    if (int const error = error_of(faults, faults.write_error, offset); error != 0) {
      errno = error;
      return -1;
    }
    return PosixFileIo{}.write(fd, from, std::min(bytes, faults.most_bytes), offset);
  }

  [[nodiscard]] ssize_t
  read(int fd, void* to, std::size_t bytes, std::uint64_t offset) const noexcept {
    Faults const faults = next_call(&Calls::reads);
    if (int const error = error_of(faults, faults.read_error, offset); error != 0) {
      errno = error;
      return -1;
    }
    return faults.is_truncated
               ? 0
               : PosixFileIo{}.read(fd, to, std::min(bytes, faults.most_bytes), offset);
  }

 private:
  struct Shared {
    std::mutex mutex;
    Faults faults;
    Calls calls;
    unsigned since_interrupt = 0;
  };

  [[nodiscard]] Faults next_call(std::size_t Calls::*counter) const noexcept {
    std::scoped_lock const lock{shared_->mutex};
    ++(shared_->calls.*counter);
    Faults faults = shared_->faults;
    if (faults.interrupt_every != 0 && ++shared_->since_interrupt % faults.interrupt_every != 0) {
      faults.interrupt_every = 0;
    }
    return faults;
  }

  static int error_of(Faults const& faults, int planted, std::uint64_t offset) noexcept {
    if (faults.interrupt_every != 0) {
      return EINTR;
    }
    return offset >= faults.failing_from && offset < faults.failing_to ? planted : 0;
  }

  std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
};

static_assert(FileIoApi<FaultyFileIo>);

}  // namespace spillway::testing
