// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/interop/torch/operands.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

#include <ATen/Context.h>
#include <ATen/core/IListRef.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/stack.h>
#include <ATen/ops/_adaptive_avg_pool2d_backward_ops.h>
#include <ATen/ops/_adaptive_avg_pool2d_ops.h>
#include <ATen/ops/_batch_norm_impl_index_ops.h>
#include <ATen/ops/_convolution_ops.h>
#include <ATen/ops/_local_scalar_dense_ops.h>
#include <ATen/ops/_log_softmax_backward_data_ops.h>
#include <ATen/ops/_log_softmax_ops.h>
#include <ATen/ops/_softmax_backward_data_ops.h>
#include <ATen/ops/_softmax_ops.h>
#include <ATen/ops/_to_copy_ops.h>
#include <ATen/ops/_unsafe_view_ops.h>
#include <ATen/ops/adaptive_avg_pool1d_ops.h>
#include <ATen/ops/adaptive_avg_pool2d_ops.h>
#include <ATen/ops/add_ops.h>
#include <ATen/ops/addbmm_ops.h>
#include <ATen/ops/addcdiv_ops.h>
#include <ATen/ops/addcmul_ops.h>
#include <ATen/ops/addmm_ops.h>
#include <ATen/ops/addmv_ops.h>
#include <ATen/ops/addr_ops.h>
#include <ATen/ops/avg_pool2d_backward_ops.h>
#include <ATen/ops/avg_pool2d_ops.h>
#include <ATen/ops/baddbmm_ops.h>
#include <ATen/ops/batch_norm_ops.h>
#include <ATen/ops/bmm_ops.h>
#include <ATen/ops/cat_ops.h>
#include <ATen/ops/clamp_min_ops.h>
#include <ATen/ops/clone_ops.h>
#include <ATen/ops/contiguous_ops.h>
#include <ATen/ops/conv1d_ops.h>
#include <ATen/ops/conv2d_ops.h>
#include <ATen/ops/convolution_backward_ops.h>
#include <ATen/ops/convolution_ops.h>
#include <ATen/ops/copy_ops.h>
#include <ATen/ops/cross_entropy_loss_ops.h>
#include <ATen/ops/div_ops.h>
#include <ATen/ops/dropout_ops.h>
#include <ATen/ops/embedding_dense_backward_ops.h>
#include <ATen/ops/embedding_ops.h>
#include <ATen/ops/exp_ops.h>
#include <ATen/ops/fill_ops.h>
#include <ATen/ops/flatten_ops.h>
#include <ATen/ops/gelu_backward_ops.h>
#include <ATen/ops/gelu_ops.h>
#include <ATen/ops/group_norm_ops.h>
#include <ATen/ops/item_ops.h>
#include <ATen/ops/layer_norm_ops.h>
#include <ATen/ops/lerp_ops.h>
#include <ATen/ops/linear_ops.h>
#include <ATen/ops/log_ops.h>
#include <ATen/ops/log_softmax_ops.h>
#include <ATen/ops/matmul_ops.h>
#include <ATen/ops/max_pool2d_ops.h>
#include <ATen/ops/max_pool2d_with_indices_backward_ops.h>
#include <ATen/ops/max_pool2d_with_indices_ops.h>
#include <ATen/ops/mean_ops.h>
#include <ATen/ops/mkldnn_convolution_ops.h>
#include <ATen/ops/mm_ops.h>
#include <ATen/ops/mse_loss_backward_ops.h>
#include <ATen/ops/mse_loss_ops.h>
#include <ATen/ops/mul_ops.h>
#include <ATen/ops/native_batch_norm_backward_ops.h>
#include <ATen/ops/native_batch_norm_ops.h>
#include <ATen/ops/native_dropout_backward_ops.h>
#include <ATen/ops/native_dropout_ops.h>
#include <ATen/ops/native_group_norm_backward_ops.h>
#include <ATen/ops/native_group_norm_ops.h>
#include <ATen/ops/native_layer_norm_backward_ops.h>
#include <ATen/ops/native_layer_norm_ops.h>
#include <ATen/ops/neg_ops.h>
#include <ATen/ops/nll_loss_backward_ops.h>
#include <ATen/ops/nll_loss_forward_ops.h>
#include <ATen/ops/nll_loss_nd_ops.h>
#include <ATen/ops/nll_loss_ops.h>
#include <ATen/ops/pow_ops.h>
#include <ATen/ops/relu_ops.h>
#include <ATen/ops/reshape_ops.h>
#include <ATen/ops/resolve_conj_ops.h>
#include <ATen/ops/resolve_neg_ops.h>
#include <ATen/ops/rsqrt_ops.h>
#include <ATen/ops/sigmoid_backward_ops.h>
#include <ATen/ops/sigmoid_ops.h>
#include <ATen/ops/silu_backward_ops.h>
#include <ATen/ops/silu_ops.h>
#include <ATen/ops/softmax_ops.h>
#include <ATen/ops/sparse_sampled_addmm_ops.h>
#include <ATen/ops/sqrt_ops.h>
#include <ATen/ops/sub_ops.h>
#include <ATen/ops/sum_ops.h>
#include <ATen/ops/tanh_backward_ops.h>
#include <ATen/ops/tanh_ops.h>
#include <ATen/ops/threshold_backward_ops.h>
#include <ATen/ops/to_ops.h>
#include <ATen/ops/type_as_ops.h>
#include <ATen/ops/zero_ops.h>
#include <ATen/ops/zeros_like_ops.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/Layout.h>
#include <c10/core/ScalarType.h>
#include <c10/macros/Macros.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

// The operations that models call most, by the name of their type and of their schema. The hook has
// kernels with their exact types, so that their arguments are not boxed.
// clang-format off
#define SPILLWAY_TORCH_KERNELS(DO) \
  DO(add_Tensor, "add.Tensor") \
  DO(add__Tensor, "add_.Tensor") \
  DO(add_out, "add.out") \
  DO(sub_Tensor, "sub.Tensor") \
  DO(sub__Tensor, "sub_.Tensor") \
  DO(mul_Tensor, "mul.Tensor") \
  DO(mul__Tensor, "mul_.Tensor") \
  DO(mul_out, "mul.out") \
  DO(div_Tensor, "div.Tensor") \
  DO(div__Tensor, "div_.Tensor") \
  DO(neg, "neg") \
  DO(sum, "sum") \
  DO(sum_dim_IntList, "sum.dim_IntList") \
  DO(mean, "mean") \
  DO(mean_dim, "mean.dim") \
  DO(sqrt, "sqrt") \
  DO(sqrt_, "sqrt_") \
  DO(rsqrt, "rsqrt") \
  DO(pow_Tensor_Scalar, "pow.Tensor_Scalar") \
  DO(exp, "exp") \
  DO(log, "log") \
  DO(addcmul_, "addcmul_") \
  DO(addcdiv_, "addcdiv_") \
  DO(lerp__Scalar, "lerp_.Scalar") \
  DO(fill__Scalar, "fill_.Scalar") \
  DO(zero_, "zero_") \
  DO(copy_, "copy_") \
  DO(cat, "cat") \
  DO(relu, "relu") \
  DO(relu_, "relu_") \
  DO(threshold_backward, "threshold_backward") \
  DO(gelu, "gelu") \
  DO(gelu_backward, "gelu_backward") \
  DO(silu, "silu") \
  DO(silu_backward, "silu_backward") \
  DO(tanh, "tanh") \
  DO(tanh_backward, "tanh_backward") \
  DO(sigmoid, "sigmoid") \
  DO(sigmoid_backward, "sigmoid_backward") \
  DO(mm, "mm") \
  DO(addmm, "addmm") \
  DO(bmm, "bmm") \
  DO(baddbmm, "baddbmm") \
  DO(convolution, "convolution") \
  DO(convolution_backward, "convolution_backward") \
  DO(native_batch_norm, "native_batch_norm") \
  DO(native_batch_norm_backward, "native_batch_norm_backward") \
  DO(native_layer_norm, "native_layer_norm") \
  DO(native_layer_norm_backward, "native_layer_norm_backward") \
  DO(native_group_norm, "native_group_norm") \
  DO(native_group_norm_backward, "native_group_norm_backward") \
  DO(native_dropout, "native_dropout") \
  DO(native_dropout_backward, "native_dropout_backward") \
  DO(_softmax, "_softmax") \
  DO(_softmax_backward_data, "_softmax_backward_data") \
  DO(_log_softmax, "_log_softmax") \
  DO(_log_softmax_backward_data, "_log_softmax_backward_data") \
  DO(nll_loss_forward, "nll_loss_forward") \
  DO(nll_loss_backward, "nll_loss_backward") \
  DO(mse_loss, "mse_loss") \
  DO(mse_loss_backward, "mse_loss_backward") \
  DO(embedding, "embedding") \
  DO(embedding_dense_backward, "embedding_dense_backward") \
  DO(max_pool2d_with_indices, "max_pool2d_with_indices") \
  DO(max_pool2d_with_indices_backward, "max_pool2d_with_indices_backward") \
  DO(avg_pool2d, "avg_pool2d") \
  DO(avg_pool2d_backward, "avg_pool2d_backward") \
  DO(_adaptive_avg_pool2d, "_adaptive_avg_pool2d") \
  DO(_adaptive_avg_pool2d_backward, "_adaptive_avg_pool2d_backward") \
  DO(_local_scalar_dense, "_local_scalar_dense") \
  DO(_unsafe_view, "_unsafe_view") \
  DO(clamp_min, "clamp_min") \
  DO(_convolution, "_convolution") \
  DO(mkldnn_convolution, "mkldnn_convolution")

// Operations with a kernel that compares the addresses of its arguments, to see whether the result
// is the operand. A boxed call would pass two different addresses for the same tensor.
#define SPILLWAY_TORCH_COMPARING_KERNELS(DO) \
  DO(addbmm_out, "addbmm.out") \
  DO(addmm_out, "addmm.out") \
  DO(addmv_out, "addmv.out") \
  DO(addr_out, "addr.out") \
  DO(baddbmm_out, "baddbmm.out") \
  DO(sparse_sampled_addmm_out, "sparse_sampled_addmm.out")

// Operations that, for dense tensors, call other operations and read no bytes themselves.
#define SPILLWAY_TORCH_COMPOSITES(DO) \
  DO(linear, "linear") \
  DO(layer_norm, "layer_norm") \
  DO(batch_norm, "batch_norm") \
  DO(_batch_norm_impl_index, "_batch_norm_impl_index") \
  DO(group_norm, "group_norm") \
  DO(conv1d, "conv1d") \
  DO(conv2d, "conv2d") \
  DO(matmul, "matmul") \
  DO(reshape, "reshape") \
  DO(flatten_using_ints, "flatten.using_ints") \
  DO(contiguous, "contiguous") \
  DO(dropout, "dropout") \
  DO(dropout_, "dropout_") \
  DO(softmax_int, "softmax.int") \
  DO(log_softmax_int, "log_softmax.int") \
  DO(cross_entropy_loss, "cross_entropy_loss") \
  DO(nll_loss, "nll_loss") \
  DO(nll_loss_nd, "nll_loss_nd") \
  DO(max_pool2d, "max_pool2d") \
  DO(adaptive_avg_pool2d, "adaptive_avg_pool2d") \
  DO(adaptive_avg_pool1d, "adaptive_avg_pool1d") \
  DO(to_dtype, "to.dtype") \
  DO(to_device, "to.device") \
  DO(item, "item") \
  DO(clone, "clone") \
  DO(_to_copy, "_to_copy") \
  DO(zeros_like, "zeros_like") \
  DO(resolve_conj, "resolve_conj") \
  DO(resolve_neg, "resolve_neg") \
  DO(type_as, "type_as")
// clang-format on

namespace spillway::torch {

/// How an operation uses the bytes of its operands, which decides what the hook does.
enum class OperationKind : std::uint8_t {
  unknown,    ///< not classified yet
  kernel,     ///< reads and writes them; all operands are leased while it runs
  view,       ///< only reads sizes and strides
  composite,  ///< calls other operations, which lease their own operands
  /// A kernel that does the same to each element of its lists, one after the other, so that the
  /// lists can be cut
  per_tensor,
  factory,  ///< returns a tensor without contents, whose address the caller may use to fill it
  /// Makes an object of its operands that uses their addresses from then on, or returns tensors of
  /// such an object
  packing,
  /// Returns a permutation, which PyTorch's random sampler in C++ reads by its address
  permutation,
  lazy_clone,  ///< would share the operand's memory until one of the two is written
  exposing     ///< may use its operands' addresses after it has returned
};

namespace detail {

inline bool writes(c10::Argument const& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

/// Whether an operation is a view: it has one tensor operand, each result is an alias of that, and
/// it writes nothing.
inline bool is_view(c10::FunctionSchema const& schema) {
  std::size_t tensors = 0;
  for (c10::Argument const& argument : schema.arguments()) {
    if (writes(argument)) {
      return false;
    }
    auto const kind = argument.type()->kind();
    bool const is_number = kind == c10::TypeKind::IntType || kind == c10::TypeKind::BoolType ||
                           kind == c10::TypeKind::SymIntType || kind == c10::TypeKind::FloatType ||
                           kind == c10::TypeKind::NumberType || kind == c10::TypeKind::StringType;
    if (kind == c10::TypeKind::TensorType) {
      ++tensors;
    } else if (!is_number && argument.type()->str().find("Tensor") != std::string::npos) {
      return false;
    }
  }
  for (c10::Argument const& result : schema.returns()) {
    if (result.alias_info() == nullptr || result.alias_info()->isWrite()) {
      return false;
    }
  }
  return tensors == 1 && !schema.returns().empty();
}

inline bool has_kernel(c10::OperatorHandle const& op,
                       std::initializer_list<c10::DispatchKey> keys) {
  return std::any_of(keys.begin(), keys.end(), [&op](c10::DispatchKey key) {
    return op.hasKernelForDispatchKey(key);
  });
}

/// Whether an argument is an object of a class in C++ that is not a tensor. Such an object may
/// contain tensors.
inline bool is_object(c10::Argument const& argument) {
  return argument.type()->kind() == c10::TypeKind::ClassType;
}

/// Whether an operation makes an object of its operands, or returns tensors of such an object.
inline bool packs(c10::FunctionSchema const& schema) {
  return std::any_of(schema.returns().begin(), schema.returns().end(), is_object) ||
         (schema.name().find("unpack") != std::string::npos &&
          std::any_of(schema.arguments().begin(), schema.arguments().end(), is_object));
}

/// Whether a composite itself reads or writes bytes: those of its operands, or of results of
/// operations that it calls. Everything that such a composite uses stays resident while it runs, as
/// for a kernel.
inline bool accesses_bytes(c10::FunctionSchema const& schema) {
  static constexpr std::array prefixes{"aten::quantile",
                                       "aten::nanquantile",
                                       "aten::sparse_",
                                       "aten::_sparse_",
                                       "aten::_validate_sparse_",
                                       "aten::_sobol_engine_",
                                       "aten::max_pool1d",
                                       "aten::choose_qparams_optimized",
                                       "aten::_saturate_weight_to_fp16",
                                       "aten::fbgemm_",
                                       "aten::ctc_loss"};
  return std::any_of(prefixes.begin(), prefixes.end(), [&schema](char const* prefix) {
    return schema.name().rfind(prefix, 0) == 0;
  });
}

/// Whether an operation has no kernel but the composite one for dense tensors. An `Autograd` kernel
/// does not count, since it only runs where there is a kernel for the backend.
inline bool is_composite(c10::OperatorHandle const& op) {
  using c10::DispatchKey;
  return op.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd) &&
         !has_kernel(op,
                     {DispatchKey::CPU,
                      DispatchKey::CUDA,
                      DispatchKey::AutogradCPU,
                      DispatchKey::AutogradCUDA,
                      DispatchKey::CompositeExplicitAutograd});
}

/// Whether that also holds for tensors that are not dense, except for nested ones.
inline bool is_composite_for_all(c10::OperatorHandle const& op) {
  using c10::DispatchKey;
  return is_composite(op) && !has_kernel(op,
                                         {DispatchKey::SparseCPU,
                                          DispatchKey::SparseCUDA,
                                          DispatchKey::SparseCsrCPU,
                                          DispatchKey::SparseCsrCUDA,
                                          DispatchKey::QuantizedCPU,
                                          DispatchKey::QuantizedCUDA,
                                          DispatchKey::MkldnnCPU});
}

/// Whether an operation may write an argument. Batch normalization writes its running statistics,
/// which its schema does not declare. The schemas of operations that are not PyTorch's own are not
/// trusted: any argument counts as written.
inline bool may_write(c10::FunctionSchema const& schema, c10::Argument const& argument) {
  bool const is_statistic = argument.name() == "running_mean" || argument.name() == "running_var";
  return writes(argument) || schema.name().rfind("aten::", 0) != 0 ||
         (is_statistic && schema.name().find("_backward") == std::string::npos);
}

/// Whether a call with these arguments may write argument `i`: batch normalization writes its
/// running statistics only in training.
inline bool may_write(c10::FunctionSchema const& schema,
                      std::span<c10::IValue const> arguments,
                      std::size_t i) {
  c10::Argument const& argument = schema.arguments()[i];
  if (writes(argument) || !may_write(schema, argument) || schema.name().rfind("aten::", 0) != 0) {
    return may_write(schema, argument);
  }
  auto const training = schema.argumentIndexWithName("training");
  return !training || !arguments[static_cast<std::size_t>(*training)].isBool() ||
         arguments[static_cast<std::size_t>(*training)].toBool();
}

/// Whether an operation that has failed half way can run again, since it writes none of its
/// arguments. The caller checks that it has drawn no random numbers.
inline bool is_repeatable(c10::OperatorHandle const& op) {
  auto const& schema = op.schema();
  return schema.name().rfind("aten::", 0) == 0 &&
         std::none_of(schema.arguments().begin(),
                      schema.arguments().end(),
                      [&schema](auto const& argument) { return may_write(schema, argument); });
}

/// The operations whose results may be recomputed instead of copied; those in `overwriting` may be,
/// too. They compute the same bytes from the same operands whenever they run, and have no other
/// effect. What one costs is measured.
///
/// Exceptions: batch normalization also updates its running statistics, so it is run again without
/// them. Operations that draw random numbers are run again with the generator state of the first
/// run. Operations in place extend the recipe of the storage that they change, if it has one.
inline constexpr std::array<std::string_view, 96> recomputable{
    "aten::add.Tensor",
    "aten::add.Scalar",
    "aten::sub.Tensor",
    "aten::sub.Scalar",
    "aten::mul.Tensor",
    "aten::mul.Scalar",
    "aten::div.Tensor",
    "aten::div.Scalar",
    "aten::neg",
    "aten::abs",
    "aten::reciprocal",
    "aten::sqrt",
    "aten::rsqrt",
    "aten::pow.Tensor_Scalar",
    "aten::exp",
    "aten::log",
    "aten::erf",
    "aten::sin",
    "aten::cos",
    "aten::maximum",
    "aten::minimum",
    "aten::clamp",
    "aten::clamp_min",
    "aten::where.self",
    "aten::masked_fill.Scalar",
    "aten::masked_fill.Tensor",
    "aten::relu",
    "aten::leaky_relu",
    "aten::elu",
    "aten::gelu",
    "aten::silu",
    "aten::mish",
    "aten::tanh",
    "aten::sigmoid",
    "aten::softplus",
    "aten::hardtanh",
    "aten::hardswish",
    "aten::hardsigmoid",
    "aten::cat",
    "aten::embedding",
    "aten::_softmax",
    "aten::_safe_softmax",
    "aten::_log_softmax",
    "aten::native_layer_norm",
    "aten::native_group_norm",
    "aten::native_batch_norm",
    "aten::cudnn_batch_norm",
    "aten::convolution",
    "aten::avg_pool2d",
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::baddbmm",
    "aten::threshold_backward",
    "aten::gelu_backward",
    "aten::silu_backward",
    "aten::tanh_backward",
    "aten::sigmoid_backward",
    "aten::_softmax_backward_data",
    "aten::_log_softmax_backward_data",
    "aten::select_backward",
    "aten::slice_backward",
    // These draw random numbers.
    "aten::rand",
    "aten::rand.generator",
    "aten::randn",
    "aten::randn.generator",
    "aten::rand_like",
    "aten::randn_like",
    "aten::bernoulli",
    "aten::bernoulli.p",
    "aten::native_dropout",
    // These change their first argument in place.
    "aten::add_.Tensor",
    "aten::add_.Scalar",
    "aten::sub_.Tensor",
    "aten::sub_.Scalar",
    "aten::mul_.Tensor",
    "aten::mul_.Scalar",
    "aten::div_.Tensor",
    "aten::div_.Scalar",
    "aten::addcmul_",
    "aten::addcdiv_",
    "aten::neg_",
    "aten::sqrt_",
    "aten::exp_",
    "aten::clamp_",
    "aten::clamp_min_",
    "aten::masked_fill_.Scalar",
    "aten::masked_fill_.Tensor",
    "aten::relu_",
    "aten::leaky_relu_",
    "aten::elu_",
    "aten::silu_",
    "aten::tanh_",
    "aten::sigmoid_",
    "aten::hardtanh_",
    "aten::hardswish_",
};

/// Operations in place that write every element and read none.
inline constexpr std::array<std::string_view, 11> overwriting{
    "aten::copy_",
    "aten::fill_.Scalar",
    "aten::zero_",
    "aten::bernoulli_.float",
    "aten::bernoulli_.Tensor",
    "aten::uniform_",
    "aten::normal_",
    "aten::exponential_",
    "aten::random_",
    "aten::random_.from",
    "aten::random_.to",
};
/// Normalizations whose fourth and fifth arguments are running statistics. They update these if
/// their sixth argument is true.
inline constexpr std::array<std::string_view, 2> updating_statistics{"aten::native_batch_norm",
                                                                     "aten::cudnn_batch_norm"};
/// Operations for which cuDNN chooses one of several algorithms. Only results that cuDNN has
/// computed are recomputed; on the CPU a convolution takes longer than a copy of its result.
inline constexpr std::array<std::string_view, 1> choosing_algorithm{"aten::convolution"};
/// Operations that draw zeros and ones.
inline constexpr std::array<std::string_view, 2> drawing_bits{"aten::bernoulli_.float",
                                                              "aten::bernoulli_.Tensor"};
/// Operations that make a tensor with the shape of an operand whose bytes they do not read.
inline constexpr std::array<std::string_view, 3> shaped_like_operand{
    "aten::rand_like", "aten::randn_like", "aten::bernoulli.p"};

template <std::size_t count>
[[nodiscard]] constexpr bool is_among(std::array<std::string_view, count> const& names,
                                      std::string_view name,
                                      std::string_view overload) noexcept {
  return std::any_of(names.begin(), names.end(), [&](std::string_view one) {
    return overload.empty()
               ? one == name
               : one.size() == name.size() + 1 + overload.size() && one.starts_with(name) &&
                     one[name.size()] == '.' && one.ends_with(overload);
  });
}
[[nodiscard]] constexpr bool is_listed(std::string_view name, std::string_view overload) noexcept {
  return is_among(recomputable, name, overload) || is_among(overwriting, name, overload);
}

[[nodiscard]] inline bool is_alias(c10::Argument const& one) {
  return one.alias_info() != nullptr;
}
/// Whether an operation writes its first argument, returns it, and has no other alias.
[[nodiscard]] inline bool is_in_place(c10::FunctionSchema const& schema) {
  return schema.returns().size() == 1 && is_alias(schema.returns().front()) &&
         !schema.arguments().empty() && writes(schema.arguments().front()) &&
         std::none_of(schema.arguments().begin() + 1, schema.arguments().end(), is_alias);
}

}  // namespace detail

/// How the results of an operation can be recomputed, according to its name and schema.
struct RecomputeTraits {
  static constexpr std::uint8_t no_position = 255;

  /// It is in one of the lists above, and all that it writes or returns are new tensors or its
  /// first argument.
  bool is_recomputable = false;
  bool is_in_place = false;         ///< it writes its first argument, and returns that
  bool is_overwriting = false;      ///< it does not read its first argument before
  bool reads_shapes = false;        ///< it reads the shapes of its operands only, not their bytes
  bool draws = false;               ///< it draws random numbers
  bool draws_bits = false;          ///< it draws zeros and ones
  bool updates_statistics = false;  ///< in its fourth and fifth argument, if the sixth is true
  bool chooses_algorithm = false;   ///< one of several that round differently is chosen
  std::uint8_t generator_position = no_position;  ///< position of the argument that is a generator
  /// Position of the argument that is the type of the results
  std::uint8_t type_position = no_position;

  RecomputeTraits() = default;
  explicit RecomputeTraits(c10::OperatorHandle const& op) {
    auto const& schema = op.schema();
    auto const& arguments = schema.arguments();
    auto const is_among = [&schema](auto const& names) {
      return detail::is_among(names, schema.name(), schema.overload_name());
    };
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      if (arguments[i].name() == "generator") {
        generator_position = static_cast<std::uint8_t>(i);
      } else if (arguments[i].name() == "dtype") {
        type_position = static_cast<std::uint8_t>(i);
      }
    }
    is_in_place = detail::is_in_place(schema);
    is_overwriting = is_among(detail::overwriting);
    is_recomputable =
        (is_overwriting || is_among(detail::recomputable)) &&
        (is_in_place ||
         (std::none_of(arguments.begin(), arguments.end(), detail::is_alias) &&
          std::none_of(schema.returns().begin(), schema.returns().end(), detail::is_alias)));
    reads_shapes = is_among(detail::shaped_like_operand);
    draws = op.hasTag(at::Tag::nondeterministic_seeded);
    draws_bits = is_among(detail::drawing_bits);
    updates_statistics = is_among(detail::updating_statistics);
    chooses_algorithm = is_among(detail::choosing_algorithm);
  }
};

/// Classifies an operation by its schema. The schemas of operations that are not PyTorch's own are
/// not trusted.
inline OperationKind kind_of(c10::OperatorHandle const& op) {
  auto const& schema = op.schema();
  auto const begins_with_one_of = [&schema](std::initializer_list<char const*> prefixes) {
    return std::any_of(prefixes.begin(), prefixes.end(), [&schema](char const* prefix) {
      return schema.name().rfind(prefix, 0) == 0;
    });
  };
  if (begins_with_one_of({"c10d::", "_c10d_functional::", "symm_mem::"})) {
    return OperationKind::exposing;
  }
  if (detail::packs(schema)) {
    return OperationKind::packing;
  }
  if (schema.name() == "aten::randperm" &&
      schema.overload_name().find("out") == std::string::npos) {
    return OperationKind::permutation;
  }
  if (!begins_with_one_of({"aten::"}) || detail::accesses_bytes(schema)) {
    return OperationKind::kernel;
  }
  if (schema.name() == "aten::_lazy_clone") {
    return OperationKind::lazy_clone;
  }
  if (begins_with_one_of({"aten::empty", "aten::new_empty", "aten::_empty"})) {
    return OperationKind::factory;
  }
  if (begins_with_one_of({"aten::_foreach_",
                          "aten::_amp_foreach_",
                          "aten::_fused_adam",
                          "aten::_fused_sgd",
                          "aten::_fused_adagrad"})) {
    return OperationKind::per_tensor;
  }
  if (detail::is_composite(op)) {
    return OperationKind::composite;
  }
  return detail::is_view(schema) ? OperationKind::view : OperationKind::kernel;
}

/// A cache of the kinds of operations: a hash table that is never resized. Each thread has one.
/// Operations that are not PyTorch's own are not cached: their library may be unloaded, and another
/// schema may get the same address.
class OperationKinds {
 public:
  [[nodiscard]] OperationKind of(c10::OperatorHandle const& op) { return entry_of(op).kind; }
  [[nodiscard]] bool is_repeatable(c10::OperatorHandle const& op) {
    return entry_of(op).is_repeatable;
  }
  [[nodiscard]] RecomputeTraits const& recompute(c10::OperatorHandle const& op) {
    return entry_of(op).recompute;
  }

 private:
  struct Entry {
    void const* schema = nullptr;
    OperationKind kind = OperationKind::unknown;
    bool is_repeatable = false;
    RecomputeTraits recompute;
  };

  [[nodiscard]] Entry const& entry_of(c10::OperatorHandle const& op) {
    void const* const name = &op.schema();
    std::size_t const bits = reinterpret_cast<std::uintptr_t>(name) >> 4U;
    for (std::size_t probe = 0;; ++probe) {
      Entry& entry = entries_[((bits ^ (bits >> 9U)) + probe) & (entries_.size() - 1)];
      if (entry.schema == name) {
        return entry;
      }
      if (entry.schema == nullptr || probe == 3) {
        bool const stays = op.schema().name().rfind("aten::", 0) == 0;
        Entry& found = stays ? entry : passing_;
        found = {
            stays ? name : nullptr, kind_of(op), detail::is_repeatable(op), RecomputeTraits{op}};
        return found;
      }
    }
  }

  std::array<Entry, 1024> entries_{};
  Entry passing_;  // the last operation that was not cached
};

/// The dispatch keys of kernels for nested tensors.
inline constexpr std::array nested_keys{c10::DispatchKey::CompositeImplicitAutogradNestedTensor,
                                        c10::DispatchKey::NestedTensorCPU,
                                        c10::DispatchKey::NestedTensorCUDA};

/// Replaces the kernel for nested tensors of an operation that bypasses the hook for all other
/// tensors. Such a kernel reads sizes, strides and offsets, which are tensors, and makes new ones.
///
/// `Hook` is a `FrameHook`.
template <class Hook>
class NestedKernel final : public c10::OperatorKernel {
 public:
  explicit NestedKernel(c10::SafeKernelFunction original) : original_{std::move(original)} {}

  void
  operator()(c10::OperatorHandle const& op, c10::DispatchKeySet keys, ::torch::jit::Stack* stack) {
    if (Hook::is_on()) {
      Hook::run_nested(op, stack, [&] { original_.callBoxed(op, keys, stack); });
    } else {
      original_.callBoxed(op, keys, stack);
    }
  }

  /// Replaces these kernels of an operation for as long as `library` lives. PyTorch's warning about
  /// overridden kernels is suppressed.
  static void install(::torch::Library& library, c10::OperatorHandle const& op) {
    NoWarnings silence;
    c10::WarningUtils::WarningHandlerGuard const guard{&silence};
    for (c10::DispatchKey const key : nested_keys) {
      c10::DispatchKey const runtime_key =
          key == nested_keys.front() ? c10::DispatchKey::NestedTensorCPU : key;
      if (op.hasKernelForDispatchKey(key)) {
        auto kernel =
            std::make_unique<NestedKernel>(op.getComputedKernelForDispatchKey(runtime_key));
        library.impl(
            toString(op.operator_name()).c_str(),
            ::torch::dispatch(key, ::torch::CppFunction::makeFromBoxedFunctor(std::move(kernel))));
      }
    }
  }

 private:
  struct NoWarnings final : c10::WarningHandler {
    void process(c10::Warning const& /*warning*/) override {}
  };

  c10::SafeKernelFunction original_;
};

/// Calls `visit(tensor, is_written)` for each tensor in a typed argument or result.
template <class Value, class Visit>
void for_each_typed(Value& value, Visit const& visit) {
  using Plain = std::remove_const_t<Value>;
  if constexpr (std::is_same_v<Plain, at::Tensor>) {
    visit(value, !std::is_const_v<Value>);
  } else if constexpr (std::is_same_v<Plain, std::optional<at::Tensor>>) {
    if (value.has_value()) {
      visit(*value, !std::is_const_v<Value>);
    }
  } else if constexpr (std::is_same_v<Plain, at::ITensorListRef> ||
                       std::is_same_v<Plain, at::TensorList>) {
    for (at::Tensor const& tensor : value) {
      visit(tensor, false);
    }
  }
}

template <class... Values, class Visit>
void for_each_typed(std::tuple<Values...> const& values, Visit const& visit) {
  std::apply([&](auto const&... one) { (for_each_typed(one, visit), ...); }, values);
}

/// Collects those of the typed arguments that have to be leased. Not inlined: there are many
/// operations, and instruction caches are small.
template <class Leases>
struct TypedCollector {
  Operands& operands;
  typename Leases::Frames const& frames;
  bool is_outermost;
  bool may_write_silently;  // it may write what its type declares as read only

  C10_NOINLINE void operator()(at::Tensor const& tensor, bool is_written) const {
    for_each_part(tensor, [&](at::Tensor const& part, bool keeps) C10_ALWAYS_INLINE_ATTRIBUTE {
      c10::TensorImpl* const impl = part.unsafeGetTensorImpl();
      c10::StorageImpl* const storage = impl->unsafe_storage().unsafeGetStorageImpl();
      OperandUse const use{keeps, is_written, !is_written && !may_write_silently};
      if (storage != nullptr &&
          (is_outermost ? Leases::is_ours(*storage) : Leases::needs_pin(frames, *storage, use))) {
        operands.push_back({storage, impl, use});
      }
    });
  }
};

/// Collects results that no operation has been seen to use, and results that PyTorch reads outside
/// of operations, which an inner operation may have enrolled already. Most arguments that are
/// returned have been seen; they are skipped without taking the lock.
template <class Leases>
struct UnseenCollector {
  Operands& operands;

  C10_NOINLINE void operator()(at::Tensor const& tensor, bool /*is_written*/) const {
    for_each_part(tensor, [&](at::Tensor const& part, bool keeps) C10_ALWAYS_INLINE_ATTRIBUTE {
      c10::TensorImpl* const impl = part.unsafeGetTensorImpl();
      c10::StorageImpl* const storage = impl->unsafe_storage().unsafeGetStorageImpl();
      if (storage != nullptr &&
          (Leases::is_unseen(*storage) || (keeps && Leases::is_ours(*storage)))) {
        operands.push_back({storage, impl, OperandUse{keeps, /*writes=*/false}});
      }
    });
  }
};

/// The unboxed kernels of one operation.
///
/// They are inlined into the function that PyTorch calls, and call the next kernel directly, to
/// keep the call stack shallow. A processor predicts the return addresses of only a few dozen
/// nested calls, and Python alone nests many.
///
/// `Hook` is a `FrameHook`; see there what a frame is.
template <class Hook, class Op, class Schema = typename Op::schema>
struct TypedKernel;

template <class Hook, class Op, class Result, class... Arguments>
struct TypedKernel<Hook, Op, Result(Arguments...)> {
  using Leases = typename Hook::Leases;
  using Site = typename Hook::site_type;

  C10_ALWAYS_INLINE static Result run(c10::DispatchKeySet keys, Arguments... arguments) {
    if constexpr (std::is_same_v<Op, at::_ops::fill__Scalar>) {
      if (may_be_filling_new_memory(arguments...)) {
        return redispatch(keys, std::forward<Arguments>(arguments)...);
      }
    }
    typename Hook::Frame frame;
    Operands operands;
    std::size_t position = 0;
    bool const trains = updates_statistics(arguments...);
    (for_each_typed(arguments,
                    TypedCollector<Leases>{operands,
                                           frame.frames(),
                                           frame.is_outermost(),
                                           is_running_statistic(position++) && trains}),
     ...);
    typename Hook::template Recipes<is_recomputable> recipes;
    if (C10_UNLIKELY(recipes.are_wanted())) {
      begin_recipe(recipes, keys, arguments...);
    }
    frame.enter(operands);
    if (C10_UNLIKELY(recipes.are_wanted()) && recipes.try_lease()) {
      recipes.start();
    }
    Result result = call(frame, operands, keys, pass<Arguments>(arguments)...);
    if constexpr (std::is_same_v<Op, at::_ops::native_dropout>) {
      if (!recipes.try_end_draw()) {
        result = redispatch_again(keys, pass<Arguments>(arguments)...);
      }
    }
    if (frame.is_outermost()) {
      if (C10_UNLIKELY(recipes.are_wanted())) {
        recipes.prepare([&] { return box(arguments...); });
      }
      // Arguments that are returned are collected again, since they may have got their memory in
      // the call.
      operands.clear();
      for_each_typed(std::as_const(result), UnseenCollector<Leases>{operands});
      frame.end(operands);
      if (C10_UNLIKELY(recipes.are_wanted())) {
        give_recipes(recipes, result);
      }
    }
    return result;
  }

  /// Bypasses the hook for dense tensors. For other tensors the operation runs as a kernel.
  C10_ALWAYS_INLINE static Result run_composite(c10::DispatchKeySet keys, Arguments... arguments) {
    bool is_dense = true;
    auto const look = [&is_dense](at::Tensor const& tensor, bool) {
      is_dense = is_dense && is_plain(tensor);
    };
    (for_each_typed(arguments, look), ...);
    if constexpr (std::is_same_v<Op, at::_ops::clone>) {
      if (is_dense) {
        return run_clone(keys, std::forward<Arguments>(arguments)...);
      }
    }
    return is_dense ? redispatch(keys, std::forward<Arguments>(arguments)...)
                    : run_not_dense(keys, std::forward<Arguments>(arguments)...);
  }

 private:
  static constexpr bool is_recomputable = detail::is_listed(Op::name, Op::overload_name);

  /// Whether an argument is a running statistic of batch normalization, which the operation writes
  /// although its schema does not declare it.
  [[nodiscard]] static constexpr bool is_running_statistic(std::size_t position) noexcept {
    return std::is_same_v<Op, at::_ops::native_batch_norm> && (position == 3 || position == 4);
  }
  [[nodiscard]] static bool
  updates_statistics(std::remove_reference_t<Arguments> const&... arguments) noexcept {
    if constexpr (std::is_same_v<Op, at::_ops::native_batch_norm>) {
      return std::get<5>(std::tie(arguments...));  // `training`
    }
    return false;
  }
  [[nodiscard]] static ::torch::jit::Stack
  box(std::remove_reference_t<Arguments> const&... arguments) {
    return c10::impl::boxArgs<std::remove_reference_t<Arguments> const&...>(arguments...);
  }
  /// Forwards an argument. The kernel may move from it, unless the argument is needed again
  /// afterwards.
  template <class Argument>
  [[nodiscard]] C10_ALWAYS_INLINE static decltype(auto)
  pass(std::remove_reference_t<Argument>& argument) {
    if constexpr (is_recomputable) {
      return static_cast<std::remove_reference_t<Argument>&>(argument);
    } else {
      return static_cast<Argument&&>(argument);
    }
  }
  template <class Recipes>
  C10_NOINLINE static void begin_recipe(Recipes& recipes,
                                        c10::DispatchKeySet keys,
                                        std::remove_reference_t<Arguments> const&... arguments) {
    recipes.begin(Site::hook().kinds.recompute(handle()), handle(), Hook::after(keys), Hook::key);
    if constexpr (std::is_same_v<Result, at::Tensor&>) {
      recipes.begin_change(first_of(arguments...));
    }
  }
  template <class First, class... Rest>
  [[nodiscard]] static First const& first_of(First const& first, Rest const&... /*rest*/) noexcept {
    return first;
  }
  template <class Recipes>
  C10_NOINLINE static void give_recipes(Recipes& recipes, Result const& result) {
    std::vector<at::Tensor> results;
    for_each_typed(result, [&](at::Tensor const& tensor, bool) { results.push_back(tensor); });
    recipes.give(results);
  }

  C10_ALWAYS_INLINE static Result run_clone(c10::DispatchKeySet keys, Arguments... arguments) {
    Result copy = redispatch(keys, std::forward<Arguments>(arguments)...);
    enrol_copy(copy);
    return copy;
  }

  /// Enrols a copy that was made inside of another operation. Autograd copies what an operation is
  /// about to overwrite, and no other operation sees that copy before the backward pass. Copies
  /// that a communication makes are not enrolled, since they may be in use after it has returned.
  C10_NOINLINE static void enrol_copy(at::Tensor const& copy) {
    Operands operands;
    UnseenCollector<Leases>{operands}(copy, false);
    if (!operands.empty()) {
      typename Hook::Frame frame;
      if (frame.frames().foreign == 0) {
        frame.enrol(operands);
      }
    }
  }
  C10_NOINLINE static Result run_not_dense(c10::DispatchKeySet keys, Arguments... arguments) {
    return run(keys, std::forward<Arguments>(arguments)...);
  }

  /// Whether PyTorch may be filling memory that it has just allocated, as it does if the program
  /// asks for deterministic algorithms. The caller of the factory continues to use the address of
  /// that memory.
  [[nodiscard]] static bool may_be_filling_new_memory(at::Tensor const& self,
                                                      at::Scalar const& /*value*/) {
    at::Context const& context = at::globalContext();
    return C10_UNLIKELY(context.deterministicAlgorithms()) &&
           context.deterministicFillUninitializedMemory() && is_plain(self) && self.has_storage() &&
           Leases::is_unseen(*self.storage().unsafeGetStorageImpl());
  }

  static constexpr bool writes_arguments = (std::is_same_v<Arguments, at::Tensor&> || ...);

  /// Calls the kernel behind the hook. If that runs out of memory and the frame can make room,
  /// calls it once more.
  C10_ALWAYS_INLINE static Result call(typename Hook::Frame& frame,
                                       Operands const& operands,
                                       c10::DispatchKeySet keys,
                                       Arguments... arguments) {
    if constexpr (writes_arguments || std::is_same_v<Op, at::_ops::native_batch_norm>) {
      return redispatch(keys, std::forward<Arguments>(arguments)...);
    } else {
      bool can_repeat = true;
      typename Hook::DrawWatch watch;
      if constexpr (std::is_same_v<Op, at::_ops::native_dropout>) {
        can_repeat = Site::leases().is_room_scarce();
        if (C10_UNLIKELY(can_repeat)) {
          watch = Hook::watch_draws();
        }
      }
      try {
        typename Hook::Frame::Repeatable const gives_way{frame, operands, can_repeat};
        return redispatch(keys, arguments...);
      } catch (c10::OutOfMemoryError const&) {
        if (!can_repeat || watch.has_drawn() || !frame.try_regroup(handle(), operands)) {
          throw;
        }
      }
      return redispatch_again(keys, std::forward<Arguments>(arguments)...);
    }
  }
  C10_NOINLINE static Result redispatch_again(c10::DispatchKeySet keys, Arguments... arguments) {
    return redispatch(keys, std::forward<Arguments>(arguments)...);
  }
  C10_ALWAYS_INLINE static Result redispatch(c10::DispatchKeySet keys, Arguments... arguments) {
    return handle().redispatch(Hook::after(keys), std::forward<Arguments>(arguments)...);
  }
  C10_ALWAYS_INLINE static auto const& handle() {
    static auto const op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow(Op::name, Op::overload_name)
                               .template typed<Result(Arguments...)>();
    return op;
  }
};

}  // namespace spillway::torch
