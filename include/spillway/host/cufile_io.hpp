// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/file_io_api.hpp>
#include <spillway/host/posix_file_io.hpp>

#include <atomic>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <utility>

#include <cufile.h>
#include <fcntl.h>
#include <sys/types.h>
#include <unistd.h>

namespace spillway::detail {

/// A file as cuFile knows it, through a descriptor of its own: cuFile takes each only once.
class CuFileHandle {
 public:
  /// Empty where cuFile refuses the file, or is not to be had on this machine.
  explicit CuFileHandle(int fd) noexcept : fd_{::fcntl(fd, F_DUPFD_CLOEXEC, 0)} {
    CUfileDescr_t description{};
    description.type = CU_FILE_HANDLE_TYPE_OPAQUE_FD;
    description.handle.fd = fd_;
    CUfileOpError const opened = cuFileDriverOpen().err;
    bool const is_open = opened == CU_FILE_SUCCESS || opened == CU_FILE_DRIVER_ALREADY_OPEN;
    if (fd_ < 0 || !is_open ||
        cuFileHandleRegister(&handle_, &description).err != CU_FILE_SUCCESS) {
      handle_ = nullptr;
    }
  }
  CuFileHandle(CuFileHandle&& other) noexcept
      : fd_{std::exchange(other.fd_, -1)}, handle_{std::exchange(other.handle_, nullptr)} {}
  CuFileHandle& operator=(CuFileHandle&&) = delete;
  ~CuFileHandle() {
    if (handle_ != nullptr) {
      cuFileHandleDeregister(handle_);
    }
    if (fd_ >= 0) {
      ::close(fd_);
    }
  }

  [[nodiscard]] CUfileHandle_t get() const noexcept { return handle_; }

 private:
  int fd_;
  CUfileHandle_t handle_ = nullptr;
};

}  // namespace spillway::detail

namespace spillway {

/// A `FileIoApi` whose queues reach the memory of GPUs, through cuFile (GPUDirect Storage): with no
/// copy in host memory where machine and file system can do that, else cuFile copies there itself.
///
/// Transfers of host memory go through `HostIo`, and so does everything where cuFile refuses
/// the file, or its calls on streams. cuFile wants direct I/O (`HostPoolOptions::file_direct_io`)
/// and is not used where bytes have checksums (`file_checksums`). Only the file is registered with
/// it, no device memory, which may move: bytes go through buffers of cuFile on the device.
///
/// Failure  the bytes of a write that fails are lost, as `HostSwapPool` says of direct transfers.
///
/// Needs libcufile of CUDA 12.2 or newer: link `spillway::cufile`.
template <FileIoApi HostIo = PosixFileIo>
class CuFileIo {
  using HostQueue = decltype(std::declval<HostIo&>().make_queue(0, std::span<std::byte>{}));

 public:
  CuFileIo() = default;
  explicit CuFileIo(HostIo host) : host_{std::move(host)} {}

  class Queue {
   public:
    Queue(HostQueue host, int fd, std::shared_ptr<std::atomic<bool>> has_refused)
        : host_{std::move(host)}, fd_{fd}, has_refused_{std::move(has_refused)} {}

    [[nodiscard]] bool can_begin() noexcept { return host_.can_begin(); }
    void begin(FileTransfer& transfer) noexcept { host_.begin(transfer); }
    [[nodiscard]] ssize_t finish(FileTransfer& transfer) noexcept { return host_.finish(transfer); }
    [[nodiscard]] std::string_view name() noexcept { return is_usable() ? "cuFile" : host_.name(); }

    /// Not called for a device without CUDA: where there is no driver, cuFile may never return.
    [[nodiscard]] bool reaches_device() noexcept {
      if (!file_) {
        file_.emplace(fd_);
      }
      return is_usable();
    }
    /// cuFile reads what it needs of `transfer` when the stream comes to it.
    template <class Device>
      requires std::same_as<typename Device::stream_type, CUstream>
    [[nodiscard]] bool try_enqueue(Device& device, FileTransfer& transfer, CUstream stream) {
      static off_t none = 0;
      auto const call = transfer.is_write ? &cuFileWriteAsync : &cuFileReadAsync;
      auto* const offset = reinterpret_cast<off_t*>(&transfer.offset);
      CUfileError_t status{};
      device.enqueue_kernels([&] {
        status = call(file_->get(),
                      transfer.memory,
                      &transfer.bytes,
                      offset,
                      &none,
                      &transfer.result,
                      stream);
      });
      if (status.err != CU_FILE_SUCCESS) {
        *has_refused_ = true;
      }
      return status.err == CU_FILE_SUCCESS;
    }

   private:
    [[nodiscard]] bool is_usable() const noexcept {
      return file_ && file_->get() != nullptr && !*has_refused_;
    }

    HostQueue host_;
    int fd_;
    std::optional<detail::CuFileHandle> file_;  // from the first `reaches_device` on
    std::shared_ptr<std::atomic<bool>> has_refused_;
  };

  [[nodiscard]] int allocate(int fd, std::uint64_t offset, std::size_t bytes) noexcept {
    return host_.allocate(fd, offset, bytes);
  }
  void discard(int fd, std::uint64_t offset, std::size_t bytes) noexcept {
    host_.discard(fd, offset, bytes);
  }
  [[nodiscard]] Queue make_queue(int fd, std::span<std::byte> memory) {
    return Queue{host_.make_queue(fd, memory), fd, has_refused_};
  }

 private:
  [[no_unique_address]] HostIo host_;
  // A call on a stream, for all queues: of the other direction, too.
  std::shared_ptr<std::atomic<bool>> has_refused_ = std::make_shared<std::atomic<bool>>(false);
};

static_assert(FileIoApi<CuFileIo<>>);

}  // namespace spillway
