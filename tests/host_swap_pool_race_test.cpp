// SPDX-License-Identifier: Apache-2.0
#include <spillway/device/sim/sim_api.hpp>
#include <spillway/host/host_tier.hpp>
#include <spillway/host_swap_pool.hpp>
#include <spillway/policy/codec/zero_bitmap.hpp>
#include <spillway/stream/stream_order.hpp>
#include <spillway/testing/faulty_file_io.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include <support/pool_bench.hpp>
#include <support/temporary_folder.hpp>

using namespace spillway;
using spillway::testing::FaultyFileIo;

namespace {

using Pool = HostSwapPool<SimApi, FaultyFileIo>;

struct World {
  explicit World(HostPoolOptions options, FaultyFileIo file_io = {})
      : io{std::move(file_io)}, order{device} {
    options.file = folder.path();
    pool.emplace(device, order, options, io);
  }

  TemporaryFolder folder;
  FaultyFileIo io;
  SimApi device;
  StreamOrder<SimApi> order;
  std::optional<Pool> pool;
  CodingId coding{};  // what slots are taken with
  std::size_t most_bytes = 24 << 10;
  bool is_file_unsteady = false;  // it refuses writes now and then
};

/// One thread of work on blocks of its own, two streams, and a pool that it shares. Device memory
/// is touched by the host only when nothing on a stream is using it.
class Worker {
 public:
  Worker(World& world, std::uint64_t seed)
      : world_{&world},
        random_{seed},
        out_{world.device.create_stream()},
        in_{world.device.create_stream()},
        from_{static_cast<std::byte*>(world.device.try_reserve(world.most_bytes))},
        to_{static_cast<std::byte*>(world.device.try_reserve(world.most_bytes))} {}
  Worker(Worker const&) = delete;
  Worker& operator=(Worker const&) = delete;
  ~Worker() {
    for (SimStream const stream : {out_, in_}) {
      world_->device.synchronize(stream);
      world_->order.retire(stream);
      world_->device.destroy_stream(stream);
    }
    world_->device.release(from_, world_->most_bytes);
    world_->device.release(to_, world_->most_bytes);
  }

  void run(int rounds) {
    for (int round = 0; round < rounds; ++round) {
      std::size_t const bytes = 1 + random_() % world_->most_bytes;
      auto id = take(bytes);
      while (!id) {  // until other threads give back what they have taken
        std::this_thread::yield();
        id = take(bytes);
      }
      carry(*id, bytes);
    }
  }

  /// A round trip of one block, while another slot takes as many bytes of the fastest tier.
  void run_beside_a_large_block() {
    auto const large = take(world_->most_bytes);
    auto const id = take(world_->most_bytes);
    REQUIRE((large && id));
    carry(*id, world_->most_bytes);
    world_->pool->give_back(*large);
  }

  /// The same with several slots at once.
  void run_together(int rounds) {
    Pool& pool = *world_->pool;
    for (int round = 0; round < rounds; ++round) {
      std::vector<TransferRequest> requests;
      std::byte* at = from_;
      for (std::size_t left = 2 + random_() % 8; left > 0; --left) {
        std::size_t const bytes = 1 + random_() % 2000;
        auto id = pool.try_take(bytes);
        if (!id && pool.try_grow(bytes)) {
          id = pool.try_take(bytes);
        }
        if (id) {
          requests.push_back({.slot = *id, .device = at, .bytes = bytes, .reservation = 1});
          at += bytes;
        }
      }
      auto const seed = static_cast<unsigned>(random_());
      put_pattern(from_, world_->most_bytes, seed);
      pool.write_all(requests, out_);
      Fence written;
      for (TransferRequest& request : requests) {
        written.add(request.done.device_done);
        request.device = to_ + (request.device - from_);
      }
      pool.read_all(requests, in_);
      Fence read;
      for (TransferRequest const& request : requests) {
        read.add(request.done.device_done);
        pool.give_back(request.slot);
      }
      world_->order.synchronize(written);
      world_->order.synchronize(read);
      auto const bytes = static_cast<std::size_t>(at - from_);
      wrong += std::equal(from_, from_ + bytes, to_) ? 0 : 1;
      done += requests.size() > 1 ? 1 : 0;
    }
  }

  /// Blocks that stay in the pool for some rounds, and are overwritten there.
  void run_held(int rounds) {
    struct Held {
      HostSlotId id{};
      std::size_t bytes = 0;
      unsigned seed = 0;
    };
    std::vector<Held> all;
    Pool& pool = *world_->pool;
    // A thread may find no room in all of its rounds, since the others hold what there is.
    for (int round = 0; round < rounds || done == 0; ++round) {
      std::size_t const bytes = 1 + random_() % world_->most_bytes;
      if (auto const id = all.size() < 4 ? take(bytes) : std::nullopt) {
        all.push_back({*id, bytes});
        write(all.back().id, bytes, all.back().seed = static_cast<unsigned>(random_()));
      }
      if (all.empty()) {
        std::this_thread::yield();
        continue;
      }
      std::swap(all[random_() % all.size()], all.back());
      Held& one = all.back();
      Transfer const read = pool.read(one.id, to_, one.bytes, in_);
      bool const is_last = random_() % 2 == 0;
      if (is_last) {
        pool.give_back(one.id);
      }
      world_->order.synchronize(read.device_done);
      wrong += has_pattern(to_, one.bytes, one.seed) ? 0 : 1;
      done += 1;
      if (is_last) {
        all.pop_back();
      } else if (random_() % 2 == 0) {
        write(one.id, one.bytes, one.seed = static_cast<unsigned>(random_()));
      }
    }
    for (Held const& one : all) {
      pool.give_back(one.id);
    }
  }

  int done = 0;
  int wrong = 0;

 private:
  void write(HostSlotId id, std::size_t bytes, unsigned seed) {
    put_pattern(from_, bytes, seed);
    world_->order.synchronize(world_->pool->write(id, from_, bytes, out_).device_done);
  }

  std::optional<HostSlotId> take(std::size_t bytes) {
    auto id = world_->pool->try_take(bytes, world_->coding);
    while (!id && world_->pool->try_grow(bytes, world_->coding)) {
      id = world_->pool->try_take(bytes, world_->coding);
    }
    return id;
  }

  void carry(HostSlotId id, std::size_t bytes) {
    Pool& pool = *world_->pool;
    put_pattern(from_, bytes, static_cast<unsigned>(random_()));
    if (world_->coding != CodingId{}) {
      std::fill(from_ + bytes / 4, from_ + bytes, std::byte{});
    }
    Transfer const written = pool.write(id, from_, bytes, out_);
    Transfer const read = pool.read(id, to_, bytes, in_);
    // Given back with everything still in flight: the next owner must wait for it.
    pool.give_back(id);
    world_->order.synchronize(written.device_done);
    world_->order.synchronize(read.device_done);
    wrong += std::equal(from_, from_ + bytes, to_) ? 0 : 1;
    done += 1;
  }

  World* world_;
  std::mt19937_64 random_;
  SimStream out_;
  SimStream in_;
  std::byte* from_;
  std::byte* to_;
};

enum class Way : std::uint8_t { one_by_one, together, held };

void run_workers(World& world, std::uint64_t seed, int rounds, Way way = Way::one_by_one) {
  CAPTURE(seed);
  constexpr std::uint64_t workers = 4;
  std::vector<int> wrong(workers);
  std::vector<int> done(workers);
  std::atomic<std::uint64_t> running{workers};
  {
    std::vector<std::thread> threads;
    for (std::uint64_t i = 0; i < workers; ++i) {
      threads.emplace_back([&, i] {
        Worker worker{world, seed + i};
        way == Way::held       ? worker.run_held(rounds)
        : way == Way::together ? worker.run_together(rounds)
                               : worker.run(rounds);
        wrong[i] = worker.wrong;
        done[i] = worker.done;
        --running;
      });
    }
    for (unsigned turn = 0; running > 0; ++turn) {  // a thread that only reads statistics
      if (world.is_file_unsteady) {
        world.io.plant({.write_error = turn % 2 == 0 ? ENOSPC : 0, .failing_from = 8 << 10});
      }
      (void)world.pool->stats();
      (void)world.pool->free_bytes();
      std::this_thread::yield();
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
  }
  for (std::uint64_t i = 0; i < workers; ++i) {
    CAPTURE(i);
    CHECK(wrong[i] == 0);
    CHECK(done[i] > 0);
  }
  for (HostTierStats const& tier : world.pool->stats().tiers) {
    CHECK(tier.slot_count == 0);
    CHECK(tier.used_bytes == 0);
  }
}

HostPoolOptions small_tiers(std::size_t pinned, std::size_t pageable, std::size_t file) {
  return {.pinned_bytes = pinned,
          .pageable_bytes = pageable,
          .file_bytes = file,
          .slab_bytes = 8 << 10,
          .staging_chunks = 2,
          .staging_bytes = 4 << 10};
}

}  // namespace

TEST_SUITE("host_swap_pool_race") {
  TEST_CASE("HostSwapPool: threads that share every tier get their own bytes back") {
    World world{small_tiers(16 << 10, 16 << 10, 32 << 10)};
    run_workers(world, 1, 60);
  }

  TEST_CASE("HostSwapPool: threads that reuse each other's pinned memory keep their own bytes") {
    World world{small_tiers(32 << 10, 0, 0)};
    run_workers(world, 100, 150);
  }

  TEST_CASE("HostSwapPool: threads that share a single staging chunk keep their own bytes") {
    auto options = small_tiers(0, 32 << 10, 32 << 10);
    options.staging_chunks = 1;
    World world{options};
    run_workers(world, 200, 60);
  }

  TEST_CASE("HostSwapPool: threads that use batches keep their own bytes") {
    World world{small_tiers(16 << 10, 16 << 10, 64 << 10)};
    run_workers(world, 400, 80, Way::together);
    World staged{small_tiers(0, 24 << 10, 64 << 10)};
    staged.io.plant({.write_error = EIO, .failing_from = 8 << 10, .failing_to = 24 << 10});
    run_workers(staged, 500, 80, Way::together);
  }

  TEST_CASE("HostSwapPool: threads with encoded blocks keep their own bytes") {
    World world{small_tiers(32 << 10, 16 << 10, 64 << 10)};
    world.coding = world.pool->coding<ZeroBitmap>(0);
    world.io.plant({.write_error = EIO, .failing_from = 8 << 10, .failing_to = 24 << 10});
    run_workers(world, 800, 100);
    HostPoolStats const stats = world.pool->stats();
    CHECK(stats.encoded_stored_bytes < stats.encoded_raw_bytes);
  }

  TEST_CASE("HostSwapPool: threads whose file calls begin early keep their own bytes") {
    World world{small_tiers(0, 0, 96 << 10), FaultyFileIo{true}};
    run_workers(world, 600, 100);
    run_workers(world, 700, 80, Way::together);
  }

  TEST_CASE("HostSwapPool: threads with direct transfers to the file keep their own bytes") {
    HostPoolOptions options = small_tiers(0, 0, 4 << 20);
    options.slab_bytes = 512 << 10;
    options.staging_bytes = 64 << 10;
    options.file_checksums = false;
    World world{options, FaultyFileIo::reaching_device()};
    world.most_bytes = 512 << 10;
    run_workers(world, 900, 30);
  }

  TEST_CASE("HostSwapPool: threads whose file fails meanwhile keep their own bytes") {
    bool can_begin = false;
    SUBCASE("file calls in time") {}
    SUBCASE("file calls begin early") {
      can_begin = true;
    }
    World world{small_tiers(24 << 10, 0, 96 << 10), FaultyFileIo{can_begin}};
    world.io.plant({.write_error = EIO, .failing_from = 8 << 10, .failing_to = 24 << 10});
    {
      Worker first{world, 299};
      first.run_beside_a_large_block();
      CHECK(first.wrong == 0);
    }
    run_workers(world, 300, 60);
    CHECK(world.pool->stats().failed_writes > 0);
    CHECK(world.pool->stats().rescued_bytes == 0);
  }

  TEST_CASE("HostSwapPool: threads whose file fails and recovers keep their own bytes") {
    for (bool const can_begin : {false, true}) {
      for (bool const is_coded : {false, true}) {
        CAPTURE(can_begin);
        CAPTURE(is_coded);
        World world{small_tiers(0, 0, 128 << 10), FaultyFileIo{can_begin}};
        world.is_file_unsteady = true;
        if (is_coded) {
          world.coding = world.pool->coding<ZeroBitmap>(0);
        }
        run_workers(world, 1000, 100, is_coded ? Way::one_by_one : Way::held);
        CHECK(world.pool->stats().rescued_bytes == 0);
      }
    }
  }
}
