// SPDX-License-Identifier: Apache-2.0
#pragma once

// How the library's kernels are written, so that nvcc compiles them for a GPU and any compiler for
// tests on the host.
//
// Kernels   A kernel is an object with the arguments of a launch. `kernel(team, memory, i)` is what
//           team `i` does with its `Kernel::Memory`, which its threads share.
// Teams     A `Team` has `size` threads. `team.each(f)` calls `f(thread)` for each of them, and has
//           all of them done when it returns. `team.exclusive_scan(values)` replaces the value of
//           each thread by the sum of those before it, and returns the sum of all. On a GPU each
//           thread runs the same function and comes to its own call; a test may call one after the
//           other.
// Launches  `launch(kernel, teams)` enqueues a kernel for `teams` > 0 teams, in order.

#if defined(__CUDACC__)
#  define SPILLWAY_KERNEL __device__
#else
#  define SPILLWAY_KERNEL
#endif

namespace spillway::detail {

/// The threads of a team.
inline constexpr unsigned team_size = 128;

/// The shared memory of a team that needs none.
struct NoMemory {};

/// Lets one thread of a team do something.
template <class Team, class Function>
SPILLWAY_KERNEL void once(Team const& team, Function function) {
  team.each([&](unsigned thread) {
    if (thread == 0) {
      function();
    }
  });
}

}  // namespace spillway::detail
