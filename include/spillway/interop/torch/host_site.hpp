// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/device/host/host_api.hpp>
#include <spillway/device/host/host_paged_api.hpp>
#include <spillway/device_allocator.hpp>
#include <spillway/interop/torch/host_tensor_allocator.hpp>
#include <spillway/interop/torch/random_draw.hpp>
#include <spillway/interop/torch/site_state.hpp>
#include <spillway/policies.hpp>

#include <cstddef>
#include <type_traits>
#include <utility>

#include <c10/core/CPUAllocator.h>
#include <c10/core/Device.h>
#include <c10/core/StorageImpl.h>

namespace spillway::torch {

/// The site of PyTorch's CPU tensors. Their memory is an arena of host memory, which takes the
/// place of device memory.
///
/// @tparam Interpreter  an object of it gives up the lock of Python's interpreter while it lives
template <class Interpreter = NoInterpreter>
struct HostSite {
  struct Policies : PoliciesFor<HostPagedApi> {};
  using allocator_type = DeviceAllocator<Policies>;
  using Leases = StorageLeases<HostSite>;
  using TensorAllocator = HostTensorAllocator<HostSite>;
  using random_type = TwisterState;
  using HookState = torch::HookState<random_type>;

  struct State : SiteState<HostSite> {
    TensorAllocator tensors;

    State(typename allocator_type::Options options, c10::Allocator& small, std::size_t least)
        : SiteState<HostSite>{options,
                              least,
                              HostPagedOptions{.granularity_bytes = HostPagedApi::granularity_for(
                                                   options.capacity_bytes)}},
          tensors{small} {}
  };
  static State*& state() {
    static State* the_state = nullptr;
    return the_state;
  }

  static void install(InstallOptions const& wanted) {
    auto options = wanted.for_allocator<allocator_type>(
        wanted.limit != 0 ? wanted.limit : HostApi{}.memory_info().free_bytes / 10 * 9);
    // Small pages, so that room which leases divide can be remapped to one range.
    options.page_bytes = HostPagedApi::granularity_for(options.capacity_bytes);
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
  static typename Leases::Frames& frames() { return frames_of_thread<HostSite>(); }
  static constexpr bool reads_results() { return std::is_same_v<Interpreter, NoInterpreter>; }
  static HookState& hook() {
    thread_local HookState mine;
    return mine;
  }
  static HostStream current_stream() { return HostStream::caller; }
  static std::nullptr_t on_stream(HostStream /*stream*/) { return nullptr; }
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
  static OperationTimes& operation_times() { return state()->operation_times; }
  static Interpreter release_interpreter() { return {}; }
  static void on_allocated(std::size_t /*bytes*/, BlockId /*block*/) noexcept {}
  static void on_freed(std::size_t /*bytes*/, BlockId /*block*/) noexcept {}
  static void on_out_of_memory(std::size_t /*bytes*/) {}
  static std::size_t foreach_bytes() { return state()->foreach_bytes; }
};

}  // namespace spillway::torch
