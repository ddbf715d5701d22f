// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/interop/torch/native_nodes.hpp>
#include <spillway/interop/torch/operands.hpp>

#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

namespace spillway::torch {

/// Keeps storages leased between `enter` and `exit`, for code that works on addresses. That code
/// counts as one operation: what it uses or makes keeps its address, too.
///
/// Threads  as `FrameHook::Hold`
template <class Site>
class HeldStorages {
 public:
  using Hook = typename Site::State::Hook;

  /// @param may_write  whether the code may write to the storages, or to addresses that it asks
  ///                   for, even if operations only read them (`StorageLeases::freeze`)
  explicit HeldStorages(bool may_write) : may_write_{may_write} {}

  /// Adds the storages of a tensor, if they may be swapped out. To be called before `enter`.
  void add(at::Tensor const& tensor) {
    for_each_part(tensor, [this](at::Tensor const& part, bool) { add(part.storage()); });
  }
  void add(c10::Storage storage) {
    // A reference to other memory, such as that of a private pool, would only delay its end. CUDA
    // graph trees reuse the memory of inputs that have ended.
    if (Site::Leases::is_ours(*storage.unsafeGetStorageImpl())) {
      storages_.push_back(std::move(storage));
    }
  }

  /// Does nothing if the site has not been installed.
  ///
  /// @throws c10::OutOfMemoryError if the storages do not fit together
  void enter() {
    if (Site::state() == nullptr || hold_) {
      return;
    }
    Operands operands;
    for (c10::Storage const& storage : storages_) {
      operands.push_back({storage.unsafeGetStorageImpl(), nullptr, {/*keeps=*/false, may_write_}});
    }
    typename Hook::Frame frame;
    call_.emplace();
    frame.enter_named(operands);
    hold_.emplace(/*is_kernel=*/!may_write_);
    operands_ = std::move(operands);
  }
  void exit() { hold_.reset(); }

  /// The storages that are leased between `enter` and `exit`.
  [[nodiscard]] Operands const& operands() const noexcept { return operands_; }
  /// To be called before `exit`, with what the function of an extension has returned.
  void returns(std::vector<at::Tensor> const& results) const {
    if (hold_) {
      call_->end(operands_, results);
    }
  }

 private:
  bool may_write_;
  std::vector<c10::Storage> storages_;
  Operands operands_;
  std::optional<typename NativeNodes<Hook>::Call> call_;
  std::optional<typename Hook::Hold> hold_;
};

}  // namespace spillway::torch
