// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/bits.hpp>
#include <spillway/interop/torch/drawn_bits.hpp>
#include <spillway/interop/torch/operands.hpp>
#include <spillway/interop/torch/operation_times.hpp>
#include <spillway/interop/torch/operations.hpp>
#include <spillway/interop/torch/random_draw.hpp>
#include <spillway/interop/torch/storage_leases.hpp>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <optional>
#include <shared_mutex>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/core/Generator.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorOptions.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/SmallVector.h>

namespace spillway::torch {

namespace detail {

/// Settings of the whole process that the results of operations depend on.
struct ProcessSettings {
  using Reduction = decltype(at::globalContext().allowFP16ReductionCuBLAS());

  /// The kinds of operations that have a precision setting of their own.
  static constexpr std::array precise_operations{at::Float32Op::MATMUL, at::Float32Op::CONV};
  template <class Value>
  using ForEachPrecise = std::array<Value, precise_operations.size()>;

  at::Float32Backend backend;  ///< kind of device; each has its own precision settings
  bool is_deterministic = at::globalContext().deterministicAlgorithms();
  bool warns_only = at::globalContext().deterministicAlgorithmsWarnOnly();
  bool uses_mkldnn = at::globalContext().userEnabledMkldnn();
  bool uses_cudnn = at::globalContext().userEnabledCuDNN();
  bool is_cudnn_deterministic = at::globalContext().deterministicCuDNN();
  bool searches_algorithms = at::globalContext().benchmarkCuDNN();
  ForEachPrecise<at::Float32Precision> precisions = precisions_of_process();
  bool accumulates_in_half = at::globalContext().allowFP16AccumulationCuBLAS();
  Reduction half_reduction = at::globalContext().allowFP16ReductionCuBLAS();
  Reduction bfloat16_reduction = at::globalContext().allowBF16ReductionCuBLAS();
  at::BlasBackend blas = backend == at::Float32Backend::CUDA
                             ? at::globalContext().blasPreferredBackend()
                             : at::BlasBackend::Default;

  explicit ProcessSettings(at::Float32Backend of) : backend{of} {}
  friend bool operator==(ProcessSettings const&, ProcessSettings const&) noexcept = default;

  /// Whether cuDNN computes the same bits whenever it gets the same shapes. It does not if it
  /// measures which of its algorithms is the fastest, nor if it may choose an algorithm that adds
  /// in no fixed order.
  [[nodiscard]] bool repeats_algorithms() const noexcept {
    return backend == at::Float32Backend::CUDA && !searches_algorithms &&
           (is_deterministic || is_cudnn_deterministic);
  }

  /// Replaces the current settings `others` by these. Settings that are equal are not touched,
  /// since another thread may be changing them.
  void replace(ProcessSettings const& others) const {
    at::Context& context = at::globalContext();
    if (is_deterministic != others.is_deterministic || warns_only != others.warns_only) {
      context.setDeterministicAlgorithms(is_deterministic, warns_only);
    }
    if (uses_mkldnn != others.uses_mkldnn) {
      context.setUserEnabledMkldnn(uses_mkldnn);
    }
    if (uses_cudnn != others.uses_cudnn) {
      context.setUserEnabledCuDNN(uses_cudnn);
    }
    if (is_cudnn_deterministic != others.is_cudnn_deterministic) {
      context.setDeterministicCuDNN(is_cudnn_deterministic);
    }
    if (searches_algorithms != others.searches_algorithms) {
      context.setBenchmarkCuDNN(searches_algorithms);
    }
    for (std::size_t i = 0; i < precisions.size(); ++i) {
      if (precisions[i] != others.precisions[i]) {
        set_precision(i, precisions[i]);
      }
    }
    if (accumulates_in_half != others.accumulates_in_half) {
      context.setAllowFP16AccumulationCuBLAS(accumulates_in_half);
    }
    if (half_reduction != others.half_reduction) {
      context.setAllowFP16ReductionCuBLAS(is_reduced(half_reduction), is_split(half_reduction));
    }
    if (bfloat16_reduction != others.bfloat16_reduction) {
      context.setAllowBF16ReductionCuBLAS(is_reduced(bfloat16_reduction),
                                          is_split(bfloat16_reduction));
    }
    if (blas != others.blas) {
      context.setBlasPreferredBackend(blas);
    }
  }

  /// @param which  position among `precise_operations`
  void set_precision(std::size_t which, at::Float32Precision precision) const {
    at::globalContext().setFloat32Precision(backend, precise_operations[which], precision);
  }
  /// Returns the precision that is set for this kind of operations alone; `NONE` if a more general
  /// setting holds for it.
  [[nodiscard]] at::Float32Precision own_precision(std::size_t which) const {
    at::Float32Precision const before = declared_precision(which);
    set_precision(which, at::Float32Precision::NONE);
    if (declared_precision(which) == before) {
      return at::Float32Precision::NONE;
    }
    set_precision(which, before);
    return before;
  }

 private:
  [[nodiscard]] at::Float32Precision declared_precision(std::size_t which) const {
    return at::globalContext().float32Precision(backend, precise_operations[which]);
  }
  /// If no precision is set, it is `IEEE` (full). That is stored in place of `NONE`, which would
  /// stand for the more general setting that holds when an operation runs again.
  [[nodiscard]] ForEachPrecise<at::Float32Precision> precisions_of_process() const {
    ForEachPrecise<at::Float32Precision> all{};
    for (std::size_t i = 0; i < all.size(); ++i) {
      at::Float32Precision const precision = declared_precision(i);
      all[i] = precision == at::Float32Precision::NONE ? at::Float32Precision::IEEE : precision;
    }
    return all;
  }
  [[nodiscard]] static bool is_reduced(Reduction wanted) noexcept {
    return wanted == Reduction::AllowReducedPrecisionWithSplitK;
  }
  [[nodiscard]] static bool is_split(Reduction wanted) noexcept {
    return wanted != Reduction::DisallowReducedPrecisionDisallowSplitK;
  }
};

/// How a thread rounds, and whether it replaces denormal numbers with 0. Does nothing on processors
/// other than x86-64 and AArch64.
class FloatMode {
 public:
  [[nodiscard]] static FloatMode of_this_thread() noexcept {
    return FloatMode{control_register() & mode_bits};
  }
  void set() const noexcept { set_control_register((control_register() & ~mode_bits) | bits_); }
  friend bool operator==(FloatMode, FloatMode) noexcept = default;

 private:
  explicit FloatMode(std::uint64_t bits) noexcept : bits_{bits} {}

#if defined(__SSE2__)
  // without the flags of exceptions that have occurred, which are in the same register
  static constexpr std::uint64_t mode_bits = 0xFFC0;
  static std::uint64_t control_register() noexcept {
    return __builtin_ia32_stmxcsr();
  }
  static void set_control_register(std::uint64_t bits) noexcept {
    __builtin_ia32_ldmxcsr(static_cast<unsigned>(bits));
  }
#elif defined(__aarch64__)
  static constexpr std::uint64_t mode_bits = ~std::uint64_t{0};
  static std::uint64_t control_register() noexcept {
    std::uint64_t bits = 0;
    asm volatile("mrs %0, fpcr" : "=r"(bits));
    return bits;
  }
  static void set_control_register(std::uint64_t bits) noexcept {
    asm volatile("msr fpcr, %0" : : "r"(bits));
  }
#else
  static constexpr std::uint64_t mode_bits = 0;
  static std::uint64_t control_register() noexcept {
    return 0;
  }
  static void set_control_register(std::uint64_t) noexcept {}
#endif

  std::uint64_t bits_;
};

/// All settings that results depend on beside operands. An operation is run again with the settings
/// of its first run. The default type is not among them, since recipes do not depend on it
/// (`OperationRecipe::give`).
struct NumericSettings {
  ProcessSettings process;
  int threads = at::get_num_threads();
  FloatMode float_mode = FloatMode::of_this_thread();

  explicit NumericSettings(at::Float32Backend of) : process{of} {}
  [[nodiscard]] static at::Float32Backend backend_of(c10::Device device) noexcept {
    return device.is_cuda() ? at::Float32Backend::CUDA : at::Float32Backend::MKLDNN;
  }
  friend bool operator==(NumericSettings const&, NumericSettings const&) noexcept = default;

  /// As `ProcessSettings::replace`.
  void replace(NumericSettings const& others) const {
    process.replace(others.process);
    if (threads != others.threads) {
      at::set_num_threads(threads);
    }
    float_mode.set();
  }
};

/// Applies settings for as long as it lives, if they differ from the current ones.
///
/// Most of them are settings of the process. While one recipe has changed some, no other recipe may
/// run: it would run with the changed settings, and might restore them afterwards. Operations of
/// other threads do run with the changed settings, as they would if the program itself changed
/// settings at that time.
class SettingsGuard {
 public:
  /// @param running  held shared by a recipe that runs, and exclusively by one that has changed
  ///                 settings of the process
  SettingsGuard(NumericSettings const& wanted, std::shared_mutex& running)
      : wanted_{wanted},
        together_{running},
        alone_{running, std::defer_lock},
        before_{std::in_place, wanted.process.backend} {
    if (before_->process != wanted.process) {
      together_.unlock();
      alone_.lock();
      before_.emplace(wanted.process.backend);
    }
    if (*before_ == wanted) {
      before_.reset();
      return;
    }
    for (std::size_t i = 0; i < own_precisions_.size(); ++i) {
      if (before_->process.precisions[i] != wanted.process.precisions[i]) {
        own_precisions_[i] = before_->process.own_precision(i);
      }
    }
    wanted.replace(*before_);
  }
  SettingsGuard(SettingsGuard const&) = delete;
  SettingsGuard& operator=(SettingsGuard const&) = delete;
  ~SettingsGuard() {
    if (before_) {
      before_->replace(wanted_);
      for (std::size_t i = 0; i < own_precisions_.size(); ++i) {
        if (own_precisions_[i]) {
          before_->process.set_precision(i, *own_precisions_[i]);
        }
      }
    }
  }

 private:
  NumericSettings const& wanted_;
  std::shared_lock<std::shared_mutex> together_;
  std::unique_lock<std::shared_mutex> alone_;
  std::optional<NumericSettings> before_;  // the settings to restore; empty if nothing was changed
  ProcessSettings::ForEachPrecise<std::optional<at::Float32Precision>> own_precisions_;
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

  /// Returns a tensor of this shape at `p`, without owning the memory.
  [[nodiscard]] at::Tensor at(void* p, c10::Device device) const {
    return at::for_blob(p, sizes)
        .strides(strides)
        .options(c10::TensorOptions{type}.device(device))
        .target_device(device)
        .make_tensor();
  }
};

}  // namespace detail

/// An operation with its arguments, which can be run again to recompute a result.
///
/// It holds no operands, so that recipes keep no memory alive. It knows the operands' shapes, and
/// gets their addresses when it runs. Operands of up to 8 KiB in host memory are copied into it:
/// they need not lie in the allocator's memory, and tensors that stand for Python numbers are gone
/// after the operation.
///
/// An operation in place gets the address of its first argument, where the bytes from before the
/// operation are. Other arguments may lie in the same memory.
///
/// It is immutable once it is made, and the recipes of all results share it.
///
/// `Site` is as for `StorageLeases` and `FrameHook`, and has
///
/// | expression                | must                                                           |
/// |---------------------------|----------------------------------------------------------------|
/// | `Site::random_type`       | the state of a generator of the device: `TwisterState`, say     |
/// | `Site::on_stream(s)`      | an object that makes `s` the thread's current stream while it  |
/// |                           | lives                                                          |
/// | `Site::operation_times()` | the `OperationTimes` of the process                            |
/// | `Site::timer()`           | where operations are enqueued: an `EventTimer`, whose type is  |
/// |                           | `Site::Timer`                                                  |
template <class Site>
class OperationRecipe {
 public:
  using Leases = StorageLeases<Site>;
  using Stack = ::torch::jit::Stack;
  using Random = typename Site::random_type;
  using stream_type = typename Leases::stream_type;

  /// Smaller results are swapped out: their copies cost less than a recipe and what it keeps.
  static constexpr std::size_t least_result_bytes = 16384;

  /// Whether only keys of the backend and of autograd follow the hook among the dispatch keys of a
  /// call. The operation is run again without autograd, which computes the same only then.
  [[nodiscard]] static bool is_plain_call(c10::DispatchKeySet next) noexcept {
    constexpr c10::DispatchKeySet plain =
        c10::DispatchKeySet{c10::DispatchKeySet::RAW, c10::full_backend_mask} |
        c10::autograd_dispatch_keyset_with_ADInplaceOrView |
        c10::DispatchKeySet{c10::DispatchKey::Dense, c10::DispatchKey::BackendSelect};
    return (next.raw_repr() & ~plain.raw_repr()) == 0;
  }

  /// Whether an operation for which cuDNN chooses an algorithm computes the same bits when it is
  /// run again. After an allocation has failed it might not, since PyTorch may have remembered an
  /// algorithm that needs less memory.
  [[nodiscard]] static bool repeats_algorithms() {
    return !Site::leases().has_refused() &&
           detail::ProcessSettings{detail::NumericSettings::backend_of(Site::device())}
               .repeats_algorithms();
  }

  /// @param draws_from  state of the generator that the operation has drawn from
  /// @param hook        dispatch key of the hook, which lets operations inside of this one draw
  ///                    from another generator
  /// @returns null if the operation cannot be run again with these arguments
  [[nodiscard]] static std::shared_ptr<OperationRecipe> make(c10::OperatorHandle const& op,
                                                             RecomputeTraits traits,
                                                             Stack arguments,
                                                             std::optional<Random> draws_from,
                                                             c10::DispatchKey hook) {
    std::shared_ptr<OperationRecipe> recipe{
        new OperationRecipe{op, traits, std::move(arguments), std::move(draws_from), hook}};
    return recipe->try_detach() ? recipe : nullptr;
  }

  /// Whether the zeros and ones that an operation draws into all of `changed` are kept as bits, so
  /// that its recipe need not draw again.
  [[nodiscard]] static bool keeps_bits(RecomputeTraits traits, at::Tensor const& changed) {
    return traits.draws_bits && changed.is_cpu() && DrawnBits::can_keep(changed.itemsize()) &&
           is_whole(changed);
  }

  /// Identifies the operation and the shapes of its operands.
  [[nodiscard]] std::uint64_t key() const noexcept { return key_.value(); }
  /// The time that it took to find the bits that were drawn. The recipe takes it as its cost, in
  /// place of the operation's time. Empty if there are no such bits.
  [[nodiscard]] std::optional<std::uint64_t> bits_ns() const noexcept {
    return bits_ ? std::optional{bits_ns_} : std::nullopt;
  }

  /// Sets the recipes of the operation's results. The frame of the operation has ended. A result of
  /// the default type, such as a quotient of integers, gets no recipe: the default type may have
  /// changed by the time of a recomputation, and it cannot be set for one thread.
  ///
  /// @param cost  time that the operation takes when it is run again
  static void give(std::shared_ptr<OperationRecipe> const& recipe,
                   std::span<at::Tensor const> results,
                   std::chrono::nanoseconds cost) {
    recipe->name_type(results);
    std::vector<RecipeOperand> const operands = std::move(recipe->operands_);
    if (recipe->changed_ && recipe->reads_changed_) {
      return;  // the operation overwrites an operand, so it cannot be run again
    }
    for (std::size_t i = 0; i < results.size(); ++i) {
      at::Tensor const& result = results[i];
      if (!result.defined() || !is_whole(result) || result.nbytes() < least_result_bytes ||
          recipe->has_default_type(result)) {
        continue;
      }
      detail::OperandShape const shape{result};
      Site::leases().try_give_recipe(
          *result.storage().unsafeGetStorageImpl(),
          operands,
          cost,
          [recipe, i, shape, bytes = result.nbytes()](
              stream_type stream, std::span<void const* const> addresses, void* made) {
            recipe->run(i, shape, bytes, stream, addresses, made);
          });
    }
  }

  /// Prepares an extension of the recipe of the storage that the operation has changed in place.
  /// The recipe is extended when the operation's frame ends.
  static void extend(std::shared_ptr<OperationRecipe> const& recipe,
                     RecipeExtension& extension,
                     std::chrono::nanoseconds cost) {
    extension.cost = cost;
    extension.operands = std::move(recipe->operands_);
    extension.make = [recipe, bytes = recipe->changed_bytes_](
                         void const* stream, std::span<void const* const> addresses, void* made) {
      recipe->run(
          0, *recipe->changed_, bytes, *static_cast<stream_type const*>(stream), addresses, made);
    };
  }
  /// Whether a tensor covers its whole storage, each byte once.
  [[nodiscard]] static bool is_whole(at::Tensor const& tensor) {
    return is_simple(tensor, Site::device()) && tensor.storage_offset() == 0 &&
           tensor.is_non_overlapping_and_dense() && tensor.storage().nbytes() == tensor.nbytes();
  }

 private:
  /// Value of `Place::operand` for the memory that the operation changes.
  static constexpr std::size_t changed_memory = ~std::size_t{0};

  /// Where an operand belongs: its position among the arguments, in a list if it is in one, and its
  /// number among the operands.
  struct Place {
    std::size_t argument = 0;
    std::optional<std::size_t> element;
    std::size_t operand = 0;
    detail::OperandShape shape;
  };

  static constexpr std::size_t most_copied_bytes = 8192;

  OperationRecipe(c10::OperatorHandle const& op,
                  RecomputeTraits traits,
                  Stack arguments,
                  std::optional<Random> draws_from,
                  c10::DispatchKey hook)
      : op_{op},
        traits_{traits},
        hook_{hook},
        arguments_(std::move(arguments)),
        draws_from_{std::move(draws_from)} {}

  /// Whether a tensor is no more than sizes, strides and an offset into a storage.
  [[nodiscard]] static bool is_simple(at::Tensor const& tensor, c10::Device device) {
    return is_plain(tensor) && tensor.has_storage() && !tensor.is_conj() && !tensor.is_neg() &&
           tensor.device() == device && tensor.numel() != 0;
  }

  /// Replaces the tensors among the arguments by descriptions of them. Their memory is leased.
  [[nodiscard]] bool try_detach() {
    combine(reinterpret_cast<std::uintptr_t>(&op_.schema()));
    combine(static_cast<std::uint64_t>(settings_.threads));
    if (traits_.updates_statistics && arguments_[5].toBool()) {
      arguments_[3] = arguments_[4] = c10::IValue{};
    }
    if (traits_.is_in_place) {
      at::Tensor const changed = arguments_.front().toTensor();
      if (!is_simple(changed, Site::device())) {
        return false;
      }
      changed_.emplace(changed);
      is_on_device_ = true;
      combine(*changed_);
      if (keeps_bits(traits_, changed)) {
        return try_keep_bits(changed);
      }
      changed_storage_ = changed.storage().unsafeGetStorageImpl();
      changed_bytes_ = changed.storage().nbytes();
      arguments_.front() = at::Tensor{};
    }
    for (std::size_t i = 0; i < arguments_.size(); ++i) {
      c10::IValue& argument = arguments_[i];
      if (i == traits_.generator_position) {
        argument = c10::IValue{};  // another generator will take its place
      } else if (argument.isTensor()) {
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
      } else {
        combine(argument);
      }
    }
    return is_on_device_ && Site::leases().note_unwritten(operands_);
  }
  [[nodiscard]] bool try_keep_bits(at::Tensor const& changed) {
    std::uint64_t const start = detail::now_ns();
    bits_ = DrawnBits::of(
        changed.const_data_ptr(), static_cast<std::size_t>(changed.numel()), changed.itemsize());
    bits_ns_ = detail::now_ns() - start;
    arguments_.clear();
    return bits_.has_value();
  }
  [[nodiscard]] bool
  try_detach(c10::IValue& value, std::size_t argument, std::optional<std::size_t> element) {
    at::Tensor const tensor = value.toTensor();
    bool const is_here = is_simple(tensor, Site::device());
    is_on_device_ = is_on_device_ || is_here;
    if (!is_here && !is_simple(tensor, c10::DeviceType::CPU)) {
      return false;
    }
    Place place{argument, element, 0, detail::OperandShape{tensor}};
    combine(place.shape);
    has_typed_operand_ =
        has_typed_operand_ || !(c10::isIntegralType(tensor.scalar_type(), /*includeBool=*/true) ||
                                tensor.unsafeGetTensorImpl()->is_wrapped_number());
    c10::StorageImpl* const storage = tensor.storage().unsafeGetStorageImpl();
    if (is_here && (traits_.reads_shapes || storage == changed_storage_)) {
      // The shape alone is needed, so any memory will do.
      reads_changed_ = true;
      place.operand = changed_memory;
      places_.push_back(std::move(place));
      value = at::Tensor{};
      return true;
    }
    if (std::size_t const bytes = extent_bytes(tensor);
        tensor.is_cpu() && bytes <= most_copied_bytes) {
      value = copy_of(tensor, bytes);
      return true;
    }
    if (!is_here || !Leases::is_ours(*storage)) {
      return false;
    }
    auto const found =
        std::find_if(operands_.begin(), operands_.end(), [storage](RecipeOperand const& one) {
          return one.storage == storage;
        });
    place.operand = static_cast<std::size_t>(found - operands_.begin());
    if (found == operands_.end()) {
      operands_.push_back({storage});
    }
    places_.push_back(std::move(place));
    value = at::Tensor{};
    return true;
  }

  /// Returns the bytes from the begin of a tensor's first element to the end of its last.
  [[nodiscard]] static std::size_t extent_bytes(at::Tensor const& tensor) {
    std::int64_t last = 0;
    for (std::int64_t d = 0; d < tensor.dim(); ++d) {
      last += (tensor.size(d) - 1) * tensor.stride(d);
    }
    return static_cast<std::size_t>(last + 1) * tensor.itemsize();
  }
  /// Returns a copy with the same alignment to cache lines as the original, since matrix products
  /// round differently if an operand is aligned differently.
  [[nodiscard]] static at::Tensor copy_of(at::Tensor const& tensor, std::size_t bytes) {
    constexpr std::align_val_t alignment{64};
    void const* const original = tensor.const_data_ptr();
    std::size_t const offset =
        reinterpret_cast<std::uintptr_t>(original) % static_cast<std::size_t>(alignment);
    auto* const memory = static_cast<std::byte*>(::operator new(offset + bytes, alignment));
    std::memcpy(memory + offset, original, bytes);
    at::Tensor copy = at::for_blob(memory + offset, tensor.sizes())
                          .strides(tensor.strides())
                          .context(memory, [](void* all) { ::operator delete(all, alignment); })
                          .options(tensor.scalar_type())
                          .make_tensor();
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
      copy.unsafeGetTensorImpl()->set_wrapped_number(true);
    }
    return copy;
  }
  /// If the type of the results was left to be the default, names it among the arguments.
  void name_type(std::span<at::Tensor const> results) {
    std::size_t const position = traits_.type_position;
    if (position < arguments_.size() && arguments_[position].isNone()) {
      arguments_[position] = results.front().scalar_type();
    }
  }
  /// Whether the default type alone determines the type of a result, since neither an operand nor
  /// an argument does.
  [[nodiscard]] bool has_default_type(at::Tensor const& result) const {
    return !has_typed_operand_ && traits_.type_position == RecomputeTraits::no_position &&
           !changed_ && !c10::isIntegralType(result.scalar_type(), /*includeBool=*/true);
  }
  void combine(std::uint64_t value) noexcept { key_.add(value); }
  /// Takes an argument into the key. Sizes of a result may be among the arguments, and so may its
  /// device.
  void combine(c10::IValue const& argument) {
    if (argument.isIntList()) {
      for (std::int64_t const number : argument.toIntVector()) {
        combine(static_cast<std::uint64_t>(number));
      }
    } else if (argument.isInt()) {
      combine(static_cast<std::uint64_t>(argument.toInt()));
    } else if (argument.isDevice()) {
      is_on_device_ = is_on_device_ || argument.toDevice().type() == Site::device().type();
    }
  }
  void combine(detail::OperandShape const& shape) noexcept {
    combine(static_cast<std::uint64_t>(shape.type));
    std::for_each(shape.sizes.begin(), shape.sizes.end(), [this](std::int64_t size) {
      combine(static_cast<std::uint64_t>(size));
    });
  }

  [[nodiscard]] Stack arguments_at(std::span<void const* const> operands, void* made) const {
    Stack arguments = arguments_;
    if (changed_) {
      arguments.front() =
          changed_->at(static_cast<char*>(made) + changed_->offset_bytes, Site::device());
    }
    std::optional<std::size_t> list;  // position of the last list that has been copied
    for (Place const& place : places_) {
      void const* const memory = place.operand == changed_memory ? made : operands[place.operand];
      void* const p =
          const_cast<char*>(static_cast<char const*>(memory)) + place.shape.offset_bytes;
      if (!place.element) {
        arguments[place.argument] = place.shape.at(p, Site::device());
        continue;
      }
      if (list != place.argument) {
        list = place.argument;
        arguments[*list] = arguments[*list].toList().copy();
      }
      arguments[*list].toList().set(*place.element, place.shape.at(p, Site::device()));
    }
    return arguments;
  }

  /// Recomputes result number `which` at `made`. In a forked process it may run on a new thread:
  /// the calling thread may belong to an OpenMP team whose other threads do not exist any more, and
  /// would wait for them forever.
  void run(std::size_t which,
           detail::OperandShape const& shape,
           std::size_t bytes,
           stream_type stream,
           std::span<void const* const> operands,
           void* made) const {
    if (C10_LIKELY(settings_.threads == 1 || bits_ || !Site::leases().is_in_child())) {
      return run_here(which, shape, bytes, stream, operands, made);
    }
    std::exception_ptr failure;
    std::thread{[&] {
      try {
        run_here(which, shape, bytes, stream, operands, made);
      } catch (...) {
        failure = std::current_exception();
      }
    }}.join();
    if (failure) {
      std::rethrow_exception(failure);
    }
  }
  void run_here(std::size_t which,
                detail::OperandShape const& shape,
                std::size_t bytes,
                stream_type stream,
                std::span<void const* const> operands,
                void* made) const {
    // Inside of a frame, operations that this one calls are nested, so that the hook does not count
    // or measure them as operations of the program.
    struct Scope {
      typename Leases::Frames& frames;
      RecipeMemory* recipe;
      at::Generator const* generator;
      Scope(typename Leases::Frames& mine, RecipeMemory& memory)
          : frames{mine},
            recipe{std::exchange(mine.recipe, &memory)},
            generator{std::exchange(mine.generator, nullptr)} {
        ++frames.depth;
      }
      Scope(Scope const&) = delete;
      Scope& operator=(Scope const&) = delete;
      ~Scope() {
        --frames.depth;
        frames.recipe = recipe;
        frames.generator = generator;
      }
    };
    std::uint64_t const start = detail::now_ns();
    auto const count = [&] {
      detail::OperationTime<Site>::count_again(key(), toString(op_.operator_name()), bytes, start);
    };
    if (bits_) {
      bits_->unpack(made);
      return count();
    }
    RecipeMemory memory{made, bytes, changed_.has_value()};
    Scope const scope{Site::frames(), memory};
    [[maybe_unused]] auto const runs_there = Site::on_stream(stream);
    Stack stack = arguments_at(operands, made);
    c10::DispatchKeySet included = c10::default_included_set;
    if (draws_from_) {
      at::Generator const& generator = Site::hook().generators.of_recipe(Site::device());
      draws_from_->restore(generator);
      if (traits_.generator_position != RecomputeTraits::no_position) {
        stack[traits_.generator_position] = generator;
      } else {
        scope.frames.generator = &generator;
        included = included | c10::DispatchKeySet{hook_};
      }
    }
    c10::impl::ForceDispatchKeyGuard const below_autograd{
        included, c10::default_excluded_set | c10::autograd_dispatch_keyset_with_ADInplaceOrView};
    at::AutoGradMode const no_gradients{false};
    detail::SettingsGuard const settings{settings_, Site::leases().running_recipes()};
    op_.callBoxed(&stack);
    if (!changed_) {
      at::Tensor const result = stack[which].toTensor();
      if (result.const_data_ptr() != made) {
        shape.at(made, Site::device()).copy_(result);
      }
    }
    count();
  }

  c10::OperatorHandle op_;
  RecomputeTraits traits_;
  c10::DispatchKey hook_;
  Stack arguments_;  // without tensors at the places of operands
  std::optional<Random> draws_from_;
  std::optional<DrawnBits> bits_;  // these are unpacked in place of running the operation
  std::uint64_t bits_ns_ = 0;      // time that it took to find them
  std::optional<detail::OperandShape> changed_;        // first argument of an operation in place
  c10::StorageImpl const* changed_storage_ = nullptr;  // only compared, during the first run
  std::size_t changed_bytes_ = 0;                      // size of that storage
  // an operand or a result is on the site's device; on the CPU everything is
  bool is_on_device_ = Site::device().is_cpu();
  bool reads_changed_ = false;      // another argument lies in the memory that is changed
  bool has_typed_operand_ = false;  // one that is not of integers and no Python number
  std::vector<Place> places_;
  std::vector<RecipeOperand> operands_;  // moved out by `give` and `extend`
  detail::NumericSettings settings_{detail::NumericSettings::backend_of(Site::device())};
  spillway::detail::Digest key_;
};

/// Sets the recipes of an operation's results if recipes are wanted, and measures the operation for
/// them. If operations are enqueued on a stream, the results get no recipe until an operation with
/// the same key has been measured.
///
/// Create it inside of the operation's frame. Its functions need be called only while
/// `are_wanted()`, which any of them may change to false.
template <class Site>
class RecipeWriter {
 public:
  using Recipe = OperationRecipe<Site>;
  using Random = typename Recipe::Random;

  RecipeWriter() {
    if (C10_UNLIKELY(Site::leases().gives_recipes())) {
      // Not a part of another operation, and not captured, so it runs now.
      are_wanted_ = Site::frames().depth == 1 && !StorageLeases<Site>::is_captured();
    }
  }
  [[nodiscard]] bool are_wanted() const noexcept { return are_wanted_; }

  /// To be called before the operands are leased.
  ///
  /// @param next  dispatch keys behind the hook
  /// @param hook  dispatch key of the hook
  void begin(RecomputeTraits traits,
             c10::OperatorHandle const& op,
             c10::DispatchKeySet next,
             c10::DispatchKey hook) {
    are_wanted_ =
        traits.is_recomputable && Recipe::is_plain_call(next) &&
        (!traits.chooses_algorithm || Recipe::repeats_algorithms()) &&
        (!traits.draws ||
         Random::draws_as_told(op, traits.generator_position != RecomputeTraits::no_position));
    if (are_wanted_) {
      work_.reset(new Work{op, traits, hook});
    }
  }
  /// To be called next, for an operation in place: its lease on the storage that it changes may
  /// keep the recipe of that.
  void begin_change(at::Tensor const& changed) {
    if (!are_wanted_) {
      return;
    }
    if (changed.defined() && changed.has_storage() &&
        changed.storage().nbytes() < Recipe::least_result_bytes) {
      are_wanted_ = false;
      return;
    }
    work_->keeps_bits = Recipe::keeps_bits(work_->traits, changed);
    if (!(work_->traits.is_overwriting && Recipe::is_whole(changed))) {
      are_wanted_ = changed.defined() && changed.has_storage();
      if (are_wanted_) {
        work_->extension.changed = changed.storage().unsafeGetStorageImpl();
        Site::frames().extension = &work_->extension;
      }
    }
  }
  /// To be called when the operands are leased. An operation in place on a storage without a recipe
  /// needs no recipe.
  ///
  /// @returns whether recipes are still wanted
  [[nodiscard]] bool try_lease() noexcept {
    are_wanted_ = are_wanted_ && (!work_->is_change() || work_->extension.is_leased);
    return are_wanted_;
  }
  /// To be called immediately before the kernel runs.
  ///
  /// @param generator  argument for the generator that the operation draws from, if it has one; may
  ///                   be replaced
  C10_NOINLINE void start(c10::IValue* generator = nullptr) {
    if (work_->traits.draws && !work_->keeps_bits && !try_begin_draw(generator)) {
      are_wanted_ = false;
      return;
    }
    try {
      work_->time.start(&work_->op.schema());
    } catch (std::exception const&) {  // it cannot be measured, so its results get no recipe
      are_wanted_ = false;
    }
  }
  /// To be called after the kernel has run. @returns false if it must run again, with the same
  /// arguments, since another thread has drawn from the generator meanwhile
  [[nodiscard]] bool try_end_draw() {
    if (C10_LIKELY(work_ == nullptr) || !work_->draw) {
      return true;
    }
    Site::frames().generator = nullptr;
    bool const has_ended = work_->draw->try_end();
    are_wanted_ = are_wanted_ && has_ended;
    return has_ended;
  }
  /// To be called next, while the operands are leased. `box` returns the arguments.
  template <class Box>
  C10_NOINLINE void prepare(Box const& box) {
    Work& work = *work_;
    try {
      work.time.stop();
      if (work.traits.chooses_algorithm && !Recipe::repeats_algorithms()) {
        return;  // the operation may have met a failed allocation
      }
      auto recipe = Recipe::make(work.op,
                                 work.traits,
                                 box(),
                                 work.draw ? std::optional{work.draw->before()} : std::nullopt,
                                 work.hook);
      auto const ns = recipe == nullptr ? std::nullopt : price(*recipe);
      if (ns) {
        work.cost = std::chrono::nanoseconds{*ns};
        if (work.is_change()) {
          Recipe::extend(recipe, work.extension, work.cost);
        }
        work.recipe = std::move(recipe);
      }
    } catch (std::exception const&) {  // NOLINT(bugprone-empty-catch): then it has no recipe
    }
  }
  /// To be called when the operation's frame has ended.
  void give(std::span<at::Tensor const> results) {
    try {
      if (work_->recipe != nullptr && !work_->is_change()) {
        Recipe::give(work_->recipe, results, work_->cost);
      }
    } catch (std::exception const&) {  // NOLINT(bugprone-empty-catch): then it has no recipe
    }
  }

 private:
  /// What is needed only if recipes are wanted.
  struct Work {
    c10::OperatorHandle op;
    RecomputeTraits traits;
    c10::DispatchKey hook;
    RecipeExtension extension{};
    bool keeps_bits = false;
    std::optional<RandomDraw<Random>> draw{};
    detail::OperationTime<Site> time{};
    std::chrono::nanoseconds cost{};
    std::shared_ptr<Recipe> recipe{};

    Work(c10::OperatorHandle const& its_op, RecomputeTraits its_traits, c10::DispatchKey its_hook)
        : op{its_op}, traits{its_traits}, hook{its_hook} {}
    Work(Work const&) = delete;
    Work& operator=(Work const&) = delete;
    ~Work() {
      auto& frames = Site::frames();
      frames.extension = nullptr;
      frames.generator = nullptr;
    }

    [[nodiscard]] bool is_change() const noexcept { return extension.changed != nullptr; }
  };

  [[nodiscard]] std::optional<std::uint64_t> price(Recipe const& recipe) {
    return recipe.bits_ns() ? Site::operation_times().note(recipe.key(), *recipe.bits_ns())
                            : work_->time.price(recipe.key());
  }
  [[nodiscard]] bool try_begin_draw(c10::IValue* generator) {
    bool const is_given = generator != nullptr && generator->isGenerator();
    at::Generator const program =
        is_given ? generator->toGenerator() : at::globalContext().defaultGenerator(Site::device());
    if (!program.defined() || !Random::is_known(program)) {
      return false;
    }
    work_->draw.emplace(program, Site::hook().generators);
    if (is_given) {
      *generator = work_->draw->generator();
    } else {
      Site::frames().generator = &work_->draw->generator();
    }
    return true;
  }
  bool are_wanted_ = false;
  std::unique_ptr<Work> work_;
};

/// Takes the place of a `RecipeWriter` for operations whose results get no recipes.
struct NoRecipes {
  [[nodiscard]] static constexpr bool are_wanted() noexcept { return false; }
  template <class... Arguments>
  void begin(Arguments&&... /*arguments*/) const noexcept {}
  void begin_change(at::Tensor const& /*changed*/) const noexcept {}
  [[nodiscard]] static constexpr bool try_lease() noexcept { return false; }
  void start() const noexcept {}
  [[nodiscard]] static constexpr bool try_end_draw() noexcept { return true; }
  template <class Box>
  void prepare(Box const& /*box*/) const noexcept {}
  void give(std::span<at::Tensor const> /*results*/) const noexcept {}
};

}  // namespace spillway::torch
