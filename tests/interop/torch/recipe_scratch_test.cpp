// SPDX-License-Identifier: Apache-2.0
#include <spillway/core/error.hpp>
#include <spillway/device_allocator.hpp>
#include <spillway/interop/torch/recipe_scratch.hpp>
#include <spillway/sim.hpp>

#include <doctest/doctest.h>

#include <cstddef>

namespace {

using namespace spillway;

struct ScratchBench {
  SimApi device{{.capacity_bytes = 8_MiB}};
  DeviceAllocator<SimPolicies> memory{device, {.capacity_bytes = 4_MiB}};
  SimStream stream = device.create_stream();
  spillway::torch::RecipeScratch<DeviceAllocator<SimPolicies>> scratch;

  ~ScratchBench() {
    device.synchronize(stream);
    memory.retire_stream(stream);
    device.destroy_stream(stream);
  }
};

}  // namespace

TEST_SUITE("recipe_scratch") {
  TEST_CASE("RecipeScratch: memory keeps its place until it is freed, once") {
    ScratchBench bench;
    void* const p = bench.scratch.allocate(bench.memory, 1_MiB, bench.stream);
    void* const q = bench.scratch.allocate(bench.memory, 1_MiB, bench.stream);
    REQUIRE(p != nullptr);
    CHECK(p != q);
    CHECK_THROWS_AS((void)bench.scratch.allocate(bench.memory, 3_MiB, bench.stream),
                    OutOfDeviceMemory);  // neither has left
    CHECK(bench.scratch.free(bench.memory, p));
    CHECK_FALSE(bench.scratch.free(bench.memory, p));
    CHECK(bench.scratch.free(bench.memory, q));
  }

  TEST_CASE("RecipeScratch: 0 bytes give null, and unknown memory is not freed") {
    ScratchBench bench;
    int other = 0;
    CHECK(bench.scratch.allocate(bench.memory, 0, bench.stream) == nullptr);
    CHECK_FALSE(bench.scratch.free(bench.memory, &other));
    CHECK_FALSE(bench.scratch.free(bench.memory, nullptr));
  }

  TEST_CASE("RecipeScratch: a failed allocation leaves nothing behind") {
    ScratchBench bench;
    void* const p = bench.scratch.allocate(bench.memory, 3_MiB, bench.stream);
    CHECK_THROWS_AS((void)bench.scratch.allocate(bench.memory, 2_MiB, bench.stream),
                    OutOfDeviceMemory);
    CHECK(bench.scratch.free(bench.memory, p));
    void* const q = bench.scratch.allocate(bench.memory, 4_MiB, bench.stream);
    CHECK(q != nullptr);
    CHECK(bench.scratch.free(bench.memory, q));
  }
}
