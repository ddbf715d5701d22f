// SPDX-License-Identifier: Apache-2.0
// What a set of policies must name, and that an allocator uses only what their concepts require.
#include <spillway/concepts/observer.hpp>
#include <spillway/concepts/policy_set.hpp>
#include <spillway/device/sim/sim_api.hpp>
#include <spillway/device_allocator.hpp>
#include <spillway/swappable_buffer.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include <support/archetypes/policy_archetypes.hpp>
#include <support/concept_checks.hpp>

namespace {

using namespace spillway;
using namespace spillway::test;

static_assert(Observer<ObserverArchetype> && LockPolicy<LockArchetype>);
static_assert(PolicySet<PoliciesArchetype>);

struct EnabledSometimes : ObserverArchetype {
  inline static bool is_enabled = true;
};
static_assert(!Observer<EnabledSometimes>, "it is a constant");

// For each alias, a set in which that alias is not a model of its concept.
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
struct BadRecompute : PoliciesArchetype {
  using recompute = ObserverArchetype;
};
struct BadFileIo : PoliciesArchetype {
  using file_io = ObserverArchetype;
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
static_assert(!PolicySet<BadRecompute>);
static_assert(!PolicySet<BadFileIo>);
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
  options.file_io.emplace(1);
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

TEST_SUITE("policy_set") {
  TEST_CASE("Observer and LockPolicy: the concepts require each member") {
    CHECK_NEEDS(Observer, ObserverArchetype, is_enabled);
    CHECK_NEEDS(Observer, ObserverArchetype, on_record);
    CHECK_REFUSES(Observer, ObserverArchetype, void on_record(Record const&));  // may throw
    CHECK_REFUSES(Observer, ObserverArchetype, bool is_enabled = true);
    CHECK_NEEDS(LockPolicy, LockArchetype, lock);
    CHECK_NEEDS(LockPolicy, LockArchetype, unlock);
    CHECK_NEEDS(LockPolicy, LockArchetype, try_lock);
    CHECK_REFUSES(LockPolicy, LockArchetype, void try_lock());
  }

  TEST_CASE("DeviceAllocator: uses only what the concepts of its policies require") {
    check_that_it_runs<PoliciesArchetype>();
    check_that_it_runs<SpeculativePolicies>();
  }

  TEST_CASE("DeviceAllocator: a policy without a default constructor must be in its options") {
    SimApi sim;
    DeviceArchetype device{sim};
    CHECK_THROWS_AS((DeviceAllocator<PoliciesArchetype>{device, {.capacity_bytes = 1 << 20}}),
                    ContractViolation);
  }
}
