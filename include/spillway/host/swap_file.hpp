// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/file_io_api.hpp>
#include <spillway/core/error.hpp>
#include <spillway/host/file_checksums.hpp>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <stdlib.h>  // NOLINT(modernize-deprecated-headers): mkostemp and realpath are POSIX
#include <sys/stat.h>
#include <unistd.h>

namespace spillway::detail {

/// Memory for file calls, aligned as O_DIRECT needs it.
struct FreeFileMemory {
  static constexpr std::align_val_t alignment{FileChecksums::unit_bytes};

  void operator()(std::byte* memory) const noexcept { ::operator delete[](memory, alignment); }
};
using FileMemory = std::unique_ptr<std::byte[], FreeFileMemory>;

/// @throws std::bad_alloc
[[nodiscard]] inline FileMemory make_file_memory(std::size_t bytes) {
  return FileMemory{static_cast<std::byte*>(::operator new[](bytes, FreeFileMemory::alignment))};
}

/// The file of the file tier: opened by the constructor, removed by the destructor.
///
/// `TierMemory` owns it and reserves and releases room in it slab by slab; `SlotIo` reads and
/// writes the slots' pieces through a queue for each direction.
///
/// If the path is a folder, the file has no name and disappears even if the program is killed. If
/// it is a file name, that file must not exist, so that no data is overwritten.
///
/// A forked child shares the file with its parent, and they would overwrite each other's bytes. So
/// only the parent may use it: in the child no room can be reserved, and transfers fail.
///
/// Threads  thread-safe. A queue: as its model says.
template <FileIoApi FileIo>
class SwapFile {
  using ModelQueue = decltype(std::declval<FileIo&>().make_queue(0, std::span<std::byte>{}));

 public:
  static constexpr int is_corrupt = EBADMSG;
  static constexpr int is_parents = ESTALE;
  /// Returns the text for one of these numbers, or for an error number of the system.
  [[nodiscard]] static std::string reason(int error) {
    if (error == is_corrupt) {
      return "they are not what was written there (their checksums differ)";
    }
    if (error == is_parents) {
      return "the file is that of the process from which this one was forked";
    }
    return std::generic_category().message(error);
  }
  /// Whether the file's queues may carry bytes straight from and to such a device.
  template <class Device>
  static constexpr bool may_reach = DeviceFileQueueApi<ModelQueue, Device>;

  /// Makes transfers complete: repeats calls that were interrupted by a signal or transferred less
  /// than was asked for. Stores checksums of what is written and checks those of what is read.
  class Queue {
   public:
    Queue(ModelQueue queue, FileChecksums* sums, pid_t owner)
        : queue_{std::move(queue)}, sums_{sums}, owner_{owner} {}

    [[nodiscard]] bool can_begin() const noexcept { return queue_.can_begin(); }
    [[nodiscard]] std::string_view name() const noexcept { return queue_.name(); }
    void begin(FileTransfer& transfer) noexcept {
      if (::getpid() == owner_) {
        queue_.begin(transfer);
      }
    }

    template <class Device>
    [[nodiscard]] bool
    try_enqueue(Device& device, FileTransfer& transfer, typename Device::stream_type stream) {
      return ::getpid() == owner_ && queue_.try_enqueue(device, transfer, stream);
    }
    /// Whether `try_enqueue` may be used, which does not support checksums.
    template <class Device>
    [[nodiscard]] bool reaches() const noexcept {
      if constexpr (may_reach<Device>) {
        return sums_ == nullptr && queue_.reaches_device();
      }
      return false;
    }

    /// Completes a transfer. @returns 0, or an error number: EIO if the file ends early,
    /// `is_corrupt` if bytes differ from those that were written, `is_parents` in a forked child
    [[nodiscard]] int finish(FileTransfer& transfer) noexcept {
      if (::getpid() != owner_) {
        return is_parents;
      }
      std::byte const* const memory = transfer.memory;
      std::size_t const bytes = transfer.bytes;
      std::uint64_t const offset = transfer.offset;
      if (sums_ != nullptr && transfer.is_write) {  // computed while the disk is writing, if begun
        sums_->note(memory, bytes, offset);
      }
      if (int const error = move(transfer); error != 0) {
        return error;
      }
      bool const is_good =
          sums_ == nullptr || transfer.is_write || sums_->match(memory, bytes, offset);
      return is_good ? 0 : is_corrupt;
    }
    /// As `finish`, of a transfer that was not begun.
    [[nodiscard]] int
    write(std::byte const* from, std::size_t bytes, std::uint64_t offset) noexcept {
      FileTransfer transfer{const_cast<std::byte*>(from), bytes, offset, true};
      return finish(transfer);
    }
    [[nodiscard]] int read(std::byte* to, std::size_t bytes, std::uint64_t offset) noexcept {
      FileTransfer transfer{to, bytes, offset, false};
      return finish(transfer);
    }

   private:
    [[nodiscard]] int move(FileTransfer& transfer) noexcept {
      while (transfer.bytes > 0) {
        ssize_t const moved = queue_.finish(transfer);
        if (moved == 0) {
          return EIO;
        }
        if (moved < 0) {
          if (moved == -EINTR) {
            continue;
          }
          return static_cast<int>(-moved);
        }
        transfer.memory += moved;
        transfer.offset += static_cast<std::uint64_t>(moved);
        transfer.bytes -= static_cast<std::size_t>(moved);
      }
      return 0;
    }

    mutable ModelQueue queue_;
    FileChecksums* sums_;  // null if checksums are off
    pid_t owner_;
  };

  /// The alignment that O_DIRECT needs of offsets, sizes and addresses, and the unit of checksums.
  static constexpr std::size_t unit_bytes = FileChecksums::unit_bytes;

  /// @throws FileTierError naming the path and the system's reason; std::bad_alloc. There is no new
  ///         file then
  SwapFile(std::string path, bool wants_direct_io, FileIo io, bool wants_checksums = false)
      : path_{std::move(path)},
        io_{std::move(io)},
        is_checked_{wants_checksums && FileChecksums::is_available} {
    struct stat status {};
    if (::stat(path_.c_str(), &status) == 0 && S_ISDIR(status.st_mode)) {
      open_nameless();
    } else {
      fd_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, S_IRUSR | S_IWUSR);
      if (fd_ >= 0) {
        is_named_ = true;
        try {
          make_absolute();
        } catch (...) {
          close();
          throw;
        }
      }
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
    close();
  }

  /// Reserves room for `bytes`: in a range that was released, else at the end of the file.
  ///
  /// @returns the offset, or nothing when the disk is full or refuses
  /// @throws  std::bad_alloc, with nothing changed
  [[nodiscard]] std::optional<std::uint64_t> try_reserve(std::size_t bytes) {
    std::scoped_lock const lock{mutex_};
    if (!is_owner()) {
      refusal_ = is_parents;
      return std::nullopt;
    }
    auto const hole = std::find_if(
        holes_.begin(), holes_.end(), [&](Hole const& each) { return each.bytes >= bytes; });
    std::uint64_t const offset = hole != holes_.end() ? hole->offset : size_bytes_;
    if (is_checked_) {
      sums_.grow(offset + bytes);
    }
    refusal_ = io_.allocate(fd_, offset, bytes);
    if (refusal_ != 0) {
      io_.discard(fd_, offset, bytes);  // frees what was allocated before the disk was full
      return std::nullopt;
    }
    if (hole == holes_.end()) {
      size_bytes_ += bytes;
    } else if (hole->bytes == bytes) {
      holes_.erase(hole);
    } else {
      *hole = {offset + bytes, hole->bytes - bytes};
    }
    return offset;
  }

  /// Gives the room of a range back to the file system. @throws std::bad_alloc; the file then keeps
  /// the room
  void release(std::uint64_t offset, std::size_t bytes) {
    std::scoped_lock const lock{mutex_};
    if (!is_owner()) {
      return;
    }
    auto const next = std::find_if(
        holes_.begin(), holes_.end(), [&](Hole const& each) { return each.offset > offset; });
    auto const made = holes_.insert(next, Hole{offset, bytes});
    io_.discard(fd_, offset, bytes);
    if (auto const after = made + 1; after != holes_.end() && after->offset == offset + bytes) {
      made->bytes += after->bytes;
      holes_.erase(after);
    }
    if (made != holes_.begin() && (made - 1)->offset + (made - 1)->bytes == offset) {
      (made - 1)->bytes += made->bytes;
      holes_.erase(made);
    }
  }

  /// Writes one unit to room of its own, to find out whether the file takes writes.
  ///
  /// @returns 0 or an error number
  [[nodiscard]] int try_out(Queue& queue) noexcept {
    alignas(unit_bytes) static constexpr std::array<std::byte, unit_bytes> zeros{};
    try {
      std::optional<std::uint64_t> const offset = try_reserve(zeros.size());
      if (!offset) {
        return refusal_;
      }
      int const error = queue.write(zeros.data(), zeros.size(), *offset);
      release(*offset, zeros.size());
      return error;
    } catch (std::bad_alloc const&) {
      return ENOMEM;
    }
  }

  /// A queue of transfers, most of them to and from `memory`. @throws std::bad_alloc
  [[nodiscard]] Queue make_queue(std::span<std::byte> memory) {
    return Queue{io_.make_queue(fd_, memory), is_checked_ ? &sums_ : nullptr, owner_};
  }

  [[nodiscard]] std::string const& path() const noexcept {
    return path_;
  }
  /// Returns the error number of the last request for room; 0 if it was granted.
  [[nodiscard]] int refusal() const noexcept {
    return refusal_;
  }
  [[nodiscard]] bool is_direct() const noexcept {
    return is_direct_;
  }
  /// Whether bytes are compared with their checksums when they are read.
  [[nodiscard]] bool is_checked() const noexcept {
    return is_checked_;
  }
  /// Whether offsets and sizes must be multiples of `unit_bytes`.
  [[nodiscard]] bool moves_units() const noexcept {
    return is_direct_ || is_checked_;
  }

 private:
  [[nodiscard]] bool is_owner() const noexcept {
    return ::getpid() == owner_;
  }
  /// Makes the path absolute, since the program may change its working directory.
  void make_absolute() {
    struct Free {
      void operator()(char* memory) const noexcept { ::free(memory); }
    };
    std::unique_ptr<char, Free> const name{::realpath(path_.c_str(), nullptr)};
    if (name != nullptr) {
      path_ = name.get();
    }
  }
  void close() noexcept {
    if (is_named_ && is_owner() && is_at(path_)) {
      ::unlink(path_.c_str());
    }
    ::close(fd_);
  }
  /// Whether `path` still names this file: it may have been renamed and another one created.
  [[nodiscard]] bool is_at(std::string const& path) const noexcept {
    struct stat mine {};
    struct stat there {};
    return ::fstat(fd_, &mine) == 0 && ::lstat(path.c_str(), &there) == 0 &&
           mine.st_dev == there.st_dev && mine.st_ino == there.st_ino;
  }
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

  struct Hole {
    std::uint64_t offset = 0;
    std::size_t bytes = 0;
  };

  std::string path_;
  [[no_unique_address]] FileIo io_;
  pid_t const owner_ = ::getpid();
  int fd_ = -1;
  bool is_named_ = false;
  bool is_direct_ = false;
  bool is_checked_ = false;
  FileChecksums sums_;
  std::atomic<int> refusal_{0};
  std::mutex mutex_;  // guards what follows, and is held while the file system makes room
  std::uint64_t size_bytes_ = 0;
  std::vector<Hole> holes_;  // by offset; none touches the next
};

}  // namespace spillway::detail
