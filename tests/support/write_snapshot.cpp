// SPDX-License-Identifier: Apache-2.0
// Prints the memory snapshot of an allocator that has been used for a while, with one failure.
#include <spillway/observe/snapshot.hpp>

#include <iostream>

#include <support/watched_program.hpp>

int main() {
  support::WatchedProgram<support::WatchedOnDemand> program{1};
  program.run(400);
  {
    auto const stream = program.device.create_stream();
    auto const lease = program.buffers[0].acquire(spillway::Access::read, stream);
    try {
      decltype(program)::Buffer const all{program.allocator, 768 * 1024};
    } catch (spillway::OutOfDeviceMemory const&) {  // the failure that the snapshot shall show
    }
  }
  program.run(100);
  write_json(std::cout,
             spillway::snapshot(program.allocator, program.allocator.observer().records()));
  return std::cout.good() ? 0 : 1;
}
