// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/device_api.hpp>

#include <concepts>
#include <cstddef>
#include <span>

namespace spillway {

/// A device that takes many copies in one call, for less than they cost one by one.
///
/// Given `d` of type `D`, `to`, `from` and `sizes` of the same length, and a stream `s`:
///
/// | expression                              | must                                              |
/// |-----------------------------------------|---------------------------------------------------|
/// | `d.copy_batch(to, from, sizes, kind, s)` | enqueue copies of one kind, of any order among themselves; later work on `s` waits for all of them |
///
/// No range that a batch writes overlaps another range of it. Sizes may be 0. Thread-safe. Unlike other
/// calls it may have had an effect when it throws `DeviceError`: any of the copies may have been
/// enqueued, and none of them need have been.
// clang-format off
template <class D>
concept BatchCopyApi =
    DeviceApi<D> &&
    requires(D d, std::span<void* const> to, std::span<void const* const> from,
             std::span<std::size_t const> sizes, CopyKind kind, typename D::stream_type s) {
      { d.copy_batch(to, from, sizes, kind, s) } -> std::same_as<void>;
    };
// clang-format on

}  // namespace spillway
