// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/bits.hpp>
#include <spillway/core/stats.hpp>
#include <spillway/interop/torch/operands.hpp>
#include <spillway/interop/torch/operations.hpp>
#include <spillway/interop/torch/storage_leases.hpp>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/SmallVector.h>

namespace spillway::torch {

namespace detail {

/// What results depend on beside operands and PyTorch's settings of types: an operation runs again
/// with the settings that it ran with.
struct NumericSettings {
  bool is_deterministic = at::globalContext().deterministicAlgorithms();
  bool warns_only = at::globalContext().deterministicAlgorithmsWarnOnly();
  bool uses_mkldnn = at::globalContext().userEnabledMkldnn();
  at::Float32Precision product_precision = precision_of_products();
  int threads = at::get_num_threads();
#if defined(__SSE2__)
  unsigned float_mode = __builtin_ia32_stmxcsr() & float_mode_bits;  // of this thread
#endif

  friend bool operator==(NumericSettings const&, NumericSettings const&) noexcept = default;

  void apply() const {
    at::globalContext().setDeterministicAlgorithms(is_deterministic, warns_only);
    at::globalContext().setUserEnabledMkldnn(uses_mkldnn);
    if (product_precision != precision_of_products()) {
      at::globalContext().setFloat32Precision(
          at::Float32Backend::MKLDNN, at::Float32Op::MATMUL, product_precision);
    }
    if (threads != at::get_num_threads()) {
      at::set_num_threads(threads);
    }
#if defined(__SSE2__)
    __builtin_ia32_ldmxcsr((__builtin_ia32_stmxcsr() & ~float_mode_bits) | float_mode);
#endif
  }

 private:
  [[nodiscard]] static at::Float32Precision precision_of_products() {
    return at::globalContext().float32Precision(at::Float32Backend::MKLDNN, at::Float32Op::MATMUL);
  }
  static constexpr unsigned float_mode_bits = 0xFFC0;  // not the flags of what has happened
};

/// Applies settings for as long as it lives, if they are not those that hold.
class SettingsGuard {
 public:
  explicit SettingsGuard(NumericSettings const& wanted) : is_needed_{!(before_ == wanted)} {
    if (is_needed_) {
      wanted.apply();
    }
  }
  SettingsGuard(SettingsGuard const&) = delete;
  SettingsGuard& operator=(SettingsGuard const&) = delete;
  ~SettingsGuard() {
    if (is_needed_) {
      before_.apply();
    }
  }

 private:
  NumericSettings before_;
  bool is_needed_;
};

/// The shape of an operand, and where it begins in its storage.
struct OperandShape {
  c10::SmallVector<std::int64_t, 5> sizes;
  c10::SmallVector<std::int64_t, 5> strides;
  std::int64_t offset_bytes = 0;
  c10::ScalarType type = c10::ScalarType::Undefined;

  explicit OperandShape(at::Tensor const& tensor)
      : sizes{tensor.sizes().begin(), tensor.sizes().end()},
        strides{tensor.strides().begin(), tensor.strides().end()},
        offset_bytes{tensor.storage_offset() * static_cast<std::int64_t>(tensor.itemsize())},
        type{tensor.scalar_type()} {}

  /// A tensor of this shape at `p`, which belongs to somebody else.
  [[nodiscard]] at::Tensor at(void* p) const {
    return at::for_blob(p, sizes).strides(strides).options(type).make_tensor();
  }
};

}  // namespace detail

/// What has been run again, by operation, and how long operations take.
///
/// Threads  thread-safe.
class OperationTimes {
 public:
  struct Recomputed {
    Tally results;
    std::uint64_t ns = 0;
  };

  /// Takes note of how long an operation took on operands of certain shapes.
  ///
  /// @param key  stands for the operation and the shapes
  /// @returns    the least time so far: in the others the processor did something else, too
  std::uint64_t note(std::uint64_t key, std::uint64_t ns) {
    std::lock_guard const guard{mutex_};
    if (least_.size() >= most_keys) {
      least_.clear();
    }
    auto const noted = least_.try_emplace(key, ns).first;
    noted->second = std::min(noted->second, ns);
    return noted->second;
  }
  void count(std::uint64_t key, std::string const& name, std::size_t bytes, std::uint64_t ns) {
    (void)note(key, ns);
    std::lock_guard const guard{mutex_};
    Recomputed& counted = recomputed_[name];
    counted.results.add(bytes);
    counted.ns += ns;
  }
  [[nodiscard]] std::unordered_map<std::string, Recomputed> recomputed() const {
    std::lock_guard const guard{mutex_};
    return recomputed_;
  }

 private:
  static constexpr std::size_t most_keys = 1 << 14;

  mutable std::mutex mutex_;
  std::unordered_map<std::uint64_t, std::uint64_t> least_;
  std::unordered_map<std::string, Recomputed> recomputed_;
};

/// An operation with its arguments, ready to run again.
///
/// Holds no operand, so that recipes keep no memory: it knows the operands' shapes, and is told
/// their addresses when it runs. Operands of a few kilobytes are copied, since they need not be the
/// allocator's, and numbers that Python has made tensors of are gone after the operation.
///
/// Immutable once it is made, and shared by the recipes of all results.
template <class Site>
class OperationRecipe {
 public:
  using Leases = StorageLeases<Site>;
  using Stack = ::torch::jit::Stack;

  /// @param next  the dispatch keys behind the hook. Nothing but autograd may be in front of the
  ///              kernel, as it is passed by when the operation runs again
  /// @returns null if the operation cannot be run again with these arguments
  [[nodiscard]] static std::shared_ptr<OperationRecipe>
  make(c10::OperatorHandle const& op, c10::DispatchKeySet next, Stack arguments) {
    constexpr c10::DispatchKeySet plain =
        c10::DispatchKeySet{c10::DispatchKeySet::RAW, c10::full_backend_mask} |
        c10::autograd_dispatch_keyset_with_ADInplaceOrView |
        c10::DispatchKeySet{c10::DispatchKey::Dense, c10::DispatchKey::BackendSelect};
    if ((next.raw_repr() & ~plain.raw_repr()) != 0) {
      return nullptr;
    }
    std::shared_ptr<OperationRecipe> recipe{new OperationRecipe{op, std::move(arguments)}};
    return recipe->try_detach() ? recipe : nullptr;
  }

  /// Gives the operation's results recipes. The frame of the operation has ended.
  ///
  /// @param ns  what the operation took
  static void give(std::shared_ptr<OperationRecipe> const& recipe,
                   std::span<at::Tensor const> results,
                   std::uint64_t ns) {
    std::chrono::nanoseconds const cost{Site::operation_times().note(recipe->key_, ns)};
    std::vector<c10::StorageImpl*> const operands = std::move(recipe->operands_);
    for (std::size_t i = 0; i < results.size(); ++i) {
      at::Tensor const& result = results[i];
      if (!result.defined() || !is_simple(result) || result.storage_offset() != 0 ||
          !result.is_non_overlapping_and_dense() || result.nbytes() < least_result_bytes ||
          result.storage().nbytes() != result.nbytes()) {
        continue;
      }
      detail::OperandShape const shape{result};
      Site::leases().try_give_recipe(
          *result.storage().unsafeGetStorageImpl(),
          operands,
          cost,
          [recipe, i, shape, bytes = result.nbytes()](
              auto /*stream*/, std::span<void const* const> addresses, void* made) {
            recipe->run(i, shape, bytes, addresses, made);
          });
    }
  }

 private:
  /// An operand among the arguments: which one, where in a list, and its place among the operands.
  struct Place {
    std::size_t argument = 0;
    std::optional<std::size_t> element;
    std::size_t operand = 0;
    detail::OperandShape shape;
  };

  /// Smaller results are copied: their copies take less than what comes with a recipe.
  static constexpr std::size_t least_result_bytes = 16384;
  static constexpr std::size_t most_copied_bytes = 8192;

  OperationRecipe(c10::OperatorHandle const& op, Stack arguments)
      : op_{op}, arguments_(std::move(arguments)) {}

  /// Whether a tensor is no more than sizes, strides and an offset into a storage.
  [[nodiscard]] static bool is_simple(at::Tensor const& tensor) {
    return is_plain(tensor) && tensor.has_storage() && !tensor.is_conj() && !tensor.is_neg() &&
           tensor.device() == Site::device() && tensor.numel() != 0;
  }

  /// Replaces the tensors among the arguments by what is known of them. Their memory is leased.
  [[nodiscard]] bool try_detach() {
    combine(reinterpret_cast<std::uintptr_t>(&op_.schema()));
    combine(static_cast<std::uint64_t>(settings_.threads));
    if (op_.schema().name() == "aten::native_batch_norm" && arguments_[5].toBool()) {
      arguments_[3] = arguments_[4] = c10::IValue{};
    }
    for (std::size_t i = 0; i < arguments_.size(); ++i) {
      c10::IValue& argument = arguments_[i];
      if (argument.isTensor()) {
        if (argument.toTensor().defined() && !try_detach(argument, i, std::nullopt)) {
          return false;
        }
      } else if (argument.isTensorList()) {
        c10::impl::GenericList elements{c10::TypePtr{c10::TensorType::get()}};
        std::size_t position = 0;
        for (c10::IValue const& element : argument.toListRef()) {
          c10::IValue detached = element;
          if (!try_detach(detached, i, position++)) {
            return false;
          }
          elements.push_back(std::move(detached));
        }
        argument = std::move(elements);
      } else if (argument.isGenerator() || argument.isOptionalTensorList()) {
        return false;
      }
    }
    return true;
  }
  [[nodiscard]] bool
  try_detach(c10::IValue& value, std::size_t argument, std::optional<std::size_t> element) {
    at::Tensor const tensor = value.toTensor();
    if (!is_simple(tensor)) {
      return false;
    }
    Place place{argument, element, 0, detail::OperandShape{tensor}};
    combine(static_cast<std::uint64_t>(place.shape.type));
    std::for_each(place.shape.sizes.begin(), place.shape.sizes.end(), [this](std::int64_t size) {
      combine(static_cast<std::uint64_t>(size));
    });
    if (std::size_t const bytes = extent_bytes(tensor); bytes <= most_copied_bytes) {
      value = copy_of(tensor, bytes);
      return true;
    }
    c10::StorageImpl* const storage = tensor.storage().unsafeGetStorageImpl();
    if (!Leases::is_ours(*storage)) {
      return false;
    }
    auto const found = std::find(operands_.begin(), operands_.end(), storage);
    place.operand = static_cast<std::size_t>(found - operands_.begin());
    if (found == operands_.end()) {
      operands_.push_back(storage);
    }
    places_.push_back(std::move(place));
    value = at::Tensor{};
    return true;
  }

  /// The bytes from a tensor's first element to its last.
  [[nodiscard]] static std::size_t extent_bytes(at::Tensor const& tensor) {
    std::int64_t last = 0;
    for (std::int64_t d = 0; d < tensor.dim(); ++d) {
      last += (tensor.size(d) - 1) * tensor.stride(d);
    }
    return static_cast<std::size_t>(last + 1) * tensor.itemsize();
  }
  [[nodiscard]] static at::Tensor copy_of(at::Tensor const& tensor, std::size_t bytes) {
    constexpr std::align_val_t alignment{64};
    void* const p = ::operator new(bytes, alignment);
    std::memcpy(p, tensor.const_data_ptr(), bytes);
    at::Tensor copy = at::for_blob(p, tensor.sizes())
                          .strides(tensor.strides())
                          .deleter([](void* q) { ::operator delete(q, alignment); })
                          .options(tensor.scalar_type())
                          .make_tensor();
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
      copy.unsafeGetTensorImpl()->set_wrapped_number(true);
    }
    return copy;
  }
  void combine(std::uint64_t value) noexcept { key_ = spillway::detail::mix_bits(key_ ^ value); }

  [[nodiscard]] Stack arguments_at(std::span<void const* const> operands) const {
    Stack arguments = arguments_;
    std::optional<std::size_t> list;  // among the arguments, copied already
    for (Place const& place : places_) {
      void* const p = const_cast<char*>(static_cast<char const*>(operands[place.operand])) +
                      place.shape.offset_bytes;
      if (!place.element) {
        arguments[place.argument] = place.shape.at(p);
        continue;
      }
      if (list != place.argument) {
        list = place.argument;
        arguments[*list] = arguments[*list].toList().copy();
      }
      arguments[*list].toList().set(*place.element, place.shape.at(p));
    }
    return arguments;
  }

  /// Makes result number `which` at `made`.
  void run(std::size_t which,
           detail::OperandShape const& shape,
           std::size_t bytes,
           std::span<void const* const> operands,
           void* made) const {
    struct Scope {
      typename Leases::Frames& frames;
      RecipeMemory* before;
      ~Scope() { frames.recipe = before; }
    };
    auto const start = std::chrono::steady_clock::now();
    RecipeMemory memory{made, bytes};
    Scope const scope{Site::frames(), std::exchange(Site::frames().recipe, &memory)};
    c10::impl::ForceDispatchKeyGuard const below_autograd{
        c10::default_included_set,
        c10::default_excluded_set | c10::autograd_dispatch_keyset_with_ADInplaceOrView};
    at::AutoGradMode const no_gradients{false};
    detail::SettingsGuard const settings{settings_};
    Stack stack = arguments_at(operands);
    op_.callBoxed(&stack);
    at::Tensor const result = stack[which].toTensor();
    if (result.const_data_ptr() != made) {
      shape.at(made).copy_(result);
    }
    auto const ns = std::chrono::steady_clock::now() - start;
    Site::operation_times().count(
        key_, toString(op_.operator_name()), bytes, static_cast<std::uint64_t>(ns.count()));
  }

  c10::OperatorHandle op_;
  Stack arguments_;  // with nothing in the places of operands
  std::vector<Place> places_;
  std::vector<c10::StorageImpl*> operands_;  // until `give`
  detail::NumericSettings settings_;
  std::uint64_t key_ = 0;
};

/// Gives results of an operation recipes, if that is wanted: made before its kernel runs, it
/// measures the kernel. Waiting for memory is left out: under pressure an operation that allocates
/// may wait for copies.
template <class Site>
class RecipeWriter {
 public:
  /// @param depth  of frames, at which the operation is not part of another
  explicit RecipeWriter(int depth) {
    if constexpr (StorageLeases<Site>::can_recompute) {
      if (C10_UNLIKELY(Site::leases().gives_recipes())) {
        begin(depth);
      }
    }
  }
  [[nodiscard]] bool are_wanted() const noexcept { return start_ns_ != 0; }
  /// To be called while the operands are leased, with a function that returns the arguments.
  template <class Box>
  C10_NOINLINE void
  prepare(c10::OperatorHandle const& op, c10::DispatchKeySet next, Box const& box) {
    if constexpr (StorageLeases<Site>::can_recompute) {
      std::uint64_t const all = now_ns() - start_ns_;
      ns_ = all - std::min(all, Site::frames().waited_ns - waited_ns_);
      try {
        recipe_ = OperationRecipe<Site>::make(op, next, box());
      } catch (std::exception const&) {  // NOLINT(bugprone-empty-catch): then it has no recipe
      }
    }
  }
  /// To be called when the operation's frame has ended.
  void give(std::span<at::Tensor const> results) {
    if constexpr (StorageLeases<Site>::can_recompute) {
      try {
        if (recipe_ != nullptr) {
          OperationRecipe<Site>::give(recipe_, results, ns_);
        }
      } catch (std::exception const&) {  // NOLINT(bugprone-empty-catch): then it has no recipe
      }
    }
  }

 private:
  C10_NOINLINE void begin(int depth) {
    if (Site::frames().depth == depth) {
      waited_ns_ = Site::frames().waited_ns;
      start_ns_ = now_ns();
    }
  }
  [[nodiscard]] static std::uint64_t now_ns() {
    return static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
  }

  std::uint64_t start_ns_ = 0;  // 0: no recipes
  std::uint64_t waited_ns_ = 0;
  std::uint64_t ns_ = 0;
  std::shared_ptr<OperationRecipe<Site>> recipe_;
};

/// For operations whose results have none.
struct NoRecipes {
  explicit NoRecipes(int /*depth*/) noexcept {}
  [[nodiscard]] static constexpr bool are_wanted() noexcept { return false; }
  template <class... Arguments>
  void prepare(Arguments&&... /*arguments*/) const noexcept {}
  void give(std::span<at::Tensor const> /*results*/) const noexcept {}
};

}  // namespace spillway::torch
