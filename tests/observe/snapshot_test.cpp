// SPDX-License-Identifier: Apache-2.0
#include <spillway/observe/snapshot.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>
#include <support/watched_program.hpp>

using namespace spillway;
using nlohmann::json;

namespace {

using State = MemorySnapshot::State;
using Kind = MemorySnapshot::Change::Kind;
using support::Watched;
using support::WatchedOnDemand;
using support::WatchedProgram;
using namespace spillway::literals;

json written(MemorySnapshot const& snapshot) {
  std::ostringstream out;
  write_json(out, snapshot);
  return json::parse(out.str());
}

/// Each segment is made of its blocks, in order, with nothing between them and nothing left out.
void check_tiles(MemorySnapshot const& snapshot) {
  std::uintptr_t last_end = 0;
  for (auto const& segment : snapshot.segments) {
    CHECK(segment.address >= last_end);
    std::uintptr_t at = segment.address;
    for (auto const& block : segment.blocks) {
      CHECK(block.address == at);
      CHECK(block.size_bytes > 0);
      CHECK(block.requested_bytes <= block.size_bytes);
      CHECK((block.state == State::free) == (block.id == BlockId{}));
      at += block.size_bytes;
    }
    CHECK(at == segment.address + segment.size_bytes);
    last_end = at;
  }
}

}  // namespace

TEST_SUITE("snapshot") {
  TEST_CASE("snapshot: blocks and free ranges tile the segments and add up to the statistics") {
    for (std::uint64_t const seed : {1U, 2U, 3U, 4U}) {
      CAPTURE(seed);
      WatchedProgram<Watched> program{seed};
      program.run(400);
      auto const now = snapshot(program.allocator);
      auto const stats = program.allocator.stats();

      check_tiles(now);
      std::size_t reserved = 0;
      std::size_t resident = 0;
      std::size_t free = 0;
      std::size_t requested = 0;
      std::size_t blocks = 0;
      std::size_t largest_free = 0;
      for (auto const& segment : now.segments) {
        reserved += segment.size_bytes;
        resident += segment.bytes(State::allocated);
        free += segment.bytes(State::free);
        requested += segment.requested_bytes(State::allocated);
        for (auto const& block : segment.blocks) {
          blocks += block.state == State::allocated ? 1 : 0;
          largest_free = std::max(largest_free, block.state == State::free ? block.size_bytes : 0);
        }
      }
      for (auto const& block : now.absent) {
        requested += block.requested_bytes;
      }
      CHECK(now.segments.size() > 1);
      CHECK(reserved == stats.reserved_bytes);
      CHECK(resident == stats.resident.bytes.current);
      CHECK(blocks == stats.resident.blocks.current);
      CHECK(free == stats.free_bytes);
      CHECK(largest_free == stats.largest_free_bytes);
      CHECK(requested == stats.requested_bytes.current);
      CHECK(now.absent.size() == stats.allocated.blocks.current - stats.resident.blocks.current);
      CHECK(!now.absent.empty());
    }
  }

  TEST_CASE("snapshot: shows whether a block is leased, clean or away") {
    WatchedProgram<WatchedOnDemand> program{1};
    program.run(8);
    program.buffers.resize(4);
    auto const stream = program.device.create_stream();
    (void)program.buffers[1].acquire(Access::write, stream);
    program.buffers[1].swap_out();
    auto const first = program.buffers[1].acquire(Access::read, stream);
    auto const second = program.buffers[1].acquire(Access::read, stream);
    program.buffers[2].swap_out();
    decltype(program)::Buffer untouched{program.allocator, 300};
    untouched.swap_out();

    auto const now = snapshot(program.allocator);
    std::map<BlockId, MemorySnapshot::Block> blocks;
    for (auto const& segment : now.segments) {
      for (auto const& block : segment.blocks) {
        blocks[block.id] = block;
      }
    }
    auto const& leased = blocks.at(program.buffers[1].id());
    CHECK(leased.leases == 2);
    CHECK(leased.is_clean);
    CHECK(leased.address == reinterpret_cast<std::uintptr_t>(first.data()));
    CHECK(leased.requested_bytes == program.buffers[1].size_bytes());
    auto const& dirty = blocks.at(program.buffers[0].id());
    CHECK(dirty.leases == 0);
    CHECK_FALSE(dirty.is_clean);
    REQUIRE(now.absent.size() == 2);
    std::map<BlockId, Residency> absent;
    for (auto const& block : now.absent) {
      absent[block.id] = block.residency;
    }
    CHECK(absent.at(program.buffers[2].id()) == Residency::host);
    CHECK(absent.at(untouched.id()) == Residency::none);
  }

  TEST_CASE("snapshot: a dropped block has no place, and a freed block does not appear") {
    WatchedProgram<WatchedOnDemand> program{1};
    program.buffers.clear();
    auto const stream = program.device.create_stream();
    std::vector<decltype(program)::Buffer> chain;
    for (std::size_t i = 0; i != 3; ++i) {
      chain.emplace_back(program.allocator, 4_KiB);
      (void)chain[i].acquire(Access::write, stream);
      if (i != 0) {
        program.allocator.set_recipe(
            chain[i].id(), {chain[i - 1].id()}, std::chrono::nanoseconds{0}, [](auto...) {});
      }
    }
    chain[1].reset();
    chain[2].swap_out();
    auto const now = snapshot(program.allocator);
    REQUIRE(now.absent.size() == 1);
    CHECK(now.absent.front().id == chain[2].id());
    CHECK(now.absent.front().residency == Residency::none);
  }

  TEST_CASE("snapshot: memory below and between addresses that were given back is shown") {
    testing::SteppedSimApi device{{.capacity_bytes = 8_MiB}};
    DeviceAllocator<WatchedOnDemand> allocator{device,
                                               {.capacity_bytes = 4_MiB,
                                                .initial_bytes = 0,
                                                .grows_in_place = true,
                                                .page_bytes = 256_KiB}};
    auto const stream = device.create_stream();
    std::vector<decltype(allocator.allocate(1))> blocks;
    for (std::size_t i = 0; i < 4; ++i) {
      blocks.push_back(allocator.allocate(512_KiB));
    }
    {
      auto const second = allocator.acquire(blocks[1], Access::write, stream);
      auto const last = allocator.acquire(blocks[3], Access::write, stream);
      allocator.deallocate(blocks[0]);
      allocator.deallocate(blocks[2]);
      REQUIRE(allocator.trim_sync() == 1_MiB);

      auto const now = snapshot(allocator);

      REQUIRE(now.segments.size() == 2);
      check_tiles(now);
      CHECK(now.segments[0].address == reinterpret_cast<std::uintptr_t>(second.data()));
      CHECK(now.segments[1].address == reinterpret_cast<std::uintptr_t>(last.data()));
      CHECK(now.segments[0].size_bytes + now.segments[1].size_bytes == now.stats.reserved_bytes);
    }
    allocator.deallocate(blocks[1]);
    allocator.deallocate(blocks[3]);
    allocator.retire_stream(stream);
  }

  TEST_CASE("snapshot: a block in a segment that was released is not shown") {
    WatchedProgram<WatchedOnDemand> program{1};
    program.run(8);
    auto const plain = snapshot(program.allocator);
    REQUIRE(!plain.segments.empty());
    auto const& segment = plain.segments.front();
    Record const grow{.kind = RecordKind::grow,
                      .bytes = segment.size_bytes,
                      .address = reinterpret_cast<std::byte*>(segment.address)};
    auto const arrival = [&](std::uint32_t block, std::uint64_t time_ns) {
      return Record{.kind = RecordKind::make_resident,
                    .block = make_block_id(block, 1),
                    .bytes = 256,
                    .address = grow.address,
                    .start_ns = time_ns};
    };
    Record later = grow;
    later.start_ns = 2;
    std::vector<Record> const records{grow, arrival(100, 1), later, arrival(200, 3)};

    auto const now = snapshot(program.allocator, records);

    REQUIRE(now.changes.size() >= 2);
    CHECK(now.changes.front().kind == Kind::reserve);
    CHECK(now.changes.front().time_ns == 2);
    CHECK(now.changes.back().kind == Kind::take);
    CHECK(now.changes.back().id == make_block_id(200, 1));
    for (auto const& change : now.changes) {
      CHECK(change.time_ns >= 2);
    }
  }

  TEST_CASE("write_json: a snapshot has every member that PyTorch's viewers read") {
    WatchedProgram<Watched> program{7};
    program.run(300);
    auto const now = snapshot(program.allocator, program.allocator.observer().records());
    json const it = written(now);

    REQUIRE(it.at("segments").size() == now.segments.size());
    for (json const& segment : it.at("segments")) {
      for (char const* const name : {"device",
                                     "address",
                                     "total_size",
                                     "allocated_size",
                                     "active_size",
                                     "requested_size",
                                     "stream"}) {
        CHECK(segment.at(name).is_number_unsigned());
      }
      CHECK(segment.at("segment_type") == "large");
      CHECK(segment.at("segment_pool_id") == json::array({0, 0}));
      CHECK(segment.at("is_expandable") == false);
      CHECK(segment.at("frames").is_array());
      std::size_t allocated = 0;
      std::size_t total = 0;
      for (json const& block : segment.at("blocks")) {
        bool const is_active = block.at("state") == "active_allocated";
        CHECK((is_active || block.at("state") == "inactive"));
        allocated += is_active ? block.at("size").get<std::size_t>() : 0;
        total += block.at("size").get<std::size_t>();
        CHECK(block.at("address").is_number_unsigned());
        CHECK(block.at("requested_size").is_number_unsigned());
        CHECK(block.at("frames").empty());
        CHECK(block.contains("leases") == is_active);
      }
      CHECK(segment.at("allocated_size") == allocated);
      CHECK(segment.at("active_size") == allocated);
      CHECK(segment.at("total_size") == total);
    }
    REQUIRE(it.at("device_traces").size() == 1);
    std::uint64_t last_us = 0;
    for (json const& entry : it.at("device_traces").at(0)) {
      CHECK(entry.at("frames").empty());
      CHECK(entry.at("stream") == 0);
      CHECK(entry.contains(entry.at("action") == "oom" ? "device_free" : "addr"));
      CHECK(entry.at("time_us").get<std::uint64_t>() >= last_us);
      last_us = entry.at("time_us");
    }
    CHECK(it.at("device_traces").at(0).back().at("action") == "snapshot");
    CHECK(it.at("allocator_settings").is_object());
    CHECK(it.at("external_annotations").is_array());
    CHECK(it.at("spillway").at("absent").size() == now.absent.size());
    CHECK(it.at("spillway").at("stats").at("resident").at("bytes").at("current") ==
          now.stats.resident.bytes.current);
    CHECK(it.at("spillway").at("host").at("tiers").at("pinned").at("slot_count") ==
          now.host.tier(HostTier::pinned).slot_count);
  }

  TEST_CASE(
      "write_json: a block in transit is pending; devices with a lower ordinal have empty traces") {
    MemorySnapshot made;
    made.device = 2;
    made.segments.push_back({.address = 1024, .size_bytes = 768});
    made.segments[0].blocks = {
        {.address = 1024, .size_bytes = 256, .requested_bytes = 200, .state = State::allocated},
        {.address = 1280, .size_bytes = 512, .state = State::leaving}};
    made.changes.push_back(
        {.kind = Kind::out_of_memory, .size_bytes = 9, .time_ns = 5000, .free_bytes = 4});
    json const it = written(made);

    CHECK(it.at("segments").at(0).at("device") == 2);
    CHECK(it.at("segments").at(0).at("allocated_size") == 256);
    CHECK(it.at("segments").at(0).at("active_size") == 768);
    CHECK(it.at("segments").at(0).at("requested_size") == 200);
    CHECK(it.at("segments").at(0).at("blocks").at(1).at("state") == "active_pending_free");
    REQUIRE(it.at("device_traces").size() == 3);
    CHECK(it.at("device_traces").at(0).empty());
    CHECK(it.at("device_traces").at(2).at(0) ==
          json::parse(
              R"({"action":"oom","size":9,"stream":0,"time_us":5,"frames":[],"device_free":4})"));
  }
}
