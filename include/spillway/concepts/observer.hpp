// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/event.hpp>

#include <concepts>

namespace spillway {

/// Is told what an allocator does.
///
/// Given `o` of type `O` and `e` of type `Event`:
///
/// | expression      | must                                                             | cost  |
/// |-----------------|------------------------------------------------------------------|-------|
/// | `O::is_enabled` | be false if `on_event` does nothing, so that no event is made     | -     |
/// | `o.on_event(e)` | note the event; it may call the allocator's queries               | short |
///
/// Called outside every lock, from any thread that uses the allocator, possibly at once: a model is
/// thread-safe. Events of one thread come in order.
// clang-format off
template <class O>
concept Observer =
    std::default_initializable<O> &&
    requires(O o, Event const& e) {
      { O::is_enabled  }          -> std::convertible_to<bool>;
      { o.on_event(e)  } noexcept -> std::same_as<void>;
    };
// clang-format on

}  // namespace spillway
