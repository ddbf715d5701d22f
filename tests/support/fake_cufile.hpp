// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstddef>

#include <sys/types.h>

/// Stands in for libcufile in a test program that defines its functions itself (fake_cufile.cpp),
/// beside `FakeCudart`. It says nothing about a real machine.
///
/// Threads  thread-unsafe: one thread makes all calls, and changes the state only while nothing is
///          in flight.
struct FakeCufile {
  struct State {
    bool has_driver = true;
    bool takes_files = true;
    bool has_streams = true;  ///< it has calls on streams
    ssize_t result = 0;       ///< of each transfer, instead of making it, unless it is 0
  };
  struct File {
    int fd;
  };

  static State& state();
  static inline std::atomic<std::size_t> reads{0};
  static inline std::atomic<std::size_t> writes{0};
  [[nodiscard]] static std::size_t open_files();
};
