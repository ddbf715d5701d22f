// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/interop/framework/buffer_leases.hpp>
#include <spillway/interop/tensorflow/operands.hpp>
#include <spillway/interop/tensorflow/operation_kind.hpp>

#include <cstddef>
#include <exception>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <absl/status/status.h>
#include <absl/strings/str_cat.h>
#include <tensorflow/core/framework/op_kernel.h>

namespace spillway::tensorflow {

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
      Site::leases().show(kept, true);
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
    if (!results.empty()) {
      Site::leases().show(results, must_keep());
    }
  }

  void end() noexcept {
    if (std::exchange(is_open_, false)) {
      Site::leases().leave(frame_);
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
