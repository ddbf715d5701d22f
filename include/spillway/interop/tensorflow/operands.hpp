// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/interop/framework/buffer_leases.hpp>
#include <spillway/interop/tensorflow/operation_kind.hpp>

#include <cstddef>
#include <vector>

#include <tensorflow/core/common_runtime/dma_helper.h>
#include <tensorflow/core/framework/op_kernel.h>
#include <tensorflow/core/framework/resource_handle.h>
#include <tensorflow/core/framework/resource_mgr.h>
#include <tensorflow/core/framework/resource_var.h>
#include <tensorflow/core/framework/variant.h>
#include <tensorflow/core/kernels/data/optional_ops_util.h>
#include <tensorflow/core/kernels/tensor_list.h>

namespace spillway::tensorflow {

namespace tf = ::tensorflow;

/// The address that a tensor's memory was allocated at; null if it has none.
[[nodiscard]] inline void* base_of(tf::Tensor const& tensor) {
  tf::TensorBuffer const* const buffer = tf::DMAHelper::buffer(&tensor);
  return buffer == nullptr ? nullptr : const_cast<tf::TensorBuffer*>(buffer)->root_buffer()->data();
}

/// Calls `use` for a tensor that is plain bytes, or for those that a list or an optional value holds.
///
/// @returns false if there are variants of other kinds in it
template <class Use>
bool for_each_plain(tf::Tensor const& tensor, Use const& use) {
  if (tensor.dtype() != tf::DT_VARIANT) {
    if (tf::DataTypeCanUseMemcpy(tensor.dtype())) {
      use(tensor);
    }
    return true;
  }
  bool is_known = true;
  if (tensor.IsInitialized()) {
    auto const variants = tensor.flat<tf::Variant>();
    for (Eigen::Index i = 0; i < variants.size(); ++i) {
      std::vector<tf::Tensor> const* parts = nullptr;
      if (auto const* const list = variants(i).get<tf::TensorList>()) {
        parts = &list->tensors();
      } else if (auto const* const one = variants(i).get<tf::data::OptionalVariant>()) {
        parts = one->has_value() ? &one->get_values() : nullptr;
      } else {
        is_known = is_known && variants(i).is_empty();
      }
      if (parts != nullptr) {
        for (tf::Tensor const& part : *parts) {
          is_known = (part.dtype() == tf::DT_INVALID || for_each_plain(part, use)) && is_known;
        }
      }
    }
  }
  return is_known;
}

/// The buffers that an operation uses.
///
/// An operand that somebody else holds, too, is not written: TensorFlow forwards an operand's memory to a
/// result only if nobody else has it. So that this stays true while the operation runs, a reference
/// is held; the operand is then leased for reading, and leaves later without being copied again.
///
/// @tparam Site  see `SwappingDevice`
template <class Site>
class Operands {
 public:
  Operands(tf::OpKernelContext& context, OperationKind kind) : kind_{kind} {
    if (kind == OperationKind::passes) {
      captures_ = true;  // to code outside of operations: others do not come here
    }
    for (tf::TensorValue const& value : context.params()->inputs) {
      if (value.tensor == nullptr) {
        continue;
      }
      if (value.mutex_if_ref != nullptr) {
        tf::mutex_lock const lock{*value.mutex_if_ref};
        add_reference(*value.tensor);
      } else {
        add(context, *value.tensor);
      }
    }
    captures_ = captures_ || (!holds_tensors_ && makes_variant(context));
  }

  [[nodiscard]] std::vector<framework::BufferUse> const& uses() const noexcept { return uses_; }
  /// Operands that code outside of operations may use from now on.
  [[nodiscard]] bool captures() const noexcept { return captures_; }

  /// Drops references to variables' memory: they would make the operation copy what it can change in
  /// place.
  void drop_variables_memory() noexcept { variables_held_.clear(); }
  /// Drops all references. Memory that nobody else has is freed.
  void drop() noexcept {
    variables_held_.clear();
    held_.clear();
    variables_.clear();
  }

  /// What has to be shown after the operation: its results, and what its variables are now.
  [[nodiscard]] std::vector<void*> results(tf::OpKernelContext& context) const {
    std::vector<void*> shown;
    auto const show = [&shown](tf::Tensor const& tensor) {
      if (void* const p = base_of(tensor); p != nullptr && Site::may_own(p)) {
        shown.push_back(p);
      }
    };
    for (int i = 0; i < context.num_outputs(); ++i) {
      if (tf::Tensor const* const tensor = context.mutable_output(i)) {
        for_each_plain(*tensor, show);
      }
    }
    for (auto const& variable : variables_) {
      tf::tf_shared_lock const lock{*variable->mu()};
      for_each_plain(*variable->tensor(), show);
    }
    return shown;
  }

 private:
  void add(tf::OpKernelContext& context, tf::Tensor const& tensor) {
    if (tensor.dtype() == tf::DT_RESOURCE) {
      if (tensor.IsInitialized()) {
        auto const handles = tensor.flat<tf::ResourceHandle>();
        for (Eigen::Index i = 0; i < handles.size(); ++i) {
          add_resource(context, handles(i));
        }
      }
    } else if (tensor.dtype() == tf::DT_VARIANT) {
      bool const is_known =
          for_each_plain(tensor, [this](tf::Tensor const& part) { add_plain(part); });
      captures_ = captures_ || !is_known;
      holds_tensors_ = true;
    } else {
      add_plain(tensor);
    }
  }

  void add_plain(tf::Tensor const& tensor) {
    if (void* const p = base_of(tensor); p != nullptr && Site::may_own(p)) {
      bool const may_be_forwarded = tensor.RefCountIsOne();
      uses_.push_back({p, may_be_forwarded});
      if (!may_be_forwarded) {
        held_.push_back(reference_to(tensor));
      }
    }
  }

  /// A variable of the old kind, or the name of a resource of the old kind.
  void add_reference(tf::Tensor const& tensor) {
    if (tensor.dtype() == tf::DT_STRING) {
      captures_ = true;
    } else if (void* const p = base_of(tensor); p != nullptr && Site::may_own(p)) {
      uses_.push_back({p, true});
      variables_held_.push_back(reference_to(tensor));
    }
  }

  void add_resource(tf::OpKernelContext& context, tf::ResourceHandle const& handle) {
    if (handle.hash_code() != tf::TypeIndex::Make<tf::Var>().hash_code()) {
      captures_ = true;  // a table, a queue, an iterator: it may keep what it gets
      return;
    }
    tf::core::RefCountPtr<tf::Var> variable;
    if (!tf::LookupResource(&context, handle, &variable).ok()) {
      return;  // not initialized: the operation says so
    }
    {
      tf::tf_shared_lock const lock{*variable->mu()};
      tf::Tensor const& tensor = *variable->tensor();
      if (void* const p = base_of(tensor); p != nullptr && Site::may_own(p)) {
        uses_.push_back({p, kind_ != OperationKind::reads});
        variables_held_.push_back(reference_to(tensor));
      }
    }
    variables_.push_back(std::move(variable));
  }

  /// Whether the results may hold on to the operands, as a data set does.
  [[nodiscard]] static bool makes_variant(tf::OpKernelContext const& context) {
    auto const& kernel = context.op_kernel();
    for (int i = 0; i < kernel.num_outputs(); ++i) {
      if (kernel.output_type(i) == tf::DT_VARIANT) {
        return !kernel.type_string_view().starts_with("TensorList");
      }
    }
    return false;
  }

  [[nodiscard]] static tf::core::RefCountPtr<tf::TensorBuffer>
  reference_to(tf::Tensor const& tensor) {
    auto* const buffer = const_cast<tf::TensorBuffer*>(tf::DMAHelper::buffer(&tensor));
    buffer->Ref();
    return tf::core::RefCountPtr<tf::TensorBuffer>{buffer};
  }

  OperationKind kind_;
  bool captures_ = false;
  bool holds_tensors_ = false;  // variants that are made of tensors are among the operands
  std::vector<framework::BufferUse> uses_;
  std::vector<tf::core::RefCountPtr<tf::TensorBuffer>> held_;
  std::vector<tf::core::RefCountPtr<tf::TensorBuffer>> variables_held_;
  std::vector<tf::core::RefCountPtr<tf::Var>> variables_;
};

}  // namespace spillway::tensorflow
