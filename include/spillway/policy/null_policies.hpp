// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/observer.hpp>
#include <spillway/core/record.hpp>

namespace spillway {

/// Observes nothing and costs nothing.
class NullObserver {
 public:
  static constexpr bool is_enabled = false;

  void on_record(Record const& /*record*/) noexcept {}
};

static_assert(Observer<NullObserver>);

}  // namespace spillway
