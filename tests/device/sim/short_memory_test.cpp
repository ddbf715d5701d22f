// SPDX-License-Identifier: Apache-2.0
// Calls of simulated devices without memory for their own lists: they have no effect.
#include <spillway/core/types.hpp>
#include <spillway/sim.hpp>
#include <spillway/testing/stepped_sim_api.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <fstream>
#include <iterator>
#include <new>
#include <optional>
#include <span>
#include <thread>

#include <support/little_memory.hpp>

namespace {

using namespace spillway::literals;
using spillway::CopyKind;
using spillway::SimApi;
using spillway::testing::SteppedSimApi;
using support::call_with_little_memory;

/// The number of memory mappings of this process.
std::size_t mappings() {
  std::ifstream maps{"/proc/self/maps"};
  return static_cast<std::size_t>(
      std::count(std::istreambuf_iterator<char>{maps}, std::istreambuf_iterator<char>{}, '\n'));
}

}  // namespace

TEST_SUITE("sim_short_memory") {
  TEST_CASE("SimApi: a thread is not taken for one of a stream that there was no memory for") {
    SimApi device;
    std::optional<SimApi::stream_type> stream;
    call_with_little_memory(
        [&] { stream = device.create_stream(); },
        [&] {
          // The system gives the ids of threads that have ended to new ones.
          bool is_mistaken = false;
          std::thread{[&] { is_mistaken = device.is_host_function_caller(); }}.join();
          CHECK_FALSE(is_mistaken);
          CHECK(device.usage().streams == 0);
        });
    device.destroy_stream(*stream);
  }

  TEST_CASE("SimApi: memory is unmapped if there is no memory for its record") {
    SimApi device{{.granularity_bytes = 64_KiB}};
    void* p = nullptr;
    auto const check = [&](auto map, auto unmap) {
      map();  // what else the first call maps stays
      unmap();
      std::size_t const before = mappings();
      call_with_little_memory(map, [&] { CHECK(mappings() == before); });
      unmap();
    };
    check([&] { p = device.try_reserve(64_KiB); }, [&] { device.release(p, 64_KiB); });
    check([&] { p = device.try_allocate_pinned(64_KiB, -1); },
          [&] { device.free_pinned(p, 64_KiB); });
    check([&] { p = device.reserve_address(64_KiB); }, [&] { device.free_address(p, 64_KiB); });
    CHECK(device.usage().device_bytes == 0);
    CHECK(device.usage().pinned_bytes == 0);
  }

  TEST_CASE("SimApi: memory is not in use by an operation that there was no memory for") {
    SimApi device{{.granularity_bytes = 64_KiB}};
    auto const stream = device.create_stream();
    auto* const p = static_cast<std::byte*>(device.reserve_address(64_KiB));
    auto const physical = device.try_create_physical(64_KiB).value();
    REQUIRE(device.try_map(p, 64_KiB, std::span{&physical, 1}));
    auto const map_anew = [&] {  // ends the program if an operation may still use the memory
      device.unmap(p, 64_KiB);
      REQUIRE(device.try_map(p, 64_KiB, std::span{&physical, 1}));
    };
    call_with_little_memory([&] { device.fill(p, 1, 64_KiB, stream); }, map_anew);
    device.synchronize(stream);
    std::array<void*, 2> const to{p, p + 1_KiB};
    std::array<void const*, 2> const from{p + 2_KiB, p + 3_KiB};
    std::array<std::size_t, 2> const sizes{1_KiB, 1_KiB};
    call_with_little_memory(
        [&] { device.copy_batch(to, from, sizes, CopyKind::on_device, stream); }, map_anew);
    device.synchronize(stream);
    device.unmap(p, 64_KiB);
    device.release_physical(physical);
    device.free_address(p, 64_KiB);
    device.destroy_stream(stream);
  }

  TEST_CASE("SteppedSimApi: a batch that there was no memory for is not in the queue") {
    SteppedSimApi device{{.check_order = false}};
    auto const stream = device.create_stream();
    auto* const p = static_cast<std::byte*>(device.try_reserve(64_KiB));
    std::array<void*, 2> const to{p, p + 1_KiB};
    std::array<void const*, 2> const from{p + 2_KiB, p + 3_KiB};
    std::array<std::size_t, 2> const sizes{1_KiB, 1_KiB};
    auto const copy = [&] { device.copy_batch(to, from, sizes, CopyKind::on_device, stream); };
    copy();  // the device has its list of copies from now on
    device.run_all();
    call_with_little_memory(copy, [&] { CHECK(device.queued_ops(stream) == 0); });
    CHECK(device.queued_ops(stream) == 1);
    device.run_all();
    device.release(p, 64_KiB);
    device.destroy_stream(stream);
  }
}
