// SPDX-License-Identifier: Apache-2.0
#include <spillway/device/host/host_api.hpp>
#include <spillway/stream/stream_order.hpp>
#include <spillway/testing/stepped_sim_api.hpp>

#include <doctest/doctest.h>

#include <array>
#include <optional>
#include <vector>

TEST_SUITE("stream_order") {
  namespace {

  using spillway::Fence;
  using spillway::StreamIndex;
  using spillway::Ticket;
  using spillway::testing::SteppedSimApi;
  using Order = spillway::StreamOrder<SteppedSimApi>;

  /// Three streams, each with host functions that note their name when they run.
  struct Bench {
    // Before the device, whose end runs what is still enqueued.
    std::vector<int> ran;
    struct Note {
      std::vector<int>* ran;
      int name;
    };
    std::array<Note, 8> notes{};
    std::size_t used = 0;
    SteppedSimApi device{{.capacity_bytes = 1 << 20}};
    Order order{device};
    std::array<SteppedSimApi::stream_type, 3> streams{
        device.create_stream(), device.create_stream(), device.create_stream()};
    std::array<StreamIndex, 3> index{
        order.index_of(streams[0]), order.index_of(streams[1]), order.index_of(streams[2])};

    void work(std::size_t stream, int name) {
      notes.at(used) = {&ran, name};
      device.launch_host(
          streams.at(stream),
          [](void* p) noexcept {
            auto const* note = static_cast<Note*>(p);
            note->ran->push_back(note->name);
          },
          &notes.at(used++));
    }
  };

  /// A device one of whose streams the test can declare captured.
  struct Capturing : SteppedSimApi {
    [[nodiscard]] bool is_capturing(stream_type stream) const { return captured == stream; }
    std::optional<stream_type> captured;
  };
  static_assert(spillway::CapturingApi<Capturing>);

  }  // namespace

  TEST_CASE("Fence: keeps the latest ticket of each stream; a fifth stream makes it wait for all") {
    Fence fence;
    CHECK(fence.is_empty());
    fence.add(Ticket{StreamIndex{1}, 5});
    fence.add(Ticket{StreamIndex{1}, 3});
    CHECK(fence == Fence{Ticket{StreamIndex{1}, 5}});
    fence.add(Ticket{StreamIndex{2}, 6});
    fence.add(Ticket{StreamIndex{3}, 4});
    fence.add(Ticket{StreamIndex{4}, 3});
    CHECK(fence.tickets()[3] == Ticket{StreamIndex{4}, 3});

    fence.add(Ticket{StreamIndex{5}, 2});

    CHECK(fence == Fence{Ticket{StreamIndex::every, 6}});
  }

  TEST_CASE("StreamOrder: marking makes no device call") {
    Bench bench;
    auto const before = bench.device.calls();
    Ticket const ticket = bench.order.mark(bench.index[0]);
    CHECK(bench.order.is_ordered(ticket, bench.index[0]));
    CHECK_FALSE(bench.order.is_ordered(ticket, bench.index[1]));
    bench.order.wait(bench.index[0], ticket);
    CHECK(bench.device.calls() == before);
  }

  TEST_CASE("StreamOrder: a wait holds a stream up until the point has passed") {
    Bench bench;
    bench.work(0, 1);
    Ticket const ticket = bench.order.mark(bench.index[0]);
    bench.order.wait(bench.index[1], ticket);
    bench.work(1, 2);

    bench.device.run(bench.streams[1]);
    CHECK(bench.ran.empty());
    bench.device.run_all();

    CHECK(bench.ran == std::vector{1, 2});
  }

  TEST_CASE("StreamOrder: a second wait for the same point costs no device call") {
    Bench bench;
    bench.work(0, 1);
    Ticket const ticket = bench.order.mark(bench.index[0]);
    bench.order.wait(bench.index[1], ticket);
    auto const before = bench.device.calls();
    CHECK(bench.order.is_ordered(ticket, bench.index[1]));
    bench.order.wait(bench.index[1], ticket);
    CHECK(bench.device.calls() == before);
  }

  TEST_CASE(
      "StreamOrder: waiting for an event recorded early does not wait for work enqueued later") {
    Bench bench;
    bench.work(0, 1);
    Ticket const early = bench.order.mark(bench.index[0]);
    bench.order.record(bench.index[0]);
    bench.work(0, 2);
    bench.order.wait(bench.index[1], early);
    bench.work(1, 3);

    bench.device.step(bench.streams[0]);  // the work
    bench.device.step(bench.streams[0]);  // the record
    bench.device.run(bench.streams[1]);

    CHECK(bench.ran == std::vector{1, 3});
  }

  // Law 3: a stream that takes something over waits for its last use and marks a new one.
  TEST_CASE("StreamOrder: A is held up, B takes over, C takes over from B: C runs after A") {
    Bench bench;
    bench.device.stall(bench.streams[0]);
    bench.work(0, 1);
    Fence range = bench.order.mark(bench.index[0]);

    bench.order.wait(bench.index[1], range);
    range = bench.order.mark(bench.index[1]);  // B did not use it
    bench.order.wait(bench.index[2], range);
    bench.work(2, 3);
    bench.device.run_all();
    CHECK(bench.ran.empty());

    bench.device.resume(bench.streams[0]);
    bench.device.run_all();
    CHECK(bench.ran == std::vector{1, 3});
  }

  TEST_CASE("StreamOrder: a folded fence waits for every stream") {
    Bench bench;
    bench.work(0, 1);
    bench.work(1, 2);
    (void)bench.order.mark(bench.index[0]);
    Ticket const last = bench.order.mark(bench.index[1]);
    bench.order.wait(bench.index[2], Ticket{StreamIndex::every, last.sequence()});
    bench.work(2, 3);

    bench.device.run(bench.streams[2]);
    bench.device.run(bench.streams[1]);
    bench.device.run(bench.streams[2]);
    CHECK(bench.ran == std::vector{2});
    bench.device.run_all();
    CHECK(bench.ran == std::vector{2, 1, 3});
  }

  TEST_CASE("StreamOrder: a wait for all includes unmarked work and points of retired streams") {
    Bench bench;
    bench.work(0, 1);
    bench.work(1, 2);
    (void)bench.order.mark(bench.index[1]);
    bench.order.retire(bench.streams[1]);
    bench.order.wait_for_all(bench.index[2]);
    bench.work(2, 3);

    bench.device.run(bench.streams[2]);
    CHECK(bench.ran.empty());
    bench.device.run(bench.streams[0]);
    bench.device.run(bench.streams[2]);
    CHECK(bench.ran == std::vector{1});
    bench.device.run_all();

    CHECK(bench.ran == std::vector{1, 2, 3});
  }

  TEST_CASE("StreamOrder: is_complete asks the device, synchronize waits for it") {
    Bench bench;
    bench.work(0, 1);
    Ticket const ticket = bench.order.mark(bench.index[0]);
    CHECK_FALSE(bench.order.is_complete(ticket));
    bench.order.synchronize(ticket);
    CHECK(bench.ran == std::vector{1});
    auto const before = bench.device.calls();
    CHECK(bench.order.is_complete(ticket));
    CHECK(bench.order.is_ordered(ticket, bench.index[2]));
    CHECK(bench.device.calls() == before);
  }

  TEST_CASE("StreamOrder: points of a retired stream stay valid when its index is used again") {
    Bench bench;
    bench.work(0, 1);
    Ticket const ticket = bench.order.mark(bench.index[0]);
    bench.order.retire(bench.streams[0]);
    bench.device.destroy_stream(bench.streams[0]);

    bench.order.wait(bench.index[1], ticket);
    bench.work(1, 2);
    bench.device.run_all();
    CHECK(bench.ran == std::vector{1, 2});

    auto const fresh = bench.device.create_stream();
    CHECK(bench.order.index_of(fresh) == bench.index[0]);
    CHECK(bench.order.is_complete(ticket));
    CHECK_FALSE(bench.order.is_ordered(bench.order.mark(bench.index[0]), bench.index[1]));
  }

  TEST_CASE("StreamOrder: a new stream with a reused index has waited for nothing") {
    Bench bench;
    (void)bench.order.mark(bench.index[1]);
    bench.order.record(bench.index[1]);
    bench.device.run_all();
    bench.work(0, 1);
    Ticket const ticket = bench.order.mark(bench.index[0]);
    bench.order.wait(bench.index[1], ticket);
    bench.order.retire(bench.streams[1]);  // no point of it comes after the wait
    bench.streams[1] = bench.device.create_stream();
    REQUIRE(bench.order.index_of(bench.streams[1]) == bench.index[1]);

    CHECK_FALSE(bench.order.is_ordered(ticket, bench.index[1]));
    bench.order.wait(bench.index[1], ticket);
    bench.work(1, 2);
    bench.device.run(bench.streams[1]);
    CHECK(bench.ran.empty());
    bench.device.run_all();
    CHECK(bench.ran == std::vector{1, 2});
  }

  TEST_CASE("StreamOrder: a point marked after its stream was retired is waited for once") {
    Bench bench;
    bench.work(0, 1);
    (void)bench.order.mark(bench.index[0]);
    bench.order.retire(bench.streams[0]);
    Ticket const late = bench.order.mark(bench.index[0]);

    bench.order.wait(bench.index[1], late);
    bench.work(1, 2);
    auto const before = bench.device.calls();
    CHECK(bench.order.is_ordered(late, bench.index[1]));
    bench.order.wait(bench.index[1], late);
    CHECK(bench.device.calls() == before);

    bench.device.run(bench.streams[1]);
    CHECK(bench.ran.empty());
    bench.device.run_all();
    CHECK(bench.ran == std::vector{1, 2});
  }

  TEST_CASE("StreamOrder: too many streams are an error that says what to do") {
    SteppedSimApi device;
    Order order{device};
    std::vector<SteppedSimApi::stream_type> streams;
    for (std::size_t i = 1; i < Order::max_streams; ++i) {
      streams.push_back(device.create_stream());
      (void)order.index_of(streams.back());
    }
    auto const one_more = device.create_stream();
    CHECK_THROWS_AS((void)order.index_of(one_more), spillway::ContractViolation);
    order.retire(streams.front());
    CHECK_NOTHROW((void)order.index_of(one_more));
  }

  TEST_CASE("StreamOrder: if it has no free index, it waits for a retired stream") {
    SteppedSimApi device;
    Order order{device};
    std::vector<SteppedSimApi::stream_type> streams;
    auto const retire_with_work = [&](std::size_t which) {
      device.launch_host(
          streams[which], [](void*) noexcept {}, nullptr);
      (void)order.mark(order.index_of(streams[which]));
      order.retire(streams[which]);
    };
    for (std::size_t i = 1; i < Order::max_streams; ++i) {
      streams.push_back(device.create_stream());
      (void)order.index_of(streams.back());
    }
    StreamIndex const first = order.index_of(streams[7]);
    StreamIndex const second = order.index_of(streams[3]);
    retire_with_work(7);
    retire_with_work(3);
    CHECK(order.index_of(device.create_stream()) == first);
    CHECK(order.index_of(device.create_stream()) == second);
    CHECK_THROWS_AS((void)order.index_of(device.create_stream()), spillway::ContractViolation);
  }

  TEST_CASE("StreamOrder: a handle that is another stream in each thread is refused") {
    struct Device : SteppedSimApi {
      using SteppedSimApi::SteppedSimApi;
      [[nodiscard]] static bool is_one_stream(stream_type stream) noexcept {
        return stream != stream_type{};
      }
    };
    Device device{{.capacity_bytes = 1 << 20}};
    spillway::StreamOrder<Device> order{device};
    CHECK_THROWS_AS((void)order.index_of({}), spillway::ContractViolation);
    CHECK_NOTHROW((void)order.index_of(device.create_stream()));
  }

  TEST_CASE("StreamOrder: points of another order are refused") {
    Bench bench;
    Fence own{bench.order.mark(bench.index[0])};
    own.add(bench.order.mark(bench.index[2]));
    CHECK(bench.order.has_marked({}));
    CHECK(bench.order.has_marked(own));
    CHECK(bench.order.has_marked(Ticket::everything()));
    bench.order.retire(bench.streams[2]);
    CHECK(bench.order.has_marked(own));

    // A point of a stream that is unknown here, and one beyond the last point marked here.
    CHECK_FALSE(bench.order.has_marked(Ticket{StreamIndex{4}, 1}));
    Ticket const last = bench.order.mark(bench.index[1]);
    CHECK_FALSE(bench.order.has_marked(Ticket{last.stream(), last.sequence() + 1}));
  }

  TEST_CASE("StreamOrder: a failed record or wait leaves the order usable") {
    for (auto const call :
         {spillway::SimCall::create_event, spillway::SimCall::record, spillway::SimCall::wait}) {
      Bench bench;
      bench.work(0, 1);
      Ticket const ticket = bench.order.mark(bench.index[0]);
      bench.device.fail(call, 1);
      CHECK_THROWS_AS(bench.order.wait(bench.index[1], ticket), spillway::DeviceError);
      CHECK_FALSE(bench.order.is_ordered(ticket, bench.index[1]));

      bench.order.wait(bench.index[1], ticket);
      bench.work(1, 2);
      bench.device.run(bench.streams[1]);
      CHECK(bench.ran.empty());
      bench.device.run_all();
      CHECK(bench.ran == std::vector{1, 2});
    }
  }

  TEST_CASE("StreamOrder: a stream that is being captured waits for nothing, and is refused if it "
            "would have to") {
    Capturing device;
    spillway::StreamOrder<Capturing> order{device};
    std::array const streams{device.create_stream(), device.create_stream()};
    StreamIndex const captured = order.index_of(streams[0]);
    StreamIndex const other = order.index_of(streams[1]);
    Ticket const before = order.mark(other);
    order.wait(captured, before);
    device.captured = streams[0];

    auto const calls = device.calls();
    order.wait(captured, before);
    CHECK(device.calls() == calls);
    Ticket const late = order.mark(other);
    CHECK_THROWS_AS(order.wait(captured, late), spillway::ContractViolation);
    CHECK_THROWS_AS(order.wait_for_all(captured), spillway::ContractViolation);
    CHECK_FALSE(order.is_ordered(late, captured));

    device.captured.reset();
    order.wait(captured, late);
    CHECK(order.is_ordered(late, captured));
    device.run_all();
  }

  TEST_CASE("StreamOrder: record_all records on every stream that is not being captured") {
    Capturing device;
    spillway::StreamOrder<Capturing> order{device};
    std::array const streams{
        device.create_stream(), device.create_stream(), device.create_stream()};
    StreamIndex const waiting = order.index_of(streams[2]);
    Ticket const on_captured = order.mark(order.index_of(streams[0]));
    Ticket const on_other = order.mark(order.index_of(streams[1]));
    device.captured = streams[0];

    order.record_all();

    CHECK_THROWS_AS(order.wait(waiting, on_captured), spillway::ContractViolation);
    device.captured = streams[1];  // it joins a capture
    CHECK_NOTHROW(order.wait(waiting, on_other));
    device.captured.reset();
    device.run_all();
  }

  TEST_CASE("StreamOrder: nothing waits for work that the caller has finished already") {
    spillway::HostApi device;
    spillway::StreamOrder<spillway::HostApi> order{device};
    StreamIndex const caller = order.index_of(spillway::HostStream::caller);
    auto const stream = device.create_stream();
    StreamIndex const other = order.index_of(stream);

    CHECK(order.mark(caller).is_none());
    order.record(caller);
    order.wait_for_all(other);
    CHECK(order.is_ordered(order.mark(caller), other));

    Ticket const copied = order.mark(other);
    CHECK_FALSE(copied.is_none());
    CHECK_FALSE(order.is_ordered(copied, caller));
    order.wait(caller, copied);
    CHECK(order.is_ordered(copied, caller));
    order.retire(stream);
    device.destroy_stream(stream);
  }
}
