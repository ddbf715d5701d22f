// SPDX-License-Identifier: Apache-2.0
#include <spillway/device/sim/model_api.hpp>
#include <spillway/host_swap_pool.hpp>
#include <spillway/pager/copy_streams.hpp>
#include <spillway/stream/stream_order.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace {

using namespace spillway;

/// A link of one byte a nanosecond, with copies of a mebibyte each enqueued one after the other.
struct Link {
  static constexpr std::uint64_t copy_ns = 1_MiB;

  ModelApi device{{.capacity_bytes = 64_MiB, .link_bytes_per_second = 1'000'000'000}};
  StreamOrder<ModelApi> order{device};
  HostSwapPool<ModelApi> pool{device, order, {.pinned_bytes = 64_MiB}};
  detail::CopyStreams<ModelApi, SystemFileIo> streams{device, order, pool};
  std::byte* memory = static_cast<std::byte*>(device.try_reserve(32_MiB));
  std::vector<Transfer> transfers;
  std::vector<HostSlotId> slots;

  Link() = default;
  Link(Link const&) = delete;
  Link& operator=(Link const&) = delete;
  ~Link() {
    for (HostSlotId const slot : slots) {
      pool.give_back(slot);
    }
    order.synchronize(streams.out().mark());
    order.synchronize(streams.in().mark());
    device.release(memory, 32_MiB);
  }

  /// Swaps out `count` more blocks, one by one.
  void swap_out(std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
      REQUIRE(pool.try_grow(1_MiB));
      slots.push_back(pool.try_take(1_MiB).value());
      TransferRequest request = request_for(slots.size() - 1);
      streams.swap_out({&request, 1});
      REQUIRE(request.state == TransferState::enqueued);
      transfers.push_back(request.done);
    }
  }

  /// Swaps all of them in, one by one.
  void swap_in() {
    transfers.clear();
    for (std::size_t i = 0; i < slots.size(); ++i) {
      TransferRequest request = request_for(i);
      streams.swap_in({&request, 1});
      REQUIRE(request.state == TransferState::enqueued);
      transfers.push_back(request.done);
    }
  }

  TransferRequest request_for(std::size_t i) {
    return {.slot = slots[i], .device = memory + (i + 1) * 1_MiB, .bytes = 1_MiB};
  }

  /// The time at which work on a new stream could run that waits for `fence`.
  std::uint64_t time_after(Fence const& fence) {
    auto const stream = device.create_stream();
    order.wait(order.index_of(stream), fence);
    std::uint64_t time_ns = 0;
    struct Call {
      ModelApi* device;
      std::uint64_t* time_ns;
    } call{&device, &time_ns};
    device.launch_host(
        stream,
        [](void* p) noexcept {
          auto const* const the_call = static_cast<Call*>(p);
          *the_call->time_ns = the_call->device->clock_ns();
        },
        &call);
    order.retire(stream);
    device.destroy_stream(stream);
    return time_ns;
  }
};

}  // namespace

TEST_SUITE("copy_streams") {
  TEST_CASE("CopyStreams: waiting for one copy out does not wait for later ones") {
    Link link;
    link.swap_out(20);
    CHECK(link.time_after(link.transfers[0].device_done) == Link::copy_ns);
    CHECK(link.time_after(link.transfers[5].device_done) == 6 * Link::copy_ns);
    CHECK(link.time_after(link.transfers[19].device_done) == 20 * Link::copy_ns);
  }

  TEST_CASE("CopyStreams: waiting for one copy in does not wait for later ones") {
    Link link;
    link.swap_out(8);
    link.order.synchronize(link.streams.out().mark());
    link.swap_in();
    CHECK(link.time_after(link.transfers[0].device_done) == 9 * Link::copy_ns);
    CHECK(link.time_after(link.transfers[7].device_done) == 16 * Link::copy_ns);
  }

  TEST_CASE("CopyStreams: copies of the two directions overlap") {
    Link link;
    link.swap_out(4);
    link.order.synchronize(link.streams.out().mark());
    std::uint64_t const start = link.device.clock_ns();
    link.swap_in();
    link.swap_out(4);
    CHECK(link.device.finish_time_ns() == start + 4 * Link::copy_ns);
  }

  TEST_CASE(
      "CopyStreams: one of several blocks that leave together can be waited for without the last") {
    Link link;
    std::vector<TransferRequest> requests;
    for (std::size_t i = 0; i < 20; ++i) {
      REQUIRE(link.pool.try_grow(1_MiB));
      link.slots.push_back(link.pool.try_take(1_MiB).value());
      requests.push_back(link.request_for(i));
    }
    link.streams.swap_out(requests);
    CHECK(link.time_after(requests[0].done.device_done) == 8 * Link::copy_ns);
    CHECK(link.time_after(requests[9].done.device_done) == 16 * Link::copy_ns);
    CHECK(link.time_after(requests[19].done.device_done) == 20 * Link::copy_ns);
  }
}
