// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/error.hpp>
#include <spillway/interop/framework/install_options.hpp>
#include <spillway/interop/torch/frame_hook.hpp>
#include <spillway/interop/torch/operation_times.hpp>
#include <spillway/interop/torch/site.hpp>
#include <spillway/interop/torch/storage_leases.hpp>

#include <atomic>
#include <cstddef>
#include <limits>
#include <memory>
#include <new>
#include <utility>

#include <c10/core/DispatchKey.h>
#include <c10/util/Exception.h>
#include <unistd.h>

namespace spillway::torch {

/// For a site of a program without Python: nothing has to be given up while a thread waits.
struct NoInterpreter {
  NoInterpreter() noexcept {}  // NOLINT(modernize-use-equals-default): its object is never read
};

/// The frames of one thread of a program in C++, for a thread-local variable of a site. They end
/// with the thread. Those of the main thread are never destroyed, since objects with static storage
/// may still use them when its thread-local variables are gone. In Python the module itself ends a
/// thread's holds.
template <class Site>
class ThreadFramesOf {
 public:
  using Frames = typename StorageLeases<Site>::Frames;

  ThreadFramesOf() = default;
  ThreadFramesOf(ThreadFramesOf const&) = delete;
  ThreadFramesOf& operator=(ThreadFramesOf const&) = delete;
  ~ThreadFramesOf() {
    if (Site::state() != nullptr) {
      Site::leases().end_thread(*frames_);
    }
    if (::gettid() != ::getpid()) {
      delete frames_;
    }
  }

  [[nodiscard]] Frames& get() noexcept { return *frames_; }

 private:
  Frames* frames_ = new Frames;
};

/// The frames of the calling thread.
template <class Site>
[[nodiscard]] typename StorageLeases<Site>::Frames& frames_of_thread() {
  if constexpr (ReadingSite<Site>) {
    thread_local ThreadFramesOf<Site> mine;
    return mine.get();
  } else {
    thread_local typename StorageLeases<Site>::Frames mine;
    return mine;
  }
}

/// The dispatch key on which the hook is installed. PyTorch itself uses it in tests only.
inline constexpr c10::DispatchKey hook_key = c10::DispatchKey::TESTING_ONLY_GenericMode;

/// Options of `LargeModelSupport::install`.
struct InstallOptions : framework::InstallOptions {
  int ordinal = -1;  ///< number of the CUDA device; -1: the current one
  /// Rate of copies in each direction. A device without a link is slowed down to it; the allocator
  /// of one with a link plans with it. 0: no slowdown, and the allocator's default.
  double link_bytes_per_second = 0;
};

/// The objects of which a process has one each. `install` makes them. They are never destroyed,
/// since tensors may outlive everything else.
template <class Site>
struct SiteState {
  using Allocator = typename Site::allocator_type;
  using Device = typename Allocator::device_type;
  using Hook = FrameHook<Site, hook_key>;

  Device device;
  Allocator memory;
  std::size_t most_bytes;  // the highest limit that can be set
  StorageLeases<Site> leases;
  OperationTimes operation_times;
  std::unique_ptr<typename Hook::Registration> hook;
  std::atomic<std::size_t> foreach_bytes{0};
  std::atomic<std::size_t> least_bytes{0};

  template <class... Args>
  explicit SiteState(typename Allocator::Options memory_options,
                     std::size_t least,
                     Args... device_args)
      : device{device_args...},
        memory{device, fitted(std::move(memory_options))},
        most_bytes{memory.stats().capacity_bytes},
        leases{memory},
        foreach_bytes{most_bytes / 8},
        least_bytes{least} {}

  /// @throws c10::Error if another module has put a fallback on the hook's key
  [[nodiscard]] static std::unique_ptr<typename Hook::Registration> install_hook() {
    try {
      return Hook::install();
    } catch (c10::Error const& error) {
      TORCH_CHECK(false,
                  "spillway cannot be installed beside a module that has a fallback on "
                  "PyTorch's dispatch key ",
                  c10::toString(hook_key),
                  ", which it needs for itself: ",
                  error.what_without_backtrace());
    }
  }

  [[nodiscard]] std::size_t limit() const { return memory.stats().capacity_bytes; }

  /// Sets the limit, which can be lowered and raised again up to that of `install`, which 0 stands
  /// for.
  void set_limit(std::size_t limit) {
    limit = limit == 0 ? most_bytes : limit;
    TORCH_CHECK(limit <= most_bytes,
                "the limit can be raised to ",
                most_bytes,
                " bytes at most, with which spillway was installed");
    auto const refuse = [](std::bad_alloc const& error) {
      TORCH_CHECK_WITH(
          OutOfMemoryError, false, "the limit cannot be lowered that far now: ", error.what());
    };
    try {
      leases.set_capacity(limit);
    } catch (OutOfDeviceMemory const& error) {
      refuse(error);
    } catch (OutOfHostMemory const& error) {
      refuse(error);
    }
    foreach_bytes = limit / 8;
  }

 private:
  /// Adapts options to the device. If the device has virtual memory, the arena grows in place.
  /// Otherwise memory that is reserved later would not be adjacent to the first, so everything is
  /// reserved at once.
  [[nodiscard]] typename Allocator::Options fitted(typename Allocator::Options options) const {
    options = framework::with_host_memory(device, std::move(options));
    options.grows_in_place = true;
    if constexpr (requires { device.has_virtual_memory(); }) {
      options.grows_in_place = device.has_virtual_memory();
    }
    if (!options.grows_in_place) {
      options.initial_bytes = std::numeric_limits<std::size_t>::max();
      // for growth after `empty_cache`
      options.growth_bytes = std::numeric_limits<std::size_t>::max();
    }
    return options;
  }
};

}  // namespace spillway::torch
