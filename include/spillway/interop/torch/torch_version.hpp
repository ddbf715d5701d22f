// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include <c10/core/StorageImpl.h>
#include <c10/util/Exception.h>
#include <torch/headeronly/version.h>

// The only header that depends on the version of PyTorch.
#define SPILLWAY_TORCH_AT_LEAST(major, minor)                                                      \
  (TORCH_VERSION_MAJOR > (major) ||                                                                \
   (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))

namespace spillway::torch {

inline constexpr char away_message[] =
    "spillway: this tensor's memory may have been swapped out, and its address was asked for "
    "outside of an operation. Call spillway_torch.keep(tensor) first.";

/// Whether an error is the refusal of the address of a tensor that is away.
[[nodiscard]] inline bool is_refused_address(c10::Error const& error) {
  return error.msg().find(away_message) != std::string::npos;
}

#if SPILLWAY_TORCH_AT_LEAST(2, 13)

/// Whether storages can call a function when their address is asked for.
inline constexpr bool has_access_hooks = true;

/// Makes a storage call `hook` once when its address is asked for to write there, as `data_ptr()`
/// does in C++; the hook may throw.
inline void set_access_hook(c10::StorageImpl& storage, void (*hook)(c10::StorageImpl*)) {
  storage.clear_materializer();
  storage.set_materializer(hook);
}

/// Ends what `forbid_access` and `set_access_hook` have set.
inline void allow_access(c10::StorageImpl& storage) {
  storage.clear_materializer();
  storage.clear_data_ptr_access_error_msg_();
}

/// Makes asking for the address of a storage that is swapped out an error with a message that says
/// what to do. If it `may_be_read`, that is so for code that wants to write; who wants to read gets
/// null.
inline void forbid_access(c10::StorageImpl& storage, bool may_be_read) {
  if (may_be_read) {
    storage.clear_data_ptr_access_error_msg_();
    set_access_hook(storage, [](c10::StorageImpl*) { TORCH_CHECK(false, away_message); });
  } else {
    storage.clear_materializer();
    storage.release_data_and_set_meta_custom_data_ptr_error_msg_(away_message);
  }
}

#else

inline constexpr bool has_access_hooks = false;

/// The flags of a storage that make asking for its address an error. Without them code that asks
/// would read from null. These versions of PyTorch have functions that set the flags, but none that
/// clears the second. An explicit instantiation is the one place that may name private members.
struct AccessFlags {
  friend void clear(AccessFlags, c10::StorageImpl& storage);
};
template <auto on_read, auto on_write, auto refresh>
struct AccessFlagsOf {
  friend void clear(AccessFlags, c10::StorageImpl& storage) {
    storage.*on_read = false;
    storage.*on_write = false;
    (storage.*refresh)();
  }
};
template struct AccessFlagsOf<&c10::StorageImpl::throw_on_immutable_data_ptr_,
                              &c10::StorageImpl::throw_on_mutable_data_ptr_,
                              &c10::StorageImpl::refresh_has_data_ptr_check>;

inline void allow_access(c10::StorageImpl& storage) {
  clear(AccessFlags{}, storage);
}

/// As with newer versions, but where it `may_be_read`, PyTorch's own message says less.
inline void forbid_access(c10::StorageImpl& storage, bool may_be_read) {
  allow_access(storage);
  if (may_be_read) {
    storage.set_throw_on_mutable_data_ptr();
  } else {
    storage.release_data_and_set_meta_custom_data_ptr_error_msg_(away_message);
  }
}

#endif

}  // namespace spillway::torch
