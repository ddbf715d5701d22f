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

/// Registers a file with cuFile. It uses a duplicated descriptor, since cuFile accepts each
/// descriptor only once.
class CuFileHandle {
 public:
  /// Makes an empty handle if cuFile refuses the file or is not available on this machine.
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

/// A `FileIoApi` whose queues transfer between a file and GPU memory, through cuFile (GPUDirect
/// Storage). There is no copy in host memory if machine and file system support that; otherwise
/// cuFile itself copies through host memory.
///
/// Transfers of host memory go through `HostIo`. So does everything if cuFile refuses the file or
/// its calls on streams. cuFile needs direct I/O (`HostPoolOptions::file_direct_io`) and is not
/// used if checksums are on (`file_checksums`). Only the file is registered with cuFile, not the
/// device memory, whose mapping may change; bytes go through cuFile's own buffers on the device.
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

    /// Must not be called for a device without CUDA: without a driver, cuFile may never return.
    [[nodiscard]] bool reaches_device() noexcept {
      if (!file_) {
        file_.emplace(fd_);
      }
      return is_usable();
    }
    /// `transfer` must stay unchanged until the stream has run it, since cuFile reads it then.
    template <class Device>
      requires std::same_as<typename Device::stream_type, CUstream>
    [[nodiscard]] bool try_enqueue(Device& device, FileTransfer& transfer, CUstream stream) {
      // Static, since cuFile reads it when the stream runs the transfer. Nothing writes it.
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
  // Set once cuFile has refused a call on a stream. Shared by the queues of both directions.
  std::shared_ptr<std::atomic<bool>> has_refused_ = std::make_shared<std::atomic<bool>>(false);
};

static_assert(FileIoApi<CuFileIo<>>);

}  // namespace spillway
