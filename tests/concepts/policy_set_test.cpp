// SPDX-License-Identifier: Apache-2.0
// What each concept of a bundle of policies asks for, and that an allocator asks for no more.
#include <spillway/concepts/compaction_policy.hpp>
#include <spillway/concepts/device_api.hpp>
#include <spillway/concepts/device_capabilities.hpp>
#include <spillway/concepts/eviction_policy.hpp>
#include <spillway/concepts/fit_policy.hpp>
#include <spillway/concepts/observer.hpp>
#include <spillway/concepts/policy_set.hpp>
#include <spillway/concepts/prefetch_policy.hpp>
#include <spillway/device/host/host_paged_api.hpp>
#include <spillway/device/sim/sim_api.hpp>
#include <spillway/device_allocator.hpp>
#include <spillway/swappable_buffer.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include <support/archetypes/policy_archetypes.hpp>

namespace {

using namespace spillway;
using namespace spillway::test;

// A type derived from a model, in which a deleted member hides the model's member of that name.
#define CHECK_NEEDS(Concept, Model, member)                                                        \
  do {                                                                                             \
    struct Lacking : Model {                                                                       \
      void member() = delete;                                                                      \
    };                                                                                             \
    static_assert(!Concept<Lacking>, #Concept " does not ask for " #member);                       \
  } while (false)

// The same for a member whose declaration does not do.
#define CHECK_REFUSES(Concept, Model, declaration)                                                 \
  do {                                                                                             \
    struct Lacking : Model {                                                                       \
      declaration;                                                                                 \
    };                                                                                             \
    static_assert(!Concept<Lacking>, #Concept " is content with " #declaration);                   \
  } while (false)

static_assert(EvictionPolicy<EvictionArchetype>);
static_assert(SpeculativeEvictionPolicy<SpeculativeEvictionArchetype>);
static_assert(!SpeculativeEvictionPolicy<EvictionArchetype>);
static_assert(PrefetchPolicy<PrefetchArchetype>);
static_assert(Observer<ObserverArchetype>);
static_assert(LockPolicy<LockArchetype>);
static_assert(FitPolicy<FitArchetype>);
static_assert(CompactionPolicy<CompactionArchetype>);
static_assert(DeviceApi<DeviceArchetype>);
static_assert(PolicySet<PoliciesArchetype>);

static_assert(!BatchCopyApi<DeviceArchetype>);
static_assert(!VirtualMemoryApi<DeviceArchetype>);
static_assert(VirtualMemoryApi<HostPagedApi>);

// One bundle for each alias, with a type that is no model.
struct BadDevice : PoliciesArchetype {
  using device = ObserverArchetype;
};
struct BadFit : PoliciesArchetype {
  using fit = ObserverArchetype;
};
struct BadCompaction : PoliciesArchetype {
  using compaction = ObserverArchetype;
};
struct BadEviction : PoliciesArchetype {
  using eviction = ObserverArchetype;
};
struct BadPrefetch : PoliciesArchetype {
  using prefetch = ObserverArchetype;
};
struct BadLock : PoliciesArchetype {
  using lock = ObserverArchetype;
};
struct BadObserver : PoliciesArchetype {
  using observer = LockArchetype;
};
static_assert(!PolicySet<BadDevice>);
static_assert(!PolicySet<BadFit>);
static_assert(!PolicySet<BadCompaction>);
static_assert(!PolicySet<BadEviction>);
static_assert(!PolicySet<BadPrefetch>);
static_assert(!PolicySet<BadLock>);
static_assert(!PolicySet<BadObserver>);

/// Runs a program on archetypes whose blocks do not fit the device at once, and checks its bytes.
template <class Policies>
void check_that_it_runs() {
  SimApi sim{{.capacity_bytes = 4 << 20}};
  typename Policies::device device{sim};
  using Allocator = DeviceAllocator<Policies>;
  typename Allocator::Options options{.capacity_bytes = std::size_t{256} << 10};
  options.bounce_bytes = 0;
  options.host.pinned_bytes = std::size_t{4} << 20;
  options.host.slab_bytes = std::size_t{1} << 20;
  Allocator allocator{device, std::move(options)};
  auto const stream = device.create_stream();
  {
    constexpr std::size_t block_bytes = std::size_t{100} << 10;
    std::vector<SwappableBuffer<Allocator>> buffers;
    for (int i = 0; i < 5; ++i) {
      buffers.emplace_back(allocator, block_bytes);
    }
    for (int step = 0; step < 3; ++step) {
      allocator.begin_step();
      for (std::size_t i = 0; i < buffers.size(); ++i) {
        if (step != 0) {
          auto const lease = buffers[i].acquire(Access::read, stream);
          std::vector<unsigned char> bytes(block_bytes);
          allocator.copy_to_host_sync(bytes.data(), lease.data(), block_bytes, stream);
          CHECK(bytes == std::vector<unsigned char>(block_bytes, static_cast<unsigned char>(i)));
        }
        auto const lease = buffers[i].acquire(Access::write, stream);
        device.fill(lease.data(), static_cast<unsigned char>(i), block_bytes, stream);
      }
    }
    CHECK(allocator.stats().swap_ins.bytes != 0);
  }
  allocator.retire_stream(stream);
  device.synchronize(stream);
  device.destroy_stream(stream);
}

struct SpeculativePolicies : PoliciesArchetype {
  using eviction = SpeculativeEvictionArchetype;
};

}  // namespace

TEST_SUITE("concepts") {
  TEST_CASE("EvictionPolicy: each member is asked for") {
    CHECK_NEEDS(EvictionPolicy, EvictionArchetype, on_insert);
    CHECK_NEEDS(EvictionPolicy, EvictionArchetype, on_access);
    CHECK_NEEDS(EvictionPolicy, EvictionArchetype, on_erase);
    CHECK_NEEDS(EvictionPolicy, EvictionArchetype, victim);
    CHECK_NEEDS(EvictionPolicy, EvictionArchetype, on_misprediction);
    CHECK_NEEDS(EvictionPolicy, EvictionArchetype, on_step);
    CHECK_NEEDS(SpeculativeEvictionPolicy, SpeculativeEvictionArchetype, victim);
    CHECK_NEEDS(SpeculativeEvictionPolicy, SpeculativeEvictionArchetype, early_victim);
    CHECK_NEEDS(SpeculativeEvictionPolicy, SpeculativeEvictionArchetype, is_leaving);
    CHECK_NEEDS(SpeculativeEvictionPolicy, SpeculativeEvictionArchetype, may_return);
    CHECK_REFUSES(SpeculativeEvictionPolicy,
                  SpeculativeEvictionArchetype,
                  bool is_leaving(BlockId) noexcept);  // not const
  }

  TEST_CASE("PrefetchPolicy: each member is asked for") {
    CHECK_NEEDS(PrefetchPolicy, PrefetchArchetype, on_create);
    CHECK_NEEDS(PrefetchPolicy, PrefetchArchetype, on_access);
    CHECK_NEEDS(PrefetchPolicy, PrefetchArchetype, on_destroy);
    CHECK_NEEDS(PrefetchPolicy, PrefetchArchetype, on_step);
    CHECK_NEEDS(PrefetchPolicy, PrefetchArchetype, candidates);
    CHECK_NEEDS(PrefetchPolicy, PrefetchArchetype, max_inflight_bytes);
  }

  TEST_CASE("Observer and LockPolicy: each member is asked for") {
    CHECK_NEEDS(Observer, ObserverArchetype, is_enabled);
    CHECK_NEEDS(Observer, ObserverArchetype, on_record);
    CHECK_REFUSES(Observer, ObserverArchetype, void on_record(Record const&));  // may throw
    CHECK_NEEDS(LockPolicy, LockArchetype, lock);
    CHECK_NEEDS(LockPolicy, LockArchetype, unlock);
    CHECK_NEEDS(LockPolicy, LockArchetype, try_lock);
    CHECK_REFUSES(LockPolicy, LockArchetype, void try_lock());
  }

  TEST_CASE("FitPolicy and CompactionPolicy: each member is asked for") {
    CHECK_NEEDS(FitPolicy, FitArchetype, insert);
    CHECK_NEEDS(FitPolicy, FitArchetype, erase);
    CHECK_NEEDS(FitPolicy, FitArchetype, resize);
    CHECK_NEEDS(FitPolicy, FitArchetype, find);
    CHECK_NEEDS(FitPolicy, FitArchetype, largest);
    CHECK_NEEDS(FitPolicy, FitArchetype, visit_large);
    CHECK_REFUSES(FitPolicy, FitArchetype, void insert(RangeTable&, std::uint32_t));  // may throw
    CHECK_NEEDS(CompactionPolicy, CompactionArchetype, plan);
    CHECK_NEEDS(CompactionPolicy, CompactionArchetype, moves_blocks);
  }

  TEST_CASE("DeviceApi: each member is asked for") {
    CHECK_NEEDS(DeviceApi, DeviceArchetype, try_reserve);
    CHECK_NEEDS(DeviceApi, DeviceArchetype, release);
    CHECK_NEEDS(DeviceApi, DeviceArchetype, try_allocate_pinned);
    CHECK_NEEDS(DeviceApi, DeviceArchetype, free_pinned);
    CHECK_NEEDS(DeviceApi, DeviceArchetype, copy);
    CHECK_NEEDS(DeviceApi, DeviceArchetype, fill);
    CHECK_NEEDS(DeviceApi, DeviceArchetype, launch_host);
    CHECK_NEEDS(DeviceApi, DeviceArchetype, create_stream);
    CHECK_NEEDS(DeviceApi, DeviceArchetype, destroy_stream);
    CHECK_NEEDS(DeviceApi, DeviceArchetype, create_event);
    CHECK_NEEDS(DeviceApi, DeviceArchetype, destroy_event);
    CHECK_NEEDS(DeviceApi, DeviceArchetype, record);
    CHECK_NEEDS(DeviceApi, DeviceArchetype, wait);
    CHECK_NEEDS(DeviceApi, DeviceArchetype, is_complete);
    CHECK_REFUSES(DeviceApi, DeviceArchetype, void synchronize(DeviceArchetype::event_type));
    CHECK_REFUSES(DeviceApi, DeviceArchetype, void synchronize(DeviceArchetype::stream_type));
    CHECK_NEEDS(DeviceApi, DeviceArchetype, memory_info);
    CHECK_NEEDS(DeviceApi, DeviceArchetype, numa_node);
    CHECK_NEEDS(DeviceApi, DeviceArchetype, clock_ns);
    CHECK_REFUSES(DeviceApi, DeviceArchetype, void release(void*, std::size_t));  // may throw
  }

  TEST_CASE("VirtualMemoryApi: each member is asked for") {
    CHECK_NEEDS(VirtualMemoryApi, HostPagedApi, granularity_bytes);
    CHECK_NEEDS(VirtualMemoryApi, HostPagedApi, reserve_address);
    CHECK_NEEDS(VirtualMemoryApi, HostPagedApi, free_address);
    CHECK_NEEDS(VirtualMemoryApi, HostPagedApi, try_create_physical);
    CHECK_NEEDS(VirtualMemoryApi, HostPagedApi, release_physical);
    CHECK_NEEDS(VirtualMemoryApi, HostPagedApi, map);
    CHECK_NEEDS(VirtualMemoryApi, HostPagedApi, unmap);
    CHECK_NEEDS(VirtualMemoryApi, HostPagedApi, copy);
  }

  TEST_CASE("DeviceAllocator: it needs no more than the concepts of its policies promise") {
    check_that_it_runs<PoliciesArchetype>();
    check_that_it_runs<SpeculativePolicies>();
  }
}
