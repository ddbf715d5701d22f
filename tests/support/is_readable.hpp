// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <doctest/doctest.h>

#include <array>

#include <unistd.h>

namespace support {

/// Whether the byte at an address can be read. Asks the system, which answers instead of faulting.
inline bool is_readable(void const* p) {
  std::array<int, 2> pipe_ends{};
  REQUIRE(::pipe(pipe_ends.data()) == 0);
  bool const is_read = ::write(pipe_ends[1], p, 1) == 1;
  ::close(pipe_ends[0]);
  ::close(pipe_ends[1]);
  return is_read;
}

}  // namespace support
