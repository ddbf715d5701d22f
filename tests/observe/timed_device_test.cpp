// SPDX-License-Identifier: Apache-2.0
#include <spillway/device/sim/model_api.hpp>
#include <spillway/device_allocator.hpp>
#include <spillway/observe/timed_device.hpp>
#include <spillway/sim.hpp>
#include <spillway/testing/stepped_sim_api.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

using namespace spillway;

namespace {

using TimedModel = TimedDevice<ModelApi>;
static_assert(BatchCopyApi<TimedModel> && VirtualMemoryApi<TimedModel> &&
              KernelTimeApi<TimedModel> && VirtualClockApi<TimedModel>);

struct ModelPolicies : PoliciesFor<TimedModel> {};

std::uint64_t bytes_of(std::vector<DeviceSpan> const& spans, SpanKind kind) {
  std::uint64_t bytes = 0;
  for (DeviceSpan const& span : spans) {
    bytes += span.kind == kind ? span.bytes : 0;
  }
  return bytes;
}

SimOptions const gigabyte_a_second{
    .link_bytes_per_second = 1'000'000'000, .poison = false, .checked = false};

/// A device that can be told that its streams are captured.
struct CapturingDevice : SimApi {
  using SimApi::SimApi;
  [[nodiscard]] bool is_capturing(stream_type /*stream*/) const { return captures; }
  bool captures = false;
};
static_assert(CapturingApi<CapturingDevice>);

/// A device that runs enqueued work in its destructor, and counts queries of the time.
struct AskedDevice : testing::SteppedSimApi {
  explicit AskedDevice(int& count) : asked{&count} {}
  [[nodiscard]] std::uint64_t clock_ns() const noexcept {
    ++*asked;
    return 0;
  }
  int* asked;
};

}  // namespace

TEST_SUITE("timed_device") {
  TEST_CASE("TimedDevice: a span is as long as its copy, and starts when its stream was ready") {
    TimedModel device{gigabyte_a_second};
    auto const kernels = device.create_stream();
    auto const copies = device.create_stream();
    auto const event = device.create_event();
    auto* const on_device = static_cast<std::byte*>(device.try_reserve(1_MiB));
    auto* const on_host = static_cast<std::byte*>(device.try_allocate_pinned(1_MiB, -1));

    device.compute(kernels, 500);
    device.record(event, kernels);
    device.wait(copies, event);
    device.copy(on_host, on_device + 256, 2000, CopyKind::to_host, copies);

    auto const spans = device.spans();
    REQUIRE(spans.size() == 2);
    CHECK(spans[0].kind == SpanKind::kernel);
    CHECK(spans[0].start_ns == 0);
    CHECK(spans[0].end_ns == 500);
    CHECK(spans[1].kind == SpanKind::copy_to_host);
    CHECK(spans[1].address == on_device + 256);
    CHECK(spans[1].bytes == 2000);
    CHECK(spans[1].start_ns == 500);
    CHECK(spans[1].end_ns == 2500);
    device.clear_spans();
    CHECK(device.spans().empty());

    device.destroy_event(event);
    device.destroy_stream(kernels);
    device.destroy_stream(copies);
    device.free_pinned(on_host, 1_MiB);
    device.release(on_device, 1_MiB);
  }

  TEST_CASE("TimedDevice: the spans of an allocator's copies add up to its statistics") {
    TimedModel device{gigabyte_a_second};
    DeviceAllocator<ModelPolicies> memory{device, {.capacity_bytes = 4_MiB}};
    auto const stream = memory.create_stream();
    std::vector<BlockId> blocks;
    for (int i = 0; i < 8; ++i) {
      blocks.push_back(memory.declare(1_MiB));
    }
    for (int step = 0; step < 3; ++step) {
      memory.begin_step();
      for (BlockId const id : blocks) {
        auto const lease =
            memory.acquire(id, step == 0 ? Access::write : Access::read_write, stream);
        device.compute(stream, 400'000);
      }
    }
    memory.synchronize();

    auto const stats = memory.stats();
    auto const spans = device.spans();
    CHECK(stats.swap_ins.bytes > 8_MiB);
    CHECK(bytes_of(spans, SpanKind::copy_to_host) == stats.swap_outs.bytes);
    CHECK(bytes_of(spans, SpanKind::copy_to_device) == stats.swap_ins.bytes);
    CHECK(bytes_of(spans, SpanKind::copy_on_device) == 0);
    CHECK(std::count_if(spans.begin(), spans.end(), [](DeviceSpan const& span) {
            return span.kind == SpanKind::kernel && span.end_ns - span.start_ns == 400'000;
          }) == 24);
    // Copies run while kernels do: that is what the spans are for.
    CHECK(std::any_of(spans.begin(), spans.end(), [&](DeviceSpan const& copy) {
      return copy.kind == SpanKind::copy_to_host &&
             std::any_of(spans.begin(), spans.end(), [&](DeviceSpan const& kernel) {
               return kernel.kind == SpanKind::kernel && kernel.start_ns < copy.end_ns &&
                      copy.start_ns < kernel.end_ns;
             });
    }));
    for (BlockId const id : blocks) {
      memory.deallocate(id);
    }
  }

  TEST_CASE("TimedDevice: real copies and kernels have spans, on the device's clock") {
    TimedDevice<SimApi> device{SimOptions{.capacity_bytes = 4_MiB}};
    auto const stream = device.create_stream();
    void* const memory = device.try_reserve(1_MiB);
    void* const host = device.try_allocate_pinned(4096, -1);
    std::memset(host, 7, 4096);
    std::uint64_t const before = device.clock_ns();
    int calls = 0;

    std::array<void*, 2> const to{memory, static_cast<std::byte*>(memory) + 4096};
    std::array<void const*, 2> const from{host, host};
    std::array<std::size_t, 2> const sizes{4096, 2048};
    device.copy_batch(to, from, sizes, CopyKind::to_device, stream);
    device.launch(stream, [&calls] { ++calls; });
    device.synchronize(stream);
    std::uint64_t const after = device.clock_ns();

    auto const spans = device.spans();
    REQUIRE(spans.size() == 2);
    CHECK(calls == 1);
    CHECK(spans[0].kind == SpanKind::copy_to_device);
    CHECK(spans[0].bytes == 6144);
    CHECK(spans[0].address == memory);
    CHECK(spans[1].kind == SpanKind::kernel);
    CHECK(before <= spans[0].start_ns);
    CHECK(spans[0].start_ns <= spans[0].end_ns);
    CHECK(spans[0].end_ns <= spans[1].start_ns);
    CHECK(spans[1].end_ns <= after);
    device.destroy_stream(stream);
    device.free_pinned(host, 4096);
    device.release(memory, 1_MiB);
  }

  TEST_CASE("TimedDevice: a refused copy has no span, and a copy that cannot be timed still runs") {
    TimedDevice<SimApi> device{SimOptions{.capacity_bytes = 4_MiB}};
    auto const stream = device.create_stream();
    void* const memory = device.try_reserve(1_MiB);
    void* const host = device.try_allocate_pinned(4096, -1);
    std::memset(host, 7, 4096);

    device.fail(SimCall::copy, 1);
    CHECK_THROWS_AS(device.copy(memory, host, 4096, CopyKind::to_device, stream), DeviceError);
    device.fail(SimCall::launch_host, 1);
    device.copy(memory, host, 4096, CopyKind::to_device, stream);
    device.synchronize(stream);

    CHECK(device.spans().empty());
    CHECK(*static_cast<std::byte const*>(memory) == std::byte{7});
    CHECK(device.calls().copies() == 1);
    device.destroy_stream(stream);
    device.free_pinned(host, 4096);
    device.release(memory, 1_MiB);
  }

  TEST_CASE("TimedDevice: a batch of lists that differ in length is refused, as by the device") {
    TimedDevice<SimApi> device;
    auto const stream = device.create_stream();
    std::array<void*, 1> const to{};
    std::array<void const*, 1> const from{};
    std::array<std::size_t, 1> const sizes{1};

    CHECK_THROWS_AS(device.copy_batch({}, from, sizes, CopyKind::to_host, stream),
                    ContractViolation);
    CHECK_THROWS_AS(device.copy_batch(to, {}, sizes, CopyKind::to_host, stream), ContractViolation);
    CHECK_THROWS_AS(device.copy_batch(to, from, {}, CopyKind::to_host, stream), ContractViolation);
    device.copy_batch({}, {}, {}, CopyKind::to_host, stream);
    device.synchronize(stream);

    CHECK(device.spans().empty());
    device.destroy_stream(stream);
  }

  TEST_CASE("TimedDevice: work that runs during destruction of the device is not timed") {
    int asked = 0;
    int calls = 0;
    {
      TimedDevice<AskedDevice> device{asked};
      auto const stream = device.create_stream();
      device.launch(stream, [&calls] { ++calls; });
      CHECK(device.calls().host_launches == 3);
    }
    CHECK(calls == 1);
    CHECK(asked == 0);
  }

  TEST_CASE("TimedDevice: captured work, or any work while disabled, is enqueued and not timed") {
    TimedDevice<CapturingDevice> device;
    auto const stream = device.create_stream();
    int calls = 0;

    device.captures = true;
    device.launch(stream, [&calls] { ++calls; });
    device.captures = false;
    device.set_timing(false);
    device.launch(stream, [&calls] { ++calls; });
    device.set_timing(true);
    device.launch(stream, [&calls] { ++calls; });
    device.synchronize(stream);

    CHECK(calls == 3);
    CHECK(device.calls().host_launches == 5);  // the three calls, and two that time the last one
    CHECK(device.spans().size() == 1);
    device.destroy_stream(stream);
  }
}
