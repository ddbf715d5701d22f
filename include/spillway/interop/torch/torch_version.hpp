// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/StorageImpl.h>
#include <c10/util/Exception.h>
#include <torch/headeronly/version.h>

// The only header that depends on the version of PyTorch.
#define SPILLWAY_TORCH_AT_LEAST(major, minor)                                                      \
  (TORCH_VERSION_MAJOR > (major) ||                                                                \
   (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))

namespace spillway::torch {

/// Makes a storage call `hook` once when its address is asked for to write there, as `data_ptr()`
/// does in C++; the hook may throw. Before PyTorch 2.15 storages have no hooks.
inline void set_access_hook([[maybe_unused]] c10::StorageImpl& storage,
                            [[maybe_unused]] void (*hook)(c10::StorageImpl*)) {
#if SPILLWAY_TORCH_AT_LEAST(2, 15)
  storage.clear_materializer();
  storage.set_materializer(hook);
#endif
}

/// Makes asking for the address of a storage that is swapped out an error with a message that says
/// what to do. If it `may_be_read`, that is so for code that wants to write; who wants to read gets
/// null. Before PyTorch 2.15 such an address is null.
inline void forbid_access([[maybe_unused]] c10::StorageImpl& storage,
                          [[maybe_unused]] bool may_be_read) {
#if SPILLWAY_TORCH_AT_LEAST(2, 15)
  static constexpr char message[] =
      "spillway: this tensor's memory may have been swapped out, and its address was asked for "
      "outside of an operation. Call spillway_torch.keep(tensor) first.";
  if (may_be_read) {
    storage.clear_data_ptr_access_error_msg_();
    set_access_hook(storage, [](c10::StorageImpl*) { TORCH_CHECK(false, message); });
  } else {
    storage.clear_materializer();
    storage.release_data_and_set_meta_custom_data_ptr_error_msg_(message);
  }
#endif
}

/// Ends what `forbid_access` and `set_access_hook` have set.
inline void allow_access([[maybe_unused]] c10::StorageImpl& storage) {
#if SPILLWAY_TORCH_AT_LEAST(2, 15)
  storage.clear_materializer();
  storage.clear_data_ptr_access_error_msg_();
#endif
}

}  // namespace spillway::torch
