// SPDX-License-Identifier: Apache-2.0
#pragma once

/// TensorFlow's GPU as a `SwappingDevice`. Needs a TensorFlow that was built for CUDA, and
/// `GOOGLE_CUDA` defined as 1.

#include <spillway/interop/tensorflow/swapping_device.hpp>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <absl/container/inlined_vector.h>
#include <absl/status/status.h>
#include <absl/strings/string_view.h>
#include <tensorflow/core/common_runtime/gpu/gpu_device.h>
#include <tensorflow/core/common_runtime/gpu/gpu_process_state.h>
#include <tensorflow/core/public/session_options.h>

namespace spillway::tensorflow {

/// Copies between the host and the GPU that are not operations, with the GPU's tensor leased.
///
/// The copies are those of TensorFlow's own context, on its own copy streams. These wait for the
/// compute stream first, and the compute stream waits for a tensor's swap-in, so a copy runs after
/// the swap-in. The lease ends when the host is notified that the copy has finished.
template <class Site>
class SwappingGpuContext final : public tf::GPUDeviceContext {
 public:
  /// Uses the same streams as `other`.
  explicit SwappingGpuContext(tf::GPUDeviceContext const& other)
      : tf::GPUDeviceContext{other.stream_id(),
                             other.stream(),
                             other.host_to_device_stream(),
                             other.device_to_host_stream(),
                             device_to_device_streams(other),
                             other.host_memory_allocator()} {}

  /// Always waits for the compute stream, whatever `sync_dst_compute` is, since the target may
  /// still be being swapped in.
  void CopyCPUTensorToDevice(tf::Tensor const* from,
                             tf::Device* device,
                             tf::Tensor* to,
                             tf::StatusCallback done,
                             bool /*sync_dst_compute*/) const override {
    copy_leased<Site>(*from, *to, std::move(done), [&](tf::StatusCallback after) {
      tf::GPUDeviceContext::CopyCPUTensorToDevice(from, device, to, std::move(after), true);
    });
  }
  void CopyDeviceTensorToCPU(tf::Tensor const* from,
                             absl::string_view edge_name,
                             tf::Device* device,
                             tf::Tensor* to,
                             tf::StatusCallback done) override {
    copy_leased<Site>(*from, *to, std::move(done), [&](tf::StatusCallback after) {
      tf::GPUDeviceContext::CopyDeviceTensorToCPU(from, edge_name, device, to, std::move(after));
    });
  }
  void CopyTensorInSameDevice(tf::Tensor const* from,
                              tf::Device* device,
                              tf::Tensor* to,
                              tf::StatusCallback done) const override {
    copy_leased<Site>(*from, *to, std::move(done), [&](tf::StatusCallback after) {
      tf::GPUDeviceContext::CopyTensorInSameDevice(from, device, to, std::move(after));
    });
  }

 private:
  using Streams = absl::InlinedVector<stream_executor::Stream*, 4UL>;

  /// Asks for one stream after the other until the first one is returned again.
  [[nodiscard]] static Streams device_to_device_streams(tf::GPUDeviceContext const& other) {
    Streams streams{other.device_to_device_stream(0)};
    for (int i = 1; other.device_to_device_stream(i) != streams.front(); ++i) {
      streams.push_back(other.device_to_device_stream(i));
    }
    return streams;
  }
};

/// TensorFlow's GPU device as a `SwappingDevice`.
///
/// Streams  leases belong to the compute stream, on which kernels run. Other streams wait for it
///          before they use a tensor. If an operation or copy uses other streams, its leases end on
///          the host, in the callback that reports its end.
template <class Site>
class SwappingGpuDevice final : public SwappingDevice<Site, tf::BaseGPUDevice> {
  using Base = SwappingDevice<Site, tf::BaseGPUDevice>;

 public:
  SwappingGpuDevice(tf::SessionOptions const& options,
                    std::string const& name,
                    tf::Bytes memory_limit,
                    tf::DeviceLocality const& locality,
                    tsl::TfDeviceId id,
                    std::string const& description,
                    tf::Allocator* gpu_allocator,
                    tf::Allocator* cpu_allocator)
      : Base{options,
             name,
             memory_limit,
             locality,
             id,
             description,
             gpu_allocator,
             cpu_allocator,
             false},
        options_{options.config.gpu_options()} {
    // Unique among all devices of a program, those of other machines included.
    this->set_xla_global_id(static_cast<std::int64_t>(std::hash<std::string>{}(name) %
                                                      std::numeric_limits<std::int32_t>::max()));
  }

  /// As in TensorFlow's own GPU device.
  tf::Allocator* GetAllocator(tf::AllocatorAttributes attributes) override {
    if (!attributes.on_host()) {
      return this->gpu_allocator_;
    }
    return attributes.gpu_compatible() || options_.force_gpu_compatible()
               ? tf::GPUProcessState::singleton()->GetGpuHostAllocator(options_, 0)
               : this->cpu_allocator_;
  }

  /// Replaces the context that the device was made with by a `SwappingGpuContext`. To be called
  /// once, after `Init`.
  void replace_context() {
    info_ = *this->tensorflow_accelerator_device_info();
    context_.reset(new SwappingGpuContext<Site>{
        static_cast<tf::GPUDeviceContext const&>(*info_.default_context)});
    info_.default_context = context_.get();
    this->set_tensorflow_accelerator_device_info(&info_);
  }

 private:
  tf::GPUOptions options_;
  tf::core::RefCountPtr<SwappingGpuContext<Site>> context_;
  tf::DeviceBase::AcceleratorDeviceInfo info_;
};

/// Makes a `SwappingGpuDevice` where TensorFlow would make its own GPU device.
///
/// Register it for "GPU" before the first device is made, with a priority above that of
/// TensorFlow's own factory (210). `Site` must offer, beside what `SwappingDevice` lists:
///
/// | expression                     | must                                                        |
/// |--------------------------------|-------------------------------------------------------------|
/// | `Site::start(ordinal, stream)` | make `Site::leases()` for this device and compute stream    |
/// | `Site::share_of(total)`        | the bytes of `total` for TensorFlow's own allocator         |
/// | `Site::put_before(others)`     | the `TensorAllocator`, with `others` behind it              |
///
/// `start` returns a status: an error if it has been called before with another device or stream.
template <class Site>
class SwappingGpuDeviceFactory final : public tf::BaseGPUDeviceFactory {
 public:
  absl::Status CreateDevices(tf::SessionOptions const& options,
                             std::string const& name_prefix,
                             std::vector<std::unique_ptr<tf::Device>>* devices) override {
    std::size_t const before = devices->size();
    absl::Status status = tf::BaseGPUDeviceFactory::CreateDevices(options, name_prefix, devices);
    if (status.ok() && devices->size() > before + 1) {
      status = absl::InvalidArgumentError(
          "spillway serves one GPU: let TensorFlow see one, with CUDA_VISIBLE_DEVICES or "
          "tf.config.set_visible_devices, as one logical device");
    }
    for (std::size_t i = before; status.ok() && i < devices->size(); ++i) {
      auto& device = static_cast<SwappingGpuDevice<Site>&>(*(*devices)[i]);
      status =
          Site::start(device.gpu_id(), device.compute_stream()->platform_specific_handle().stream);
      device.replace_context();
    }
    if (!status.ok()) {
      devices->resize(before);
    }
    return status;
  }

 private:
  std::unique_ptr<tf::BaseGPUDevice> CreateGPUDevice(tf::SessionOptions const& options,
                                                     std::string const& name,
                                                     tf::Bytes memory_limit,
                                                     tf::DeviceLocality const& locality,
                                                     tsl::TfDeviceId id,
                                                     std::string const& description,
                                                     tf::Allocator* gpu_allocator,
                                                     tf::Allocator* cpu_allocator) override {
    return std::make_unique<SwappingGpuDevice<Site>>(
        options, name, memory_limit, locality, id, description, gpu_allocator, cpu_allocator);
  }
};

/// Makes the `TensorAllocator` the GPU's allocator. TensorFlow's own allocator gets the rest of the
/// memory.
template <class Site>
class SwappingGpuProcessState final : public tf::GPUProcessState {
 public:
  /// Replaces TensorFlow's `GPUProcessState` for good. To be called before anything uses that.
  ///
  /// @returns false if it is in use already
  [[nodiscard]] static bool try_install() {
    // NOLINTNEXTLINE: never destroyed, like TensorFlow's own
    auto* const mine = new SwappingGpuProcessState;
    return tf::GPUProcessState::singleton(mine) == mine;
  }

  tf::Allocator* GetGPUAllocator(tf::GPUOptions const& options,
                                 tsl::TfDeviceId id,
                                 std::size_t total_bytes,
                                 std::vector<tsl::TfDeviceId> const& peers) override {
    tf::Allocator* const others = tf::GPUProcessState::GetGPUAllocator(
        options, id, total_bytes == 0 ? 0 : Site::share_of(total_bytes), peers);
    return others == nullptr || id.value() != 0 ? others : Site::put_before(*others);
  }
};

}  // namespace spillway::tensorflow
