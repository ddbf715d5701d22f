// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/prefetch_policy.hpp>
#include <spillway/core/types.hpp>
#include <spillway/cuda.hpp>
#include <spillway/device/cuda/cuda_api.hpp>
#include <spillway/device_allocator.hpp>
#include <spillway/interop/framework/buffer_leases.hpp>
#include <spillway/interop/tensorflow.hpp>
#include <spillway/interop/tensorflow/gpu_device.hpp>
#include <spillway/page_arena.hpp>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <limits>
#include <memory>
#include <stdexcept>

#include "site.hpp"
#include <absl/status/status.h>
#include <absl/strings/str_cat.h>

namespace spillway_tf {

/// A CUDA device that can tell quickly whether an address may lie in one of its reservations.
///
/// Threads  as `CudaApi`, except that addresses are reserved by one thread at a time.
class TrackedCudaApi : public spillway::CudaApi {
 public:
  using spillway::CudaApi::CudaApi;

  [[nodiscard]] void* reserve_address(std::size_t bytes) {
    void* const p = spillway::CudaApi::reserve_address(bytes);
    auto const first = reinterpret_cast<std::uintptr_t>(p);
    lowest_ = std::min(lowest_.load(), first);
    highest_ = std::max(highest_.load(), first + bytes);
    return p;
  }
  [[nodiscard]] bool may_own(void const* p) const noexcept {
    auto const address = reinterpret_cast<std::uintptr_t>(p);
    return address >= lowest_.load(std::memory_order_relaxed) &&
           address < highest_.load(std::memory_order_relaxed);
  }

 private:
  std::atomic<std::uintptr_t> lowest_{std::numeric_limits<std::uintptr_t>::max()};
  std::atomic<std::uintptr_t> highest_{0};
};

/// The site of TensorFlow's GPU tensors. Their memory is the driver's virtual memory, so blocks
/// keep their addresses when they are swapped out.
///
/// TensorFlow makes the GPU device when it is first used. It asks for the allocator before the
/// device's compute stream exists; `BufferLeases` is made once that exists. Both happen in one
/// thread, before the first operation.
struct GpuSite {
  struct Policies : spillway::CudaPolicies {
    using device = TrackedCudaApi;
    using arena = spillway::StableAddresses;
  };
  using allocator_type = spillway::DeviceAllocator<Policies>;
  using Leases = spillway::framework::BufferLeases<allocator_type>;
  using Tensors = spillway::tensorflow::TensorAllocator<GpuSite>;
  using State = SiteState<GpuSite>;

  static constexpr bool is_whole_device = true;
  /// The least memory for TensorFlow's own allocator, for small tensors and scratch memory.
  static constexpr std::size_t least_share = std::size_t{64} << 20U;

  static void install(InstallOptions const& wanted) {
    if (!spillway::tensorflow::SwappingGpuProcessState<GpuSite>::try_install()) {
      throw std::runtime_error{
          "TensorFlow has begun to use its GPUs already: call spillway_tf.install() before"};
    }
    plan() = new Plan{.wanted = wanted};
    tensorflow::DeviceFactory::Register(
        "GPU",
        std::make_unique<spillway::tensorflow::SwappingGpuDeviceFactory<GpuSite>>(),
        300,
        false);
  }
  static bool is_installed() { return plan() != nullptr; }

  /// Decides how much of `total_bytes` this site uses: the limit, or seven eighths if none was set.
  /// Returns the rest, which is at least `least_share`, for TensorFlow's own allocator.
  static std::size_t share_of(std::size_t total_bytes) {
    std::size_t const wanted = plan()->wanted.limit;
    std::size_t const most = total_bytes - std::min(total_bytes, least_share);
    plan()->total_bytes = total_bytes;
    plan()->capacity_bytes = wanted != 0 ? wanted : std::min(total_bytes / 8 * 7, most);
    return total_bytes - std::min(plan()->capacity_bytes, most);
  }
  static tensorflow::Allocator* put_before(tensorflow::Allocator& others) {
    if (plan()->tensors == nullptr) {
      std::size_t const least = plan()->wanted.least_bytes;
      plan()->tensors = std::make_unique<Tensors>(others, least != 0 ? least : page_bytes / 4);
    }
    return plan()->tensors.get();
  }
  static absl::Status start(int ordinal, void* stream) {
    if (is_ready()) {
      return state()->stream == static_cast<cudaStream_t>(stream)
                 ? absl::OkStatus()
                 : absl::InvalidArgumentError("spillway_tf: the GPU has got another stream");
    }
    if (plan()->capacity_bytes + least_share > plan()->total_bytes) {
      return absl::InvalidArgumentError(
          absl::StrCat("spillway_tf.install: of the ",
                       plan()->total_bytes,
                       " bytes that TensorFlow may use on the GPU the limit leaves less than the ",
                       least_share,
                       " that are needed beside it"));
    }
    try {
      constexpr std::size_t lookahead_ops = spillway::PrefetchOptions{}.lookahead_ops;
      state() = new State{ordinal,
                          static_cast<cudaStream_t>(stream),
                          plan()->wanted.for_allocator<allocator_type>(plan()->capacity_bytes),
                          lookahead_ops};
    } catch (std::exception const& error) {
      return absl::InternalError(absl::StrCat("spillway_tf.install: ", error.what()));
    }
    return absl::OkStatus();
  }

  static State*& state() {
    static State* the_state = nullptr;
    return the_state;
  }
  static bool is_ready() { return state() != nullptr; }
  static Leases& leases() { return state()->leases; }
  static Tensors& tensors() { return *plan()->tensors; }
  static spillway::tensorflow::StepDetector& steps() { return state()->steps; }
  static Leases::Frame*& frame() {
    thread_local Leases::Frame* mine = nullptr;
    return mine;
  }
  static bool may_own(void const* p) { return is_ready() && state()->device.may_own(p); }
  static std::size_t limit_bytes() {
    return is_ready() ? state()->limit() : plan()->capacity_bytes;
  }

 private:
  static constexpr std::size_t page_bytes = std::size_t{2} << 20U;  // on every GPU so far

  /// What is known before TensorFlow makes the device.
  struct Plan {
    InstallOptions wanted;
    std::size_t total_bytes = 0;
    std::size_t capacity_bytes = 0;
    std::unique_ptr<Tensors> tensors{};
  };
  static Plan*& plan() {
    static Plan* the_plan = nullptr;
    return the_plan;
  }
};

}  // namespace spillway_tf
