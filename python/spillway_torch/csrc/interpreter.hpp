// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "held.hpp"
#include <c10/core/impl/PyInterpreter.h>
#include <torch/csrc/PyInterpreter.h>

namespace spillway_torch {

/// Wraps PyTorch's calls into Python: puts a `Barrier` around those that run `__torch_dispatch__`
/// of a mode or a subclass. Operations of DTensor come this way, too, although its
/// `__torch_dispatch__` is written in C++.
template <class Site>
class InterpreterWithBarriers : public c10::impl::PyInterpreterVTable {
 public:
  using Impl = c10::TensorImpl;
  using Device = c10::DeviceType;
  using Keys = c10::DispatchKeySet;
  using Operation = c10::OperatorHandle;
  using Stack = ::torch::jit::Stack;
  using Format = at::MemoryFormat;

  explicit InterpreterWithBarriers(c10::impl::PyInterpreterVTable const& original)
      : original_{&original} {}

  c10::intrusive_ptr<Impl> detach(Impl const* self) const override {
    Barrier<Site> const barrier;
    return original_->detach(self);
  }
  void dispatch(Operation const& op, Stack* stack) const override {
    Barrier<Site> const barrier;
    original_->dispatch(op, stack);
  }

  // All other calls are passed on to PyTorch's own interpreter.

  std::string name() const override { return original_->name(); }
  void incref(PyObject* object) const override { original_->incref(object); }
  void decref(PyObject* object) const override { original_->decref(object); }
  bool try_incref(c10::impl::PyObjectSlot const& slot) const override {
    return original_->try_incref(slot);
  }
  std::size_t refcnt(PyObject* object) const override { return original_->refcnt(object); }
  void reportErrorCallback(PyObject* callback, c10::DispatchKey key) const override {
    original_->reportErrorCallback(callback, key);
  }
  void python_op_registration_trampoline(Operation const& op,
                                         c10::DispatchKey key,
                                         Keys keys,
                                         Stack* stack,
                                         bool with_keyset,
                                         bool with_op) const override {
    original_->python_op_registration_trampoline(op, key, keys, stack, with_keyset, with_op);
  }
  void throw_abstract_impl_not_imported_error(std::string op,
                                              char const* module,
                                              char const* context) const override {
    original_->throw_abstract_impl_not_imported_error(std::move(op), module, context);
  }
  void python_dispatcher(Operation const& op, Keys keys, Stack* stack) const override {
    original_->python_dispatcher(op, keys, stack);
  }
  bool is_contiguous(Impl const* self, Format format) const override {
    return original_->is_contiguous(self, format);
  }
  c10::SymBool sym_is_contiguous(Impl const* self, Format format) const override {
    return original_->sym_is_contiguous(self, format);
  }
  bool is_strides_like(Impl const* self, Format format) const override {
    return original_->is_strides_like(self, format);
  }
  bool is_non_overlapping_and_dense(Impl const* self) const override {
    return original_->is_non_overlapping_and_dense(self);
  }
  c10::Device device(Impl const* self) const override { return original_->device(self); }
  std::int64_t dim(Impl const* self) const override { return original_->dim(self); }
  c10::IntArrayRef strides(Impl const* self) const override { return original_->strides(self); }
  c10::IntArrayRef sizes(Impl const* self) const override { return original_->sizes(self); }
  c10::SymIntArrayRef sym_sizes(Impl const* self) const override {
    return original_->sym_sizes(self);
  }
  c10::Layout layout(Impl const* self) const override { return original_->layout(self); }
  std::int64_t numel(Impl const* self) const override { return original_->numel(self); }
  c10::SymInt sym_numel(Impl const* self) const override { return original_->sym_numel(self); }
  c10::SymIntArrayRef sym_strides(Impl const* self) const override {
    return original_->sym_strides(self);
  }
  c10::SymInt sym_storage_offset(Impl const* self) const override {
    return original_->sym_storage_offset(self);
  }
  void trace_gpu_event_creation(Device type, std::uintptr_t event) const override {
    original_->trace_gpu_event_creation(type, event);
  }
  void trace_gpu_event_deletion(Device type, std::uintptr_t event) const override {
    original_->trace_gpu_event_deletion(type, event);
  }
  void
  trace_gpu_event_record(Device type, std::uintptr_t event, std::uintptr_t stream) const override {
    original_->trace_gpu_event_record(type, event, stream);
  }
  void
  trace_gpu_event_wait(Device type, std::uintptr_t event, std::uintptr_t stream) const override {
    original_->trace_gpu_event_wait(type, event, stream);
  }
  void trace_gpu_memory_allocation(Device type, std::uintptr_t p) const override {
    original_->trace_gpu_memory_allocation(type, p);
  }
  void trace_gpu_memory_deallocation(Device type, std::uintptr_t p) const override {
    original_->trace_gpu_memory_deallocation(type, p);
  }
  void trace_gpu_stream_creation(Device type, std::uintptr_t stream) const override {
    original_->trace_gpu_stream_creation(type, stream);
  }
  void trace_gpu_device_synchronization(Device type) const override {
    original_->trace_gpu_device_synchronization(type);
  }
  void trace_gpu_stream_synchronization(Device type, std::uintptr_t stream) const override {
    original_->trace_gpu_stream_synchronization(type, stream);
  }
  void trace_gpu_event_synchronization(Device type, std::uintptr_t event) const override {
    original_->trace_gpu_event_synchronization(type, event);
  }
  void reset_backward_hooks(Impl const* self) const override {
    original_->reset_backward_hooks(self);
  }

 private:
  c10::impl::PyInterpreterVTable const* original_;
};

/// Installs barriers around PyTorch's calls into Python, for as long as the process lives.
template <class Site>
void install_barriers() {
  c10::impl::PyInterpreter& interpreter = *getPyInterpreter();
  interpreter.vtable_ = new InterpreterWithBarriers<Site>{*interpreter.vtable_};
}

}  // namespace spillway_torch
