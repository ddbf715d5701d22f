// SPDX-License-Identifier: Apache-2.0
#include <spillway/concepts/file_io_api.hpp>
#include <spillway/device/sim/sim_api.hpp>
#include <spillway/host/posix_file_io.hpp>
#include <spillway/host/swap_file.hpp>
#include <spillway/host_swap_pool.hpp>
#include <spillway/stream/stream_order.hpp>
#include <spillway/testing/faulty_file_io.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include <support/archetypes/batch_copy_archetype.hpp>
#include <support/archetypes/file_io_archetype.hpp>
#include <support/pool_bench.hpp>
#include <support/temporary_folder.hpp>

using namespace spillway;
using spillway::test::DeviceFileIoArchetype;
using spillway::test::FileIoArchetype;
using spillway::test::OneByOneArchetype;
using spillway::testing::FaultyFileIo;

template class spillway::HostSwapPool<SimApi, FileIoArchetype>;
template class spillway::HostSwapPool<OneByOneArchetype, DeviceFileIoArchetype>;
template class spillway::detail::SwapFile<FileIoArchetype>;

namespace {

// Types that break one requirement each.
struct NotCopyable : PosixFileIo {
  NotCopyable() = default;
  NotCopyable(NotCopyable const&) = delete;
};
struct AllocateSaysBool : PosixFileIo {
  bool allocate(int fd, std::uint64_t offset, std::size_t bytes) noexcept;
};
struct DiscardMayThrow : PosixFileIo {
  void discard(int fd, std::uint64_t offset, std::size_t bytes);
};
struct MakesNoQueue : private PosixFileIo {
  using PosixFileIo::allocate;
  using PosixFileIo::discard;
};
template <class Q>
struct Makes : PosixFileIo {
  Q make_queue(int fd, std::span<std::byte> memory);
};
struct NotMovableQueue : PosixFileIo::Queue {
  NotMovableQueue(NotMovableQueue&&) = delete;
};
struct CannotSayWhetherItBegins : PosixFileIo::Queue {
  void can_begin() noexcept;
};
struct BeginMayThrow : PosixFileIo::Queue {
  void begin(FileTransfer& transfer);
};
struct FinishMayThrow : PosixFileIo::Queue {
  ssize_t finish(FileTransfer& transfer);
};
struct FinishSaysUnsigned : PosixFileIo::Queue {
  std::size_t finish(FileTransfer& transfer) noexcept;
};
struct HasNoName : private PosixFileIo::Queue {
  using Queue::begin;
  using Queue::can_begin;
  using Queue::finish;
};

struct ReachesMayThrow : DeviceFileIoArchetype::Queue {
  bool reaches_device();
};
struct EnqueueSaysNothing : DeviceFileIoArchetype::Queue {
  void try_enqueue(SimApi& device, FileTransfer& transfer, SimStream stream);
};
struct EnqueuesOnNumbers : DeviceFileIoArchetype::Queue {
  bool try_enqueue(SimApi& device, FileTransfer& transfer, int* stream);
};

static_assert(DeviceFileQueueApi<DeviceFileIoArchetype::Queue, SimApi>);
static_assert(DeviceFileQueueApi<FaultyFileIo::Queue, SimApi>);
static_assert(!DeviceFileQueueApi<FaultyFileIo::Queue, OneByOneArchetype>);  // not addressable
static_assert(!DeviceFileQueueApi<PosixFileIo::Queue, SimApi>);
static_assert(!DeviceFileQueueApi<DeviceFileIoArchetype::Queue, int>);
static_assert(!DeviceFileQueueApi<ReachesMayThrow, SimApi>);
static_assert(!DeviceFileQueueApi<EnqueueSaysNothing, SimApi>);
static_assert(!DeviceFileQueueApi<EnqueuesOnNumbers, SimApi>);

static_assert(FileIoApi<PosixFileIo> && FileIoApi<FaultyFileIo>);
static_assert(!FileIoApi<NotCopyable>);
static_assert(!FileIoApi<AllocateSaysBool>);
static_assert(!FileIoApi<DiscardMayThrow>);
static_assert(!FileIoApi<MakesNoQueue>);
static_assert(!FileIoApi<int>);
static_assert(FileIoApi<Makes<PosixFileIo::Queue>>);
static_assert(!FileIoApi<Makes<PosixFileIo::Queue&>>);
static_assert(!FileIoApi<Makes<PosixFileIo::Queue&&>>);
static_assert(!FileIoApi<Makes<NotMovableQueue>>);
static_assert(!FileIoApi<Makes<CannotSayWhetherItBegins>>);
static_assert(!FileIoApi<Makes<BeginMayThrow>>);
static_assert(!FileIoApi<Makes<FinishMayThrow>>);
static_assert(!FileIoApi<Makes<FinishSaysUnsigned>>);
static_assert(!FileIoApi<Makes<HasNoName>>);
static_assert(!FileIoApi<Makes<int>>);

}  // namespace

TEST_SUITE("file_io_api") {
  TEST_CASE("FileIoApi: a pool runs on file calls that have only what the concept requires") {
    TemporaryFolder folder;
    SimApi device;
    StreamOrder<SimApi> order{device};
    auto const stream = device.create_stream();
    auto* const block = static_cast<std::byte*>(device.try_reserve(10'000));
    put_pattern(block, 10'000, 3);
    {
      HostSwapPool<SimApi, FileIoArchetype> pool{
          device,
          order,
          {.file_bytes = 64 << 10, .file = folder.path(), .slab_bytes = 16 << 10},
          FileIoArchetype{0}};
      REQUIRE(pool.try_grow(10'000));
      HostSlotId const slot = pool.try_take(10'000).value();

      order.synchronize(pool.write(slot, block, 10'000, stream).device_done);
      std::memset(block, 0, 10'000);
      order.synchronize(pool.read(slot, block, 10'000, stream).device_done);

      CHECK(has_pattern(block, 10'000, 3));
    }
    device.release(block, 10'000);
  }
}
