// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/interop/framework/buffer_leases.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <string>
#include <string_view>
#include <typeinfo>
#include <utility>
#include <vector>

#include <absl/status/status.h>
#include <absl/strings/str_cat.h>
#include <absl/types/span.h>
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

/// How an operation uses the bytes of its operands.
enum class OperationKind : std::uint8_t {
  touches,     ///< reads or writes its operands while it runs
  passes,      ///< passes tensors on without reading their bytes
  reads,       ///< as `touches`, but does not write the variables among its operands
  changes,     ///< as `touches`, and writes operands even if there are other references to them
  gives_away,  ///< code outside of operations may use its operands afterwards
};

/// Classifies an operation by its name; `touches` for a name that is not known.
[[nodiscard]] inline OperationKind kind_of(std::string_view name) noexcept {
  // Sorted. An operation may be listed only if none of its implementations reads a large operand.
  // Calls of functions are listed, since the operations of the function lease their own operands.
  // So are calls of Python functions: what these do with a tensor is an operation, or a copy that
  // leases the tensor itself.
  static constexpr std::array<std::string_view, 74> passing{
      "Bitcast",
      "Case",
      "ControlTrigger",
      "DestroyResourceOp",
      "DisableCopyOnRead",
      "EagerPyFunc",
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
      "PyFunc",
      "PyFuncStateless",
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
  if (name == "InplaceAdd" || name == "InplaceSub" || name == "InplaceUpdate" ||
      name == "_ParallelConcatUpdate") {
    return OperationKind::changes;
  }
  // The first three keep references to their operands for a later operation, which finds them by a
  // name. The result of the last one is memory in which the operands of a collective operation are
  // made. They lie at addresses inside of a buffer, which are not known here.
  if (name == "AddManySparseToTensorsMap" || name == "AddSparseToTensorsMap" ||
      name == "UnbatchGrad" || name == "_ScopedAllocator") {
    return OperationKind::gives_away;
  }
  return OperationKind::touches;
}

/// Whether a kernel is the call of a function that XLA has compiled. Such a call is one operation.
/// Graphs run it as an asynchronous one, but it depends on no other operation, unless it contains
/// collective ones.
[[nodiscard]] inline bool is_compiled_call(::tensorflow::OpKernel const& kernel) {
  if (!kernel.type_string_view().ends_with("PartitionedCall")) {
    return false;
  }
  auto const& attributes = kernel.def().attr();
  auto const compiled = attributes.find("_XlaMustCompile");
  return compiled != attributes.end() && compiled->second.b();
}

/// Classifies a kernel. A compiled call reads the operands. The call of any other function only
/// passes them on.
[[nodiscard]] inline OperationKind kind_of(::tensorflow::OpKernel const& kernel) {
  return is_compiled_call(kernel) ? OperationKind::touches : kind_of(kernel.type_string_view());
}

/// The operand that an operation of the kind `passes` reads, though it is only the shape of another
/// one; -1 if it reads none. A row of a table shares the table's memory, which may be swapped out,
/// if it is a multiple of 64 bytes long, so a shape can be one. The other numbers that such
/// operations read are single ones, which are never rows of this kind.
[[nodiscard]] inline int shape_operand(std::string_view name) noexcept {
  if (name == "EmptyTensorList" || name == "TensorListReserve") {
    return 0;
  }
  if (name == "Reshape" || name == "TensorListPopBack") {
    return 1;
  }
  return name == "TensorListGetItem" ? 2 : -1;
}

/// Whether an operation, before it returns, runs other operations (on any thread) or waits for
/// some.
[[nodiscard]] inline bool calls_back(std::string_view name) noexcept {
  static constexpr std::array<std::string_view, 21> those{
      "Batch",           "BatchFunction",     "For",
      "MapDefun",        "MapPeek",           "MapStage",
      "MapUnstage",      "MapUnstageNoKey",   "OrderedMapPeek",
      "OrderedMapStage", "OrderedMapUnstage", "OrderedMapUnstageNoKey",
      "ReduceDataset",   "SaveDataset",       "Stage",
      "StagePeek",       "Unbatch",           "UnbatchGrad",
      "Unstage",         "XlaLaunch",         "_XlaRun",
  };
  static_assert(std::is_sorted(those.begin(), those.end()));
  return name.starts_with("Collective") || std::binary_search(those.begin(), those.end(), name);
}

/// Whether an operation reads a checkpoint. Its results need not fit together: they are made in
/// memory of the other allocator, the large ones by threads of the operation, and are moved one by
/// one when the operation ends.
[[nodiscard]] inline bool reads_checkpoint(std::string_view name) noexcept {
  return name == "RestoreV2";
}

/// Whether an operation writes its operands to a checkpoint. Its operands need not fit together: if
/// they do not, it is given copies in memory of the other allocator, which are made one by one.
[[nodiscard]] inline bool writes_checkpoint(std::string_view name) noexcept {
  return name == "SaveV2";
}

/// Whether an operation copies what it keeps of its operands, and nothing else keeps its results,
/// although a resource other than a variable or a variant of an unknown kind is among them.
///
/// A checkpoint with an iterator has such a variant, which is encoded as bytes when it is written.
/// The other operations that write summaries are given only strings and numbers of steps.
[[nodiscard]] inline bool copies_what_it_keeps(std::string_view name) noexcept {
  return reads_checkpoint(name) || writes_checkpoint(name) || name == "LookupTableFindV2" ||
         name == "LookupTableInsertV2" || name == "WriteAudioSummary" ||
         name == "WriteHistogramSummary" || name == "WriteImageSummary" ||
         name == "WriteScalarSummary" || name == "WriteSummary";
}

/// Whether an operation may run an input pipeline on its own thread. What the pipeline allocates is
/// not memory of the operation: a cache or a buffer of the pipeline may keep it.
[[nodiscard]] inline bool runs_pipeline(std::string_view name) noexcept {
  return name.starts_with("IteratorGetNext") || name == "DatasetToSingleElement" ||
         name == "MakeIterator" || name == "ReduceDataset" || name == "SaveDataset";
}

/// Whether an operation is part of a program's computation, so that only operations use its
/// tensors.
///
/// Operations of an input pipeline are not, since threads of the pipeline use their results, and
/// neither are those that the runtime runs to fold constants. The former are recognised by the
/// class of their call frame, the latter because they have neither a collective executor nor a
/// session.
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

/// Calls `use` with a tensor of plain bytes, or with each such tensor in a list or an optional
/// value.
///
/// @returns false if it contains variants of other kinds
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

/// The variables among the operands of an operation.
[[nodiscard]] inline std::vector<framework::ObjectUse> variables_of(tf::OpKernelContext& context,
                                                                    bool are_changed) {
  std::vector<framework::ObjectUse> uses;
  for (tf::TensorValue const& value : context.params()->inputs) {
    bool const is_handle = value.tensor != nullptr && value.mutex_if_ref == nullptr &&
                           value.tensor->dtype() == tf::DT_RESOURCE &&
                           value.tensor->IsInitialized();
    if (!is_handle) {
      continue;
    }
    auto const handles = value.tensor->flat<tf::ResourceHandle>();
    for (Eigen::Index i = 0; i < handles.size(); ++i) {
      tf::core::RefCountPtr<tf::Var> variable;
      if (handles(i).hash_code() == tf::TypeIndex::Make<tf::Var>().hash_code() &&
          tf::LookupResource(&context, handles(i), &variable).ok()) {
        uses.push_back({variable.get(), are_changed});
      }
    }
  }
  return uses;
}

/// Collects the buffers that an operation uses, and keeps references to them.
///
/// TensorFlow lets a result reuse an operand's memory only if the operation has the only reference
/// to it. An operand with other references is therefore not written. It is leased for reading, so
/// that its copy on the host stays valid. This object holds a reference to such an operand, so that
/// the operation's reference does not become the only one while it runs.
///
/// @tparam Site  see `SwappingDevice`
template <class Site>
class Operands {
 public:
  Operands(tf::OpKernelContext& context, OperationKind kind)
      : kind_{kind},
        may_keep_{!copies_what_it_keeps(context.op_kernel().type_string_view())},
        captures_{kind == OperationKind::gives_away} {
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
    captures_ = captures_ || makes_resource(context);
  }

  [[nodiscard]] std::vector<framework::BufferUse> const& uses() const noexcept { return uses_; }
  /// Whether code outside of operations may use the operands from now on. For an operation that
  /// makes a data set, this is known only after `results` has been called.
  [[nodiscard]] bool captures() const noexcept { return captures_; }

  /// Drops the references to the variables' memory. With them the operation would copy what it can
  /// change in place.
  void drop_variables_memory() noexcept { variables_held_.clear(); }
  /// Drops all references. Memory without other references is freed.
  void drop() noexcept {
    variables_held_.clear();
    held_.clear();
    variables_.clear();
  }

  /// Returns the buffers of the results, and the buffers that the operation's variables have now.
  [[nodiscard]] std::vector<void*> results(tf::OpKernelContext& context) {
    std::vector<void*> addresses;
    auto const add_address = [&addresses](tf::Tensor const& tensor) {
      if (void* const p = base_of(tensor); p != nullptr && Site::may_own(p)) {
        addresses.push_back(p);
      }
    };
    for (int i = 0; i < context.num_outputs(); ++i) {
      if (tf::Tensor const* const tensor = context.mutable_output(i)) {
        bool const is_known = for_each_plain(*tensor, add_address);
        // Of an unknown kind is, for example, a data set, which keeps its operands.
        captures_ = captures_ || (!is_known && may_keep_);
      }
    }
    for (auto const& variable : variables_) {
      tf::tf_shared_lock const lock{*variable->mu()};
      for_each_plain(*variable->tensor(), add_address);
    }
    return addresses;
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
      captures_ = captures_ || (!is_known && may_keep_);
    } else {
      add_plain(tensor);
    }
  }

  void add_plain(tf::Tensor const& tensor) {
    if (void* const p = base_of(tensor); p != nullptr && Site::may_own(p)) {
      bool const may_be_forwarded = tensor.RefCountIsOne();
      uses_.push_back({p, may_be_forwarded || kind_ == OperationKind::changes});
      if (!may_be_forwarded) {
        held_.push_back(reference_to(tensor));
      }
    }
  }

  /// Adds a reference variable of TensorFlow 1. A tensor of strings is the name of a resource of
  /// TensorFlow 1, which may keep the operands.
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
      // Other resources, such as tables, queues and iterators, may keep the operands.
      captures_ = captures_ || may_keep_;
      return;
    }
    tf::core::RefCountPtr<tf::Var> variable;
    if (!tf::LookupResource(&context, handle, &variable).ok()) {
      return;  // the variable is not initialized, which the operation itself reports
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

  /// Whether a result is a resource, which may keep references to the operands, as a table does.
  [[nodiscard]] static bool makes_resource(tf::OpKernelContext const& context) {
    auto const& kernel = context.op_kernel();
    for (int i = 0; i < kernel.num_outputs(); ++i) {
      tf::DataType const type = kernel.output_type(i);
      if (type == tf::DT_RESOURCE || type == tf::DT_STRING_REF) {
        return true;
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
  bool may_keep_;  // its resources and variants of unknown kinds, of what it is given
  bool captures_;
  std::vector<framework::BufferUse> uses_;
  std::vector<tf::core::RefCountPtr<tf::TensorBuffer>> held_;
  std::vector<tf::core::RefCountPtr<tf::TensorBuffer>> variables_held_;
  std::vector<tf::core::RefCountPtr<tf::Var>> variables_;
};

/// While this object lives, the calling thread's allocations belong to the given frame.
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

/// One run of an operation: leases its operands from `try_begin` to `end`.
template <class Site>
class Operation {
 public:
  using Frame = typename framework::BufferLeases<typename Site::allocator_type>::Frame;

  Operation(tf::OpKernelContext& context,
            std::string_view name,
            OperationKind kind,
            bool is_program,
            bool is_synchronous)
      : context_{&context},
        is_program_{is_program},
        operands_{context, kind},
        frame_{depth(), is_synchronous && is_program && may_wait(name)} {
    frame_.pins_results = !runs_pipeline(name) && !reads_checkpoint(name);
  }
  Operation(Operation const&) = delete;
  Operation& operator=(Operation const&) = delete;
  ~Operation() { end(); }

  [[nodiscard]] Frame& frame() noexcept { return frame_; }

  /// @returns false if the operation cannot run; its context then has the error
  [[nodiscard]] bool try_begin() {
    if (!is_program_ && operands_.uses().empty()) {
      // not part of the program, and no operand is a buffer: there is nothing to lease
      return true;
    }
    std::string why;
    try {
      why = Site::leases().try_enter(frame_, operands_.uses());
      if (!why.empty() && !Site::is_whole_device &&
          writes_checkpoint(context_->op_kernel().type_string_view())) {
        why = try_begin_with_copies();
      }
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
    return is_open_;
  }

  /// To be called after the operation has run. Its results may be swapped out from now on. If code
  /// outside of operations may use them or the operands, all of these are kept resident instead.
  void finish() {
    if (std::size_t const bytes = frame_.refused_bytes(); bytes != 0 && !Site::is_whole_device) {
      context_->SetStatus(
          absl::ResourceExhaustedError(absl::StrCat("OOM when allocating tensor: ",
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
    if (!Site::is_whole_device && is_program_ &&
        reads_checkpoint(context_->op_kernel().type_string_view())) {
      move_results();
    }
    auto results = operands_.results(*context_);
    if (must_keep()) {
      for (framework::BufferUse const& use : operands_.uses()) {
        results.push_back(use.address);
      }
      Site::leases().keep(results);
    } else {
      Site::leases().make_swappable(results);
    }
  }

  void end() noexcept {
    if (std::exchange(is_open_, false)) {
      Site::leases().exit(frame_);
    }
    if (!copies_.empty()) {
      context_->params()->inputs = inputs_before_;
      copies_.clear();
    }
    operands_.drop();
  }

 private:
  [[nodiscard]] static int depth() {
    Frame const* const outer = Site::frame();
    return (outer == nullptr ? 0 : outer->depth()) + 1;
  }
  [[nodiscard]] bool may_wait(std::string_view name) const {
    return depth() == 1 && !operands_.captures() && !calls_back(name);
  }
  [[nodiscard]] bool must_keep() const noexcept { return !is_program_ || operands_.captures(); }
  [[nodiscard]] std::string const& name() const { return context_->op_kernel().name(); }
  /// Whether one of the tensors in a list or an optional value may have been swapped out.
  [[nodiscard]] static bool has_buffer(tf::Tensor const& tensor) {
    bool has_any = false;
    (void)for_each_plain(tensor, [&has_any](tf::Tensor const& part) {
      void* const p = base_of(part);
      has_any = has_any || (p != nullptr && Site::may_own(p));
    });
    return has_any;
  }
  /// Gives the operation copies of its operands. Each operand is resident only while it is copied.
  ///
  /// @returns as `BufferLeases::try_enter`
  [[nodiscard]] std::string try_begin_with_copies() {
    inputs_before_ = context_->params()->inputs;
    inputs_.assign(inputs_before_.begin(), inputs_before_.end());
    copies_.reserve(inputs_.size());  // so that the copies keep their addresses
    for (tf::TensorValue& value : inputs_) {
      if (value.tensor != nullptr && value.tensor->dtype() == tf::DT_VARIANT) {
        if (has_buffer(*value.tensor)) {
          return "An operand is a list of tensors, which cannot be copied.";
        }
        continue;  // such as the state of an iterator, which needs no copy
      }
      void* const p = value.tensor == nullptr ? nullptr : base_of(*value.tensor);
      if (p == nullptr || !Site::may_own(p)) {
        continue;
      }
      InFrame<Site> const outside{nullptr};
      tf::Tensor copy{&Site::tensors(), value.tensor->dtype(), value.tensor->shape()};
      if (!copy.IsInitialized()) {
        return "There is no host memory for a copy of an operand.";
      }
      Frame frame{frame_.depth()};
      std::array<framework::BufferUse, 1> const use{framework::BufferUse{p, false}};
      if (std::string why = Site::leases().try_enter(frame, use); !why.empty()) {
        return why;
      }
      std::memcpy(copy.data(), value.tensor->data(), value.tensor->TotalBytes());
      Site::leases().exit(frame);
      copies_.push_back(std::move(copy));
      value.tensor = &copies_.back();
    }
    std::string why = Site::leases().try_enter(frame_, {});
    if (why.empty()) {
      context_->params()->inputs = inputs_;
    }
    return why;
  }
  /// Copies results that lie in memory of another allocator to memory that can be swapped out, one
  /// by one, so that they need not be resident together. A result that finds no room stays where it
  /// is.
  void move_results() {
    for (int i = 0; i < context_->num_outputs(); ++i) {
      tf::Tensor* const tensor = context_->mutable_output(i);
      if (tensor == nullptr || !tf::DataTypeCanUseMemcpy(tensor->dtype()) ||
          tensor->TotalBytes() < Site::tensors().least_bytes() || Site::may_own(base_of(*tensor))) {
        continue;
      }
      Frame frame{depth()};
      if (!Site::leases().try_enter(frame, {}).empty()) {
        continue;
      }
      {
        InFrame<Site> const inside{&frame};
        tf::Tensor moved{&Site::tensors(), tensor->dtype(), tensor->shape()};
        if (void* const p = base_of(moved); Site::may_own(p)) {
          std::memcpy(p, base_of(*tensor), tensor->TotalBytes());
          *tensor = std::move(moved);
          Site::leases().make_swappable(std::array<void*, 1>{p});
        }
      }
      Site::leases().exit(frame);
    }
  }

  tf::OpKernelContext* context_;
  bool is_program_;
  Operands<Site> operands_;
  Frame frame_;
  bool is_open_ = false;
  // for an operation that runs with copies of its operands
  absl::Span<tf::TensorValue const> inputs_before_;
  std::vector<tf::TensorValue> inputs_;
  std::vector<tf::Tensor> copies_;
};

}  // namespace spillway::tensorflow
