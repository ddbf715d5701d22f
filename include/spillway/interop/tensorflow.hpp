// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Large-model support for TensorFlow: tensors that no operation uses may leave the device.
///
/// Needs TensorFlow's headers, 2.21 or newer. For GPUs there is
/// `interop/tensorflow/gpu_device.hpp`, which needs a TensorFlow that was built for CUDA.
/// `python/spillway_tf` makes a Python module of it.

#include <spillway/interop/tensorflow/operation.hpp>
#include <spillway/interop/tensorflow/step_detector.hpp>
#include <spillway/interop/tensorflow/swapping_device.hpp>
#include <spillway/interop/tensorflow/tensor_allocator.hpp>
