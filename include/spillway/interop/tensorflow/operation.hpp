// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/interop/framework/buffer_leases.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <string>
#include <string_view>
#include <typeinfo>
#include <utility>
#include <vector>

#include <absl/status/status.h>
#include <absl/strings/str_cat.h>
#include <tensorflow/core/common_runtime/dma_helper.h>
#include <tensorflow/core/framework/function.h>
#include <tensorflow/core/framework/op_kernel.h>
#include <tensorflow/core/framework/resource_handle.h>
#include <tensorflow/core/framework/resource_mgr.h>
#include <tensorflow/core/framework/resource_var.h>
#include <tensorflow/core/framework/variant.h>
#include <tensorflow/core/kernels/data/optional_ops_util.h>
#include <tensorflow/core/kernels/tensor_list.h>

namespace spillway::tensorflow {

/// What an operation does with the bytes of its operands.
enum class OperationKind : std::uint8_t {
  touches,  ///< reads or writes them while it runs
  passes,   ///< hands tensors on and never looks at their bytes
  reads,    ///< touches, and what it gets as a variable it only reads
};

/// By the name of the operation. What is not known touches.
[[nodiscard]] inline OperationKind kind_of(std::string_view name) noexcept {
  // Sorted. An operation belongs here only if no implementation of it reads a large operand. Calls do not:
  // the operations of the function they call do, each on its own.
  static constexpr std::array<std::string_view, 70> passing{
      "Bitcast",
      "Case",
      "ControlTrigger",
      "DestroyResourceOp",
      "EmptyTensorList",
      "EnsureShape",
      "Enter",
      "Exit",
      "ExpandDims",
      "GuaranteeConst",
      "Identity",
      "IdentityN",
      "If",
      "LoopCond",
      "Merge",
      "NextIteration",
      "NoOp",
      "OptionalFromValue",
      "OptionalGetValue",
      "OptionalHasValue",
      "OptionalNone",
      "PartitionedCall",
      "PlaceholderWithDefault",
      "PreventGradient",
      "Rank",
      "RefEnter",
      "RefExit",
      "RefIdentity",
      "RefMerge",
      "RefNextIteration",
      "RefSwitch",
      "RemoteCall",
      "Reshape",
      "Shape",
      "ShapeN",
      "Size",
      "Squeeze",
      "StatefulPartitionedCall",
      "StatelessCase",
      "StatelessIf",
      "StatelessWhile",
      "StopGradient",
      "Switch",
      "SymbolicGradient",
      "TemporaryVariable",
      "TensorListElementShape",
      "TensorListGetItem",
      "TensorListLength",
      "TensorListPopBack",
      "TensorListPushBack",
      "TensorListReserve",
      "TensorListResize",
      "TensorListSetItem",
      "VarHandleOp",
      "VarIsInitializedOp",
      "VariableShape",
      "VariableV2",
      "While",
      "_Arg",
      "_DeviceArg",
      "_DeviceRetval",
      "_EagerConst",
      "_HostRecv",
      "_HostSend",
      "_Recv",
      "_Retval",
      "_Send",
      "_SwitchN",
      "_VarHandlesOp",
      "_While",
  };
  static_assert(std::is_sorted(passing.begin(), passing.end()));
  if (std::binary_search(passing.begin(), passing.end(), name)) {
    return OperationKind::passes;
  }
  if (name == "ReadVariableOp" || name == "ResourceGather" || name == "ResourceGatherNd") {
    return OperationKind::reads;
  }
  return OperationKind::touches;
}

/// Whether an operation calls code that runs operations, on this thread or others, before it returns.
[[nodiscard]] inline bool calls_back(std::string_view name) noexcept {
  return name == "EagerPyFunc" || name == "PyFunc" || name == "PyFuncStateless" ||
         name == "XlaLaunch" || name == "_XlaRun";
}

/// Whether an operation is part of a program's computation: its tensors are used by operations alone.
///
/// What an input pipeline computes is used by threads of its own, and what the runtime folds into
/// constants by itself. Both are told apart by what an operation is called with: the first by the class
/// of its call frame, the second because it takes part in no collective and belongs to no session.
[[nodiscard]] inline bool
belongs_to_program(::tensorflow::OpKernelContext const& context) noexcept {
  if (context.collective_executor() == nullptr && context.session_state() == nullptr) {
    return false;
  }
  auto const* const frame = context.call_frame();
  if (frame == nullptr) {
    return true;
  }
  auto const& type = typeid(*frame);
  return type == typeid(::tensorflow::FunctionCallFrame) ||
         !std::string_view{type.name()}.starts_with("N10tensorflow4data");
}

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

/// Says which frame the calling thread's allocations belong to.
template <class Site>
class InFrame {
  using Frame = typename framework::BufferLeases<typename Site::allocator_type>::Frame;

 public:
  explicit InFrame(Frame* frame) : before_{std::exchange(Site::frame(), frame)} {}
  InFrame(InFrame const&) = delete;
  InFrame& operator=(InFrame const&) = delete;
  ~InFrame() { Site::frame() = before_; }

 private:
  Frame* before_;
};

/// One operation that is run, with what it has in use.
template <class Site>
class Operation {
 public:
  using Frame = typename framework::BufferLeases<typename Site::allocator_type>::Frame;

  Operation(tf::OpKernelContext& context,
            std::string_view name,
            bool is_program,
            bool is_synchronous)
      : context_{&context},
        is_program_{is_program},
        operands_{context, kind_of(name)},
        frame_{depth(), is_synchronous && is_program && may_run_alone(name)} {}
  Operation(Operation const&) = delete;
  Operation& operator=(Operation const&) = delete;
  ~Operation() { end(); }

  [[nodiscard]] Frame& frame() noexcept { return frame_; }

  /// @returns false if the operation cannot run; the context then knows why
  [[nodiscard]] bool try_begin() {
    if (!is_program_ && operands_.uses().empty()) {
      return true;  // none of ours, and what it allocates is not ours either
    }
    std::string why;
    try {
      why = Site::leases().try_enter(frame_, operands_.uses());
      is_open_ = why.empty();
      if (!is_open_) {
        context_->SetStatus(absl::ResourceExhaustedError(
            absl::StrCat("OOM when bringing in the operands of ", name(), ": ", why)));
      }
    } catch (std::exception const& error) {
      context_->SetStatus(absl::DataLossError(
          absl::StrCat("the operands of ", name(), " cannot be brought in: ", error.what())));
    }
    operands_.drop_variables_memory();
    if (is_open_ && must_keep()) {
      std::vector<void*> kept;
      for (framework::BufferUse const& use : operands_.uses()) {
        kept.push_back(use.address);
      }
      Site::leases().keep(kept);
    }
    return is_open_;
  }

  /// After it has run.
  void show_results() {
    if (std::size_t const bytes = frame_.refused_bytes(); bytes != 0 && !Site::is_whole_device) {
      context_->SetStatus(absl::ResourceExhaustedError(absl::StrCat("OOM when allocating tensor: ",
                                                                    bytes,
                                                                    " bytes for ",
                                                                    name(),
                                                                    " on ",
                                                                    context_->device()->name(),
                                                                    " by allocator ",
                                                                    Site::tensors().Name(),
                                                                    ": ",
                                                                    Site::leases().last_failure())));
    }
    auto const results = operands_.results(*context_);
    if (must_keep()) {
      Site::leases().keep(results);
    } else {
      Site::leases().make_swappable(results);
    }
  }

  void end() noexcept {
    if (std::exchange(is_open_, false)) {
      Site::leases().exit(frame_);
    }
    operands_.drop();
  }

 private:
  [[nodiscard]] static int depth() {
    Frame const* const outer = Site::frame();
    return (outer == nullptr ? 0 : outer->depth()) + 1;
  }
  [[nodiscard]] bool may_run_alone(std::string_view name) const {
    return depth() == 1 && !operands_.captures() && !calls_back(name);
  }
  [[nodiscard]] bool must_keep() const noexcept { return !is_program_ || operands_.captures(); }
  [[nodiscard]] std::string const& name() const { return context_->op_kernel().name(); }

  tf::OpKernelContext* context_;
  bool is_program_;
  Operands<Site> operands_;
  Frame frame_;
  bool is_open_ = false;
};

}  // namespace spillway::tensorflow
