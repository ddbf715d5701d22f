// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>

#include <ATen/NestedTensorImpl.h>
#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/functorch/BatchedTensorImpl.h>
#include <ATen/quantized/QTensorImpl.h>
#include <ATen/quantized/Quantizer.h>
#include <c10/core/Layout.h>
#include <c10/core/StorageImpl.h>
#include <c10/macros/Macros.h>
#include <c10/util/FunctionRef.h>
#include <c10/util/SmallVector.h>

namespace spillway::torch {

/// What an operation does with an operand: whether PyTorch also uses its address outside of
/// operations (`keeps`), whether the operation declares that it writes it (`writes`), and whether
/// it is known to read it only (`only_reads`). If neither of the last two holds, the operation may
/// write the operand without declaring it. All three are in one word, since reading a word that was
/// just written in parts stalls the processor.
class OperandUse {
 public:
  OperandUse() = default;
  OperandUse(bool keeps, bool writes, bool only_reads = false) noexcept
      : bits_{(keeps ? keeps_bit : 0) | (writes ? writes_bit : 0) |
              (only_reads ? only_reads_bit : 0)} {}

  [[nodiscard]] bool keeps() const noexcept { return (bits_ & keeps_bit) != 0; }
  [[nodiscard]] bool writes() const noexcept { return (bits_ & writes_bit) != 0; }
  [[nodiscard]] bool only_reads() const noexcept { return (bits_ & only_reads_bit) != 0; }

 private:
  static constexpr std::uintptr_t keeps_bit = 1;
  static constexpr std::uintptr_t writes_bit = 2;
  static constexpr std::uintptr_t only_reads_bit = 4;
  std::uintptr_t bits_ = 0;
};

/// A storage among the operands or results of an operation, and a tensor that uses it.
struct Operand {
  c10::StorageImpl* storage = nullptr;
  c10::TensorImpl const* tensor = nullptr;
  OperandUse use{};
};
using Operands = c10::SmallVector<Operand, 12>;

/// Whether a tensor consists of sizes, strides and an offset into a storage only, or is undefined.
/// All other tensors have a dispatch key that tells what they are.
[[nodiscard]] inline bool is_plain(at::Tensor const& tensor) noexcept {
  constexpr c10::DispatchKeySet plain =
      c10::DispatchKeySet{c10::DispatchKeySet::RAW, c10::full_backend_mask} |
      c10::DispatchKeySet{c10::DispatchKey::Dense,
                          c10::DispatchKey::Conjugate,
                          c10::DispatchKey::Negative,
                          c10::DispatchKey::ADInplaceOrView,
                          c10::DispatchKey::AutogradFunctionality} |
      c10::autocast_dispatch_keyset;
  return (tensor.unsafeGetTensorImpl()->key_set().raw_repr() & ~plain.raw_repr()) == 0;
}

inline void for_each_part_of_special(at::Tensor const& tensor,
                                     c10::function_ref<void(at::Tensor const&, bool)> visit);

/// Calls `visit(tensor, keeps)` for each tensor with a storage that `tensor` consists of: itself,
/// the parts of a sparse or nested tensor, or the tensor that a batched tensor of `vmap` wraps,
/// whose address kernels for batched tensors may ask for. Python subclasses have no storage;
/// operations on them call operations on their inner tensors. `keeps` is true for parts that
/// PyTorch reads outside of operations: the sizes, strides and offsets of a nested tensor, and the
/// scales and zero points of a quantized one.
template <class Visit>
C10_ALWAYS_INLINE void for_each_part(at::Tensor const& tensor, Visit const& visit) {
  if (!is_plain(tensor)) {
    for_each_part_of_special(tensor, visit);
  } else if (tensor.unsafeGetTensorImpl()->unsafe_storage()) {
    visit(tensor, false);
  }
}

/// Visits the scales and zero points of a tensor that is quantized per channel. They are tensors of
/// the quantizer, which several tensors may share.
inline void visit_quantizer(at::QuantizerPtr const& quantizer,
                            c10::function_ref<void(at::Tensor const&, bool)> visit) {
  if (auto const* const channels =
          dynamic_cast<at::PerChannelAffineQuantizer const*>(quantizer.get())) {
    auto const keep = [&visit](at::Tensor const& part, bool) { visit(part, true); };
    for_each_part(channels->scales(), keep);
    for_each_part(channels->zero_points(), keep);
  }
}

inline void for_each_part_of_special(at::Tensor const& tensor,
                                     c10::function_ref<void(at::Tensor const&, bool)> visit) {
  if (auto const* const batched = at::functorch::maybeGetBatchedImpl(tensor)) {
    for_each_part(batched->value(), visit);
    return;
  }
  c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
  if (impl->is_nested() && !impl->is_python_dispatch()) {
    auto const* const nested = static_cast<at::native::NestedTensorImpl const*>(impl);
    visit(nested->get_nested_sizes(), true);
    visit(nested->get_nested_strides(), true);
    visit(nested->get_storage_offsets(), true);
  }
  if (impl->is_quantized() && !impl->is_python_dispatch()) {
    visit_quantizer(static_cast<at::QTensorImpl*>(impl)->quantizer(), visit);
  }
  if (impl->has_storage()) {
    visit(tensor, false);
    return;
  }
  switch (impl->layout()) {
  case c10::kSparse: {
    if (impl->is_python_dispatch()) {
      return;
    }
    auto const* const sparse = static_cast<at::SparseTensorImpl const*>(impl);
    for_each_part(sparse->indices(), visit);
    for_each_part(sparse->values(), visit);
    return;
  }
  case c10::kSparseCsr:
  case c10::kSparseCsc:
  case c10::kSparseBsr:
  case c10::kSparseBsc: {
    if (impl->is_python_dispatch()) {
      return;
    }
    auto const* const sparse = static_cast<at::SparseCsrTensorImpl const*>(impl);
    for_each_part(sparse->compressed_indices(), visit);
    for_each_part(sparse->plain_indices(), visit);
    for_each_part(sparse->values(), visit);
    return;
  }
  default:
    return;
  }
}

/// As `for_each_part`, for a value that is a tensor, an optional tensor, or a list, a tuple or the
/// values of a dictionary of such values. A list of any values may also have others among them.
template <class Visit>
void for_each_tensor(c10::IValue const& value, Visit const& visit) {
  if (value.isTensor()) {
    for_each_part(value.toTensor(), visit);
  } else if (value.isTensorList() || value.isList()) {
    for (c10::IValue const& element : value.toListRef()) {
      for_each_tensor(element, visit);
    }
  } else if (value.isTuple()) {
    for (c10::IValue const& element : value.toTupleRef().elements()) {
      for_each_tensor(element, visit);
    }
  } else if (value.isGenericDict()) {
    for (auto const& entry : value.toGenericDict()) {
      for_each_tensor(entry.value(), visit);
    }
  }
}

/// Collects the storages among `values` whose memory is that of `Leases`.
///
/// @param kept_only  collect only the storages that PyTorch reads outside of operations
template <class Leases>
void collect(std::span<c10::IValue const> values,
             Operands& operands,
             OperandUse use,
             bool kept_only = false) {
  auto const add = [&operands, use, kept_only](at::Tensor const& tensor, bool keeps) {
    c10::StorageImpl* const storage = tensor.storage().unsafeGetStorageImpl();
    if (storage != nullptr && Leases::is_ours(*storage) && (keeps || !kept_only)) {
      operands.push_back({storage,
                          tensor.unsafeGetTensorImpl(),
                          OperandUse{use.keeps() || keeps, use.writes(), use.only_reads()}});
    }
  };
  for (c10::IValue const& value : values) {
    if (value.isStorage()) {
      c10::StorageImpl* const storage = value.toStorage().unsafeGetStorageImpl();
      if (storage != nullptr && Leases::is_ours(*storage)) {
        operands.push_back({storage, nullptr, use});
      }
    } else {
      for_each_tensor(value, add);
    }
  }
}

}  // namespace spillway::torch
