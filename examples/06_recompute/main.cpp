// SPDX-License-Identifier: Apache-2.0
// Tensors that cost less to recompute than to copy: they leave the device without a copy and are
// recomputed when they are used.
#include <spillway/sim.hpp>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <vector>

using namespace spillway::literals;
using namespace std::chrono_literals;

namespace {

using Matrix = spillway::Tensor<float, 2>;

/// Enqueues `to = max(0, from - bias)`. On a GPU: a kernel.
void relu(spillway::SimApi& device, spillway::SimStream stream, auto to, auto from, float bias) {
  device.launch(stream, [to, from, bias] {
    for (std::size_t i = 0; i < to.extent(0); ++i) {
      for (std::size_t j = 0; j < to.extent(1); ++j) {
        to(i, j) = std::max(0.0F, from(i, j) - bias);
      }
    }
  });
}

}  // namespace

int main() {
  spillway::SimApi device;
  spillway::DeviceAllocator<> memory{device, {.capacity_bytes = 8_MiB}};
  auto const stream = memory.create_stream();

  auto x = spillway::make_tensor<float>(memory, {512, 512});
  x.copy_from_host_sync(std::vector<float>(512 * 512, 10.0F), stream);

  // Twelve tensors of 1 MiB beside x, where there is room for seven.
  std::vector<Matrix> results;
  for (int i = 0; i < 12; ++i) {
    auto const bias = static_cast<float>(i);
    Matrix& y = results.emplace_back(spillway::make_tensor<float>(memory, {512, 512}));
    // [recipe]
    relu(device, stream, y.acquire_write(stream).view(), x.acquire_read(stream).view(), bias);
    y.set_recipe(
        10us, [&, bias](auto on, auto to, auto from) { relu(device, on, to, from, bias); }, x);
    // [recipe end]
  }

  bool is_right = true;
  for (int i = 0; i < 12; ++i) {
    std::vector<float> values(512 * 512);
    results[static_cast<std::size_t>(i)].copy_to_host_sync(values, stream);
    is_right =
        is_right &&
        values == std::vector<float>(values.size(), 10.0F - static_cast<float>(std::min(i, 10)));
  }
  spillway::Stats const stats = memory.stats();
  std::printf("%zu MiB left without a copy, %zu tensors were made again\n",
              static_cast<std::size_t>(stats.spared.bytes >> 20U),
              static_cast<std::size_t>(stats.recomputations.count));
  return is_right && stats.recomputations.count != 0 ? 0 : 1;
}
