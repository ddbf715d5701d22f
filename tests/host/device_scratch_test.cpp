// SPDX-License-Identifier: Apache-2.0
#include <spillway/core/error.hpp>
#include <spillway/core/types.hpp>
#include <spillway/device/sim/sim_api.hpp>
#include <spillway/host/device_scratch.hpp>
#include <spillway/stream/stream_order.hpp>
#include <spillway/testing/stepped_sim_api.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <functional>
#include <thread>
#include <utility>
#include <vector>

using namespace spillway;
using namespace spillway::literals;
using spillway::detail::DeviceScratch;

TEST_SUITE("device_scratch") {
  TEST_CASE("DeviceScratch: has the longest size that was requested, and is released at its end") {
    SimApi device;
    StreamOrder<SimApi> order{device};
    auto const free_bytes = [&] { return device.memory_info().free_bytes; };
    std::size_t const before = free_bytes();
    {
      DeviceScratch<SimApi> scratch{device, order};
      scratch.reserve(0);
      CHECK(free_bytes() == before);
      scratch.reserve(4_KiB);
      scratch.reserve(64_KiB);
      scratch.reserve(16_KiB);
      SimStream const stream = device.create_stream();
      CHECK((DeviceScratch<SimApi>::Use{scratch, order.index_of(stream)}.memory().size()) ==
            64_KiB);
      CHECK(free_bytes() == before - 64_KiB);
      order.retire(stream);
      device.destroy_stream(stream);
    }
    CHECK(free_bytes() == before);
  }

  TEST_CASE("DeviceScratch: each use is ordered after the use before it, on any stream") {
    SimApi device;
    StreamOrder<SimApi> order{device};
    SimStream const first = device.create_stream();
    SimStream const second = device.create_stream();
    {
      DeviceScratch<SimApi> scratch{device, order};
      scratch.reserve(4_KiB);
      std::vector<int> done;
      {
        DeviceScratch<SimApi>::Use const use{scratch, order.index_of(first)};
        device.launch(first, [&] { done.push_back(1); });
      }
      {
        DeviceScratch<SimApi>::Use const use{scratch, order.index_of(second)};
        device.launch(second, [&] { done.push_back(2); });
      }
      device.synchronize(second);
      CHECK(done == std::vector{1, 2});
      device.synchronize(first);
    }
    order.retire(first);
    order.retire(second);
    device.destroy_stream(first);
    device.destroy_stream(second);
  }

  TEST_CASE("DeviceScratch: is replaced by longer memory only after its last use has finished") {
    SimApi device;
    StreamOrder<SimApi> order{device};
    SimStream const stream = device.create_stream();
    {
      DeviceScratch<SimApi> scratch{device, order};
      scratch.reserve(4_KiB);
      {
        DeviceScratch<SimApi>::Use const use{scratch, order.index_of(stream)};
        device.fill(use.memory().data(), 1, use.memory().size(), stream);
      }
      auto const used = order.mark(order.index_of(stream));
      scratch.reserve(64_KiB);
      CHECK(order.is_complete(used));
    }
    order.retire(stream);
    device.destroy_stream(stream);
  }

  TEST_CASE("DeviceScratch: can be used by other threads while the device makes longer memory") {
    struct Device : SimApi {
      void* try_reserve(std::size_t bytes) {
        if (auto const act = std::exchange(at_next_reserve, nullptr)) {
          std::thread{act}.join();
        }
        return SimApi::try_reserve(bytes);
      }
      std::function<void()> at_next_reserve;
    };
    Device device;
    StreamOrder<Device> order{device};
    SimStream const stream = device.create_stream();
    {
      DeviceScratch<Device> scratch{device, order};
      scratch.reserve(4_KiB);
      std::size_t const before = device.memory_info().free_bytes;
      std::size_t used = 0;
      device.at_next_reserve = [&] {
        used = DeviceScratch<Device>::Use{scratch, order.index_of(stream)}.memory().size();
      };
      SUBCASE("the memory is used meanwhile") {
        scratch.reserve(16_KiB);
        CHECK(used == 4_KiB);
        CHECK(device.memory_info().free_bytes == before - 12_KiB);
      }
      SUBCASE("another thread is faster") {
        device.at_next_reserve = [&] { scratch.reserve(64_KiB); };
        scratch.reserve(16_KiB);
        CHECK(device.memory_info().free_bytes == before - 60_KiB);
      }
    }
    order.retire(stream);
    device.synchronize(stream);
    device.destroy_stream(stream);
  }

  TEST_CASE("DeviceScratch: is unchanged if the wait for its last use fails") {
    testing::SteppedSimApi device;
    StreamOrder<testing::SteppedSimApi> order{device};
    auto const stream = device.create_stream();
    {
      DeviceScratch<testing::SteppedSimApi> scratch{device, order};
      scratch.reserve(4_KiB);
      {
        DeviceScratch<testing::SteppedSimApi>::Use const use{scratch, order.index_of(stream)};
        device.fill(use.memory().data(), 1, use.memory().size(), stream);
      }
      std::size_t const before = device.memory_info().free_bytes;

      device.fail(SimCall::synchronize, 1);
      CHECK_THROWS_AS(scratch.reserve(64_KiB), DeviceError);

      CHECK(device.memory_info().free_bytes == before);
      scratch.reserve(64_KiB);
      CHECK(device.memory_info().free_bytes == before - 60_KiB);
    }
    order.retire(stream);
    device.run_all();
    device.destroy_stream(stream);
  }

  TEST_CASE("DeviceScratch: is unchanged if the device has no room for more") {
    SimOptions options;
    options.capacity_bytes = 64_KiB;
    SimApi device{options};
    StreamOrder<SimApi> order{device};
    SimStream const stream = device.create_stream();
    {
      DeviceScratch<SimApi> scratch{device, order};
      scratch.reserve(16_KiB);
      CHECK_THROWS_AS(scratch.reserve(56_KiB), OutOfDeviceMemory);
      CHECK((DeviceScratch<SimApi>::Use{scratch, order.index_of(stream)}.memory().size()) ==
            16_KiB);
    }
    order.retire(stream);
    device.destroy_stream(stream);
  }
}
