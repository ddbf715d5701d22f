// SPDX-License-Identifier: Apache-2.0
// A program that does the same in every step, as training does. It tells the allocator where a step
// begins. The allocator learns the order of uses, evicts what is needed last, and prefetches the
// next operands.
#include <spillway/spillway.hpp>

#include <cstddef>
#include <cstdio>
#include <vector>

using namespace spillway::literals;

int main() {
  spillway::SimApi device;
  spillway::DeviceAllocator<> memory{device, {.capacity_bytes = 16_MiB}};
  auto const stream = memory.create_stream();
  using Buffer = spillway::SwappableBuffer<decltype(memory)>;

  std::vector<Buffer> activations;  // 32 MiB of them, twice the capacity
  for (int i = 0; i < 32; ++i) {
    activations.emplace_back(memory, 1_MiB);
    (void)activations.back().acquire_write(stream);  // a first use has nothing to read
  }

  std::size_t const layers = activations.size() - 1;
  for (int step = 0; step < 5; ++step) {
    // [step]
    memory.begin_step();
    for (std::size_t i = 0; i < layers; ++i) {  // forward
      // All operands of one operation together: none is evicted to make room for another.
      auto const [in, out] =
          memory.acquire_all(stream, reads(activations[i]), writes(activations[i + 1]));
      device.copy(out.data(), in.data(), 1_MiB, spillway::CopyKind::on_device, stream);
    }
    for (std::size_t i = layers; i-- > 0;) {  // backward
      auto const [in, gradient] =
          memory.acquire_all(stream, reads(activations[i]), updates(activations[i + 1]));
      device.copy(gradient.data(), in.data(), 1_MiB, spillway::CopyKind::on_device, stream);
    }
    // [step end]
    memory.synchronize();
    spillway::Stats const stats = memory.stats();
    std::printf("after step %d: %zu swap-ins, %zu of them ahead of need, %zu drops\n",
                step + 1,
                static_cast<std::size_t>(stats.swap_ins.count),
                static_cast<std::size_t>(stats.prefetch_hits + stats.prefetch_late),
                static_cast<std::size_t>(stats.drops.count));
  }

  bool const has_prefetched = memory.stats().prefetch_hits + memory.stats().prefetch_late > 0;
  return has_prefetched ? 0 : 1;
}
