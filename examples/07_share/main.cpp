// SPDX-License-Identifier: Apache-2.0
// Two processes that use one device, each as if it had it alone. Here the device is simulated, so
// each has one of its own; the memory that they divide is 64 MiB.
#include <spillway/device_share.hpp>
#include <spillway/sim.hpp>

#include <cstddef>
#include <cstdio>
#include <filesystem>
#include <string>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

using namespace spillway::literals;

namespace {

constexpr std::size_t capacity_bytes = 64_MiB;
constexpr std::size_t elements = 1_MiB;  // of a tensor: 4 MiB

/// Uses tensors of 60 MiB altogether until the process may use at least `enough_bytes`.
/// @returns whether every tensor had the right values at each use
bool work(std::string const& name, std::filesystem::path const& file, std::size_t enough_bytes) {
  // [share]
  spillway::DeviceAllocator<> memory{
      {.capacity_bytes = capacity_bytes, .initial_bytes = 0, .grows_in_place = true}};
  spillway::DeviceShare share{memory, {.file = file, .least_bytes = 8_MiB}};
  // [share end]
  auto const stream = memory.create_stream();
  std::vector<spillway::Tensor<float, 1>> tensors;
  for (int i = 0; i < 15; ++i) {
    tensors.push_back(spillway::make_tensor<float>(memory, {elements}));
    // [retry]
    auto const lease = share.retry([&] { return tensors.back().acquire_write(stream); });
    // [retry end]
    memory.device().launch(stream, [view = lease.view(), value = static_cast<float>(i)] {
      for (std::size_t j = 0; j < view.extent(0); ++j) {
        view(j) = value;
      }
    });
  }
  bool is_right = true;
  std::size_t before = 0;
  for (bool is_enough = false; !is_enough;) {
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      auto const lease = share.retry([&] { return tensors[i].acquire_read(stream); });
      float last = -1;
      memory.copy_to_host_sync(&last, &lease.view()(elements - 1), sizeof last, stream);
      is_right = is_right && last == static_cast<float>(i);
    }
    std::size_t const now = share.capacity_bytes();
    if (now != before) {
      std::printf("%s has %zu MiB\n", name.c_str(), now >> 20U);
    }
    before = now;
    is_enough = now >= enough_bytes;
  }
  return is_right;
}

}  // namespace

int main() {
  std::filesystem::path const file =
      std::filesystem::temp_directory_path() / ("spillway-share-" + std::to_string(::getpid()));
  pid_t const child = ::fork();
  if (child == 0) {
    bool const is_right = work("the second process", file, capacity_bytes / 2);
    std::fflush(stdout);
    ::_exit(is_right ? 0 : 1);
  }
  // When the other process has ended, this one may use all of the memory.
  bool const is_right = work("the first process", file, capacity_bytes);
  int status = -1;
  ::waitpid(child, &status, 0);
  std::filesystem::remove(file);
  return is_right && status == 0 ? 0 : 1;
}
