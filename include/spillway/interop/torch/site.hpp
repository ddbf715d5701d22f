// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <functional>

namespace c10 {
struct StorageImpl;
}

namespace spillway::torch {

// A *site* says where the objects are that PyTorch's plain functions need, and what its device can
// do. `StorageLeases` lists what every site has; here is what one may offer beyond that.

/// A site on whose device streams can be captured into graphs.
///
/// | expression                          | must                                              |
/// |-------------------------------------|---------------------------------------------------|
/// | `Site::is_capturing()`              | tell whether `current_stream()` is being captured |
/// | `Site::uncaptured_stream()`         | be another stream, waited for when a capture ends |
/// | `Site::give_back_after_launches(f)` | call `f` when that stream runs after all others   |
template <class Site>
concept CapturingSite = requires(std::function<void()> give_back) {
  { Site::is_capturing() } -> std::same_as<bool>;
  Site::uncaptured_stream();
  Site::give_back_after_launches(give_back);
};

/// A site where communication runs on many streams. `Site::joining_stream()` is one stream that
/// stands for all of them: it is made to run after each.
template <class Site>
concept JoiningSite = requires {
  Site::joining_stream();
};

/// A site of tensors whose pointers PyTorch takes outside of operations, too, without reading what
/// they point to: where gradients and futures pass from one stream to another. That must not fail
/// while the tensors are swapped out. `Site::on_access(storage)` is called instead when code asks
/// for the address of one in order to write, and brings it in for good. Before PyTorch 2.13 no
/// function can be called there, and to ask for an address to write to is an error instead.
template <class Site>
concept PassingSite = requires(c10::StorageImpl* storage) {
  { Site::on_access(storage) } -> std::same_as<void>;
};

}  // namespace spillway::torch
