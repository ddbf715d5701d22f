// SPDX-License-Identifier: Apache-2.0
// The number of stack frames between a tensor's acquire and the device's copy when the bytes are
// away.
#include <spillway/device_allocator.hpp>
#include <spillway/sim.hpp>
#include <spillway/swappable_tensor.hpp>
#include <spillway/testing/stepped_sim_api.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <span>
#include <vector>

#include <execinfo.h>

namespace {

using namespace spillway::literals;
using spillway::Access;

/// The number of frames on the stack of the calling thread, including this function's.
[[gnu::noinline]] std::size_t stack_depth() {
  std::array<void*, 512> frames{};
  return static_cast<std::size_t>(::backtrace(frames.data(), static_cast<int>(frames.size())));
}

/// A device that notes how deep in the stack it is asked to copy.
class DepthProbe : public spillway::testing::SteppedSimApi {
 public:
  using Base = spillway::testing::SteppedSimApi;
  using Base::Base;

  [[gnu::noinline]] void
  copy(void* to, void const* from, std::size_t bytes, spillway::CopyKind kind, stream_type stream) {
    depths.push_back(stack_depth());
    Base::copy(to, from, bytes, kind, stream);
  }
  [[gnu::noinline]] void copy_batch(std::span<void* const> to,
                                    std::span<void const* const> from,
                                    std::span<std::size_t const> sizes,
                                    spillway::CopyKind kind,
                                    stream_type stream) {
    depths.push_back(stack_depth());
    Base::copy_batch(to, from, sizes, kind, stream);
  }

  std::vector<std::size_t> depths;
};

struct Probed : spillway::SimPolicies {
  using device = DepthProbe;
};
using Allocator = spillway::DeviceAllocator<Probed>;

}  // namespace

TEST_SUITE("acquire_depth") {
  TEST_CASE("SwappableTensor: an acquire that misses is at most ten frames from the copy") {
    DepthProbe device{{.capacity_bytes = 8_MiB}};
    Allocator allocator{device, {.capacity_bytes = 1_MiB}};
    {
      auto const stream = allocator.create_stream();
      auto tensor = spillway::make_tensor<float>(allocator, {64_KiB});
      (void)tensor.acquire<Access::write>(stream);
      for (bool const is_run_time_form : {false, true}) {
        tensor.swap_out();
        device.depths.clear();
        std::size_t const here = stack_depth();
        if (is_run_time_form) {
          (void)tensor.acquire(Access::read, stream);
        } else {
          (void)tensor.acquire<Access::read>(stream);
        }
        REQUIRE(!device.depths.empty());
        CHECK(*std::max_element(device.depths.begin(), device.depths.end()) - here <= 10);
      }
    }
  }
}
