// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/interop/framework/buffer_leases.hpp>
#include <spillway/interop/tensorflow/operands.hpp>

#include <array>
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <absl/status/status.h>
#include <absl/strings/str_cat.h>
#include <tensorflow/core/framework/device_base.h>
#include <tensorflow/core/framework/tensor.h>

namespace spillway::tensorflow {

/// Copies one tensor to another, and holds those of the two that are the desk's until the copy is done.
///
/// What was copied to is shown: operations and such copies are all that use it from then on.
///
/// @param copy  called with what it has to call when the copy is done, with a status; not called if the
///              tensors cannot be brought in
/// @param done  called once, with the status
template <class Site, class Copy>
void copy_leased(tf::Tensor const& from, tf::Tensor const& to, tf::StatusCallback done, Copy copy) {
  using Frame = typename framework::BufferLeases<typename Site::allocator_type>::Frame;
  std::vector<framework::BufferUse> uses;
  auto const add = [&uses](tf::Tensor const& tensor, bool writes) {
    if (void* const p = base_of(tensor); p != nullptr && Site::may_own(p)) {
      uses.push_back({p, writes});
    }
  };
  add(from, false);
  add(to, true);
  if (uses.empty()) {
    copy(std::move(done));
    return;
  }
  auto const frame = std::make_shared<Frame>();
  try {
    std::string const why = Site::leases().try_enter(*frame, uses);
    if (!why.empty()) {
      done(absl::ResourceExhaustedError(
          absl::StrCat("OOM when bringing in a tensor that is copied: ", why)));
      return;
    }
  } catch (std::exception const& error) {
    done(absl::DataLossError(
        absl::StrCat("a tensor that is copied cannot be brought in: ", error.what())));
    return;
  }
  std::array<void*, 1> const target{uses.back().writes ? uses.back().address : nullptr};
  copy([frame, target, done = std::move(done)](absl::Status const& status) {
    Site::leases().show(target, false);
    Site::leases().leave(*frame);
    done(status);
  });
}

}  // namespace spillway::tensorflow
