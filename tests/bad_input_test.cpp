// SPDX-License-Identifier: Apache-2.0
// Calls that are wrong or beyond a limit throw the error of docs/errors.md and change nothing else.
#include <spillway/device_allocator.hpp>

#include <doctest/doctest.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <support/small_allocator.hpp>
#include <support/temporary_folder.hpp>
#include <sys/resource.h>

TEST_SUITE("bad input") {
  using namespace spillway;
  using namespace spillway::literals;
  using support::KnownBytes;
  using support::small_options;
  using support::SmallAllocator;
  using support::SmallBench;
  using support::SmallBuffer;

  namespace {

  constexpr std::size_t most = std::numeric_limits<std::size_t>::max();
  constexpr double no_number = std::numeric_limits<double>::quiet_NaN();

  /// An allocator with blocks of known contents: resident, swapped out, and away but clean.
  struct Witnessed : SmallBench {
    explicit Witnessed(SmallAllocator::Options options = small_options(1_MiB))
        : SmallBench{options} {
      swapped_out.buffer().swap_out();
      before = allocator.stats();
    }

    /// Checks that there are the same blocks with the same contents.
    void check_intact() {
      auto const now = allocator.stats();
      CHECK(now.allocated.blocks.current == before.allocated.blocks.current);
      CHECK(now.allocated.bytes.current == before.allocated.bytes.current);
      CHECK(now.requested_bytes.current == before.requested_bytes.current);
      CHECK(now.leased.blocks.current == 0);
      CHECK(now.resident.bytes.current + now.free_bytes == now.reserved_bytes);
      CHECK(resident.is_intact());
      CHECK(swapped_out.is_intact());
      CHECK(large.is_intact());
    }

    KnownBytes resident{*this, 10'000, 1};
    KnownBytes swapped_out{*this, 20'001, 2};
    KnownBytes large{*this, 300'000, 3};
    Stats before;
  };

  /// The message of the error that was thrown, or an empty text.
  template <class Error, class Call>
  std::string message_of(Call call) {
    try {
      call();
    } catch (Error const& error) {
      return error.what();
    }
    return {};
  }

  bool contains(std::string const& text, std::string const& part) {
    return text.find(part) != std::string::npos;
  }

  /// Checks that every call that takes an id refuses this one as unknown.
  void check_unknown(Witnessed& it, BlockId id) {
    CHECK_THROWS_AS(it.allocator.deallocate(id), ContractViolation);
    CHECK_THROWS_AS((void)it.allocator.acquire(id, Access::read, it.stream), ContractViolation);
    CHECK_THROWS_AS((void)it.allocator.acquire(id, Access::write, it.stream), ContractViolation);
    CHECK_THROWS_AS(it.allocator.swap_out(id), ContractViolation);
    CHECK_THROWS_AS(it.allocator.swap_in(id), ContractViolation);
    CHECK_THROWS_AS((void)it.allocator.residency(id), ContractViolation);
  }

  /// Checks that an allocator with these options cannot be made, and leaves nothing on the device.
  template <class Error>
  void check_refused(SmallAllocator::Options const& options) {
    SimApi device{{.capacity_bytes = 64_MiB}};
    auto const before = device.memory_info().free_bytes;
    CHECK_THROWS_AS((SmallAllocator{device, options}), Error);
    CHECK(device.memory_info().free_bytes == before);
    auto const calls = device.calls();
    CHECK(calls.reserves == calls.releases);
    CHECK(calls.pinned_allocations == calls.pinned_frees);
    CHECK(calls.streams_created == calls.streams_destroyed);
    CHECK(calls.events_created == calls.events_destroyed);
  }

  }  // namespace

  TEST_CASE("DeviceAllocator: a size of 0 bytes is refused") {
    Witnessed it;

    CHECK_THROWS_AS((void)it.allocator.allocate(0), ContractViolation);
    CHECK_THROWS_AS((void)it.allocator.declare(0), ContractViolation);
    CHECK_THROWS_AS((SmallBuffer{it.allocator, 0}), ContractViolation);
    it.check_intact();
  }

  TEST_CASE("DeviceAllocator: a block larger than the capacity is refused, however large") {
    Witnessed it;

    std::uint64_t refused = 0;
    for (std::size_t const bytes :
         {1_MiB + 1, 2_MiB, most / 2, most / 2 + 1, most - 256, most - 255, most - 1, most}) {
      CAPTURE(bytes);
      try {
        (void)it.allocator.allocate(bytes);
        FAIL("there was no room");
      } catch (OutOfDeviceMemory const& error) {
        CHECK(error.report().requested_bytes == bytes);
        CHECK(error.report().capacity_bytes == 1_MiB);
        CHECK(contains(error.what(), "larger than the capacity"));
      }
      CHECK_THROWS_AS((void)it.allocator.declare(bytes), OutOfDeviceMemory);
      refused += 2;
    }
    CHECK(it.allocator.stats().out_of_memory == refused);
    CHECK(it.allocator.stats().swap_outs == it.before.swap_outs);
    it.check_intact();
    it.allocator.deallocate(it.allocator.allocate(1_MiB));  // the largest there can be
    it.check_intact();
  }

  TEST_CASE(
      "DeviceAllocator: the id of a freed block is unknown, even after its index is used again") {
    Witnessed it;
    BlockId const stale = it.allocator.allocate(1000);
    it.allocator.deallocate(stale);

    check_unknown(it, stale);
    BlockId const next = it.allocator.allocate(1000);
    REQUIRE(index_of_block(next) == index_of_block(stale));
    check_unknown(it, stale);
    CHECK_NOTHROW((void)it.allocator.acquire(next, Access::write, it.stream));
    it.allocator.deallocate(next);
    it.check_intact();
  }

  TEST_CASE("DeviceAllocator: ids that were never assigned are unknown") {
    Witnessed it;
    SmallBench other;
    BlockId foreign{};
    std::vector<SmallBuffer> others;
    for (int i = 0; i < 10; ++i) {
      others.emplace_back(other.allocator, 100);
      foreign = others.back().id();
    }

    check_unknown(it, BlockId{});
    check_unknown(it, foreign);
    check_unknown(it, make_block_id(0, 77));
    check_unknown(it, BlockId{std::numeric_limits<std::uint64_t>::max()});
    it.check_intact();
    CHECK(other.allocator.stats().allocated.blocks.current == 10);
  }

  TEST_CASE("DeviceAllocator: one unknown operand makes the whole group fail") {
    Witnessed it;
    BlockId const good = it.resident.buffer().id();
    BlockId const away = it.swapped_out.buffer().id();

    CHECK_THROWS_AS(
        (void)it.allocator.acquire_all(
            {{good, Access::write}, {away, Access::read}, {BlockId{}, Access::read}}, it.stream),
        ContractViolation);
    CHECK(it.allocator.stats().swap_ins == it.before.swap_ins);
    it.check_intact();
    CHECK(it.allocator.acquire_all({}, it.stream).empty());
  }

  TEST_CASE(
      "DeviceAllocator: a group that does not fit at once is refused, and none of it is leased") {
    auto options = small_options(1_MiB);
    options.paging.lease_wait = std::chrono::milliseconds{0};
    Witnessed it{options};
    {
      KnownBytes first{it, 500'000, 4};
      KnownBytes second{it, 500'000, 5};

      CHECK_THROWS_AS((void)it.allocator.acquire_all({first.buffer().request(Access::write),
                                                      it.large.buffer().request(Access::write),
                                                      second.buffer().request(Access::write)},
                                                     it.stream),
                      OutOfDeviceMemory);
      CHECK(it.allocator.stats().leased.blocks.current == 0);
      CHECK(first.is_intact());
      CHECK(second.is_intact());
    }
    it.check_intact();
  }

  TEST_CASE("DeviceAllocator: a leased block can neither be freed nor swapped out") {
    Witnessed it;
    SmallBuffer& buffer = it.resident.buffer();
    auto lease = buffer.acquire(Access::read, it.stream);

    CHECK_THROWS_AS(it.allocator.deallocate(buffer.id()), ContractViolation);
    CHECK_THROWS_AS(buffer.swap_out(), ContractViolation);
    CHECK_THROWS_AS(buffer.reset(), ContractViolation);
    CHECK(lease.data() != nullptr);
    lease.release();
    lease.release();  // a second time does nothing
    it.check_intact();
  }

  TEST_CASE("DeviceAllocator: a lease outlives its buffer, whose id is unknown from then on") {
    Witnessed it;
    auto buffer = std::make_unique<KnownBytes>(it, 5'000, 9);
    BlockId const id = buffer->buffer().id();
    auto lease = buffer->buffer().acquire(Access::read, it.stream);
    void* const address = lease.data();
    buffer.reset();

    check_unknown(it, id);
    CHECK_THROWS_AS((void)it.allocator.allocate(1_MiB), OutOfDeviceMemory);  // it keeps its range
    CHECK(lease.data() == address);
    std::vector<std::uint8_t> bytes(5'000);
    it.allocator.copy_to_host_sync(bytes.data(), lease.data(), bytes.size(), it.stream);
    CHECK(bytes[0] == 9);
    CHECK(bytes[1] == 16);
    lease.release();
    it.check_intact();
  }

  TEST_CASE(
      "DeviceAllocator: close() is refused while blocks are left, and the allocator stays usable") {
    Witnessed it;
    auto lease = it.resident.buffer().acquire(Access::read, it.stream);
    auto const what = message_of<ContractViolation>([&] { it.allocator.close(); });

    CHECK(contains(what, "3 of its blocks"));
    CHECK(contains(what, "1 of them leased"));
    lease.release();
    CHECK_THROWS_AS(it.allocator.close(), ContractViolation);
    it.check_intact();
    SmallBench empty;
    CHECK_NOTHROW(empty.allocator.close());
  }

  TEST_CASE("DeviceAllocator: if leases leave no room, the error says how many bytes are leased") {
    auto options = small_options(1_MiB);
    options.paging.lease_wait = std::chrono::milliseconds{0};
    Witnessed it{options};
    SmallBuffer held{it.allocator, 600'000};
    auto lease = held.acquire(Access::write, it.stream);

    try {
      (void)it.allocator.allocate(500'000);
      FAIL("there was no room");
    } catch (OutOfDeviceMemory const& error) {
      CHECK(error.report().requested_bytes >= 500'000);
      CHECK(error.report().leased_bytes >= 600'000);
      CHECK(error.report().capacity_bytes - error.report().leased_bytes < 500'000);
      CHECK(contains(error.what(), "Release leases"));
    }
    lease.release();
    held.reset();
    it.check_intact();
  }

  TEST_CASE("DeviceAllocator: the error names a full host pool, and no byte is lost") {
    auto options = small_options(1_MiB);
    options.host.pinned_bytes = 128_KiB;
    options.host.slab_bytes = 64_KiB;
    Witnessed it{options};

    CHECK_THROWS_AS(it.large.buffer().swap_out(), OutOfHostMemory);
    CHECK(it.large.buffer().residency() == Residency::device);
    try {
      (void)it.allocator.allocate(900'000);
      FAIL("there was no room");
    } catch (OutOfDeviceMemory const& error) {
      CHECK(error.report().host_free_bytes < error.report().reclaimable_bytes);
      CHECK(contains(error.what(), "host pool is full"));
    }
    it.check_intact();
  }

  TEST_CASE("DeviceAllocator: the error for a host tier that does not exist says so") {
    Witnessed it;
    for (HostTier const first : {HostTier::file, HostTier::pageable}) {
      it.allocator.set_first_host_tier(first);
      auto const what = message_of<OutOfHostMemory>([&] { it.resident.buffer().swap_out(); });
      CHECK(contains(what, "The first host tier is set to"));
      CHECK_FALSE(contains(what, "full"));
    }
    it.allocator.set_first_host_tier(HostTier::pinned);
    CHECK_NOTHROW(it.resident.buffer().swap_out());
    it.check_intact();
    auto options = small_options(1_MiB);
    options.host.pinned_bytes = 0;
    options.paging.swapping = false;  // or there would be pinned memory by default
    SmallBench bench{options};
    KnownBytes known{bench, 1000, 1};
    CHECK(contains(message_of<OutOfHostMemory>([&] { known.buffer().swap_out(); }),
                   "The host pool has no tier"));
  }

  TEST_CASE("DeviceAllocator: an error for memory that the device does not have names no tier") {
    SimApi device{{.capacity_bytes = 1_MiB}};
    auto options = small_options(4_MiB);
    auto what = message_of<OutOfDeviceMemory>([&] { SmallAllocator{device, options}; });
    CHECK(contains(what, "requested 4194304 bytes; capacity 4194304"));
    CHECK(contains(what, "The device has 1048576 bytes free: lower capacity_bytes"));
    CHECK_FALSE(contains(what, "host pool"));
    CHECK_FALSE(contains(what, "leased"));

    options.initial_bytes = 512_KiB;
    options.growth_bytes = 64_KiB;
    SmallAllocator memory{device, options};
    what = message_of<OutOfDeviceMemory>([&] { (void)memory.allocate(2_MiB); });
    CHECK(contains(what, "The device does not have the rest of the capacity"));
  }

  TEST_CASE(
      "DeviceAllocator: a part of a page at the end of the capacity is not the device's lack") {
    auto options = small_options(1_MiB + 512);
    options.initial_bytes = 0;
    options.growth_bytes = 64_KiB;
    options.grows_in_place = true;
    SmallBench bench{options};
    auto const what =
        message_of<OutOfDeviceMemory>([&] { (void)bench.allocator.allocate(1_MiB + 256); });
    CHECK(contains(what, "The rest of the capacity is less than the device reserves at once"));
    CHECK_FALSE(contains(what, "memory that others have"));
  }

  TEST_CASE("DeviceAllocator: the error for a full file system gives its reason") {
    auto options = small_options(1_MiB);
    options.host.pinned_bytes = 0;
    options.host.file_bytes = 1_GiB;
    TemporaryFolder const folder;
    options.host.file = folder.path();
    rlimit before{};
    REQUIRE(::getrlimit(RLIMIT_FSIZE, &before) == 0);
    rlimit none = before;
    none.rlim_cur = 0;
    SmallBench bench{options};
    KnownBytes known{bench, 600'000, 1};
    REQUIRE(::setrlimit(RLIMIT_FSIZE, &none) == 0);

    auto const moved = message_of<OutOfHostMemory>([&] { known.buffer().swap_out(); });
    auto const made =
        message_of<OutOfDeviceMemory>([&] { (void)bench.allocator.allocate(500'000); });

    REQUIRE(::setrlimit(RLIMIT_FSIZE, &before) == 0);
    for (auto const& what : {moved, made}) {
      CHECK(contains(what, folder.path().string() + ": File too large"));
    }
    CHECK(known.is_intact());
  }

  TEST_CASE("DeviceAllocator: without swapping a full device is an error that says so") {
    auto options = small_options(1_MiB);
    options.paging.swapping = false;
    SmallBench bench{options};
    KnownBytes known{bench, 600'000, 1};

    auto const what =
        message_of<OutOfDeviceMemory>([&] { (void)bench.allocator.allocate(500'000); });
    CHECK(contains(what, "Swapping is off"));
    auto const lowered =
        message_of<OutOfDeviceMemory>([&] { bench.allocator.set_capacity(500'000); });
    CHECK(contains(lowered, "Swapping is off"));
    CHECK(known.is_intact());
  }

  TEST_CASE("DeviceAllocator: without swapping and without tier options, no host memory is used") {
    auto options = small_options(1_MiB);
    options.host = {};
    options.paging.swapping = false;
    SmallBench bench{options};

    CHECK(bench.allocator.host_stats().tier(HostTier::pinned).capacity_bytes == 0);
  }

  TEST_CASE("DeviceAllocator: watermarks that contradict each other are refused") {
    using Marks = std::pair<double, double>;  // high, low
    for (Marks const& marks : {Marks{0.5, 0.6},
                               Marks{0.5, 1.0},
                               Marks{0.0, 0.0},
                               Marks{0.5, 0.0},
                               Marks{-0.5, -0.6},
                               Marks{1.1, 0.5},
                               Marks{no_number, 0.5},
                               Marks{0.5, no_number}}) {
      CAPTURE(marks.first);
      CAPTURE(marks.second);
      auto options = small_options(1_MiB);
      options.paging.high_watermark = marks.first;
      options.paging.low_watermark = marks.second;
      check_refused<ContractViolation>(options);
    }
    auto options = small_options(1_MiB);
    options.paging.high_watermark = 0.5;
    options.paging.low_watermark = 0.5;
    CHECK_NOTHROW(SmallBench{options});
  }

  TEST_CASE("DeviceAllocator: bandwidths that are not positive numbers are refused") {
    for (double const speed : {0.0, -1.0, no_number}) {
      CAPTURE(speed);
      auto link = small_options(1_MiB);
      link.paging.link_bytes_per_second = speed;
      check_refused<ContractViolation>(link);
      auto device = small_options(1_MiB);
      device.paging.device_bytes_per_second = speed;
      check_refused<ContractViolation>(device);
    }
  }

  TEST_CASE(
      "DeviceAllocator: a capacity that is too small, too large or not available is refused") {
    check_refused<ContractViolation>(small_options(1));
    check_refused<ContractViolation>(small_options(255));
    check_refused<ContractViolation>(small_options(most));
    check_refused<OutOfDeviceMemory>(small_options(65_MiB));
    CHECK_NOTHROW(SmallBench{small_options(256)});
  }

  TEST_CASE("DeviceAllocator: a capacity that the device does not have is an error when it is "
            "first needed") {
    auto options = small_options(128_MiB);  // the device has 64 MiB
    options.initial_bytes = 1_MiB;
    SmallBench bench{options};
    KnownBytes known{bench, 600'000, 1};

    CHECK_THROWS_AS((void)bench.allocator.allocate(100_MiB), OutOfDeviceMemory);
    CHECK(known.is_intact());
  }

  TEST_CASE("DeviceAllocator: invalid tier options are refused") {
    auto no_path = small_options(1_MiB);
    no_path.host.file_bytes = 1_MiB;
    check_refused<ContractViolation>(no_path);

    for (int i = 0; i < 2; ++i) {
      auto no_staging = small_options(1_MiB);
      no_staging.host.pageable_bytes = 1_MiB;
      (i == 0 ? no_staging.host.staging_chunks : no_staging.host.staging_bytes) = 0;
      check_refused<ContractViolation>(no_staging);
    }
  }

  TEST_CASE(
      "DeviceAllocator: invalid sizes of staging are refused, and the error names the option") {
    using Staging = std::pair<std::size_t, std::size_t>;  // chunks, bytes of each
    for (auto const& [chunks, bytes] : {Staging{12, 1_GiB + 1},
                                        Staging{12, most},
                                        Staging{12, most - 4095},
                                        Staging{65'537, 2_MiB},
                                        Staging{most / 4096 + 2, 4096},  // the product is 4096
                                        Staging{most, 2_MiB}}) {
      CAPTURE(chunks);
      CAPTURE(bytes);
      auto options = small_options(1_MiB);
      options.host.pageable_bytes = 1_MiB;
      options.host.staging_chunks = chunks;
      options.host.staging_bytes = bytes;
      check_refused<ContractViolation>(options);
      SimApi device{{.capacity_bytes = 64_MiB}};
      auto const what = message_of<ContractViolation>([&] {
        (void)SmallAllocator{device, options};
      });
      CHECK(contains(what, chunks == 12 ? "staging_bytes" : "staging_chunks"));
    }
    auto unused = small_options(1_MiB);  // whose tiers need no staging
    unused.host.staging_bytes = most;
    CHECK_NOTHROW(SmallBench{unused});
  }

  TEST_CASE("DeviceAllocator: a file tier that cannot be opened is refused with its path") {
    TemporaryFolder const folder;
    auto const file = folder.path() / "taken";
    std::ofstream{file} << "something else";
    for (auto const& path : {folder.path() / "no" / "such" / "folder", file, file / "below"}) {
      CAPTURE(path.string());
      auto options = small_options(1_MiB);
      options.host.file_bytes = 1_MiB;
      options.host.file = path;
      check_refused<FileTierError>(options);
      SimApi device{{.capacity_bytes = 64_MiB}};
      auto const what = message_of<FileTierError>([&] { (void)SmallAllocator{device, options}; });
      CHECK(contains(what, path.c_str()));
    }
    std::string text;
    std::getline(std::ifstream{file}, text);
    CHECK(text == "something else");
    CHECK(folder.entries() == 1);
  }

  TEST_CASE(
      "DeviceAllocator: a failed construction does not disturb another allocator on the device") {
    Witnessed it;
    auto options = small_options(64_MiB);
    CHECK_THROWS_AS((SmallAllocator{it.device, options}), OutOfDeviceMemory);
    options = small_options(1_MiB);
    options.paging.high_watermark = 2;
    CHECK_THROWS_AS((SmallAllocator{it.device, options}), ContractViolation);

    it.check_intact();
  }
}
