// SPDX-License-Identifier: Apache-2.0
// Kernels for a CUDA device that cannot run GPU code. With the stand-in for the CUDA runtime,
// tensors, streams, events and copies of the unpatched PyTorch work as on a GPU, but no kernel can
// be launched.
//
// This file replaces the CUDA kernel of each operation by one that enqueues a host function on the
// current stream. The host function runs the operation on the CPU, with CPU tensors over the memory
// of the device, which is host memory. So, as on a GPU, the results exist only when the stream has
// reached the operation, and they are wrong if an operand leaves too early. The shapes of the
// results are computed with tensors without memory, of the device "meta". If PyTorch needs the
// operands' bytes for that, the kernel waits for its stream instead.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/ops/copy_native.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using c10::OperatorHandle;
using Stack = torch::jit::Stack;

std::mutex failure_mutex;
std::string failure;  // of the last kernel that threw on a stream
bool waits_always = false;

/// Returns a value in which each tensor is replaced by `replacement(tensor)`.
template <class Function>
IValue with_tensors(IValue const& value, Function replacement) {
  if (value.isTensor()) {
    at::Tensor const& tensor = value.toTensor();
    return tensor.defined() ? IValue{replacement(tensor)} : value;
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (at::Tensor const& tensor : value.toTensorVector()) {
      list.push_back(tensor.defined() ? replacement(tensor) : tensor);
    }
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (std::optional<at::Tensor> const& tensor : value.toOptionalTensorVector()) {
      list.push_back(tensor && tensor->defined() ? std::optional{replacement(*tensor)} : tensor);
    }
    return list;
  }
  return value;
}

template <class Function>
void for_each_tensor(IValue const& value, Function act) {
  (void)with_tensors(value, [&](at::Tensor const& tensor) {
    act(tensor);
    return tensor;
  });
}

/// Makes tensors of another device with the same shapes and overlaps as those of the CUDA device.
class Twins {
 public:
  /// `device`: the CPU, for tensors over the same memory, or "meta", for those without memory.
  explicit Twins(c10::DeviceType device) : device_{device} {}

  at::Tensor of(at::Tensor const& tensor) {
    auto const [found, is_new] = tensors_.try_emplace(tensor.unsafeGetTensorImpl());
    if (is_new) {
      found->second = make(tensor);
    }
    return found->second;
  }

 private:
  at::Tensor make(at::Tensor const& tensor) {
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
      return tensor;  // it is a Python number, not a tensor of the program
    }
    if (tensor.is_cpu() && device_ == c10::DeviceType::CPU) {
      return tensor.clone();
    }
    at::Tensor twin = at::empty({0}, at::TensorOptions{}.dtype(tensor.dtype()).device(device_));
    twin.unsafeGetTensorImpl()->set_storage_keep_dtype(storage_of(tensor));
    twin.unsafeGetTensorImpl()->set_sizes_and_strides(
        tensor.sizes(), tensor.strides(), tensor.storage_offset());
    twin._set_conj(tensor.is_conj());
    twin._set_neg(tensor.is_neg());
    return twin;
  }
  c10::Storage const& storage_of(at::Tensor const& tensor) {
    c10::StorageImpl const* const key = tensor.storage().unsafeGetStorageImpl();
    auto found = storages_.find(key);
    if (found == storages_.end()) {
      std::size_t const bytes = key->nbytes();
      void* const p =
          bytes == 0 || device_ == c10::DeviceType::Meta ? nullptr : const_cast<void*>(key->data());
      TORCH_CHECK(p != nullptr || bytes == 0 || device_ == c10::DeviceType::Meta,
                  "an operand has no address: nothing leases it");
      auto* const allocator = c10::GetAllocator(device_);
      // An operation may enlarge its result, which then gets memory of its own.
      found = storages_
                  .emplace(key,
                           c10::Storage{c10::Storage::use_byte_size_t{},
                                        bytes,
                                        c10::DataPtr{p, nullptr, [](void*) {}, device_},
                                        allocator,
                                        /*resizable=*/true})
                  .first;
    }
    return found->second;
  }

  c10::DeviceType device_;
  std::unordered_map<c10::TensorImpl const*, at::Tensor> tensors_;
  std::unordered_map<c10::StorageImpl const*, c10::Storage> storages_;
};

/// Disables autograd and modes that intercept operations, as is the case inside of a kernel.
struct InsideOfKernel {
  c10::impl::ExcludeDispatchKeyGuard keys{
      c10::autograd_dispatch_keyset_with_ADInplaceOrView |
      DispatchKeySet({DispatchKey::TESTING_ONLY_GenericMode, DispatchKey::PythonDispatcher})};
  c10::AutoGradMode gradients{false};
};

bool writes(c10::Argument const& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

/// An operation that is enqueued on a stream. Like a kernel of a GPU it does not keep its operands'
/// memory alive.
struct Work {
  OperatorHandle op;
  Stack arguments;
  std::vector<at::Tensor> results;  // CPU tensors over the memory of the results, in order
  bool is_of_graph = false;         // captured, so it runs with each launch of the graph

  void run() const {
    InsideOfKernel const inside;
    Stack stack = arguments;
    op.callBoxed(stack);
    auto place = results.begin();
    for (std::size_t i = 0; i < stack.size(); ++i) {
      if (op.schema().returns()[i].alias_info() != nullptr) {
        continue;
      }
      for_each_tensor(stack[i], [&](at::Tensor const& result) {
        at::Tensor const& to = *place++;
        // Some CPU kernels return an empty tensor for a result that is not needed.
        result.numel() == 0 ? to.zero_() : to.copy_(result);
      });
    }
  }
};

void run_and_delete(void* argument) {
  auto* const work = static_cast<Work*>(argument);
  try {
    work->run();
  } catch (std::exception const& error) {
    std::string const text = error.what();
    std::lock_guard const lock{failure_mutex};
    failure = work->op.schema().name() + ": " + text.substr(0, text.find('\n'));
  }
  if (!work->is_of_graph) {
    delete work;
  }
}

void launch(std::unique_ptr<Work> work) {
  work->is_of_graph =
      c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
  TORCH_CHECK(cudaLaunchHostFunc(c10::cuda::getCurrentCUDAStream(), &run_and_delete, work.get()) ==
                  cudaSuccess,
              "the stand-in has no stream for ",
              work->op.schema().name());
  (void)work.release();
}

at::Tensor empty_like_twin(at::Tensor const& twin) {
  at::Tensor made = at::empty_strided(
      twin.sizes(), twin.strides(), at::TensorOptions{}.dtype(twin.dtype()).device(at::kCUDA));
  made._set_conj(twin.is_conj());
  made._set_neg(twin.is_neg());
  return made;
}

void take_shape_of(at::Tensor const& twin, at::Tensor const& tensor) {
  tensor.resize_(twin.sizes());
  if (tensor.strides() != twin.strides()) {
    tensor.as_strided_(twin.sizes(), twin.strides());
  }
}

/// One call of an operation of the device.
class Call {
 public:
  Call(OperatorHandle const& op, Stack& stack)
      : op_{op},
        given_(stack.end() - static_cast<std::ptrdiff_t>(op.schema().arguments().size()),
               stack.end()),
        plain_(given_) {
    torch::jit::drop(stack, given_.size());
    for (std::size_t i = 0; i < given_.size(); ++i) {
      for_each_tensor(given_[i], [&](at::Tensor const& tensor) {
        if (tensor.is_cuda()) {
          device_.set_device(tensor.device());
        }
      });
      if (argument(i).name() == "pin_memory") {
        plain_[i] = {};
      }
      if (given_[i].isDevice() && given_[i].toDevice().is_cuda()) {
        device_.set_device(given_[i].toDevice());
        plain_[i] = at::Device{at::kCPU};
      }
    }
    if (op.hasTag(at::Tag::nondeterministic_seeded)) {
      draw_seed();
    }
  }

  void run(Stack& stack) {
    if (auto const results = waits_always ? std::nullopt : known_results()) {
      run_on_stream(stack, *results);
    } else {
      run_now(stack);
    }
  }

 private:
  [[nodiscard]] c10::Argument const& argument(std::size_t i) const {
    return op_.schema().arguments()[i];
  }

  /// Computes the seed of this call from the generator's seed and counter, and advances the
  /// counter, as GPU kernels do.
  void draw_seed() {
    at::Generator generator = at::cuda::detail::getDefaultCUDAGenerator();
    for (std::size_t i = 0; i < given_.size(); ++i) {
      if (given_[i].isGenerator()) {
        generator = given_[i].toGenerator();
      }
    }
    std::lock_guard const lock{generator.mutex()};
    std::uint64_t const counter = generator.get_offset();
    generator.set_offset(counter + 4);
    seed_ = (generator.current_seed() * 0x9E3779B97F4A7C15U ^ counter * 0xBF58476D1CE4E5B9U) >> 2U;
    for (std::size_t i = 0; i < given_.size(); ++i) {
      if (argument(i).name() == "generator") {
        plain_[i] = at::detail::createCPUGenerator(*seed_);
        has_generator_ = true;
      }
    }
  }

  /// Returns meta tensors with the shapes of the results, or nothing if the operands' bytes are
  /// needed for that, or if the operation changes the size of an operand.
  std::optional<Stack> known_results() const {
    if (seed_ && !has_generator_) {
      return std::nullopt;  // it would use the default CPU generator, which is the program's
    }
    Twins shapes{c10::DeviceType::Meta};
    Stack stack;
    for (std::size_t i = 0; i < given_.size(); ++i) {
      IValue const& value = plain_[i];
      stack.push_back(value.isGenerator() ? IValue{}
                      : value.isDevice()  ? IValue{at::Device{at::kMeta}}
                                          : with_tensors(value, [&](at::Tensor const& tensor) {
                                             return shapes.of(tensor);
                                           }));
    }
    try {
      InsideOfKernel const inside;
      op_.callBoxed(stack);
    } catch (std::exception const&) {
      return std::nullopt;  // the kernel reports what is wrong with the operands
    }
    bool keeps_sizes = true;
    for_each_written([&](at::Tensor const& tensor) {
      keeps_sizes = keeps_sizes && shapes.of(tensor).sizes() == tensor.sizes();
    });
    return keeps_sizes ? std::optional{stack} : std::nullopt;
  }

  void run_on_stream(Stack& stack, Stack const& results) {
    Twins twins{c10::DeviceType::CPU};
    auto work = std::make_unique<Work>(Work{op_, twins_of_arguments(twins), {}});
    for (std::size_t i = 0; i < results.size(); ++i) {
      stack.push_back(returned(i, results[i], [&](at::Tensor const& shape) {
        at::Tensor const made = empty_like_twin(shape);
        work->results.push_back(twins.of(made));
        return made;
      }));
    }
    launch(std::move(work));
  }

  void run_now(Stack& stack) {
    synchronize();
    Twins twins{c10::DeviceType::CPU};
    Stack results = twins_of_arguments(twins);
    call_drawing(results);
    for_each_written([&](at::Tensor const& tensor) {
      at::Tensor const twin = twins.of(tensor);
      bool const is_same_memory =
          tensor.is_cuda() && twin.storage().data() == tensor.storage().data();
      if (!is_same_memory || twin.sizes() != tensor.sizes()) {
        at::Tensor const bytes = is_same_memory ? twin.clone() : twin;
        take_shape_of(twin, tensor);
        fill(tensor, bytes);
      }
    });
    for (std::size_t i = 0; i < results.size(); ++i) {
      stack.push_back(returned(i, results[i], [&](at::Tensor const& result) {
        at::Tensor const dense =
            result.is_non_overlapping_and_dense() ? result : result.contiguous();
        at::Tensor const made = empty_like_twin(dense);
        fill(made, dense);
        return made;
      }));
    }
  }

  void call_drawing(Stack& stack) const {
    InsideOfKernel const inside;
    if (!seed_ || has_generator_) {
      op_.callBoxed(stack);
      return;
    }
    struct Restore {
      at::Generator generator = at::detail::getDefaultCPUGenerator();
      at::Tensor state = generator.get_state();
      ~Restore() { generator.set_state(state); }
    } restore;
    restore.generator.set_current_seed(*seed_);
    op_.callBoxed(stack);
  }

  static void synchronize() { c10::cuda::getCurrentCUDAStream().synchronize(); }

  /// Writes a tensor. Waits first, since operations on the stream may still use its memory.
  static void fill(at::Tensor const& tensor, at::Tensor const& bytes) {
    synchronize();
    InsideOfKernel const inside;
    Twins{c10::DeviceType::CPU}.of(tensor).copy_(bytes);
  }

  Stack twins_of_arguments(Twins& twins) const {
    Stack stack;
    for (IValue const& value : plain_) {
      stack.push_back(
          with_tensors(value, [&](at::Tensor const& tensor) { return twins.of(tensor); }));
    }
    return stack;
  }

  template <class Function>
  void for_each_written(Function act) const {
    for (std::size_t i = 0; i < given_.size(); ++i) {
      if (writes(argument(i))) {
        for_each_tensor(given_[i], act);
      }
    }
  }

  /// Returns the argument that a result aliases, or else the result with `make` of each tensor.
  template <class Make>
  IValue returned(std::size_t result, IValue const& value, Make make) const {
    auto const* const aliases = op_.schema().returns()[result].alias_info();
    if (aliases == nullptr) {
      return with_tensors(value, make);
    }
    for (std::size_t i = 0; i < given_.size(); ++i) {
      if (argument(i).alias_info() != nullptr &&
          argument(i).alias_info()->beforeSets() == aliases->beforeSets()) {
        return given_[i];
      }
    }
    TORCH_CHECK(false, op_.schema().name(), " returns what it was not given");
  }

  OperatorHandle op_;
  c10::cuda::OptionalCUDAGuard device_;
  std::vector<IValue> given_;
  std::vector<IValue> plain_;  // arguments for the CPU, with the tensors unchanged
  std::optional<std::uint64_t> seed_;
  bool has_generator_ = false;
};

void run(OperatorHandle const& op, DispatchKeySet, Stack* stack) {
  Call{op, *stack}.run(*stack);
}

/// Of all copies only those inside of the device that change type, shape or layout need a kernel.
at::Tensor& copy_(at::Tensor& self, at::Tensor const& source, bool non_blocking) {
  bool const is_plain = self.dtype() == source.dtype() && self.sizes() == source.sizes() &&
                        self.strides() == source.strides() && self.is_non_overlapping_and_dense() &&
                        self.is_conj() == source.is_conj() && self.is_neg() == source.is_neg();
  bool const is_inside = self.is_cuda() && source.is_cuda() && self.layout() == at::kStrided &&
                         source.layout() == at::kStrided;
  if (!is_inside || is_plain || self.numel() == 0) {
    return at::native::copy_(self, source, non_blocking);
  }
  static auto const op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
  c10::cuda::CUDAGuard const device{self.device()};
  Twins twins{c10::DeviceType::CPU};
  Stack arguments{twins.of(self), twins.of(source), false};
  launch(std::make_unique<Work>(Work{op, std::move(arguments), {}}));
  return self;
}

/// Whether an operation is not replaced: such operations allocate, copy, make views or read
/// properties.
bool needs_no_kernel(OperatorHandle const& op) {
  static std::set<std::string> const names{"aten::_efficientzerotensor",
                                           "aten::_local_scalar_dense",
                                           "aten::_pin_memory",
                                           "aten::copy_",
                                           "aten::empty.memory_format",
                                           "aten::empty_strided",
                                           "aten::is_pinned",
                                           "aten::is_set_to",
                                           "aten::record_stream",
                                           "aten::resize_",
                                           "aten::set_",
                                           "aten::set_.source_Storage",
                                           "aten::set_.source_Storage_storage_offset",
                                           "aten::set_.source_Tensor"};
  auto const& results = op.schema().returns();
  bool const is_view = std::any_of(results.begin(), results.end(), [](c10::Argument const& result) {
    return result.alias_info() != nullptr && !writes(result);
  });
  return is_view || names.count(c10::toString(op.operator_name())) != 0;
}

}  // namespace

extern "C" {

/// Call it once. Operations without a CPU kernel are not replaced. `waits`: each kernel waits for
/// its stream, so that the shapes of results need not be known before.
void spillway_install_kernels(bool waits) {
  waits_always = waits;
  static std::vector<c10::RegistrationHandleRAII> registered;
  auto& dispatcher = c10::Dispatcher::singleton();
  auto names = dispatcher.getRegistrationsForDispatchKey(DispatchKey::CUDA);
  names.push_back({"aten::convolution", ""});  // use the CPU's kernel, not cuDNN
  for (c10::OperatorName const& name : names) {
    auto const op = dispatcher.findSchema(name);
    if (op && name.name.rfind("aten::", 0) == 0 && !needs_no_kernel(*op) &&
        op->hasComputedKernelForDispatchKey(DispatchKey::CPU)) {
      registered.push_back(
          dispatcher.registerImpl(name,
                                  DispatchKey::CUDA,
                                  c10::KernelFunction::makeFromBoxedFunction<&run>(),
                                  std::nullopt,
                                  nullptr,
                                  "stand-in"));
    }
  }
  registered.push_back(
      dispatcher.registerImpl({"aten::copy_", ""},
                              DispatchKey::CUDA,
                              c10::KernelFunction::makeFromUnboxedRuntimeFunction(&copy_),
                              std::nullopt,
                              nullptr,
                              "stand-in"));
}

/// Returns the error of a kernel since the last call, or an empty text. A GPU would stop at it.
char const* spillway_kernel_failure() {
  thread_local std::string text;
  std::lock_guard const lock{failure_mutex};
  text = std::exchange(failure, {});
  return text.c_str();
}

}  // extern "C"
