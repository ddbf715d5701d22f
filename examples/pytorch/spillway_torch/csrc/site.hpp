// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/default_policies.hpp>
#include <spillway/device/host_api.hpp>
#include <spillway/device_allocator.hpp>
#include <spillway/interop/torch.hpp>

#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include <c10/core/Device.h>
#include <c10/core/StorageImpl.h>
#include <pybind11/pybind11.h>

namespace spillway_torch {

/// Gives up the interpreter's lock if this thread has it, while it waits for threads that may need it.
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

/// CPU tensors: an arena of host memory stands in for a device's.
struct HostSite {
  struct Policies : spillway::SimPolicies {
    using device = spillway::HostApi;
  };
  using allocator_type = spillway::DeviceAllocator<Policies>;
  using Desk = spillway::pytorch::StorageDesk<HostSite>;
  using TensorAllocator = spillway::pytorch::HostTensorAllocator<HostSite>;

  /// All that exists once in a process. Made by `install` and never destroyed: tensors outlive
  /// everything else.
  struct State {
    spillway::HostApi device;
    allocator_type memory;
    Desk desk;
    TensorAllocator tensors;
    std::shared_ptr<void> hook;
    std::mutex ballast_mutex;
    std::vector<std::pair<spillway::BlockId, allocator_type::lease_type>> ballast;
    std::size_t ballast_bytes = 0;
    std::atomic<std::size_t> foreach_bytes{0};

    State(allocator_type::Options options, c10::Allocator& small, std::size_t least_bytes)
        : memory{device, std::move(options)}, desk{memory}, tensors{small, least_bytes} {}
  };
  static State*& state() {
    static State* the_state = nullptr;
    return the_state;
  }

  static Desk& desk() { return state()->desk; }
  static Desk::Frames& frames() {
    thread_local Desk::Frames mine;
    return mine;
  }
  static spillway::pytorch::HookState& hook() {
    thread_local spillway::pytorch::HookState mine;
    return mine;
  }
  static spillway::HostStream current_stream() { return spillway::HostStream::caller; }
  static c10::Device device() { return c10::Device{c10::DeviceType::CPU}; }
  static bool allocates_for(c10::StorageImpl const& storage) {
    // Storages that cannot be resized, such as those that `torch.load` makes, may name no allocator.
    return storage.allocator() == &state()->tensors || storage.allocator() == nullptr;
  }
  static void drop_foreign(void* p) { state()->tensors.drop_small(p); }
  static WithoutInterpreter let_others_run() { return {}; }
  static void on_out_of_memory() {}
  static std::size_t foreach_bytes() { return state()->foreach_bytes; }
};

}  // namespace spillway_torch
