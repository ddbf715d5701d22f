// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/record.hpp>

#include <concepts>
#include <type_traits>

namespace spillway {

/// Receives a record of each thing an allocator does.
///
/// Given `o` of type `O` and `r` of type `Record`:
///
/// | expression       | must                                                            | cost  |
/// |------------------|-----------------------------------------------------------------|-------|
/// | `O::is_enabled`  | a constant, false if `on_record` does nothing, so that no       | -     |
/// |                  | record is made                                                  |       |
/// | `o.on_record(r)` | take note of the record; it may call the allocator's queries    | short |
///
/// The allocator calls `on_record` outside every lock, from any thread that uses it, possibly from
/// several at once: a model is thread-safe. The records of one thread come in order.
// clang-format off
template <class O>
concept Observer =
    std::default_initializable<O> &&
    requires(O o, Record const& r) {
      { O::is_enabled  }          -> std::convertible_to<bool>;
      typename std::bool_constant<static_cast<bool>(O::is_enabled)>;
      { o.on_record(r) } noexcept -> std::same_as<void>;
    };
// clang-format on

}  // namespace spillway
