// SPDX-License-Identifier: Apache-2.0
#include <spillway/concepts/device_capabilities.hpp>
#include <spillway/core/error.hpp>
#include <spillway/device/sim/model_api.hpp>
#include <spillway/device/sim/sim_api.hpp>
#include <spillway/stream/copy_batch.hpp>
#include <spillway/testing/device_contracts.hpp>
#include <spillway/testing/stepped_sim_api.hpp>

#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <cstring>
#include <mutex>
#include <span>

#include <support/archetypes/batch_copy_archetype.hpp>

using namespace spillway;
using namespace spillway::detail;
using spillway::test::BatchCopyArchetype;
using spillway::test::OneByOneArchetype;
using spillway::testing::DeviceRig;
using spillway::testing::SteppedSimApi;

TEST_CASE_TEMPLATE_INVOKE(batch_copy_contract, SimApi, SteppedSimApi, ModelApi, BatchCopyArchetype);

namespace {

/// A device whose batches return something.
struct Answering : SteppedSimApi {
  bool copy_batch(std::span<void* const>,
                  std::span<void const* const>,
                  std::span<std::size_t const>,
                  CopyKind,
                  stream_type);
};
static_assert(DeviceApi<Answering> && !BatchCopyApi<Answering>);

/// Three pieces of 256 bytes that are not adjacent.
template <class D>
struct Pieces {
  explicit Pieces(D& device) : rig{device}, stream{rig.stream()} {
    for (std::size_t i = 0; i < 3; ++i) {
      to[i] = memory + i * 512;
      from[i] = host + i * 512;
    }
  }

  DeviceRig<D> rig;
  typename D::stream_type stream;
  unsigned char* memory = rig.device_memory(2048);
  unsigned char* host = rig.pinned(2048, 7);
  std::array<void*, 3> to{};
  std::array<void const*, 3> from{};
  std::array<std::size_t, 3> sizes{256, 256, 256};
};

}  // namespace

TEST_SUITE("copy_batch") {
  TEST_CASE("SteppedSimApi: a batch is one operation of its stream and counts each of its copies") {
    SteppedSimApi device;
    Pieces now{device};

    device.copy_batch(now.to, now.from, now.sizes, CopyKind::to_device, now.stream);

    CHECK(device.queued_ops(now.stream) == 1);
    CHECK(device.calls().copy_batches == 1);
    CHECK(device.calls().copies_to_device == 3);
    CHECK(device.calls().bytes_to_device == 768);
    CHECK(now.memory[0] != 7);
    CHECK(device.step(now.stream));
    CHECK(now.memory[512] == 7);
    CHECK(now.memory[256] != 7);
  }

  TEST_CASE("SteppedSimApi: each copy of a batch has to be ordered after earlier work") {
    SteppedSimApi device;
    Pieces now{device};
    auto const other = now.rig.stream();
    device.fill(now.to[2], 1, 256, other);

    CHECK_THROWS_AS(device.copy_batch(now.to, now.from, now.sizes, CopyKind::to_device, now.stream),
                    ContractViolation);

    auto const event = now.rig.event();
    device.record(event, other);
    device.wait(now.stream, event);
    device.copy_batch(now.to, now.from, now.sizes, CopyKind::to_device, now.stream);
    CHECK_THROWS_AS(device.fill(now.to[0], 1, 256, other), ContractViolation);
  }

  TEST_CASE("SteppedSimApi: copies of one batch must not touch bytes that another one writes") {
    SteppedSimApi device;
    Pieces now{device};
    auto const copy = [&](CopyKind kind) {
      device.copy_batch(now.to, now.from, now.sizes, kind, now.stream);
    };
    SUBCASE("both copies write the bytes") {
      now.to[2] = now.memory + 255;
      CHECK_THROWS_AS(copy(CopyKind::to_device), ContractViolation);
    }
    SUBCASE("one copy reads the bytes") {
      now.from = {now.memory + 1279, now.memory + 1536, now.memory + 256};
      CHECK_THROWS_AS(copy(CopyKind::on_device), ContractViolation);
    }
    SUBCASE("a small range inside a large one") {
      now.sizes = {2048, 16, 16};
      now.to = {now.memory, now.memory + 1024, now.memory + 1100};
      now.from = {now.host, now.host, now.host};
      CHECK_THROWS_AS(copy(CopyKind::to_device), ContractViolation);
    }
    SUBCASE("reading the same bytes twice is allowed, and so are adjacent ranges") {
      now.from[1] = now.host;
      now.to[1] = now.memory + 256;
      copy(CopyKind::to_device);
    }
  }

  TEST_CASE_TEMPLATE("SimApi: if a batch fails, the copies before the failed one are enqueued",
                     D,
                     SimApi,
                     SteppedSimApi) {
    D device;
    Pieces<D> now{device};
    device.fill(now.memory, 0, 2048, now.stream);
    SUBCASE("an injected fault") {
      device.fail_copy(3);
      CHECK_THROWS_AS(
          device.copy_batch(now.to, now.from, now.sizes, CopyKind::to_device, now.stream),
          DeviceError);
    }
    SUBCASE("outside of allocated memory") {
      now.to[2] = now.memory + 2048 - 255;
      CHECK_THROWS_AS(
          device.copy_batch(now.to, now.from, now.sizes, CopyKind::to_device, now.stream),
          DeviceError);
    }
    device.synchronize(now.stream);
    CHECK(now.memory[0] == 7);
    CHECK(now.memory[512] == 7);
    CHECK(now.memory[1024] == 0);
    CHECK(device.calls().copy_batches == 0);
  }

  TEST_CASE("SimApi: memory of a batch is in use until the batch has run") {
    std::array<unsigned char, 1024> bytes{};
    std::array<detail::SimCopy, 2> const copies{
        {{bytes.data(), bytes.data() + 512, 16}, {bytes.data() + 32, bytes.data() + 600, 16}}};
    auto const op = detail::SimOp::batch(copies, 32, CopyKind::on_device);
    for (std::size_t const used : {0U, 15U, 32U, 512U, 527U, 600U}) {
      CAPTURE(used);
      CHECK(op.touches(bytes.data() + used, 1));
    }
    for (std::size_t const unused : {16U, 31U, 48U, 528U, 599U, 616U}) {
      CAPTURE(unused);
      CHECK_FALSE(op.touches(bytes.data() + unused, 1));
    }

    SteppedExecutor executor{SimOptions{.check_order = false}};
    SimStream const stream = executor.create_stream();
    SteppedExecutor::mutex_type mutex;
    std::unique_lock lock{mutex};
    executor.enqueue(stream, op, lock);
    CHECK(executor.is_in_use(bytes.data() + 600, 1));
    CHECK_FALSE(executor.is_in_use(bytes.data() + 599, 1));
    executor.run_all();
    CHECK_FALSE(executor.is_in_use(bytes.data() + 600, 1));
  }

  TEST_CASE("ModelApi: a batch takes the time of all its bytes and one latency") {
    ModelApi device{{.link_bytes_per_second = 1'000'000'000, .copy_latency_ns = 500}};
    Pieces now{device};

    device.copy_batch(now.to, now.from, now.sizes, CopyKind::to_device, now.stream);

    CHECK(device.finish_time_ns() == 768 + 500);
  }

  TEST_CASE("CopyBatch: copies adjacent on both sides are one copy") {
    SteppedSimApi device;
    Pieces now{device};
    CopyBatch copies;
    auto* const to = reinterpret_cast<std::byte*>(now.memory);
    auto* const from = reinterpret_cast<std::byte*>(now.host);
    copies.add(to, from, 256, true);
    copies.add(to + 256, from + 256, 100, true);
    CHECK(copies.size() == 1);
    copies.add(to + 356, from + 512, 100, true);  // not on the host
    CHECK(copies.size() == 2);
    copies.add(to + 512, from + 612, 100, true);  // not on the device
    CHECK(copies.size() == 3);
    copies.add(to + 612, from + 712, 100, false);  // in another reservation
    CHECK(copies.size() == 4);

    copies.enqueue(device, CopyKind::to_device, now.stream);

    CHECK(device.calls().copies() == 4);
    CHECK(device.queued_ops(now.stream) == 1);
    device.run_all();
    CHECK(std::memcmp(to, from, 356) == 0);
  }

  TEST_CASE("CopyBatch: a device without batches gets single copies") {
    OneByOneArchetype device;
    Pieces now{device};
    CopyBatch copies;
    for (std::size_t i = 0; i < 3; ++i) {
      copies.add(static_cast<std::byte*>(now.to[i]),
                 static_cast<std::byte const*>(now.from[i]),
                 256,
                 true);
    }

    copies.enqueue(device, CopyKind::to_device, now.stream);

    CHECK(device.simulation().queued_ops(now.stream) == 3);
    device.simulation().run_all();
    CHECK(now.memory[1024] == 7);
  }

  TEST_CASE("CopyBatch: one copy is not a batch, and an emptied batch can be filled again") {
    BatchCopyArchetype device;
    Pieces now{device};
    auto& simulation = device.simulation();
    CopyBatch copies;
    auto const add = [&](std::size_t i) {
      copies.add(static_cast<std::byte*>(now.to[i]),
                 static_cast<std::byte const*>(now.from[i]),
                 256,
                 true);
    };
    add(0);
    copies.enqueue(device, CopyKind::to_device, now.stream);
    CHECK(simulation.calls().copy_batches == 0);
    copies.clear();
    CHECK(copies.size() == 0);

    add(1);
    add(2);
    copies.enqueue(device, CopyKind::to_device, now.stream);

    CHECK(simulation.calls().copy_batches == 1);
    CHECK(simulation.calls().copies_to_device == 3);
    simulation.run_all();
    CHECK(now.memory[512] == 7);
  }

  TEST_CASE("CopyBatch: a failed single copy has enqueued nothing") {
    SteppedSimApi device;
    Pieces now{device};
    CopyBatch copies;
    copies.add(
        static_cast<std::byte*>(now.to[0]), static_cast<std::byte const*>(now.from[0]), 256, false);
    device.fail_copy(1);

    CHECK_THROWS_AS(copies.enqueue(device, CopyKind::to_device, now.stream), DeviceError);

    CHECK(device.queued_ops(now.stream) == 0);
  }
}
