// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/StorageImpl.h>
#include <torch/headeronly/version.h>

// The only header that depends on the version of PyTorch.
#define SPILLWAY_TORCH_AT_LEAST(major, minor)                                                      \
  (TORCH_VERSION_MAJOR > (major) ||                                                                \
   (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))

namespace spillway::torch {

/// Whether a storage can carry a message that says why its bytes may not be read. Reading the
/// address of a storage that is swapped out is then an error with that message.
inline constexpr bool has_named_access_error = SPILLWAY_TORCH_AT_LEAST(2, 15);

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

/// Whether a storage can call a function when its address is asked for to write there, as
/// `data_ptr()` does in C++. Such a function is called once, and may then throw.
inline constexpr bool has_access_hook = SPILLWAY_TORCH_AT_LEAST(2, 15);

using AccessHook = void (*)(c10::StorageImpl*);

inline void set_access_hook([[maybe_unused]] c10::StorageImpl& storage,
                            [[maybe_unused]] AccessHook hook) {
#if SPILLWAY_TORCH_AT_LEAST(2, 15)
  storage.clear_materializer();
  storage.set_materializer(hook);
#endif
}

inline void clear_access_hook([[maybe_unused]] c10::StorageImpl& storage) {
#if SPILLWAY_TORCH_AT_LEAST(2, 15)
  storage.clear_materializer();
#endif
}

}  // namespace spillway::torch
