// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/device_api.hpp>
#include <spillway/core/types.hpp>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <mutex>
#include <new>
#include <vector>

namespace spillway::detail {

/// Carries bytes between ordinary host memory and the device through pinned chunks.
///
/// A copy from or to memory that is not page-locked would wait inside the driver without saying so;
/// this waits in the open. Chunks are pinned at first use, one for each thread that copies at once,
/// and kept.
///
/// Threads  thread-safe.
/// Streams  enqueues on the stream it is given and waits on the host for it.
template <DeviceApi Device>
class HostStaging {
 public:
  using stream_type = typename Device::stream_type;

  static constexpr std::size_t chunk_bytes = 4_MiB;

  /// `device` is not owned and must outlive this object.
  explicit HostStaging(Device& device) : device_{&device} {}
  HostStaging(HostStaging const&) = delete;
  HostStaging& operator=(HostStaging const&) = delete;
  ~HostStaging() {
    for (void* const chunk : idle_) {
      device_->free_pinned(chunk, chunk_bytes);
    }
  }

  void
  copy_from_host_sync(void* device_to, void const* from, std::size_t bytes, stream_type stream) {
    for_each_chunk(bytes, [&](void* chunk, std::size_t offset, std::size_t length) {
      std::memcpy(chunk, static_cast<std::byte const*>(from) + offset, length);
      device_->copy(
          static_cast<std::byte*>(device_to) + offset, chunk, length, CopyKind::to_device, stream);
      device_->synchronize(stream);
    });
  }

  void copy_to_host_sync(void* to, void const* device_from, std::size_t bytes, stream_type stream) {
    for_each_chunk(bytes, [&](void* chunk, std::size_t offset, std::size_t length) {
      device_->copy(chunk,
                    static_cast<std::byte const*>(device_from) + offset,
                    length,
                    CopyKind::to_host,
                    stream);
      device_->synchronize(stream);
      std::memcpy(static_cast<std::byte*>(to) + offset, chunk, length);
    });
  }

 private:
  /// A chunk that is ours for as long as this lives.
  class Borrowed {
   public:
    explicit Borrowed(HostStaging& staging) : staging_{staging} {
      {
        std::scoped_lock const lock{staging.mutex_};
        if (!staging.idle_.empty()) {
          chunk_ = staging.idle_.back();
          staging.idle_.pop_back();
          return;
        }
        ++staging.chunks_;
        staging.idle_.reserve(staging.chunks_);  // so that giving back cannot fail
      }
      chunk_ = staging.device_->try_allocate_pinned(chunk_bytes, staging.device_->numa_node());
      if (chunk_ == nullptr) {
        throw std::bad_alloc{};
      }
    }
    Borrowed(Borrowed const&) = delete;
    Borrowed& operator=(Borrowed const&) = delete;
    ~Borrowed() {
      std::scoped_lock const lock{staging_.mutex_};
      staging_.idle_.push_back(chunk_);
    }
    [[nodiscard]] void* chunk() const noexcept { return chunk_; }

   private:
    HostStaging& staging_;
    void* chunk_ = nullptr;
  };

  template <class Use>
  void for_each_chunk(std::size_t bytes, Use use) {
    Borrowed const borrowed{*this};
    for (std::size_t offset = 0; offset < bytes; offset += chunk_bytes) {
      use(borrowed.chunk(), offset, std::min(chunk_bytes, bytes - offset));
    }
  }

  Device* device_;
  std::mutex mutex_;
  std::size_t chunks_ = 0;
  std::vector<void*> idle_;
};

}  // namespace spillway::detail
