// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/StorageImpl.h>
#include <torch/headeronly/version.h>

// The only header that depends on the version of PyTorch.
#define SPILLWAY_TORCH_AT_LEAST(major, minor)                                                      \
  (TORCH_VERSION_MAJOR > (major) ||                                                                \
   (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))

namespace spillway::torch {

/// Makes reading the address of a storage that is swapped out an error with a message that says
/// what to do. Before PyTorch 2.15 such an address is null.
inline void forbid_access([[maybe_unused]] c10::StorageImpl& storage) {
#if SPILLWAY_TORCH_AT_LEAST(2, 15)
  storage.release_data_and_set_meta_custom_data_ptr_error_msg_(
      "spillway: this tensor's memory may have been swapped out, and its address was asked for "
      "outside "
      "of an operation. Call spillway_torch.keep(tensor) first.");
#endif
}

inline void allow_access([[maybe_unused]] c10::StorageImpl& storage) {
#if SPILLWAY_TORCH_AT_LEAST(2, 15)
  storage.clear_data_ptr_access_error_msg_();
#endif
}

/// Makes a storage call `hook` once when its address is asked for to write there, as `data_ptr()`
/// does in C++; the hook may throw. Null: none. Before PyTorch 2.15 storages have no hooks.
inline void set_access_hook([[maybe_unused]] c10::StorageImpl& storage,
                            [[maybe_unused]] void (*hook)(c10::StorageImpl*)) {
#if SPILLWAY_TORCH_AT_LEAST(2, 15)
  storage.clear_materializer();
  storage.set_materializer(hook);
#endif
}

}  // namespace spillway::torch
