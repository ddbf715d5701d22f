// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/types.hpp>
#include <spillway/device/host/host_paged_api.hpp>
#include <spillway/device_allocator.hpp>
#include <spillway/interop/framework/buffer_leases.hpp>
#include <spillway/interop/tensorflow.hpp>
#include <spillway/page_arena.hpp>
#include <spillway/sim.hpp>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "fault_handler.hpp"
#include "site.hpp"
#include <tensorflow/core/common_runtime/process_state.h>

namespace spillway_tf {

/// The site of TensorFlow's CPU tensors. Their memory is address space of the host in which pages
/// are mapped and unmapped.
struct HostSite {
  struct Policies : spillway::SimPolicies {
    using device = spillway::HostPagedApi;
    using arena = spillway::StableAddresses;
  };
  using allocator_type = spillway::DeviceAllocator<Policies>;
  using Leases = spillway::framework::BufferLeases<allocator_type>;
  using Tensors = spillway::tensorflow::TensorAllocator<HostSite>;
  using State = SiteState<HostSite>;

  static constexpr bool is_whole_device = false;

  static void install(InstallOptions const& wanted) {
    std::size_t const machine_bytes = spillway::HostApi{}.memory_info().total_bytes;
    std::size_t const capacity = wanted.limit != 0 ? wanted.limit : machine_bytes / 10 * 9;
    std::size_t const granularity = spillway::HostPagedApi::granularity_for(capacity);
    if (capacity < granularity || capacity > machine_bytes) {
      throw std::invalid_argument{"spillway_tf.install: a limit of " + std::to_string(capacity) +
                                  " bytes: it can be " + std::to_string(granularity) +
                                  " bytes, which are one page, to " +
                                  std::to_string(machine_bytes) + ", which this machine has"};
    }
    auto options = wanted.for_allocator<allocator_type>(capacity);
    // The rates that the pager plans with: those of copies within the host's memory.
    options.paging.link_bytes_per_second = 8e9;
    options.paging.device_bytes_per_second = 16e9;
    // Prefetching a few operations ahead is early enough, since a copy takes no longer than a
    // kernel here. A longer lookahead would take the room of tensors that are made in between.
    constexpr std::size_t lookahead_ops = 16;
    state() = new State{spillway::HostPagedOptions{.granularity_bytes = granularity,
                                                   .remap = spillway::HostRemap::pages},
                        spillway::HostStream::caller,
                        std::move(options),
                        lookahead_ops};
    tensors_slot() = new Tensors{
        *tensorflow::ProcessState::singleton()->GetCPUAllocator(tensorflow::port::kNUMANoAffinity),
        wanted.least_bytes != 0 ? wanted.least_bytes
                                : std::max<std::size_t>(16 * 1024, granularity / 4)};
    tensorflow::DeviceFactory::Register(
        "CPU",
        std::make_unique<spillway::tensorflow::SwappingCpuDeviceFactory<HostSite>>(),
        300,
        false);
    FaultHandler<HostSite>::install();
  }
  static bool is_installed() { return is_ready(); }

  static State*& state() {
    static State* the_state = nullptr;
    return the_state;
  }
  static bool is_ready() { return state() != nullptr; }
  static Leases& leases() { return state()->leases; }
  static Tensors& tensors() { return *tensors_slot(); }
  static spillway::tensorflow::StepDetector& steps() { return state()->steps; }
  static Leases::Frame*& frame() {
    thread_local Leases::Frame* mine = nullptr;
    return mine;
  }
  static bool may_own(void const* p) { return state()->device.may_own(p); }
  static std::size_t limit_bytes() { return state()->limit(); }

 private:
  static Tensors*& tensors_slot() {
    static Tensors* the_tensors = nullptr;
    return the_tensors;
  }
};

}  // namespace spillway_tf
