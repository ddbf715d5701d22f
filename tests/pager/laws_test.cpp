// SPDX-License-Identifier: Apache-2.0
// The eight laws of docs/architecture.md, each with the test that would fail if it were broken.
#include <spillway/device_allocator.hpp>
#include <spillway/policy/eviction/queue_eviction.hpp>
#include <spillway/policy/null_policies.hpp>
#include <spillway/sim.hpp>
#include <spillway/swappable_buffer.hpp>
#include <spillway/testing/stepped_sim_api.hpp>

#include <doctest/doctest.h>

#include <array>
#include <string>
#include <vector>

#include <support/stepped_bench.hpp>
#include <support/stepped_policies.hpp>

TEST_SUITE("laws") {
  namespace {

  using namespace spillway::literals;
  using spillway::Access;
  using spillway::Residency;

  using Stepped = support::SteppedOnDemand;
  using Allocator = spillway::DeviceAllocator<Stepped>;
  using Buffer = spillway::SwappableBuffer<Allocator>;

  Allocator::Options small(std::size_t capacity_bytes) {
    Allocator::Options options{.capacity_bytes = capacity_bytes};
    options.bounce_bytes = 0;
    options.host.pinned_bytes = 64_MiB;
    options.host.initial_pinned_bytes = 64_MiB;  // so that no slab is pinned while a test counts
    return options;
  }

  struct Bench : support::SteppedBench<Stepped> {
    explicit Bench(std::size_t capacity_bytes)
        : SteppedBench{{.capacity_bytes = 64_MiB}, small(capacity_bytes), 3} {}
  };

  /// Whether the allocator's lock is held, as its lock policy and its device both see it.
  struct LockProbe {
    bool is_held = false;
    std::size_t calls_under_lock = 0;
    std::size_t calls = 0;
  };
  LockProbe* probe = nullptr;  // a lock policy is default constructed, so the probe has to be found

  class ProbedLock {
   public:
    void lock() { probe->is_held = true; }
    void unlock() { probe->is_held = false; }
    bool try_lock() {
      lock();
      return true;
    }
  };

  /// A stepped device that notes calls made while the lock is held.
  class ProbedDevice : public spillway::testing::SteppedSimApi {
   public:
    using spillway::testing::SteppedSimApi::SteppedSimApi;

    void* try_reserve(std::size_t bytes) { return note().try_reserve(bytes); }
    void* try_allocate_pinned(std::size_t bytes, int node) {
      return note().try_allocate_pinned(bytes, node);
    }
    void copy(void* to, void const* from, std::size_t n, spillway::CopyKind kind, stream_type s) {
      note().copy(to, from, n, kind, s);
    }
    void fill(void* p, unsigned char byte, std::size_t n, stream_type s) {
      note().fill(p, byte, n, s);
    }
    event_type create_event() { return note().create_event(); }
    void record(event_type event, stream_type s) { note().record(event, s); }
    void wait(stream_type s, event_type event) { note().wait(s, event); }
    bool is_complete(event_type event) { return note().is_complete(event); }
    void synchronize(event_type event) { note().synchronize(event); }
    void synchronize(stream_type s) { note().synchronize(s); }

   private:
    spillway::testing::SteppedSimApi& note() {
      ++probe->calls;
      probe->calls_under_lock += probe->is_held ? 1 : 0;
      return *this;
    }
  };

  struct Probed : Stepped {
    using device = ProbedDevice;
    using lock = ProbedLock;
  };

  }  // namespace

  TEST_CASE("Law 1: a leased block is resident and does not move, whatever other blocks need") {
    Bench bench{1_MiB};
    Buffer first{bench.allocator, 256_KiB};
    Buffer held{bench.allocator, 256_KiB};
    Buffer last{bench.allocator, 512_KiB};
    auto lease = held.acquire(Access::write, bench.streams[0]);
    void* const address = lease.data();
    first.reset();
    last.reset();

    // 768 KiB are free around the held block, 512 KiB in one piece.
    CHECK_THROWS_AS((Buffer{bench.allocator, 768_KiB}), spillway::OutOfDeviceMemory);
    CHECK(lease.data() == address);
    CHECK(held.residency() == Residency::device);
    CHECK_THROWS_AS(held.swap_out(), spillway::ContractViolation);

    lease.release();
    Buffer const big{bench.allocator, 768_KiB};
    CHECK(bench.allocator.stats().moves.count + bench.allocator.stats().drops.count == 1);
  }

  TEST_CASE(
      "Law 2: no call waits on the host while blocks are made, freed, evicted and brought back") {
    Bench bench{1_MiB};
    bench.device.stall(bench.streams[0]);  // nothing that is enqueued runs
    std::vector<Buffer> buffers;
    for (std::uint64_t i = 0; i < 8; ++i) {
      buffers.emplace_back(bench.allocator, 256_KiB);
      bench.write(buffers.back(), i);
    }
    for (std::uint64_t i = 0; i < 8; ++i) {
      bench.check(buffers[i], i);
    }
    buffers[0].reset();
    bench.allocator.compact();

    CHECK(bench.device.calls().host_synchronizations == 0);
    CHECK(bench.allocator.stats().host_waits == 0);
    CHECK(bench.kernels.checks() == 0);
    bench.device.resume(bench.streams[0]);
    bench.device.run_all();
    CHECK(bench.kernels.checks() == 8);
    CHECK(bench.kernels.failures() == 0);
  }

  TEST_CASE(
      "Law 3: A stalled, B takes its range over, C takes it from B: A's bytes reach the host") {
    Bench bench{256_KiB};
    Buffer a{bench.allocator, 256_KiB};
    bench.device.stall(bench.streams[0]);
    bench.write(a, 1, 0);

    Buffer b{bench.allocator, 256_KiB};  // a is evicted for it
    bench.write(b, 2, 1);
    b.reset();
    Buffer c{bench.allocator, 256_KiB};
    bench.write(c, 3, 2);
    bench.check(c, 3, 2);
    bench.device.run_all();
    CHECK(bench.kernels.checks() == 0);  // C must not run before A

    bench.device.resume(bench.streams[0]);
    bench.device.run_all();
    bench.check(a, 1, 1);
    bench.device.run_all();
    CHECK(bench.kernels.checks() == 2);
    CHECK(bench.kernels.failures() == 0);
  }

  TEST_CASE("Law 3: A stalled, its block is moved, B takes the place it left, C takes it from B") {
    Bench bench{768_KiB};
    Buffer before{bench.allocator, 256_KiB};
    Buffer a{bench.allocator, 256_KiB};
    Buffer after{bench.allocator, 256_KiB};
    bench.device.stall(bench.streams[0]);
    bench.write(a, 1, 0);
    before.reset();
    after.reset();

    Buffer b{bench.allocator, 512_KiB};  // a moves for it
    REQUIRE(bench.allocator.stats().moves.count == 1);
    bench.write(b, 2, 1);
    b.reset();
    Buffer c{bench.allocator, 512_KiB};
    bench.write(c, 3, 2);
    bench.check(c, 3, 2);
    bench.device.run_all();
    CHECK(bench.kernels.checks() == 0);  // C must not run before A's bytes have left

    bench.device.resume(bench.streams[0]);
    bench.device.run_all();
    bench.check(a, 1, 1);
    bench.device.run_all();
    CHECK(bench.kernels.checks() == 2);
    CHECK(bench.kernels.failures() == 0);
  }

  TEST_CASE("Law 3: A stalled under a lease, B had a lease meanwhile, C takes the range") {
    for (bool const is_first_to_end : {true, false}) {
      CAPTURE(is_first_to_end);
      Bench bench{256_KiB};
      Buffer shared{bench.allocator, 256_KiB};
      bench.write(shared, 1, 1);
      bench.run();
      bench.device.stall(bench.streams[0]);
      auto a = shared.acquire(Access::read, bench.streams[0]);
      bench.kernels.check(bench.device, bench.streams[0], a.data(), a.size_bytes(), 1);
      auto b = shared.acquire(Access::write, bench.streams[1]);
      if (is_first_to_end) {
        a.release();
      }
      b.release();
      a.release();
      shared.reset();

      Buffer c{bench.allocator, 256_KiB};
      bench.write(c, 3, 2);
      bench.device.run_all();
      bench.device.resume(bench.streams[0]);
      bench.device.run_all();
      CHECK(bench.kernels.checks() == 1);
      CHECK(bench.kernels.failures() == 0);
    }
  }

  TEST_CASE("Law 4: a clean block is dropped, and Access::write brings nothing in") {
    Bench bench{256_KiB};
    Buffer a{bench.allocator, 256_KiB};
    bench.write(a, 1);
    Buffer b{bench.allocator, 256_KiB};  // a is copied out
    bench.write(b, 2);
    bench.check(a, 1);  // b is copied out, a comes back
    CHECK(bench.allocator.stats().swap_outs.count == 2);
    CHECK(bench.allocator.stats().swap_ins.count == 1);

    bench.write(b, 3);  // a leaves again: its host copy is still valid
    CHECK(bench.allocator.stats().swap_outs.count == 2);
    CHECK(bench.allocator.stats().drops.count == 1);
    CHECK(bench.allocator.stats().swap_ins.count == 1);
    bench.check(a, 1);
    bench.check(b, 3);
    bench.device.run_all();
    CHECK(bench.kernels.failures() == 0);
  }

  TEST_CASE("Law 5: victims are chosen by value, then compaction makes room") {
    Bench bench{1_MiB};
    std::vector<Buffer> buffers;
    for (std::uint64_t i = 0; i < 4; ++i) {
      buffers.emplace_back(bench.allocator, 256_KiB);
      bench.write(buffers.back(), i);
    }
    // The least recently used are the first and the third, which do not touch.
    bench.check(buffers[1], 1);
    bench.check(buffers[3], 3);
    Buffer big{bench.allocator, 512_KiB};
    bench.write(big, 9);

    CHECK(buffers[0].residency() != Residency::device);
    CHECK(buffers[1].residency() == Residency::device);
    CHECK(buffers[2].residency() != Residency::device);
    CHECK(buffers[3].residency() == Residency::device);
    CHECK(bench.allocator.stats().moves.count == 1);
    bench.device.run_all();
    for (std::uint64_t i = 0; i < 4; ++i) {
      bench.check(buffers[i], i);
    }
    bench.check(big, 9);
    bench.device.run_all();
    CHECK(bench.kernels.failures() == 0);
  }

  TEST_CASE("Law 6: no device call is made under the lock") {
    LockProbe seen;
    probe = &seen;
    {
      ProbedDevice device{{.capacity_bytes = 64_MiB}};
      spillway::DeviceAllocator<Probed>::Options options{.capacity_bytes = 1_MiB};
      options.initial_bytes = 256_KiB;
      options.growth_bytes = 256_KiB;
      options.host.pinned_bytes = 64_MiB;
      options.host.slab_bytes = 1_MiB;
      options.paging.poison_vacated = true;
      spillway::DeviceAllocator<Probed> allocator{device, options};
      std::array const streams{device.create_stream(), device.create_stream()};
      std::vector<spillway::SwappableBuffer<spillway::DeviceAllocator<Probed>>> buffers;
      for (std::size_t i = 0; i < 24; ++i) {
        buffers.emplace_back(allocator, (i % 3 + 1) * 64_KiB);
        (void)buffers.back().acquire(Access::write, streams[i % 2]);
        (void)buffers[i / 2].acquire(Access::read_write, streams[i / 2 % 2]);
      }
      (void)buffers[0].residency();
      buffers[1].swap_in();
      buffers[1].swap_out();
      CHECK(allocator.stats().swap_ins.count > 0);
      buffers.clear();
      for (std::size_t i = 0; i < 16; ++i) {
        buffers.emplace_back(allocator, 64_KiB);
      }
      for (std::size_t i = 0; i < 8; ++i) {
        buffers.erase(buffers.begin() + static_cast<std::ptrdiff_t>(i));
      }
      allocator.compact();
      CHECK(allocator.stats().moves.count > 0);
      buffers.clear();
      for (auto const stream : streams) {
        allocator.retire_stream(stream);
      }
    }
    CHECK(seen.calls > 50);
    CHECK(seen.calls_under_lock == 0);
    probe = nullptr;
  }

  TEST_CASE("Law 7: if room cannot be made, the error gives the reason and no block changes") {
    Bench bench{1_MiB};
    Buffer a{bench.allocator, 512_KiB};
    Buffer b{bench.allocator, 256_KiB};
    bench.write(a, 1);
    bench.write(b, 2);
    auto lease = a.acquire(Access::read, bench.streams[0]);

    try {
      Buffer const c{bench.allocator, 768_KiB};
      FAIL("there was no room");
    } catch (spillway::OutOfDeviceMemory const& error) {
      CHECK(error.report().requested_bytes == 768_KiB);
      CHECK(error.report().capacity_bytes == 1_MiB);
      CHECK(error.report().leased_bytes == 512_KiB);
      CHECK(std::string{error.what()}.find("Release leases") != std::string::npos);
    }
    CHECK(bench.allocator.stats().out_of_memory == 1);
    CHECK(bench.allocator.stats().allocated.blocks.current == 2);
    lease.release();
    bench.check(a, 1);
    bench.check(b, 2);
    bench.device.run_all();
    CHECK(bench.kernels.failures() == 0);
    CHECK_NOTHROW((Buffer{bench.allocator, 768_KiB}));
  }

  TEST_CASE("Law 8: allocators share no state") {
    Bench one{1_MiB};
    Bench two{1_MiB};
    Buffer a{one.allocator, 1_MiB};
    one.write(a, 1);
    auto const before = two.allocator.stats();
    auto const calls = two.device.calls();
    Buffer b{one.allocator, 1_MiB};
    one.write(b, 2);
    CHECK(two.allocator.stats().allocated == before.allocated);
    CHECK(two.device.calls() == calls);
  }
}
