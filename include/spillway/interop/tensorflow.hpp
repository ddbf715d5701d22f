// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Large-model support for TensorFlow: tensors that no operation uses may leave the device.
///
/// Needs TensorFlow's headers, 2.21 or newer. `examples/tensorflow/spillway_tf` makes a Python module of it.

#include <spillway/interop/tensorflow/operands.hpp>
#include <spillway/interop/tensorflow/operation_kind.hpp>
#include <spillway/interop/tensorflow/step_watch.hpp>
#include <spillway/interop/tensorflow/swapping_device.hpp>
#include <spillway/interop/tensorflow/tensor_allocator.hpp>
