// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/interop/tensorflow/operands.hpp>
#include <spillway/interop/tensorflow/swapping_device.hpp>

#include <memory>
#include <string>
#include <vector>

#include <absl/status/status.h>
#include <absl/strings/str_cat.h>
#include <tensorflow/core/common_runtime/device_factory.h>
#include <tensorflow/core/common_runtime/threadpool_device.h>
#include <tensorflow/core/public/session_options.h>

namespace spillway::tensorflow {

/// TensorFlow's CPU device as a `SwappingDevice`.
template <class Site>
class SwappingCpuDevice final : public SwappingDevice<Site, tf::ThreadPoolDevice> {
 public:
  SwappingCpuDevice(tf::SessionOptions const& options, std::string const& name)
      : SwappingDevice<Site, tf::ThreadPoolDevice>{
            options, name, tf::Bytes{256 << 20}, tf::DeviceLocality{}, &Site::tensors()} {}
};

/// Makes `SwappingCpuDevice`s where TensorFlow would make its own CPU devices.
///
/// To be registered before the first device is made, with a priority above TensorFlow's own:
/// `::tensorflow::dfactory::Registrar<SwappingCpuDeviceFactory<Site>>{"CPU", 300, ...}`.
template <class Site>
class SwappingCpuDeviceFactory final : public tf::DeviceFactory {
 public:
  absl::Status ListPhysicalDevices(std::vector<std::string>* devices) override {
    devices->emplace_back("/physical_device:CPU:0");
    return absl::OkStatus();
  }

  absl::Status CreateDevices(tf::SessionOptions const& options,
                             std::string const& name_prefix,
                             std::vector<std::unique_ptr<tf::Device>>* devices) override {
    int count = 1;
    auto const wanted = options.config.device_count().find("CPU");
    if (wanted != options.config.device_count().end()) {
      count = wanted->second;
    }
    for (int i = 0; i < count; ++i) {
      devices->push_back(std::make_unique<SwappingCpuDevice<Site>>(
          options, absl::StrCat(name_prefix, "/device:CPU:", i)));
    }
    return absl::OkStatus();
  }
};

}  // namespace spillway::tensorflow
