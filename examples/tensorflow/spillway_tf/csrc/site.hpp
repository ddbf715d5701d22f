// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/default_policies.hpp>
#include <spillway/device/host_paged_api.hpp>
#include <spillway/device_allocator.hpp>
#include <spillway/interop/ballast.hpp>
#include <spillway/interop/buffer_desk.hpp>
#include <spillway/interop/tensorflow.hpp>
#include <spillway/policy/remap_compaction.hpp>

#include <cstddef>
#include <utility>

namespace spillway_tf {

/// CPU tensors: address space of the host whose memory comes and goes stands in for a device's.
struct HostSite {
  struct Policies : spillway::SimPolicies {
    using device = spillway::HostPagedApi;
    using compaction = spillway::StableAddresses;
  };
  using allocator_type = spillway::DeviceAllocator<Policies>;
  using Desk = spillway::BufferDesk<allocator_type>;
  using Tensors = spillway::tensor_flow::TensorAllocator<HostSite>;

  /// All that exists once in a process. Made by `install` and never destroyed: tensors outlive
  /// everything else.
  struct State {
    spillway::HostPagedApi device;
    allocator_type memory;
    Desk desk{memory, spillway::HostStream::caller};
    spillway::Ballast<allocator_type> ballast{memory};
    Tensors tensors;
    spillway::tensor_flow::StepWatch steps;

    State(std::size_t granularity_bytes,
          allocator_type::Options options,
          ::tensorflow::Allocator& others,
          std::size_t least_bytes)
        : device{granularity_bytes},
          memory{device, std::move(options)},
          tensors{others, least_bytes} {}
  };
  static State*& state() {
    static State* the_state = nullptr;
    return the_state;
  }

  static Desk& desk() { return state()->desk; }
  static Tensors& tensors() { return state()->tensors; }
  static spillway::tensor_flow::StepWatch& steps() { return state()->steps; }
  static Desk::Frame*& frame() {
    thread_local Desk::Frame* mine = nullptr;
    return mine;
  }
  static bool may_own(void const* p) { return state()->device.may_own(p); }
  static std::size_t ballast_bytes() { return state()->ballast.bytes(); }
  static std::size_t limit_bytes() { return state()->ballast.limit_bytes(); }
};

}  // namespace spillway_tf
