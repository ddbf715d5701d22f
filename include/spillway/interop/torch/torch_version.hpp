// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include <c10/core/StorageImpl.h>
#include <c10/util/Exception.h>
#include <torch/headeronly/version.h>

// The only header whose code depends on the version of PyTorch.
#define SPILLWAY_TORCH_AT_LEAST(major, minor)                                                      \
  (TORCH_VERSION_MAJOR > (major) ||                                                                \
   (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))

namespace spillway::torch {

inline constexpr char away_message[] =
    "spillway: this tensor's memory may have been swapped out, and its address was asked for "
    "outside of an operation. Call spillway_torch.keep(tensor) first; in C++ use "
    "LargeModelSupport's Hold or keep. If this thread was started before "
    "spillway_torch.set_enabled_lms(True), or not by Python, it lacks the hook: call "
    "set_enabled_lms(True) in it, or, in C++, make a Hook of LargeModelSupport.";

/// Whether an error says that the address of a tensor which is swapped out was asked for.
[[nodiscard]] inline bool is_refused_address(c10::Error const& error) {
  return error.msg().find(away_message) != std::string::npos;
}

#if SPILLWAY_TORCH_AT_LEAST(2, 13)

/// Whether storages can call a function when their address is asked for.
inline constexpr bool has_access_hooks = true;

/// Makes a storage call `hook` once, when code asks for its address in order to write, as
/// `data_ptr()` does in C++. The hook may throw.
inline void set_access_hook(c10::StorageImpl& storage, void (*hook)(c10::StorageImpl*)) {
  storage.clear_materializer();
  storage.set_materializer(hook);
}

/// Undoes `forbid_access` and `set_access_hook`.
inline void allow_access(c10::StorageImpl& storage) {
  storage.clear_materializer();
  storage.clear_data_ptr_access_error_msg_();
}

/// Makes it an error to ask for the address of a storage that is swapped out; the message says what
/// to do. If it `may_be_read`, only code that asks in order to write gets the error, and code that
/// asks in order to read gets null.
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

/// Clears the flags of a storage that make it an error to ask for its address. These versions of
/// PyTorch have functions that set the two flags, but none that clears the second. Private members
/// may be named only in an explicit instantiation, so the function is defined in one.
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

/// As with newer versions. If it `may_be_read`, the error has PyTorch's own message, which does not
/// say what to do.
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
