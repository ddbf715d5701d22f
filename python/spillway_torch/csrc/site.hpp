// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/error.hpp>
#include <spillway/interop/framework/install_options.hpp>
#include <spillway/interop/torch.hpp>

#include <atomic>
#include <cstddef>
#include <limits>
#include <memory>
#include <new>
#include <utility>

#include <c10/core/DispatchKey.h>
#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>

namespace spillway_torch {

/// Gives up the interpreter's lock if this thread has it, while it waits for threads that may need
/// it. The destructor is left by unwinding where the interpreter ends meanwhile (`ReleasedLock`).
class WithoutInterpreter {
 public:
  WithoutInterpreter() : state_{PyGILState_Check() != 0 ? PyEval_SaveThread() : nullptr} {}
  WithoutInterpreter(WithoutInterpreter const&) = delete;
  WithoutInterpreter& operator=(WithoutInterpreter const&) = delete;
  ~WithoutInterpreter() noexcept(false) {
    if (state_ != nullptr) {
      PyEval_RestoreThread(state_);
    }
  }

 private:
  PyThreadState* state_;
};

constexpr c10::DispatchKey hook_key = c10::DispatchKey::TESTING_ONLY_GenericMode;

/// The arguments of `install`.
struct InstallOptions : spillway::framework::InstallOptions {
  int ordinal = -1;  // of the device; -1: the current one
  /// The rate of copies each way: what a device without a link is slowed down to, and what plans
  /// count with on one that has a link; 0: as fast as they are, and what the allocator assumes.
  double link_bytes_per_second = 0;
};

/// The objects that exist once in a process. `install` makes them, and they are never destroyed,
/// since tensors outlive everything else.
template <class Site>
struct SiteState {
  using Allocator = typename Site::allocator_type;
  using Device = typename Allocator::device_type;
  using Hook = spillway::torch::FrameHook<Site, hook_key>;

  Device device;
  Allocator memory;
  std::size_t most_bytes;  // that the limit can be
  spillway::torch::StorageLeases<Site> leases;
  spillway::torch::OperationTimes operation_times;
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
                  "spillway_torch cannot be installed beside a module that has a fallback on "
                  "PyTorch's dispatch key ",
                  c10::toString(hook_key),
                  ", which it needs for itself: ",
                  error.what_without_backtrace());
    }
  }

  [[nodiscard]] std::size_t limit() const { return memory.stats().capacity_bytes; }

  /// Lowers the limit below that of `install`, or raises it again.
  void set_limit(std::size_t limit) {
    TORCH_CHECK(limit <= most_bytes,
                "the limit can be raised to ",
                most_bytes,
                " bytes at most, with which spillway_torch was installed");
    auto const refuse = [](std::bad_alloc const& error) {
      TORCH_CHECK_WITH(
          OutOfMemoryError, false, "the limit cannot be lowered so far now: ", error.what());
    };
    try {
      leases.set_capacity(limit);
    } catch (spillway::OutOfDeviceMemory const& error) {
      refuse(error);
    } catch (spillway::OutOfHostMemory const& error) {
      refuse(error);
    }
    foreach_bytes = limit / 8;
  }

 private:
  /// Adapts options to the device. Memory that is taken later joins the first, where the device can
  /// map it. Elsewhere later memory would lie apart from the first, so all is taken at once.
  [[nodiscard]] typename Allocator::Options fitted(typename Allocator::Options options) const {
    options = spillway::framework::with_host_memory(device, std::move(options));
    options.grows_in_place = true;
    if constexpr (requires { device.has_virtual_memory(); }) {
      options.grows_in_place = device.has_virtual_memory();
    }
    if (!options.grows_in_place) {
      options.initial_bytes = std::numeric_limits<std::size_t>::max();
      options.growth_bytes = std::numeric_limits<std::size_t>::max();  // after `empty_cache`
    }
    return options;
  }
};

}  // namespace spillway_torch
