// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/arena.hpp>
#include <spillway/core/types.hpp>
#include <spillway/device_allocator.hpp>
#include <spillway/swappable_buffer.hpp>
#include <spillway/testing/device_contracts.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <random>
#include <thread>
#include <vector>

// Tests of an allocator under load, with work in flight that writes and checks every byte. An
// environment `E` provides the work: kernels on a GPU, host functions elsewhere. It has
//
// | member                  | is                                                                |
// |-------------------------|-------------------------------------------------------------------|
// | `E::policies`           | a PolicySet                                                       |
// | `e.device`              | its device; `E` is made without arguments                         |
// | `e.write(p, n, tag, s)` | enqueues work that writes `n` bytes derived from `tag`            |
// | `e.check(p, n, tag, s)` | enqueues work that counts the bytes which `write` would have left |
// |                         | otherwise                                                         |
// | `e.wrong()`             | the count; all work has finished                                  |
// | `E::gate_type`          | made from the device; `close(s)` holds a stream up until `open()` |
// | `e.is_sound()`          | false if a gate opened by itself                                  |
// | `E::scale()`            | by how much every size is multiplied                              |

namespace spillway::test {

/// A block whose bytes the test knows: all of them are derived from `tag`.
template <class Allocator>
class KnownBlock {
 public:
  KnownBlock(Allocator& allocator, std::size_t size_bytes) : buffer_{allocator, size_bytes} {}

  /// Overwrites the block, on `stream`.
  template <class E>
  void write(E& e, std::uint32_t tag, typename Allocator::stream_type stream) {
    auto const lease = buffer_.acquire(Access::write, stream);
    e.write(lease.data(), buffer_.size_bytes(), tag, stream);
    tag_ = tag;
  }
  template <class E>
  void check(E& e, typename Allocator::stream_type stream) {
    auto const lease = buffer_.acquire(Access::read, stream);
    e.check(lease.data(), buffer_.size_bytes(), tag_, stream);
  }
  /// Checks the old bytes, then writes new ones, under one lease.
  template <class E>
  void update(E& e, std::uint32_t tag, typename Allocator::stream_type stream) {
    auto const lease = buffer_.acquire(Access::read_write, stream);
    e.check(lease.data(), buffer_.size_bytes(), tag_, stream);
    e.write(lease.data(), buffer_.size_bytes(), tag, stream);
    tag_ = tag;
  }

  [[nodiscard]] std::uint32_t tag() const { return tag_; }
  [[nodiscard]] auto& buffer() { return buffer_; }

 private:
  SwappableBuffer<Allocator> buffer_;
  std::uint32_t tag_ = 0;
};

}  // namespace spillway::test

TEST_CASE_TEMPLATE_DEFINE("DeviceAllocator with work in flight: ", E, allocator_load) {
  using namespace spillway;
  using namespace spillway::test;
  using Allocator = DeviceAllocator<typename E::policies>;
  using Block = KnownBlock<Allocator>;
  E e;
  testing::DeviceRig rig{e.device};
  std::size_t const kib = E::scale() * 1_KiB;
  std::size_t const mib = E::scale() * 1_MiB;
  std::size_t const capacity = 8 * mib;
  typename Allocator::Options options{};
  options.capacity_bytes = capacity;
  // All host memory is pinned first: pinning waits for the device, and so for streams that the test
  // holds up.
  options.host = {.pinned_bytes = 64 * mib, .initial_pinned_bytes = 64 * mib};
  std::array<typename Allocator::stream_type, 4> streams{};
  for (auto& stream : streams) {
    stream = rig.stream();
  }

  SUBCASE("four times the capacity, on four streams, in any order: no byte is lost") {
    std::uint32_t const seed = 20240611;
    CAPTURE(seed);
    std::minstd_rand random{seed};
    Allocator allocator{e.device, options};
    std::vector<Block> blocks;
    std::size_t total = 0;
    std::uint32_t tag = 0;
    while (total < 4 * capacity) {
      std::size_t const bytes = 1 + random() % mib;
      blocks.emplace_back(allocator, bytes).write(e, ++tag, streams[random() % streams.size()]);
      total += bytes;
    }

    for (int i = 0; i < 600; ++i) {
      Block& block = blocks[random() % blocks.size()];
      auto const stream = streams[random() % streams.size()];
      switch (random() % 4) {
      case 0:
        block.write(e, ++tag, stream);
        break;
      case 1:
        block.update(e, ++tag, stream);
        break;
      default:
        block.check(e, stream);
      }
    }
    for (Block& block : blocks) {
      block.check(e, streams[random() % streams.size()]);
    }
    allocator.synchronize();

    CHECK(e.wrong() == 0);
    CHECK(allocator.stats().swap_outs.count > 0);
    CHECK(allocator.stats().swap_ins.count > 0);
    CHECK(allocator.stats().peak_reserved_bytes <= capacity);
  }

  SUBCASE("blocks come and go while others are swapped: no byte is lost") {
    std::uint32_t const seed = 77003;
    CAPTURE(seed);
    std::minstd_rand random{seed};
    Allocator allocator{e.device, options};
    std::vector<Block> blocks;
    std::uint32_t tag = 0;
    for (int i = 0; i < 800; ++i) {
      auto const stream = streams[random() % streams.size()];
      if (blocks.size() < 48 && random() % 2 == 0) {
        blocks.emplace_back(allocator, 1 + random() % (768 * kib)).write(e, ++tag, stream);
      } else if (!blocks.empty()) {
        auto const at = static_cast<std::ptrdiff_t>(random() % blocks.size());
        blocks[static_cast<std::size_t>(at)].check(e, stream);
        if (random() % 3 == 0) {
          blocks.erase(blocks.begin() + at);
        }
      }
    }
    allocator.synchronize();

    CHECK(e.wrong() == 0);
    CHECK(allocator.stats().swap_outs.count > 0);
  }

  SUBCASE("swapping out and in keeps every byte, at any size") {
    Allocator allocator{e.device, options};
    for (std::size_t const bytes : {std::size_t{1}, std::size_t{255}, 4 * kib + 1, 3 * mib + 7}) {
      CAPTURE(bytes);
      Block block{allocator, bytes};
      for (std::uint32_t round = 1; round < 4; ++round) {
        block.write(e, round, streams[round % 4]);
        block.buffer().swap_out();
        CHECK(block.buffer().residency() != Residency::device);
        block.buffer().swap_in();
        block.check(e, streams[(round + 1) % 4]);
      }
    }
    allocator.synchronize();
    CHECK(e.wrong() == 0);
    CHECK(allocator.stats().swap_outs.count == 12);
  }

  SUBCASE("a leased block keeps its place while all others are evicted") {
    Allocator allocator{e.device, options};
    Block block{allocator, 2 * mib + 3};
    block.write(e, 1, streams[0]);
    auto const lease = block.buffer().acquire(Access::read_write, streams[0]);
    void const* const address = lease.data();
    std::uint32_t tag = 2;
    std::vector<Block> others;
    for (int i = 0; i < 24; ++i) {
      others.emplace_back(allocator, mib).write(e, tag, streams[1 + tag % 3]);
      ++tag;
      e.check(address, 2 * mib + 3, 1, streams[0]);
    }
    for (Block& other : others) {
      other.check(e, streams[2]);
    }
    CHECK(lease.data() == address);
    CHECK(allocator.stats().swap_outs.count > 0);
    allocator.synchronize();
    CHECK(e.wrong() == 0);
  }

  SUBCASE("threads with blocks of their own share the device: no byte is lost") {
    Allocator allocator{e.device, options};
    std::atomic<int> failures{0};
    std::vector<std::thread> threads;
    for (std::uint32_t t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        try {
          std::minstd_rand random{t + 1};
          std::vector<Block> blocks;
          for (std::uint32_t i = 0; i < 16; ++i) {
            blocks.emplace_back(allocator, 1 + random() % (512 * kib))
                .write(e, t * 100'000 + i, streams[t]);
          }
          for (std::uint32_t i = 0; i < 200; ++i) {
            Block& block = blocks[random() % blocks.size()];
            block.update(e, t * 100'000 + 1000 + i, streams[t]);
          }
          for (Block& block : blocks) {
            block.check(e, streams[t]);
          }
        } catch (...) {
          ++failures;
        }
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
    allocator.synchronize();
    CHECK(failures == 0);
    CHECK(e.wrong() == 0);
  }

  if constexpr (StableAddressArena<ArenaOf<typename E::policies>>) {
    SUBCASE("a stable block keeps its address when it is swapped out and in") {
      Allocator allocator{e.device, options};
      std::vector<Block> blocks;
      std::vector<void const*> addresses;
      for (std::uint32_t i = 0; i < 24; ++i) {
        blocks.emplace_back(allocator, mib).write(e, i, streams[i % 4]);
        addresses.push_back(blocks.back().buffer().acquire(Access::read, streams[i % 4]).data());
      }
      for (std::uint32_t i = 0; i < 96; ++i) {
        Block& block = blocks[i * 7 % 24];
        CHECK(block.buffer().acquire(Access::read, streams[i % 4]).data() == addresses[i * 7 % 24]);
        CHECK(allocator.stable_address(block.buffer().id()) == addresses[i * 7 % 24]);
        block.update(e, 100 + i, streams[i % 4]);
      }
      allocator.synchronize();
      CHECK(e.wrong() == 0);
      CHECK(allocator.stats().swap_outs.count > 0);
    }
  }

  if constexpr (MappingArena<ArenaOf<typename E::policies>>) {
    return;  // waits for pages are host waits, which would be deadlocks below
  }

  SUBCASE("compaction moves blocks ordered after work in flight, without host waits") {
    options.paging.swapping = false;
    Allocator allocator{e.device, options};
    std::vector<Block> blocks;
    for (std::uint32_t i = 0; i < 16; ++i) {
      blocks.emplace_back(allocator, capacity / 16).write(e, i + 1, streams[i % 3]);
    }
    allocator.synchronize();
    auto const waits = allocator.stats().host_waits;
    auto gate = e.make_gate();
    gate.close(e, streams[0]);
    for (std::uint32_t i = 0; i < 16; ++i) {
      blocks[i].update(e, 100 + i, streams[0]);  // held up: not done when the block moves
    }
    for (std::size_t i = 0; i < 8; ++i) {
      blocks.erase(blocks.begin() + static_cast<std::ptrdiff_t>(i));  // every second one
    }

    Block large{allocator, capacity / 2};
    large.write(e, 1000, streams[3]);
    CHECK(allocator.stats().moves.count > 0);
    CHECK(allocator.stats().host_waits == waits);
    gate.open();
    for (Block& block : blocks) {
      block.check(e, streams[1]);
    }
    large.check(e, streams[2]);
    allocator.synchronize();

    CHECK(e.wrong() == 0);
    CHECK(e.is_sound());
  }

  SUBCASE("three streams: a range passes from a stream that is held up to a second and a third") {
    options.paging.swapping = false;
    Allocator allocator{e.device, options};
    auto gate = e.make_gate();
    gate.close(e, streams[0]);
    for (std::uint32_t owner = 0; owner < 3; ++owner) {
      Block block{allocator, capacity};  // there is room for one alone
      block.write(e, owner + 1, streams[owner]);
      block.check(e, streams[owner]);
    }
    Block last{allocator, capacity};
    last.write(e, 9, streams[3]);
    gate.open();
    last.check(e, streams[1]);
    allocator.synchronize();

    CHECK(e.wrong() == 0);
    CHECK(e.is_sound());
  }

  SUBCASE("three streams: a block swapped out after work that is held up comes back intact") {
    Allocator allocator{e.device, options};
    Block first{allocator, capacity};
    Block second{allocator, capacity};
    auto gate = e.make_gate();
    gate.close(e, streams[0]);
    first.write(e, 1, streams[0]);   // held up
    second.write(e, 2, streams[1]);  // takes the range behind the copy out
    first.check(e, streams[2]);      // takes it back behind the other copy out
    gate.open();
    second.check(e, streams[3]);
    allocator.synchronize();

    CHECK(e.wrong() == 0);
    CHECK(e.is_sound());
    CHECK(allocator.stats().swap_outs.count >= 2);
  }
}
