// SPDX-License-Identifier: Apache-2.0
// How much host memory may be used, and how to see what the allocator did: statistics, a summary, a
// timeline for Perfetto and a snapshot for PyTorch's viewers.
#include <spillway/spillway.hpp>

#include <cstdio>
#include <sstream>
#include <string>
#include <vector>

using namespace spillway::literals;

// [observed]
struct Observed : spillway::SimPolicies {
  using observer = spillway::Timeline;  // remembers the newest records
};
// [observed end]

int main() {
  spillway::SimApi device;
  // [settings]
  spillway::DeviceAllocator<Observed>::Options options{.capacity_bytes = 8_MiB};
  options.host.pinned_bytes = 16_MiB;    // first choice: copies of it need no staging
  options.host.pageable_bytes = 64_MiB;  // when that is full
  options.paging.poison_vacated = true;  // while debugging: stale addresses read a pattern
  spillway::DeviceAllocator<Observed> memory{device, options};
  // [settings end]
  auto const stream = memory.create_stream();
  std::vector<spillway::SwappableBuffer<decltype(memory)>> buffers;
  for (int i = 0; i < 24; ++i) {  // 24 MiB, where 8 MiB are there
    buffers.emplace_back(memory, 1_MiB);
    (void)buffers.back().acquire_write(stream);
  }
  stream.synchronize();

  std::ostringstream timeline;  // a std::ofstream in a real program
  std::ostringstream state;
  // [look]
  spillway::Stats const stats = memory.stats();
  std::string const table = spillway::summary(stats, memory.host_stats());
  memory.observer().write(timeline, stats);  // open it in ui.perfetto.dev
  spillway::write_json(state, spillway::snapshot(memory, memory.observer().records()));
  // [look end]
  std::printf("%s", table.c_str());
  bool const is_written = !timeline.str().empty() && !state.str().empty();
  return is_written && stats.swap_outs.bytes >= 16_MiB ? 0 : 1;
}
