// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/file_io_api.hpp>
#include <spillway/host/posix_file_io.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace spillway::test {

/// A model of `FileIoApi` that has only what the concept requires: it is made from a number,
/// copied, and called without `const`.
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

  class Queue {
   public:
    explicit Queue(int fd) : plain_{fd} {}
    Queue(Queue&&) = default;
    Queue& operator=(Queue&&) = delete;
    ~Queue() = default;

    bool can_begin() noexcept { return false; }
    void begin(FileTransfer& /*transfer*/) noexcept {}
    ssize_t finish(FileTransfer& transfer) noexcept { return plain_.finish(transfer); }
    std::string_view name() noexcept { return "archetype"; }

   private:
    PosixFileIo::Queue plain_;
  };
  Queue make_queue(int fd, std::span<std::byte> /*memory*/) { return Queue{fd}; }
};

/// The same with queues that model `DeviceFileQueueApi` for every device, of a file that cannot be
/// reached.
class DeviceFileIoArchetype : public FileIoArchetype {
 public:
  using FileIoArchetype::FileIoArchetype;

  class Queue : public FileIoArchetype::Queue {
   public:
    using FileIoArchetype::Queue::Queue;

    bool reaches_device() noexcept { return false; }
    template <class Device>
    bool try_enqueue(Device& /*device*/, FileTransfer& /*t*/, typename Device::stream_type) {
      return false;
    }
  };
  Queue make_queue(int fd, std::span<std::byte> /*memory*/) { return Queue{fd}; }
};

static_assert(FileIoApi<FileIoArchetype> && FileIoApi<DeviceFileIoArchetype>);

}  // namespace spillway::test
