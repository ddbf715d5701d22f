// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/device/host/host_api.hpp>
#include <spillway/device/host/host_paged_api.hpp>
#include <spillway/device_allocator.hpp>
#include <spillway/interop/torch.hpp>
#include <spillway/sim.hpp>

#include <cstddef>
#include <utility>

#include "site.hpp"
#include <c10/core/CPUAllocator.h>
#include <c10/core/Device.h>
#include <c10/core/StorageImpl.h>

namespace spillway_torch {

/// The site of PyTorch's CPU tensors. Their memory is an arena of host memory, which takes the
/// place of device memory.
struct HostSite {
  struct Policies : spillway::SimPolicies {
    using device = spillway::HostPagedApi;
  };
  using allocator_type = spillway::DeviceAllocator<Policies>;
  using Leases = spillway::torch::StorageLeases<HostSite>;
  using TensorAllocator = spillway::torch::HostTensorAllocator<HostSite>;
  using random_type = spillway::torch::TwisterState;
  using HookState = spillway::torch::HookState<random_type>;

  struct State : SiteState<HostSite> {
    TensorAllocator tensors;

    State(allocator_type::Options options, c10::Allocator& small, std::size_t least)
        : SiteState{options,
                    least,
                    spillway::HostPagedOptions{
                        .granularity_bytes =
                            spillway::HostPagedApi::granularity_for(options.capacity_bytes)}},
          tensors{small} {}
  };
  static State*& state() {
    static State* the_state = nullptr;
    return the_state;
  }

  static void install(InstallOptions const& wanted) {
    auto options = wanted.for_allocator<allocator_type>(
        wanted.limit != 0 ? wanted.limit : spillway::HostApi{}.memory_info().free_bytes / 10 * 9);
    // Small pages, so that room which leases divide can be remapped to one range.
    options.page_bytes = spillway::HostPagedApi::granularity_for(options.capacity_bytes);
    // The rates that the pager plans with: those of copies within the host's memory.
    bool const has_link = wanted.link_bytes_per_second != 0;
    options.paging.link_bytes_per_second = has_link ? wanted.link_bytes_per_second : 8e9;
    options.paging.device_bytes_per_second = 16e9;
    auto hook = State::install_hook();
    state() =
        new State(std::move(options), *c10::GetAllocator(c10::DeviceType::CPU), wanted.least_bytes);
    state()->hook = std::move(hook);
    state()->device.set_link_bytes_per_second(wanted.link_bytes_per_second);
    c10::SetAllocator(c10::DeviceType::CPU, &state()->tensors, 200);
  }

  static Leases& leases() { return state()->leases; }
  static Leases::Frames& frames() {
    thread_local Leases::Frames mine;
    return mine;
  }
  static HookState& hook() {
    thread_local HookState mine;
    return mine;
  }
  static spillway::HostStream current_stream() { return spillway::HostStream::caller; }
  static std::nullptr_t on_stream(spillway::HostStream /*stream*/) { return nullptr; }
  static char const* codec_refusal() { return nullptr; }
  static c10::Device device() { return c10::Device{c10::DeviceType::CPU}; }
  static bool allocates_for(c10::StorageImpl const& storage) {
    // Storages that cannot be resized, such as those that `torch.load` makes, may have no
    // allocator.
    return storage.allocator() == &state()->tensors || storage.allocator() == nullptr;
  }
  static std::size_t least_bytes() { return state()->least_bytes; }
  // smaller allocations come from PyTorch's own allocator
  static bool enrols(std::size_t /*bytes*/) { return true; }
  static c10::DataPtr allocate_foreign(std::size_t bytes) {
    return state()->tensors.allocate_small(bytes);
  }
  static void free_foreign(void* p) {
    if (frames().recipe == nullptr || frames().recipe->result != p) {
      state()->tensors.free_small(p);
    }
  }
  static spillway::torch::OperationTimes& operation_times() { return state()->operation_times; }
  static WithoutInterpreter release_interpreter() { return {}; }
  static void on_allocated(std::size_t /*bytes*/, spillway::BlockId /*block*/) noexcept {}
  static void on_freed(std::size_t /*bytes*/, spillway::BlockId /*block*/) noexcept {}
  static void on_out_of_memory(std::size_t /*bytes*/) {}
  static std::size_t foreach_bytes() { return state()->foreach_bytes; }
};

}  // namespace spillway_torch
