// SPDX-License-Identifier: Apache-2.0
#include <spillway/concepts/pager.hpp>
#include <spillway/lease.hpp>

#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <type_traits>
#include <utility>
#include <vector>

TEST_SUITE("lease") {
  namespace {

  using namespace spillway;

  /// Gives leases out and notes which have ended.
  class Giver {
   public:
    [[nodiscard]] Lease<Giver> give(BlockId block, Access access) {
      return {*this, LeaseRecord{.block = block, .access = access}, bytes_.data(), bytes_.size()};
    }
    void release(LeaseRecord const& lease) noexcept { ended.push_back(lease.block); }

    std::vector<BlockId> ended{};

   private:
    std::array<std::byte, 64> bytes_{};
  };

  /// A minimal operand: the block `id`.
  struct Holder {
    BlockId id{};
    [[nodiscard]] LeaseRequest request(Access access) const noexcept { return {id, access}; }
    template <Access access>
    [[nodiscard]] LeaseFor<Lease<Giver>, access> typed(Lease<Giver> lease) const noexcept {
      return LeaseFor<Lease<Giver>, access>{std::move(lease)};
    }
  };

  constexpr BlockId first{1};
  constexpr BlockId second{2};

  static_assert(BlockLease<Lease<Giver>>);
  static_assert(std::is_same_v<LeaseFor<Lease<Giver>, Access::read>, ReadLease<Lease<Giver>>>);
  static_assert(std::is_same_v<LeaseFor<Lease<Giver>, Access::write>, Lease<Giver>>);
  static_assert(std::is_same_v<LeaseFor<Lease<Giver>, Access::read_write>, Lease<Giver>>);
  static_assert(std::is_same_v<decltype(ReadLease<Lease<Giver>>{}.data()), void const*>);
  static_assert(Leasable<Holder> && !Leasable<int>);

  }  // namespace

  TEST_CASE("Lease: ends once, by release() or its destructor, and is then empty") {
    Giver giver;
    {
      Lease<Giver> lease = giver.give(first, Access::write);
      Lease<Giver> const other = giver.give(second, Access::read);
      CHECK(lease);
      CHECK(lease.size_bytes() == 64);
      lease.release();
      lease.release();
      CHECK(giver.ended == std::vector{first});
      CHECK(lease.empty());
      CHECK(lease.data() == nullptr);
      CHECK(lease.size_bytes() == 0);
      CHECK(lease.block() == first);  // the block of an ended lease is still known
      CHECK(lease.access() == Access::write);
    }
    CHECK(giver.ended == std::vector{first, second});
    CHECK(Lease<Giver>{}.empty());
  }

  TEST_CASE("Lease: moving transfers it, and ends the lease that it is assigned to") {
    Giver giver;
    Lease<Giver> lease = giver.give(first, Access::read_write);
    void* const data = lease.data();
    Lease<Giver> taken = std::move(lease);
    CHECK(lease.empty());  // NOLINT(bugprone-use-after-move): that it is empty is promised
    CHECK(lease.data() == nullptr);
    CHECK(taken.data() == data);
    taken = giver.give(second, Access::read);
    CHECK(giver.ended == std::vector{first});
    CHECK(taken.block() == second);
    Lease<Giver>& same = taken;
    taken = std::move(same);
    CHECK_FALSE(taken.empty());
    taken = Lease<Giver>{};
    CHECK(giver.ended == std::vector{first, second});
  }

  TEST_CASE("ReadLease: is made from a run-time lease, and can be turned back into one") {
    Giver giver;
    ReadLease<Lease<Giver>> reading{giver.give(first, Access::read)};
    CHECK(reading);
    CHECK(reading.data() != nullptr);
    CHECK(reading.size_bytes() == 64);
    CHECK(reading.block() == first);
    CHECK(reading.access() == Access::read);
    Lease<Giver> lease = std::move(reading).take_lease();
    CHECK(reading.empty());  // NOLINT(bugprone-use-after-move): as above
    CHECK(giver.ended.empty());
    lease.release();
    CHECK(giver.ended == std::vector{first});
  }

  TEST_CASE("Operand: requests its access, and gives the lease the matching type") {
    Giver giver;
    Holder const read{first};
    Holder written{second};
    CHECK(reads(read).request().access == Access::read);
    CHECK(reads(read).request().id == first);
    CHECK(writes(written).request().access == Access::write);
    CHECK(updates(written).request().access == Access::read_write);
    auto const reading = reads(read).typed(giver.give(first, Access::read));
    auto const writing = writes(written).typed(giver.give(second, Access::write));
    static_assert(std::is_same_v<decltype(reading), ReadLease<Lease<Giver>> const>);
    static_assert(std::is_same_v<decltype(writing), Lease<Giver> const>);
    CHECK(writing.block() == second);
  }
}
