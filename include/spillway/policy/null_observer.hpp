// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/observer.hpp>
#include <spillway/core/event.hpp>

namespace spillway {

/// Observes nothing and costs nothing.
class NullObserver {
 public:
  static constexpr bool is_enabled = false;

  void on_event(Event const& /*event*/) noexcept {}
};

static_assert(Observer<NullObserver>);

}  // namespace spillway
