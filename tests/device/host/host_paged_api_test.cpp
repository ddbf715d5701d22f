// SPDX-License-Identifier: Apache-2.0
#include <spillway/device/host/host_paged_api.hpp>
#include <spillway/device_allocator.hpp>
#include <spillway/page_arena.hpp>
#include <spillway/policy/eviction/queue_eviction.hpp>
#include <spillway/policy/null_policies.hpp>
#include <spillway/sim.hpp>
#include <spillway/testing/device_contracts.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <limits>
#include <random>
#include <vector>

#include <support/fork.hpp>
#include <support/is_readable.hpp>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

using namespace spillway;
using spillway::testing::Gate;

namespace {

/// Moves pages, where the system can.
struct PageMovingApi : HostPagedApi {
  PageMovingApi() : HostPagedApi{{.remap = HostRemap::pages}} {}
};

}  // namespace

TEST_CASE_TEMPLATE_INVOKE(device_memory_contract, HostPagedApi);
TEST_CASE_TEMPLATE_INVOKE(device_copy_contract, HostPagedApi);
TEST_CASE_TEMPLATE_INVOKE(device_order_contract, HostPagedApi);
TEST_CASE_TEMPLATE_INVOKE(device_progress_contract, HostPagedApi);
TEST_CASE_TEMPLATE_INVOKE(device_memory_contract, PageMovingApi);

namespace {

struct PagedPolicies : SimPolicies {
  using device = HostPagedApi;
  using arena = StableAddresses;
};

struct PlainPagedPolicies : PagedPolicies {
  using eviction = LruEviction;
  using prefetch = NoPrefetch;
};

template <class Policies>
typename DeviceAllocator<Policies>::Options options_of(std::size_t capacity_bytes) {
  typename DeviceAllocator<Policies>::Options options;
  options.capacity_bytes = capacity_bytes;
  options.host.pinned_bytes = 64_MiB;
  options.paging.lease_wait = std::chrono::milliseconds{0};
  return options;
}

std::vector<HostPhysical>
create_pieces(HostPagedApi& device, std::size_t count, std::size_t piece_bytes) {
  std::vector<HostPhysical> pieces;
  while (pieces.size() < count) {
    pieces.push_back(*device.try_create_physical(piece_bytes));
  }
  return pieces;
}

/// Whether this process may lock some megabytes. Locks memory that is mapped later.
bool may_lock_future_memory() {
#ifdef MCL_ONFAULT
  constexpr std::size_t n = 64_MiB;
  constexpr int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  if (::mlockall(MCL_FUTURE | MCL_ONFAULT) != 0) {
    return false;
  }
  void* const p = ::mmap(nullptr, n, PROT_NONE, flags, -1, 0);
  return p != MAP_FAILED && ::munmap(p, n) == 0;
#else
  return false;
#endif
}

/// What the system counts of this process towards RLIMIT_DATA, and its stack.
std::size_t data_bytes() {
  std::size_t pages = 0;
  std::ifstream numbers{"/proc/self/statm"};
  for (int number = 0; number < 6; ++number) {
    numbers >> pages;
  }
  return pages * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
}

/// Whether the system moves pages from mapping to mapping (Linux since 5.7).
bool moves_pages() {
#ifdef MREMAP_DONTUNMAP
  constexpr std::size_t n = 16_KiB;
  void* const from = ::mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  void* const to = ::mremap(from, n, n, MREMAP_MAYMOVE | MREMAP_DONTUNMAP, nullptr);
  ::munmap(from, n);
  return to != MAP_FAILED && ::munmap(to, n) == 0;
#else
  return false;
#endif
}

}  // namespace

TEST_SUITE("host_paged_api") {
  TEST_CASE_TEMPLATE("HostPagedApi: addresses are accessible while they are mapped",
                     Device,
                     HostPagedApi,
                     PageMovingApi) {
    Device device;
    std::size_t const n = device.granularity_bytes();
    auto* const p = static_cast<unsigned char*>(device.reserve_address(4 * n));
    CHECK_FALSE(support::is_readable(p + n));
    std::array const two{*device.try_create_physical(n), *device.try_create_physical(n)};
    REQUIRE(device.try_map(p + n, n, two));
    CHECK(support::is_readable(p + n));
    CHECK_FALSE(support::is_readable(p));
    CHECK_FALSE(support::is_readable(p + 3 * n));
    device.unmap(p + n, 2 * n);
    CHECK_FALSE(support::is_readable(p + n));
    REQUIRE(device.try_map(p + n, n, {two.data(), 1}));
    CHECK(support::is_readable(p + n));
    CHECK_FALSE(support::is_readable(p + 2 * n));
    device.move_mapped(p + 3 * n, p + n, n);
    CHECK(support::is_readable(p + 3 * n));
    CHECK_FALSE(support::is_readable(p + n));
    device.free_address(p, 4 * n);
  }

  TEST_CASE_TEMPLATE("HostPagedApi: released pages are used for other ranges, and returned to the "
                     "system in the end",
                     Device,
                     HostPagedApi,
                     PageMovingApi) {
    Device device;
    constexpr std::size_t n = 2_MiB;
    auto* const p = static_cast<unsigned char*>(device.reserve_address(4 * n));
    std::array const two{*device.try_create_physical(n), *device.try_create_physical(n)};
    REQUIRE(device.try_map(p, n, two));
    std::memset(p, 5, 2 * n);
    device.unmap(p, 2 * n);
    REQUIRE(device.try_map(p + 2 * n, n, two));
    if (moves_pages()) {
      CHECK(p[2 * n] == 5);
      CHECK(p[4 * n - 1] == 5);
    }
    device.unmap(p + 2 * n, 2 * n);
    device.release_physical(two[0]);
    REQUIRE(device.try_map(p, n, {&two[1], 1}));
    if (moves_pages()) {
      CHECK(p[0] == 5);
    }
    device.unmap(p, n);
    device.release_physical(two[1]);
    HostPhysical const other = *device.try_create_physical(n);
    REQUIRE(device.try_map(p, n, {&other, 1}));
    CHECK(p[0] == 0);
    device.free_address(p, 4 * n);
  }

  TEST_CASE_TEMPLATE("HostPagedApi: ranges of random pages keep their contents",
                     Device,
                     HostPagedApi,
                     PageMovingApi) {
    constexpr unsigned seed = 20261;
    MESSAGE("seed ", seed);
    std::mt19937 random{seed};
    Device device;
    std::size_t const n = device.granularity_bytes();
    constexpr std::size_t pages = 96;
    auto* const p = static_cast<unsigned char*>(device.reserve_address(pages * n));
    std::vector<HostPhysical> pieces;
    std::array<unsigned char, pages> held{};  // 0: not mapped
    std::size_t mapped = 0;
    std::size_t moves = 0;
    for (int i = 0; i < 4000; ++i) {
      std::size_t const first = random() % pages;
      std::size_t const count = 1 + random() % (pages - first);
      bool const is_free = std::all_of(held.begin() + first,
                                       held.begin() + first + count,
                                       [](unsigned char byte) { return byte == 0; });
      if (is_free && mapped + count <= pages * 3 / 4) {
        while (pieces.size() < mapped + count) {
          pieces.push_back(*device.try_create_physical(n));
        }
        REQUIRE(device.try_map(p + first * n, n, {pieces.data(), count}));
        for (std::size_t page = first; page < first + count; ++page) {
          held[page] = static_cast<unsigned char>(1 + random() % 255);
          std::memset(p + page * n, held[page], n);
        }
        mapped += count;
      } else if (std::size_t const to = random() % pages;
                 to >= first + count && to + count <= pages &&
                 std::find(held.begin() + first, held.begin() + first + count, 0) ==
                     held.begin() + first + count &&
                 std::all_of(held.begin() + to, held.begin() + to + count, [](auto byte) {
                   return byte == 0;
                 })) {
        device.move_mapped(p + to * n, p + first * n, count * n);
        for (std::size_t page = to; page < to + count; ++page) {
          held[page] = static_cast<unsigned char>(1 + random() % 255);
          std::memset(p + page * n, held[page], n);
        }
        std::fill_n(held.begin() + first, count, static_cast<unsigned char>(0));
        ++moves;
      } else if (!is_free && random() % 2 == 0) {
        device.unmap(p + first * n, count * n);
        mapped -= static_cast<std::size_t>(std::count_if(held.begin() + first,
                                                         held.begin() + first + count,
                                                         [](auto byte) { return byte != 0; }));
        std::fill_n(held.begin() + first, count, static_cast<unsigned char>(0));
        while (pieces.size() > mapped && random() % 4 == 0) {
          device.release_physical(pieces.back());
          pieces.pop_back();
        }
      }
      std::size_t const page = random() % pages;
      REQUIRE(support::is_readable(p + page * n) == (held[page] != 0));
      if (held[page] != 0) {
        REQUIRE(p[page * n] == held[page]);
        REQUIRE(p[page * n + n - 1] == held[page]);
      }
    }
    CHECK(moves > 20);
    device.free_address(p, pages * n);
  }

  TEST_CASE_TEMPLATE("HostPagedApi: a map that fails halfway leaves nothing mapped",
                     Device,
                     HostPagedApi,
                     PageMovingApi) {
    Device device;
    constexpr std::size_t n = 1_MiB;
    auto* const p = static_cast<unsigned char*>(device.reserve_address(8 * n));
    std::vector<HostPhysical> const pieces = create_pieces(device, 8, n);
    REQUIRE(device.try_map(p, n, {pieces.data(), 2}));
    device.unmap(p, 2 * n);
    device.free_address(p + 4 * n, 4 * n);  // so that the system cannot map the upper half
    // Spare pages are moved to the first part of the range, and the rest cannot be mapped.
    CHECK_THROWS_AS((void)device.try_map(p, n, pieces), DeviceError);
    CHECK_FALSE(support::is_readable(p));
    CHECK_FALSE(support::is_readable(p + 2 * n));
    CHECK_FALSE(support::is_readable(p + 4 * n - 1));

    REQUIRE(device.try_map(p, n, {pieces.data(), 4}));
    CHECK(support::is_readable(p));
    CHECK(support::is_readable(p + 4 * n - 1));
    device.unmap(p, 4 * n);
    for (std::size_t i = 0; i < 4; ++i) {
      CHECK_FALSE(support::is_readable(p + i * n));
    }
    device.free_address(p, 4 * n);
  }

  TEST_CASE("HostPagedApi: if moving mapped pages fails, they are mapped nowhere and can be mapped "
            "again") {
    PageMovingApi device;
    if (device.remap() != HostRemap::pages) {
      MESSAGE("the system moves no pages");
      return;
    }
    constexpr std::size_t n = 1_MiB;
    auto* const p = static_cast<unsigned char*>(device.reserve_address(8 * n));
    std::vector<HostPhysical> const pieces = create_pieces(device, 4, n);
    REQUIRE(device.try_map(p, n, pieces));
    device.free_address(p + 5 * n, 3 * n);  // so that the system puts nothing there
    CHECK_THROWS_AS(device.move_mapped(p + 4 * n, p, 4 * n), DeviceError);
    for (std::size_t i = 0; i < 8; ++i) {
      CHECK_FALSE(support::is_readable(p + i * n));
    }
    REQUIRE(device.try_map(p, n, pieces));
    CHECK(support::is_readable(p));
    CHECK(support::is_readable(p + 4 * n - 1));
    device.free_address(p, 5 * n);
  }

  TEST_CASE("HostPagedApi: when a larger range is mapped, spare pages below 64 KiB are not reused "
            "in it") {
    for (std::size_t const spare : {3U, 4U}) {
      CAPTURE(spare);
      HostPagedApi device;
      std::size_t const n = device.granularity_bytes();
      constexpr std::size_t pages = 64;
      auto* const p = static_cast<unsigned char*>(device.reserve_address(2 * pages * n));
      std::vector<HostPhysical> const pieces = create_pieces(device, pages, n);
      REQUIRE(device.try_map(p, n, {pieces.data(), spare}));
      std::memset(p, 7, spare * n);
      device.unmap(p, spare * n);
      REQUIRE(device.try_map(p + pages * n, n, pieces));
      CHECK((p[pages * n] == 7) == (spare == 4 && moves_pages()));
      CHECK(p[2 * pages * n - 1] == 0);
      device.free_address(p, 2 * pages * n);
    }
  }

  TEST_CASE(
      "HostPagedApi: spare pages are returned to the system once newer ones exceed their limit") {
    HostPagedApi device;
    std::size_t const n = device.granularity_bytes();
    constexpr std::size_t pages = 20;
    auto* const p = static_cast<unsigned char*>(device.reserve_address(pages * n));
    std::vector<HostPhysical> const pieces = create_pieces(device, pages, n);
    REQUIRE(device.try_map(p, n, {pieces.data(), 1}));
    std::memset(p, 7, n);
    device.unmap(p, n);
    REQUIRE(device.try_map(p, n, pieces));  // the spare page is too small a part of this range
    std::memset(p, 8, pages * n);
    device.unmap(p, pages * n);
    REQUIRE(device.try_map(p, n, {pieces.data(), 1}));
    CHECK(p[0] != 7);
    device.free_address(p, pages * n);
  }

  TEST_CASE("HostPagedApi: spare pages that are too far apart do not keep the process from getting "
            "new ones") {
    HostPagedApi device;
    constexpr std::size_t n = 16_KiB;
    constexpr std::size_t pages = 256;
    auto* const p = static_cast<unsigned char*>(device.reserve_address(2 * pages * n));
    std::vector<HostPhysical> const pieces = create_pieces(device, pages, n);
    REQUIRE(device.try_map(p, n, pieces));
    for (std::size_t page = 0; page < pages; page += 2) {
      device.unmap(p + page * n, n);
    }
    device.before_fork();
    spillway::test::ForkedChild const child{[&] {  // since only its memory is to be limited
      device.after_fork_in_child();
      rlimit const little_more{data_bytes() + 1_MiB, RLIM_INFINITY};
      REQUIRE(::setrlimit(RLIMIT_DATA, &little_more) == 0);
      return device.try_map(p + pages * n, n, {pieces.data(), pages / 2});
    }};
    device.after_fork_in_parent();
    CHECK(child.status() == 0);
    device.free_address(p, 2 * pages * n);
  }

#ifdef MADV_POPULATE_WRITE
  TEST_CASE_TEMPLATE(
      "HostPagedApi: mapped pages are resident at once", Device, HostPagedApi, PageMovingApi) {
    Device device;
    std::size_t const n = device.granularity_bytes();
    auto* const p = static_cast<unsigned char*>(device.reserve_address(2 * n));
    if (::madvise(p, 0, MADV_POPULATE_WRITE) == 0) {  // else the system does not know it
      std::array const two{*device.try_create_physical(n), *device.try_create_physical(n)};
      REQUIRE(device.try_map(p, n, two));
      std::vector<unsigned char> is_there(2 * n / static_cast<std::size_t>(::getpagesize()));
      REQUIRE(::mincore(p, 2 * n, is_there.data()) == 0);
      CHECK(std::all_of(is_there.begin(), is_there.end(), [](auto page) { return page & 1; }));
    }
    device.free_address(p, 2 * n);
  }
#endif

  TEST_CASE_TEMPLATE("HostPagedApi: a range is vacated at its place in the stream",
                     Device,
                     HostPagedApi,
                     PageMovingApi) {
    Device device;
    std::size_t const n = device.granularity_bytes();
    auto* const p = static_cast<unsigned char*>(device.reserve_address(n));
    HostPhysical const physical = *device.try_create_physical(n);
    REQUIRE(device.try_map(p, n, {&physical, 1}));
    auto const stream = device.create_stream();
    Gate gate;
    gate.close(device, stream);
    device.vacate(p, n, stream);
    CHECK(support::is_readable(p));
    gate.open();
    device.synchronize(stream);
    CHECK_FALSE(support::is_readable(p));
    device.destroy_stream(stream);
    device.free_address(p, n);
  }

  TEST_CASE_TEMPLATE(
      "HostPagedApi: vacating a range wakes no thread; whoever runs the stream's work does it",
      Device,
      HostPagedApi,
      PageMovingApi) {
    Device device;
    std::size_t const n = device.granularity_bytes();
    auto* const p = static_cast<unsigned char*>(device.reserve_address(n));
    HostPhysical const physical = *device.try_create_physical(n);
    REQUIRE(device.try_map(p, n, {&physical, 1}));
    p[0] = 5;
    auto const stream = device.create_stream();
    auto const copied = device.create_event();
    unsigned char copy = 0;
    device.copy(&copy, p, 1, CopyKind::to_host, stream);
    device.record(copied, stream);
    device.vacate(p, n, stream);
    CHECK(support::is_readable(p));
    device.synchronize(copied);
    CHECK(copy == 5);
    CHECK_FALSE(support::is_readable(p));
    device.destroy_event(copied);
    device.destroy_stream(stream);
    device.free_address(p, n);
  }

  TEST_CASE("HostPagedApi: if the system cannot move pages, mappings are moved") {
    rlimit before{};
    REQUIRE(::getrlimit(RLIMIT_NOFILE, &before) == 0);
    rlimit const none{0, before.rlim_max};  // no descriptor, so that the system refuses
    REQUIRE(::setrlimit(RLIMIT_NOFILE, &none) == 0);
    PageMovingApi device;
    REQUIRE(::setrlimit(RLIMIT_NOFILE, &before) == 0);
    CHECK(device.remap() == HostRemap::mappings);
    std::size_t const n = device.granularity_bytes();
    auto* const p = static_cast<unsigned char*>(device.reserve_address(2 * n));
    HostPhysical const physical = *device.try_create_physical(n);
    REQUIRE(device.try_map(p, n, {&physical, 1}));
    CHECK(support::is_readable(p));
    CHECK_FALSE(support::is_readable(p + n));
    device.unmap(p, n);
    CHECK_FALSE(support::is_readable(p));
    device.free_address(p, 2 * n);
  }

  TEST_CASE_TEMPLATE("HostPagedApi: memory that the program has locked can be unmapped and mapped",
                     Device,
                     HostPagedApi,
                     PageMovingApi) {
    Device device;
    std::size_t const n = device.granularity_bytes();
    auto* const p = static_cast<unsigned char*>(device.reserve_address(8 * n));
    std::vector<HostPhysical> const pieces = create_pieces(device, 8, n);
    REQUIRE(device.try_map(p, n, {pieces.data(), 4}));
    (void)::mlock(p + n, n);  // has no effect if the process may lock nothing
    device.unmap(p, 4 * n);
    for (std::size_t page = 0; page < 4; ++page) {
      CHECK_FALSE(support::is_readable(p + page * n));
    }
    REQUIRE(device.try_map(p, n, pieces));
    CHECK(support::is_readable(p + n));
    CHECK(support::is_readable(p + 8 * n - 1));
    device.free_address(p, 8 * n);
  }

  TEST_CASE_TEMPLATE("HostPagedApi: a program may lock its present and future memory",
                     Device,
                     HostPagedApi,
                     PageMovingApi) {
    Device early;
    std::size_t const n = early.granularity_bytes();
    auto* const p = static_cast<unsigned char*>(early.reserve_address(8 * n));
    std::vector<HostPhysical> const pieces = create_pieces(early, 8, n);
    REQUIRE(early.try_map(p, n, {pieces.data(), 4}));
    early.unmap(p, 2 * n);
    early.before_fork();
    spillway::test::ForkedChild const child{[&] {  // since only its memory is to be locked
      early.after_fork_in_child();
      if (!may_lock_future_memory() || ::mlockall(MCL_CURRENT | MCL_FUTURE) != 0) {
        return true;
      }
      auto const works = [&](Device& device, unsigned char* at) {
        bool const is_mapped = device.try_map(at, n, pieces);
        bool is_right = is_mapped && support::is_readable(at + 8 * n - 1);
        device.unmap(at + n, 6 * n);
        is_right = is_right && !support::is_readable(at + n) && support::is_readable(at);
        is_right = is_right && !support::is_readable(at + 7 * n - 1);
        device.move_mapped(at + 3 * n, at, n);
        return is_right && support::is_readable(at + 3 * n) && !support::is_readable(at);
      };
      early.unmap(p + 2 * n, 2 * n);
      Device late;
      for (HostPhysical const piece : pieces) {
        (void)late.try_create_physical(static_cast<std::size_t>(piece));
      }
      auto* const q = static_cast<unsigned char*>(late.reserve_address(8 * n));
      return works(early, p) && !support::is_readable(q) && works(late, q);
    }};
    early.after_fork_in_parent();
    CHECK(child.status() == 0);
    early.free_address(p, 8 * n);
  }

  TEST_CASE("HostPagedApi: reserving too many addresses is an error with a reason") {
    HostPagedApi device;
    errno = 0;
    CHECK_THROWS_WITH_AS((void)device.reserve_address(std::numeric_limits<std::size_t>::max()),
                         doctest::Contains(std::strerror(ENOMEM)),
                         DeviceError);
  }

  TEST_CASE("HostPagedApi: the granularity bounds the number of pieces") {
    CHECK(HostPagedApi::granularity_for(0, 4_KiB) == 16_KiB);
    CHECK(HostPagedApi::granularity_for(1_GiB, 4_KiB) == 16_KiB);
    CHECK(HostPagedApi::granularity_for(1_GiB, 64_KiB) == 64_KiB);
    CHECK(HostPagedApi::granularity_for(20_GiB, 64_KiB) == 512_KiB);
    CHECK(HostPagedApi::granularity_for(std::size_t{1} << 63U, 4_KiB) == 2_MiB);
    CHECK(HostPagedApi{}.granularity_bytes() ==
          HostPagedApi::granularity_for(0, static_cast<std::size_t>(::sysconf(_SC_PAGESIZE))));
    CHECK_THROWS_AS(HostPagedApi{{.granularity_bytes = 4_KiB}}, ContractViolation);
    CHECK_THROWS_AS(HostPagedApi{{.granularity_bytes = 48_KiB}}, ContractViolation);
  }

  TEST_CASE_TEMPLATE("HostPagedApi: swapped-out memory cannot be read, and returns to its address",
                     Device,
                     HostPagedApi,
                     PageMovingApi) {
    Device device;
    DeviceAllocator<PlainPagedPolicies> memory{device, options_of<PlainPagedPolicies>(64_KiB)};
    BlockId const a = memory.allocate(48_KiB);
    void* const address = memory.stable_address(a);
    {
      auto const lease = memory.acquire(a, Access::write, HostStream::caller);
      std::memset(lease.data(), 7, 48_KiB);
    }
    for (bool const is_clean : {false, true}) {
      CAPTURE(is_clean);  // copied out, and dropped
      memory.swap_out(a);
      memory.synchronize();
      CHECK_FALSE(support::is_readable(address));
      auto const lease = memory.acquire(a, Access::read, HostStream::caller);
      CHECK(lease.data() == address);
      auto const* const bytes = static_cast<unsigned char const*>(lease.data());
      CHECK(std::all_of(bytes, bytes + 48_KiB, [](unsigned char byte) { return byte == 7; }));
    }
    CHECK(memory.stats().drops.count == 1);
    memory.deallocate(a);
  }

  TEST_CASE_TEMPLATE(
      "HostPagedApi: a freed range is reused with its pages", Device, HostPagedApi, PageMovingApi) {
    Device device;
    DeviceAllocator<PlainPagedPolicies> memory{device, options_of<PlainPagedPolicies>(1_MiB)};
    BlockId const first = memory.allocate(64_KiB);
    void* const address = memory.stable_address(first);
    std::memset(memory.acquire(first, Access::write, HostStream::caller).data(), 9, 64_KiB);
    memory.deallocate(first);
    BlockId const second = memory.allocate(64_KiB);
    REQUIRE(memory.stable_address(second) == address);
    auto const lease = memory.acquire(second, Access::write, HostStream::caller);
    // The byte is not 0, so the memory was not mapped anew.
    CHECK(static_cast<unsigned char const*>(lease.data())[63_KiB] == 9);
    memory.abandon(second);
  }

  TEST_CASE_TEMPLATE("HostPagedApi: after a fork, parent and child each have their own pages",
                     Device,
                     HostPagedApi,
                     PageMovingApi) {
    Device device;
    std::size_t const n = device.granularity_bytes();
    constexpr std::size_t pages = 8;
    auto* const p = static_cast<unsigned char*>(device.reserve_address(2 * pages * n));
    std::vector<HostPhysical> const pieces = create_pieces(device, pages, n);
    REQUIRE(device.try_map(p, n, pieces));
    std::memset(p, 5, pages * n);
    device.unmap(p, 2 * n);  // spare pages and mapped ones
    // Both have the pages from 2 on, which the system cannot move while it has to keep them apart.
    auto const go_on = [&](unsigned char byte) {
      bool is_right = !support::is_readable(p) && !support::is_readable(p + pages * n);
      is_right = is_right && p[2 * n] == 5 && p[pages * n - 1] == 5;
      device.unmap(p + 2 * n, 2 * n);
      REQUIRE(device.try_map(p + pages * n, n, {pieces.data(), 4}));
      std::memset(p + pages * n, byte, 4 * n);
      is_right = is_right && !support::is_readable(p + 2 * n) && p[4 * n] == 5;
      std::memset(p + 4 * n, byte, 4 * n);
      device.unmap(p + 4 * n, 4 * n);
      REQUIRE(device.try_map(p, n, {pieces.data() + 4, 4}));
      std::memset(p, byte, 4 * n);
      return is_right && p[pages * n] == byte && p[(pages + 4) * n - 1] == byte;
    };
    device.before_fork();
    spillway::test::ForkedChild const child{[&] {
      device.after_fork_in_child();
      return go_on(6);
    }};
    device.after_fork_in_parent();
    CHECK(go_on(7));
    CHECK(child.status() == 0);
    CHECK(p[0] == 7);
    CHECK(p[pages * n] == 7);
    device.free_address(p, 2 * pages * n);
  }

  TEST_CASE_TEMPLATE("HostPagedApi: blocks keep bytes and addresses under random swaps and frees",
                     Policies,
                     PlainPagedPolicies,
                     PagedPolicies) {
    constexpr unsigned seed = 20260;
    MESSAGE("seed ", seed);
    std::mt19937 random{seed};
    HostRemap remap = HostRemap::mappings;
    SUBCASE("mappings are moved") {}
    SUBCASE("pages are moved") {
      remap = HostRemap::pages;
    }
    HostPagedApi device{{.remap = remap}};
    DeviceAllocator<Policies> memory{device, options_of<Policies>(1_MiB)};
    struct Block {
      BlockId id{};
      void* address = nullptr;
      std::size_t bytes = 0;
      unsigned char byte = 0;
    };
    std::vector<Block> blocks;
    for (int i = 0; i < 3000; ++i) {
      if (i % 100 == 0) {
        memory.begin_step();
      }
      if (blocks.size() < 40 && random() % 4 == 0) {
        std::size_t const bytes = 1 + random() % 150'000;
        BlockId const id = memory.allocate(bytes);
        auto const byte = static_cast<unsigned char>(random());
        auto const lease = memory.acquire(id, Access::write, HostStream::caller);
        std::memset(lease.data(), byte, bytes);
        blocks.push_back({id, lease.data(), bytes, byte});
      } else if (!blocks.empty() && random() % 8 == 0) {
        std::size_t const index = random() % blocks.size();
        memory.deallocate(blocks[index].id);
        blocks.erase(blocks.begin() + static_cast<std::ptrdiff_t>(index));
      } else if (!blocks.empty()) {
        Block& block = blocks[random() % blocks.size()];
        bool const writes = random() % 2 == 0;
        auto const lease = memory.acquire(
            block.id, writes ? Access::read_write : Access::read, HostStream::caller);
        REQUIRE(lease.data() == block.address);
        auto* const bytes = static_cast<unsigned char*>(lease.data());
        REQUIRE(bytes[0] == block.byte);
        REQUIRE(bytes[block.bytes - 1] == block.byte);
        REQUIRE(std::all_of(
            bytes, bytes + block.bytes, [&](unsigned char byte) { return byte == block.byte; }));
        if (writes) {
          block.byte = static_cast<unsigned char>(random());
          std::memset(bytes, block.byte, block.bytes);
        }
      }
    }
    CHECK(memory.stats().swap_outs.count > 100);
    for (Block const& block : blocks) {
      memory.deallocate(block.id);
    }
  }
}
