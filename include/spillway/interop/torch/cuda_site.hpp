// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/cuda.hpp>
#if defined(SPILLWAY_WITH_CUDA_CODECS) && SPILLWAY_WITH_CUDA_CODECS
#  include <spillway/cuda_codecs.hpp>
#endif
#include <spillway/device/cuda/copy_kernel.hpp>
#include <spillway/device_allocator.hpp>
#include <spillway/interop/framework/codec_choice.hpp>
#include <spillway/interop/torch/cuda_allocator.hpp>
#include <spillway/interop/torch/event_timer.hpp>
#include <spillway/interop/torch/random_draw.hpp>
#include <spillway/interop/torch/site_state.hpp>
#include <spillway/interop/torch/tensor_stats.hpp>

#include <cstddef>
#include <functional>
#include <memory>
#include <type_traits>
#include <utility>

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/StorageImpl.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#if defined(SPILLWAY_WITH_CUDA_CODECS) && SPILLWAY_WITH_CUDA_CODECS
template <>
struct spillway::framework::CodecsOn<spillway::CudaApi> {
  using lossless = CudaZeroBitmap;
  using bfloat16 = CudaAsBfloat16;
};
#endif

namespace spillway::torch {

inline CudaOptions cuda_device_options() {
  CudaOptions options;
// The macro is 1 if the module contains the library's kernels.
#if defined(SPILLWAY_WITH_CUDA_CODECS) && SPILLWAY_WITH_CUDA_CODECS
  options.copy_kernel = &CudaCopyKernel::enqueue;
#endif
  return options;
}

/// The site of CUDA tensors, for one device.
///
/// @tparam Interpreter  as for `HostSite`
template <class Interpreter = NoInterpreter>
struct CudaSite {
  struct Policies : CudaPolicies {
    using observer = TensorObserver;
  };
  using allocator_type = DeviceAllocator<Policies>;
  using Leases = StorageLeases<CudaSite>;
  using TensorAllocator = CudaTensorAllocator<CudaSite>;
  using stream_type = cudaStream_t;
  using random_type = PhiloxState;
  using HookState = torch::HookState<random_type>;
  using Timer = EventTimer<CudaApi>;
  struct OnStream {
    explicit OnStream(c10::cuda::CUDAStream the_stream) : stream{the_stream} {}
    c10::cuda::CUDAStreamGuard stream;
    c10::cuda::CUDAStreamCaptureModeGuard captures{cudaStreamCaptureModeRelaxed};
  };

  struct State : SiteState<CudaSite> {
    using SiteState<CudaSite>::device;
    using SiteState<CudaSite>::memory;

    c10::DeviceIndex ordinal;
    cudaStream_t uncaptured_stream;
    cudaStream_t joining_stream;
    std::size_t total_bytes;
    std::shared_ptr<TensorAllocator> tensors = std::make_shared<TensorAllocator>(memory);
    Timer timer{device};

    State(typename allocator_type::Options options, std::size_t least, c10::DeviceIndex the_ordinal)
        : SiteState<CudaSite>{std::move(options), least, int{the_ordinal}, cuda_device_options()},
          ordinal{the_ordinal},
          uncaptured_stream{device.create_stream()},
          joining_stream{device.create_stream()},
          total_bytes{device.memory_info().total_bytes} {
      memory.observer().on_reserved(memory.stats().reserved_bytes);
    }
  };
  static State*& state() {
    static State* the_state = nullptr;
    return the_state;
  }

  /// Replaces PyTorch's CUDA allocator for one device, which becomes the current device of this
  /// thread.
  static void install(InstallOptions const& wanted) {
    TORCH_CHECK(c10::cuda::device_count() > 0,
                "spillway: install: there is no CUDA device that PyTorch can use");
    TORCH_CHECK(!c10::cuda::CUDACachingAllocator::allocator.load()->initialized(),
                "spillway: install comes too late: PyTorch has begun to use CUDA in "
                "this process. Call it before the first CUDA tensor, torch.cuda.init() or "
                "torch.cuda.current_stream().");
    if (wanted.ordinal >= 0) {
      c10::cuda::set_device(static_cast<c10::DeviceIndex>(wanted.ordinal));
    }
    auto const ordinal = c10::cuda::current_device();
    auto hook = State::install_hook();
    auto options = wanted.for_allocator<allocator_type>(wanted.limit);
    if (wanted.link_bytes_per_second != 0) {
      options.paging.link_bytes_per_second = wanted.link_bytes_per_second;
    }
    state() = new State(std::move(options), wanted.least_bytes, ordinal);
    state()->hook = std::move(hook);
    ::torch::cuda::CUDAPluggableAllocator::changeCurrentAllocator(state()->tensors);
    c10::SetAllocator(c10::DeviceType::CUDA, state()->tensors.get(), 200);
  }

  static Leases& leases() { return state()->leases; }
  static TensorAllocator& tensors() { return *state()->tensors; }
  static typename Leases::Frames& frames() { return frames_of_thread<CudaSite>(); }
  static constexpr bool reads_results() { return std::is_same_v<Interpreter, NoInterpreter>; }
  static HookState& hook() {
    thread_local HookState mine;
    return mine;
  }
  static cudaStream_t current_stream() {
    return c10::cuda::getCurrentCUDAStream(state()->ordinal).stream();
  }
  /// Makes a stream and its device the thread's current ones, for as long as the result lives.
  /// During that time, calls of this thread do not break a capture that it has begun on another
  /// stream.
  static OnStream on_stream(cudaStream_t stream) {
    return OnStream{stream == current_stream()
                        ? c10::cuda::getCurrentCUDAStream(state()->ordinal)
                        : c10::cuda::getStreamFromExternal(stream, state()->ordinal)};
  }
  static cudaStream_t uncaptured_stream() { return state()->uncaptured_stream; }
  static cudaStream_t joining_stream() { return state()->joining_stream; }
  static void give_back_after_launches(std::function<void()> give_back) {
    state()->tensors->give_back_after_launches(std::move(give_back));
  }
  static bool try_lock_for_fork() { return state()->tensors->try_lock_for_fork(); }
  static void unlock_after_fork() noexcept { state()->tensors->unlock_after_fork(); }
  static bool is_capturing(cudaStream_t stream) noexcept {
    try {
      return state()->tensors->is_routing() && state()->device.is_capturing(stream);
    } catch (DeviceError const&) {
      return false;  // the stream has been destroyed
    }
  }
  static bool is_capturing() {
    return state()->tensors->is_routing() &&
           c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
  }
  static void on_access(c10::StorageImpl* storage) {
    State::Hook::bring_in(*storage, nullptr, /*keeps=*/true);
  }
  /// Returns the reason why no tensor can have a codec; null if tensors can.
  static char const* codec_refusal() {
#if defined(SPILLWAY_WITH_CUDA_CODECS) && SPILLWAY_WITH_CUDA_CODECS
    return CudaZeroBitmap::runs_on(state()->device)
               ? nullptr
               : "the kernels of codecs were not compiled for this GPU: build for its architecture "
                 "(for the Python module: set TORCH_CUDA_ARCH_LIST)";
#else
    return "this was built without nvcc, which the codecs of CUDA tensors need";
#endif
  }
  static c10::Device device() {
    return {c10::DeviceType::CUDA, state()->ordinal};
  }
  static bool allocates_for(c10::StorageImpl const& storage) {
    return storage.allocator() == state()->tensors.get() || storage.allocator() == nullptr;
  }
  static std::size_t least_bytes() {
    return state()->least_bytes;
  }
  /// With recipes, tensors below `least_bytes` are enrolled, too: they may be operands, and a
  /// change of them has to be noticed.
  static bool enrols(std::size_t bytes) {
    return bytes >= state()->least_bytes || state()->leases.recomputes();
  }
  static c10::DataPtr allocate_foreign(std::size_t bytes) {
    void* const p = state()->tensors->allocate_scratch(bytes, current_stream());
    return {p, p, Leases::deleter(), device()};
  }
  static void free_foreign(void* p) {
    state()->tensors->free_foreign(p);
  }
  static OperationTimes& operation_times() {
    return state()->operation_times;
  }
  static Timer& timer() {
    return state()->timer;
  }
  static Interpreter release_interpreter() {
    return {};
  }
  static void on_allocated(std::size_t bytes, BlockId block) noexcept {
    state()->tensors->on_allocated(bytes, block);
  }
  static void on_freed(std::size_t bytes, BlockId block) noexcept {
    state()->tensors->on_freed(bytes, block);
  }
  static void on_out_of_memory(std::size_t bytes) {
    state()->tensors->on_out_of_memory(bytes);
  }
  static std::size_t foreach_bytes() {
    return state()->foreach_bytes;
  }
  static std::size_t limit() {
    return state()->limit();
  }
  static void set_limit(std::size_t bytes) {
    state()->set_limit(bytes);
  }
  static std::size_t most_bytes() {
    return state()->most_bytes;
  }
  static std::size_t total_bytes() {
    return state()->total_bytes;
  }
};

}  // namespace spillway::torch
