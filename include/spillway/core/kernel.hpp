// SPDX-License-Identifier: Apache-2.0
#pragma once

// The form in which the library's kernels are written, so that nvcc can compile them for a GPU and
// any compiler can compile them for tests on the host.
//
// Kernels   A kernel is an object that contains the arguments of a launch. `kernel(team, memory,
//           i)` does the work of team `i`; `memory` is the `Kernel::Memory` that its threads share.
// Teams     A `Team` is what CUDA calls a thread block; it has `size` threads. `team.each(f)` calls
//           `f(thread)` for each thread and returns when all calls have returned.
//           `team.exclusive_scan(values)` replaces the value of each thread by the sum of those
//           before it, and returns the sum of all. On a GPU each thread makes its own call; a test
//           may make them one after the other.
// Launches  `launch(kernel, teams)` enqueues a kernel for `teams` > 0 teams, in order.

#if defined(__CUDACC__)
#  define SPILLWAY_KERNEL __device__
#else
#  define SPILLWAY_KERNEL
#endif

namespace spillway::detail {

/// The number of threads in a team.
inline constexpr unsigned team_size = 128;

/// The shared memory of a team that needs none.
struct NoMemory {};

/// Calls a function on one thread of a team.
template <class Team, class Function>
SPILLWAY_KERNEL void once(Team const& team, Function function) {
  team.each([&](unsigned thread) {
    if (thread == 0) {
      function();
    }
  });
}

}  // namespace spillway::detail
