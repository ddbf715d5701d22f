// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/prefetch_policy.hpp>
#include <spillway/core/error.hpp>
#include <spillway/interop/framework/install_options.hpp>
#include <spillway/interop/framework/memory_limit.hpp>
#include <spillway/interop/torch.hpp>

#include <atomic>
#include <cstddef>
#include <limits>
#include <memory>
#include <utility>

#include <c10/core/DispatchKey.h>
#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>

namespace spillway_torch {

/// Gives up the interpreter's lock if this thread has it, while it waits for threads that may need
/// it.
class WithoutInterpreter {
 public:
  WithoutInterpreter() : state_{PyGILState_Check() != 0 ? PyEval_SaveThread() : nullptr} {}
  WithoutInterpreter(WithoutInterpreter const&) = delete;
  WithoutInterpreter& operator=(WithoutInterpreter const&) = delete;
  ~WithoutInterpreter() {
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
};

/// The objects that exist once in a process. `install` makes them, and they are never destroyed,
/// since tensors outlive everything else.
template <class Site>
struct SiteState {
  using Allocator = typename Site::allocator_type;
  using Device = typename Allocator::device_type;
  using Hook = spillway::torch::FrameHook<Site, hook_key>;

  Device device;
  spillway::framework::SharedLimit limit_bytes = std::make_shared<std::atomic<std::size_t>>(0);
  Allocator memory;
  spillway::torch::StorageLeases<Site> leases;
  std::unique_ptr<typename Hook::Registration> hook;
  spillway::framework::LimitReservation<Allocator> reservation{memory};
  std::atomic<std::size_t> foreach_bytes{0};
  std::atomic<std::size_t> least_bytes{0};

  template <class... Args>
  explicit SiteState(typename Allocator::Options memory_options,
                     std::size_t least,
                     Args... device_args)
      : device{device_args...},
        memory{device, with_limit(std::move(memory_options))},
        leases{memory},
        least_bytes{least} {
    note_limit(memory.stats().capacity_bytes);
  }

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

  [[nodiscard]] std::size_t limit() const { return reservation.limit_bytes(); }

  /// Lowers the limit below what was reserved, or raises it again.
  void set_limit(std::size_t limit) {
    std::size_t const capacity = memory.stats().capacity_bytes;
    TORCH_CHECK(limit <= capacity,
                "the limit can be raised to ",
                capacity,
                " bytes at most, with which spillway_torch was installed");
    try {
      reservation.set_limit(limit, Site::current_stream(), [this] {
        return !leases.is_under_pressure() && (leases.start_reclaim(), true);
      });
    } catch (spillway::OutOfDeviceMemory const& error) {
      note_limit(reservation.limit_bytes());
      TORCH_CHECK_WITH(
          OutOfMemoryError, false, "the limit cannot be lowered further now: ", error.what());
    }
    note_limit(limit);
  }

 private:
  [[nodiscard]] typename Allocator::Options with_limit(typename Allocator::Options options) const {
    options.prefetch = spillway::framework::LimitedLookahead{
        {.max_inflight_bytes = std::numeric_limits<std::size_t>::max()}, limit_bytes};
    return options;
  }
  void note_limit(std::size_t bytes) {
    *limit_bytes = bytes;
    foreach_bytes = bytes / 8;
  }
};

}  // namespace spillway_torch
