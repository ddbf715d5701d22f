// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/error.hpp>
#include <spillway/interop/buffer_desk.hpp>
#include <spillway/interop/tensorflow/operands.hpp>
#include <spillway/interop/tensorflow/operation_kind.hpp>
#include <spillway/interop/tensorflow/step_watch.hpp>
#include <spillway/interop/tensorflow/tensor_allocator.hpp>

#include <exception>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <absl/status/status.h>
#include <absl/strings/str_cat.h>
#include <tensorflow/core/common_runtime/device_factory.h>
#include <tensorflow/core/common_runtime/threadpool_device.h>
#include <tensorflow/core/framework/op_kernel.h>
#include <tensorflow/core/public/session_options.h>

namespace spillway::tensor_flow {

/// TensorFlow's CPU device, with tensors that may leave its memory while no operation uses them.
///
/// Every operation of every program, eager or in a graph, is run by `Compute` or `ComputeAsync` of its
/// device. Around it the operands are leased, and what it allocates is until it is done.
///
/// `Site` says where the one desk of a process is, since TensorFlow makes devices as it likes:
///
/// | expression               | must                                                            |
/// |--------------------------|-----------------------------------------------------------------|
/// | `Site::allocator_type`   | a `DeviceAllocator` that keeps addresses                        |
/// | `Site::desk()`           | the `BufferDesk`; lives until the process ends                  |
/// | `Site::tensors()`        | the `TensorAllocator`; lives until the process ends             |
/// | `Site::steps()`          | the `StepWatch`                                                 |
/// | `Site::frame()`          | a reference to the calling thread's pointer to a frame          |
/// | `Site::may_own(p)`       | false if the desk certainly gave out no such address            |
/// | `Site::limit_bytes()`    | the limit, for statistics                                       |
/// | `Site::ballast_bytes()`  | resident bytes that are no tensors                              |
template <class Site>
class SwappingDevice final : public tf::ThreadPoolDevice {
 public:
  SwappingDevice(tf::SessionOptions const& options, std::string const& name)
      : tf::ThreadPoolDevice{
            options, name, tf::Bytes{256 << 20}, tf::DeviceLocality{}, &Site::tensors()} {}

  void Compute(tf::OpKernel* kernel, tf::OpKernelContext* context) override {
    auto const name = kernel->type_string_view();
    bool const is_program = belongs_to_program(*context);
    if (is_program && passes(name, *context)) {
      tf::ThreadPoolDevice::Compute(kernel, context);
    } else {
      Operation operation{*context, name, is_program, true};
      if (!operation.try_begin()) {
        return;
      }
      InFrame const inside{is_program ? &operation.frame() : nullptr};
      tf::ThreadPoolDevice::Compute(kernel, context);
      operation.show_results();
    }
    if (is_program && (name == "AssignVariableOp" || name == "AssignAddVariableOp")) {
      watch_steps(*context);
    }
  }

  void ComputeAsync(tf::AsyncOpKernel* kernel,
                    tf::OpKernelContext* context,
                    tf::AsyncOpKernel::DoneCallback done) override {
    auto const name = kernel->type_string_view();
    bool const is_program = belongs_to_program(*context);
    if (is_program && passes(name, *context)) {
      InFrame const outside{nullptr};
      tf::ThreadPoolDevice::ComputeAsync(kernel, context, std::move(done));
      return;
    }
    auto const operation = std::make_shared<Operation>(*context, name, is_program, false);
    if (!operation->try_begin()) {
      done();
      return;
    }
    InFrame const inside{is_program ? &operation->frame() : nullptr};
    tf::ThreadPoolDevice::ComputeAsync(kernel, context, [operation, done = std::move(done)] {
      operation->show_results();
      operation->end();
      // What comes after runs on this thread, too, and is no part of the operation.
      InFrame const outside{nullptr};
      done();
    });
  }

  void CopyTensorInSameDevice(tf::Tensor const* from,
                              tf::Tensor* to,
                              tf::DeviceContext const* context,
                              tf::StatusCallback done) override {
    auto const frame = std::make_shared<Frame>();
    std::vector<BufferUse> uses;
    auto const add = [&uses](tf::Tensor const& tensor, bool writes) {
      if (void* const p = base_of(tensor); p != nullptr && Site::may_own(p)) {
        uses.push_back({p, writes});
      }
    };
    add(*from, false);
    add(*to, true);
    std::string const why = Site::desk().try_enter(*frame, uses);
    if (!why.empty()) {
      done(absl::ResourceExhaustedError(why));
      return;
    }
    tf::ThreadPoolDevice::CopyTensorInSameDevice(
        from, to, context, [frame, done = std::move(done)](absl::Status const& status) {
          Site::desk().leave(*frame);
          done(status);
        });
  }

 private:
  using Frame = typename BufferDesk<typename Site::allocator_type>::Frame;

  /// Says which frame the calling thread's allocations belong to.
  class InFrame {
   public:
    explicit InFrame(Frame* frame) : before_{std::exchange(Site::frame(), frame)} {}
    InFrame(InFrame const&) = delete;
    InFrame& operator=(InFrame const&) = delete;
    ~InFrame() { Site::frame() = before_; }

   private:
    Frame* before_;
  };

  /// One operation that is run, with what it has in use.
  class Operation {
   public:
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
        why = Site::desk().try_enter(frame_, operands_.uses());
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
        for (BufferUse const& use : operands_.uses()) {
          kept.push_back(use.address);
        }
        Site::desk().show(kept, true);
      }
      return is_open_;
    }

    /// After it has run.
    void show_results() {
      if (std::size_t const bytes = frame_.refused_bytes(); bytes != 0) {
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
                                                      Site::desk().last_failure())));
      }
      auto const results = operands_.results(*context_);
      if (!results.empty()) {
        Site::desk().show(results, must_keep());
      }
    }

    void end() noexcept {
      if (std::exchange(is_open_, false)) {
        Site::desk().leave(frame_);
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

  /// Whether an operation hands its operands on as they are.
  [[nodiscard]] static bool passes(std::string_view name, tf::OpKernelContext& context) {
    if (name == "_Retval" || name == "_Send") {
      return context.session_state() == nullptr;  // what a session returns becomes a NumPy array
    }
    if (name == "ReadVariableOp" || name == "AssignVariableOp") {
      return !copies_on_read(context);
    }
    return kind_of(name) == OperationKind::passes;
  }

  /// Whether reading and assigning this variable copies it: once it has been used sparsely.
  [[nodiscard]] static bool copies_on_read(tf::OpKernelContext& context) {
    tf::core::RefCountPtr<tf::Var> variable;
    return !tf::LookupResource(&context, tf::HandleFromInput(&context, 0), &variable).ok() ||
           variable->copy_on_read_mode.load();
  }

  /// Optimizers count their steps in a variable.
  static void watch_steps(tf::OpKernelContext& context) {
    tf::core::RefCountPtr<tf::Var> variable;
    bool const is_counter =
        context.input(1).dtype() == tf::DT_INT64 && context.input(1).NumElements() == 1 &&
        tf::LookupResource(&context, tf::HandleFromInput(&context, 0), &variable).ok();
    if (is_counter && Site::steps().on_count(variable.get())) {
      try {
        Site::desk().begin_step();
      } catch (FileTierError const& error) {
        context.SetStatus(absl::DataLossError(error.what()));
      }
    }
  }
};

/// Makes `SwappingDevice`s where TensorFlow would make its own CPU devices.
///
/// To be registered before the first device is made, with a priority above TensorFlow's own:
/// `tensorflow::dfactory::Registrar<SwappingDeviceFactory<Site>>{"CPU", 300, ...}`.
template <class Site>
class SwappingDeviceFactory final : public tf::DeviceFactory {
 public:
  absl::Status ListPhysicalDevices(std::vector<std::string>* devices) override {
    devices->emplace_back("/physical_device:CPU:0");
    return absl::OkStatus();
  }

  absl::Status CreateDevices(tf::SessionOptions const& options,
                             std::string const& name_prefix,
                             std::vector<std::unique_ptr<tf::Device>>* devices) override {
    int count = 1;
    auto const wanted = options.config.device_count().find("CPU");
    if (wanted != options.config.device_count().end()) {
      count = wanted->second;
    }
    for (int i = 0; i < count; ++i) {
      devices->push_back(std::make_unique<SwappingDevice<Site>>(
          options, absl::StrCat(name_prefix, "/device:CPU:", i)));
    }
    return absl::OkStatus();
  }
};

}  // namespace spillway::tensor_flow
