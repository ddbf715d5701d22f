// SPDX-License-Identifier: Apache-2.0
#include <spillway/device/cuda/cuda_api.hpp>
#include <spillway/device/cuda/cuda_host_worker.hpp>
#include <spillway/host_swap_pool.hpp>
#include <spillway/stream/stream_order.hpp>
#include <spillway/testing/device_contracts.hpp>
#include <spillway/testing/faulty_file_io.hpp>

#include <doctest/doctest.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <memory>
#include <thread>
#include <vector>

#include <support/fake_cudart.hpp>
#include <support/fork.hpp>
#include <support/temporary_folder.hpp>

using namespace spillway;
using spillway::testing::Gate;

namespace {

/// Where and when a function was called.
struct Call {
  static void run(void* argument) noexcept {
    auto& call = *static_cast<Call*>(argument);
    call.thread = std::this_thread::get_id();
    call.place = call.order == nullptr ? 0 : ++*call.order;
    call.is_done = true;
  }

  std::thread::id thread;
  std::atomic<int>* order = nullptr;
  int place = 0;
  std::atomic<bool> is_done{false};
};

/// A stand-in, a device on it and a stream with a worker.
struct Bench {
  explicit Bench(FakeCudart::Options options = {}) : cuda{options} {}
  ~Bench() {
    device.synchronize(stream);
    worker.reset();
    device.destroy_stream(stream);
  }

  [[nodiscard]] std::thread::id thread_of_stream() {
    Call call;
    device.launch_host(stream, &Call::run, &call);
    device.synchronize(stream);
    return call.thread;
  }

  FakeCudart cuda;
  CudaApi device;
  cudaStream_t stream = device.create_stream();
  std::unique_ptr<detail::CudaHostWorker> worker = device.make_host_worker(stream);
};

}  // namespace

TEST_SUITE("cuda_host_worker") {
  TEST_CASE("CudaHostWorker: a forked child can destroy it") {
    Bench now;
    Call call;
    now.worker->launch(&Call::run, &call);
    now.device.synchronize(now.stream);

    spillway::test::ForkedChild const child{[&] { now.worker.reset(); }};
    CHECK(child.status() == 0);
  }

  TEST_CASE("CudaHostWorker: functions run in stream order on the worker's thread") {
    Bench now;
    std::atomic<int> order{0};
    std::array<Call, 600> calls{};  // more than there are words
    for (Call& call : calls) {
      call.order = &order;
      now.worker->launch(&Call::run, &call);
    }
    now.device.synchronize(now.stream);

    std::thread::id const streams = now.thread_of_stream();
    CHECK(calls[0].thread != streams);
    for (std::size_t i = 0; i < calls.size(); ++i) {
      CHECK(calls[i].place == static_cast<int>(i) + 1);
    }
    CHECK(now.cuda.calls("cuStreamWaitValue32") >= 256);
  }

  TEST_CASE(
      "CudaHostWorker: a function runs after earlier work of the stream, later work after it") {
    Bench now;
    Gate gate;
    gate.close(now.device, now.stream);
    Call call;
    now.worker->launch(&Call::run, &call);
    Call after;
    now.device.launch_host(now.stream, &Call::run, &after);
    cudaEvent_t const event = now.device.create_event();
    now.device.record(event, now.stream);
    CHECK_FALSE(call.is_done);
    CHECK_FALSE(now.device.is_complete(event));

    gate.open();
    now.device.synchronize(event);
    CHECK(call.is_done);
    CHECK(after.is_done);
    now.device.destroy_event(event);
  }

  TEST_CASE("CudaHostWorker: later work waits for a function that is still running") {
    Bench now;
    std::atomic<bool> may_end{false};
    now.worker->launch(
        [](void* argument) noexcept { static_cast<std::atomic<bool>*>(argument)->wait(false); },
        &may_end);
    Call after;
    now.device.launch_host(now.stream, &Call::run, &after);
    cudaStream_t const other = now.device.create_stream();
    now.device.synchronize(other);
    CHECK_FALSE(after.is_done);
    may_end = true;
    may_end.notify_all();
    now.device.synchronize(now.stream);
    CHECK(after.is_done);
    now.device.destroy_stream(other);
  }

  TEST_CASE("CudaHostWorker: if launch fails, its function never runs, whether the stream is idle "
            "or held up") {
    Bench now;
    for (char const* const function : {"cudaLaunchHostFunc", "cuStreamWaitValue32"}) {
      for (bool const is_reached : {true, false}) {
        CAPTURE(function);
        Gate gate;
        if (!is_reached) {
          gate.close(now.device, now.stream);
        }
        Call failed;
        now.cuda.fail_next(function, cudaErrorInvalidValue);
        CHECK_THROWS_AS(now.worker->launch(&Call::run, &failed), CudaError);
        Call next;
        now.worker->launch(&Call::run, &next);
        gate.open();
        now.device.synchronize(now.stream);
        CHECK_FALSE(failed.is_done);
        CHECK(next.is_done);
      }
    }
    CHECK(cudaPeekAtLastError() == cudaSuccess);
  }

  TEST_CASE("CudaHostWorker: without waits on memory values, launch uses a host function") {
    Bench now{{.has_stream_waits = false}};
    std::array<Call, 2> calls{};
    for (Call& call : calls) {
      now.worker->launch(&Call::run, &call);
      now.device.synchronize(now.stream);
      CHECK(call.thread == now.thread_of_stream());
    }
    CHECK(now.cuda.calls("cuStreamWaitValue32") == 1);  // it is not asked again
  }

  TEST_CASE("CudaHostWorker: threads may launch on the same stream") {
    Bench now;
    std::atomic<int> order{0};
    std::vector<Call> calls(400);
    std::vector<std::thread> threads;
    for (std::size_t t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        for (std::size_t i = t; i < calls.size(); i += 4) {
          calls[i].order = &order;
          now.worker->launch(&Call::run, &calls[i]);
        }
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
    now.device.synchronize(now.stream);
    CHECK(order == 400);
  }

  TEST_CASE("HostSwapPool: slower tiers go through workers, and a failed write loses nothing") {
    Bench now;
    TemporaryFolder folder;
    testing::FaultyFileIo io;
    StreamOrder<CudaApi> order{now.device};
    HostPoolOptions options{.file_bytes = 1_MiB,
                            .file = folder.path(),
                            .slab_bytes = 64 << 10,
                            .staging_chunks = 2,
                            .staging_bytes = 8 << 10};
    {
      HostSwapPool<CudaApi, testing::FaultyFileIo> pool{now.device, order, options, io};
      std::size_t const waits = now.cuda.calls("cuStreamWaitValue32");
      constexpr std::size_t bytes = 40'000;
      auto* const memory = static_cast<std::byte*>(now.device.try_reserve(bytes));
      for (bool const fails : {false, true}) {
        CAPTURE(fails);
        now.device.fill(memory, fails ? 2 : 1, bytes, now.stream);
        REQUIRE(pool.try_grow(bytes));
        HostSlotId const id = *pool.try_take(bytes);
        testing::FaultyFileIo::Faults faults;
        faults.write_error = fails ? ENOSPC : 0;
        io.plant(faults);
        (void)pool.write(id, memory, bytes, now.stream);
        now.device.fill(memory, 9, bytes, now.stream);
        (void)pool.read(id, memory, bytes, now.stream);
        std::vector<unsigned char> back(bytes);
        detail::SyncCopier<CudaApi>{now.device}.copy_to_host_sync(
            back.data(), memory, bytes, now.stream);
        CHECK(back == std::vector<unsigned char>(bytes, fails ? 2 : 1));
        CHECK((pool.stats().failed_writes > 0) == fails);
        pool.give_back(id);
      }
      CHECK(now.cuda.calls("cuStreamWaitValue32") >= waits + 20);
      now.device.synchronize(now.stream);
      now.device.release(memory, bytes);
    }
    order.retire(now.stream);
  }
}
