// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <functional>

namespace c10 {
struct StorageImpl;
}

namespace spillway::torch {

// A *site* is a class with static functions. It tells where the objects are that PyTorch's plain
// functions need, and what its device can do. `StorageLeases` lists what every site has. The
// concepts below describe what a site may offer in addition.

/// A site on whose device streams can be captured into graphs.
///
/// | expression                          | must                                              |
/// |-------------------------------------|---------------------------------------------------|
/// | `Site::is_capturing()`              | tell whether `current_stream()` is being captured |
/// | `Site::is_capturing(stream)`        | tell whether that stream is being captured        |
/// | `Site::uncaptured_stream()`         | be another stream, waited for when a capture ends |
/// | `Site::give_back_after_launches(f)` | call `f` when that stream runs after all others   |
template <class Site>
concept CapturingSite = requires(std::function<void()> give_back) {
  { Site::is_capturing() } -> std::same_as<bool>;
  { Site::is_capturing(Site::uncaptured_stream()) } -> std::same_as<bool>;
  Site::uncaptured_stream();
  Site::give_back_after_launches(give_back);
};

/// A site where each communication may run on another stream. `Site::joining_stream()` returns a
/// stream that stands for all of them, since it is made to run after each.
template <class Site>
concept JoiningSite = requires {
  Site::joining_stream();
};

/// A site with further locks, which a thread that forks has to take, so that no other thread leaves
/// them locked in the child. `Site::try_lock_for_fork()` locks them without waiting, and returns
/// false if another thread holds one; `Site::unlock_after_fork()` unlocks them.
template <class Site>
concept LockingSite = requires {
  { Site::try_lock_for_fork() } -> std::same_as<bool>;
  Site::unlock_after_fork();
};

/// A site where PyTorch itself takes the pointers of tensors outside of operations, without reading
/// what they point to: when it passes gradients and futures from one stream to another. That must
/// not be an error while a tensor is swapped out, so the pointer is null then.
/// `Site::on_access(storage)` is called when code asks for the address in order to write; it swaps
/// the storage in for good. Before PyTorch 2.13 no function can be called there, and asking in
/// order to write is an error.
template <class Site>
concept PassingSite = requires(c10::StorageImpl* storage) {
  { Site::on_access(storage) } -> std::same_as<void>;
};

/// A site of a program in C++, which may ask for the address of what an operation has used or made
/// when the operation has returned: by `accessor()` or `data_ptr()`, by printing it, or for one of
/// its own kernels. There small tensors stay resident for a while (`StorageLeases::keep_recent`).
/// In Python no program asks for an address without the adapter's knowledge. Such a site has the
/// constant expression `Site::reads_results()`, which is true.
template <class Site>
concept ReadingSite = requires {
  requires Site::reads_results();
};

}  // namespace spillway::torch
