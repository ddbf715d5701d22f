// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/interop/torch/frame_hook.hpp>
#include <spillway/interop/torch/held_storages.hpp>
#include <spillway/interop/torch/site_state.hpp>

#include <memory>
#include <optional>
#include <utility>

#include "released_lock.hpp"
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

namespace spillway_torch {

/// Keeps the tensors and storages among Python objects leased between `__enter__` and `__exit__`.
template <class Site>
class Held : public spillway::torch::HeldStorages<Site> {
 public:
  using Base = spillway::torch::HeldStorages<Site>;

  /// @param objects  tensors, storages, and lists, tuples and dictionaries of these; other
  ///                 objects are ignored
  Held(pybind11::handle objects, bool may_write) : Base{may_write} { add(objects); }

 private:
  void add(pybind11::handle object) {
    if (THPVariable_Check(object.ptr())) {
      Base::add(THPVariable_Unpack(object.ptr()));
    } else if (torch::isStorage(object.ptr())) {
      Base::add(torch::createStorage(object.ptr()));
    } else if (PyList_Check(object.ptr()) || PyTuple_Check(object.ptr())) {
      add_each(object);
    } else if (PyDict_Check(object.ptr())) {
      add_each(pybind11::reinterpret_borrow<pybind11::dict>(object).attr("values")());
    }
  }
  void add_each(pybind11::handle objects) {
    RecursiveCall const deeper;
    for (pybind11::handle const object : objects) {
      add(object);
    }
  }
  /// Throws Python's error if calls are nested too deeply, as for a list that contains itself.
  class RecursiveCall {
   public:
    RecursiveCall() {
      if (Py_EnterRecursiveCall(" to find tensors in a collection") != 0) {
        throw pybind11::error_already_set{};
      }
    }
    RecursiveCall(RecursiveCall const&) = delete;
    RecursiveCall& operator=(RecursiveCall const&) = delete;
    ~RecursiveCall() { Py_LeaveRecursiveCall(); }
  };
};

#if __has_include(<torch/csrc/distributed/c10d/Work.hpp>)
/// Surrounds a call that begins a communication without an operation, and that uses the addresses
/// of its arguments after it has returned.
template <class Site>
class Communicating {
 public:
  using Hook = typename Site::State::Hook;

  explicit Communicating(pybind11::handle objects) : held_{objects, /*may_write=*/true} {}

  void enter() {
    held_.enter();
    // A thread of the backend uses the addresses of tensors that its operations make. Without the
    // hook these are not enrolled, so they stay resident.
    without_hook_.emplace(spillway::torch::hook_key);
    without_objects_.emplace();
  }
  void exit() {
    without_objects_.reset();
    without_hook_.reset();
    held_.exit();
  }
  /// To be called before `exit`, with the `Work` that the call has returned.
  void begun(pybind11::handle work) const {
    if (Site::state() == nullptr || held_.operands().empty()) {
      return;
    }
    auto* const communication = work.cast<c10d::Work*>();
    spillway_python::ReleasedLock const others_run;
    auto use = std::make_shared<spillway::torch::ExtendedLease<Site>>(held_.operands());
    if (communication == nullptr) {
      // one of several communications, and only the last one tells when all have ended
      use->keep();
      return;
    }
    Hook::lease_until_end(
        spillway::torch::Communication::unsafe_reclaim_from_nonowning(communication),
        std::move(use));
  }

 private:
  Held<Site> held_;
  std::optional<c10::impl::ExcludeDispatchKeyGuard> without_hook_;
  std::optional<spillway::torch::WithoutPythonObjects> without_objects_;
};
#endif

/// Keeps a tensor leased for as long as this object lives, for a Python object that shares the
/// tensor's memory. May be destroyed on any thread.
template <class Site>
class Lent {
 public:
  explicit Lent(at::Tensor const& tensor) {
    if (Site::state() == nullptr) {
      return;
    }
    // A thread without the hook could not swap the tensor in again.
    bool const keeps = !Site::State::Hook::is_on() && !Site::State::Hook::is_inside();
    spillway::torch::Operands operands;
    spillway::torch::for_each_part(tensor, [&](at::Tensor const& part, bool) {
      c10::StorageImpl* const storage = part.storage().unsafeGetStorageImpl();
      if (Site::Leases::is_ours(*storage)) {
        operands.push_back({storage, part.unsafeGetTensorImpl(), {keeps, /*writes=*/true}});
      }
    });
    if (!operands.empty()) {
      typename Site::State::Hook::Frame frame;
      frame.enter_named(operands);
      lease_.emplace(operands);
    }
  }

 private:
  std::optional<spillway::torch::ExtendedLease<Site>> lease_;
};

/// Surrounds code that remembers the addresses of what it allocates: that stays resident for good.
template <class Site>
class KeepingNew {
 public:
  void enter() noexcept { before_ = std::exchange(Site::frames().keeps_new, true); }
  void exit() noexcept { Site::frames().keeps_new = before_; }

 private:
  bool before_ = false;
};

/// Surrounds Python code that is the kernel of an operation. Its operations belong to the same
/// frame. Since it may wait for other threads, these do not wait for it without a time limit.
template <class Site>
class KernelInPython {
 public:
  void enter() {
    ++Site::frames().foreign;
    if (Site::state() != nullptr) {
      Site::leases().begin_program(Site::frames());
    }
  }
  void exit() {
    --Site::frames().foreign;
    if (Site::state() != nullptr) {
      Site::leases().end_program(Site::frames());
    }
  }
};

/// Surrounds Python code that PyTorch calls in the middle of an operation. Since that code knows no
/// addresses, its operations open frames of their own. PyTorch has switched off the hook for it, so
/// this class switches the hook on.
template <class Site>
class Barrier {
 public:
  Barrier() : is_excluded_{c10::impl::tls_is_dispatch_key_excluded(spillway::torch::hook_key)} {
    bool const is_on = c10::impl::tls_is_dispatch_key_included(spillway::torch::hook_key);
    if (is_excluded_ && is_on) {
      c10::impl::tls_set_dispatch_key_excluded(spillway::torch::hook_key, false);
    }
    if (suspends_) {
      auto& frames = Site::frames();
      suspended_ = std::exchange(frames, {});
      frames.further_pins = suspended_.further_pins;
      frames.further_pins.push_back(&suspended_.pins);
      // What that code allocates may be returned to code in C++ that remembers addresses.
      frames.keeps_new = suspended_.keeps_new;
      frames.suspended = suspended_.thread_frames();
      Site::leases().begin_program(suspended_);
    }
  }
  Barrier(Barrier const&) = delete;
  Barrier& operator=(Barrier const&) = delete;
  ~Barrier() {
    c10::impl::tls_set_dispatch_key_excluded(spillway::torch::hook_key, is_excluded_);
    if (suspends_) {
      Site::leases().end_all_holds(Site::frames());
      Site::frames() = std::move(suspended_);
      Site::leases().end_program(Site::frames());
    }
  }

 private:
  bool is_excluded_;
  bool suspends_ = Site::state() != nullptr && Site::frames().held == 0;
  typename Site::Leases::Frames suspended_;
};

}  // namespace spillway_torch
