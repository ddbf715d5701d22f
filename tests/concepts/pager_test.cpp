// SPDX-License-Identifier: Apache-2.0
#include <spillway/concepts/pager.hpp>
#include <spillway/device_allocator.hpp>
#include <spillway/lease.hpp>
#include <spillway/sim.hpp>
#include <spillway/swappable_buffer.hpp>
#include <spillway/swappable_tensor.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <span>
#include <vector>

#include "support/pager_archetype.hpp"

using spillway::Access;
using spillway::BlockId;
using spillway::BlockLease;
using spillway::Pager;
using spillway::Residency;
using spillway::test::LeaseArchetype;
using spillway::test::PagerArchetype;

// These templates use only what the concept requires.
template class spillway::SwappableBuffer<PagerArchetype>;
template class spillway::SwappableTensor<float, 2, PagerArchetype>;
template class spillway::ReadLease<LeaseArchetype>;

namespace {

static_assert(BlockLease<LeaseArchetype>);
static_assert(BlockLease<spillway::Lease<PagerArchetype>>);
static_assert(Pager<PagerArchetype>);
static_assert(Pager<spillway::DeviceAllocator<>>);

// A type that lacks one requirement is not a lease.
struct CopiedLease : LeaseArchetype {
  CopiedLease() = default;
  CopiedLease(CopiedLease const&) : LeaseArchetype{} {}
  CopiedLease& operator=(CopiedLease const&) { return *this; }
};
static_assert(!BlockLease<CopiedLease>);
struct ThrowingRelease : LeaseArchetype {
  void release() {}
};
static_assert(!BlockLease<ThrowingRelease>);
struct ConstData : LeaseArchetype {
  [[nodiscard]] void const* data() const noexcept { return nullptr; }
};
static_assert(!BlockLease<ConstData>);
struct NoSize : LeaseArchetype {
  void size_bytes() const = delete;
};
static_assert(!BlockLease<NoSize>);
struct NoBlock : LeaseArchetype {
  void block() const = delete;
};
static_assert(!BlockLease<NoBlock>);
struct NoAccess : LeaseArchetype {
  void access() const = delete;
};
static_assert(!BlockLease<NoAccess>);
struct NoEmpty : LeaseArchetype {
  void empty() const = delete;
};
static_assert(!BlockLease<NoEmpty>);

// A type that lacks one requirement is not a pager.
static_assert(!Pager<int>);
struct NoStream : PagerArchetype {
  struct stream_type {
    stream_type(stream_type const&) = delete;
  };
};
static_assert(!Pager<NoStream>);
struct NoLease : PagerArchetype {
  using lease_type = int;
};
static_assert(!Pager<NoLease>);
struct NoAllocate : PagerArchetype {
  void allocate(std::size_t) = delete;
};
static_assert(!Pager<NoAllocate>);
struct NoDeallocate : PagerArchetype {
  void deallocate(BlockId) = delete;
};
static_assert(!Pager<NoDeallocate>);
struct ThrowingAbandon : PagerArchetype {
  void abandon(BlockId) {}
};
static_assert(!Pager<ThrowingAbandon>);
struct OtherLease : PagerArchetype {
  int acquire(BlockId, Access, stream_type) { return 0; }
};
static_assert(!Pager<OtherLease>);
struct NoAcquireAll : PagerArchetype {
  void acquire_all(std::span<spillway::LeaseRequest const>, stream_type) = delete;
};
static_assert(!Pager<NoAcquireAll>);
struct NoSwapOut : PagerArchetype {
  void swap_out(BlockId) = delete;
};
static_assert(!Pager<NoSwapOut>);
struct NoSwapIn : PagerArchetype {
  void swap_in(BlockId) = delete;
};
static_assert(!Pager<NoSwapIn>);
struct MutableResidency : PagerArchetype {
  Residency residency(BlockId) { return Residency::none; }
};
static_assert(!Pager<MutableResidency>);
struct NoCopyFromHost : PagerArchetype {
  void copy_from_host_sync(void*, void const*, std::size_t, stream_type) = delete;
};
static_assert(!Pager<NoCopyFromHost>);
struct NoCopyToHost : PagerArchetype {
  void copy_to_host_sync(void*, void const*, std::size_t, stream_type) = delete;
};
static_assert(!Pager<NoCopyToHost>);

}  // namespace

TEST_SUITE("concepts") {
  TEST_CASE(
      "Pager: a buffer and a tensor work on a pager that has only what the concept requires") {
    PagerArchetype pager{0};
    PagerArchetype::stream_type const stream{0};
    auto tensor = spillway::make_tensor<float>(pager, {2, 3});
    CHECK(tensor.size() == 6);
    CHECK(tensor.residency() == Residency::none);
    std::vector<float> host(6);
    tensor.copy_to_host_sync(host, stream);
    spillway::SwappableBuffer<PagerArchetype> buffer{pager, 256};
    CHECK(buffer.acquire(Access::read, stream).empty());
  }
}
