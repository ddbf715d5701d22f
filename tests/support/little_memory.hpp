// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <doctest/doctest.h>

#include <cstddef>
#include <new>

#include <support/counted_allocations.hpp>

namespace support {

/// Makes a call, first with memory for no allocation, then for one, and so on, until it succeeds.
/// After each failed call, `check()` examines the state. @returns how often it has failed
template <class Call, class Check>
std::size_t call_with_little_memory(Call call, Check check) {
  for (std::size_t more = 0;; ++more) {
    CAPTURE(more);
    REQUIRE(more < 100);
    try {
      ShortMemory const few{more};
      call();
      return more;
    } catch (std::bad_alloc const&) {
    }
    check();
  }
}

}  // namespace support
