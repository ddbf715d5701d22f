// SPDX-License-Identifier: Apache-2.0
#include <spillway/core/error.hpp>
#include <spillway/core/fence.hpp>
#include <spillway/stream/owned_stream.hpp>
#include <spillway/stream/stream_order.hpp>
#include <spillway/testing/stepped_sim_api.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

TEST_SUITE("stream") {
  namespace {

  using namespace spillway;
  using spillway::testing::SteppedSimApi;
  using Order = StreamOrder<SteppedSimApi>;
  using OwnedStream = detail::OwnedStream<SteppedSimApi>;

  struct Bench {
    SteppedSimApi device{{.capacity_bytes = 1_MiB}};
    Order order{device};
  };

  }  // namespace

  TEST_CASE("OwnedStream: its end removes it from the device and the stream order") {
    Bench bench;
    for (std::size_t i = 0; i < 2 * Order::max_streams; ++i) {
      OwnedStream const stream{bench.device, bench.order};
      REQUIRE(bench.device.usage().streams == 1);
      REQUIRE(stream.index() == bench.order.index_of(stream.handle()));
    }
    CHECK(bench.device.usage().streams == 0);
  }

  TEST_CASE("OwnedStream: a ticket of a destroyed stream still tells when its work has finished") {
    Bench bench;
    std::optional<OwnedStream> stream{std::in_place, bench.device, bench.order};
    bool has_run = false;
    bench.device.launch_host(
        stream->handle(), [](void* p) noexcept { *static_cast<bool*>(p) = true; }, &has_run);
    Fence const fence{stream->mark()};
    stream.reset();
    CHECK(!bench.order.is_complete(fence));

    OwnedStream const other{bench.device, bench.order};
    bench.order.wait(other.index(), fence);
    CHECK(bench.order.is_ordered(fence, other.index()));
    bench.device.run_all();
    CHECK(has_run);
    CHECK(bench.order.is_complete(fence));
  }

  TEST_CASE("OwnedStream: a stream for which the order has no place is destroyed at once") {
    Bench bench;
    std::vector<std::unique_ptr<OwnedStream>> streams;
    for (std::size_t i = 0; i + 1 < Order::max_streams; ++i) {
      streams.push_back(std::make_unique<OwnedStream>(bench.device, bench.order));
    }
    CHECK_THROWS_AS(OwnedStream(bench.device, bench.order), ContractViolation);
    CHECK(bench.device.usage().streams == streams.size());
    streams.pop_back();
    CHECK_NOTHROW(OwnedStream(bench.device, bench.order));
  }

  TEST_CASE("OwnedStream: if the device makes no stream, none is destroyed") {
    Bench bench;
    bench.device.fail(SimCall::create_stream, 1);
    CHECK_THROWS_AS(OwnedStream(bench.device, bench.order), DeviceError);
    CHECK(bench.device.usage().streams == 0);
  }
}
