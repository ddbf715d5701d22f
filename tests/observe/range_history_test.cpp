// SPDX-License-Identifier: Apache-2.0
#include <spillway/observe/range_history.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <support/watched_program.hpp>

using namespace spillway;
using namespace spillway::detail;

namespace {

constexpr BlockId a{1};
constexpr BlockId b{2};

Record record(RecordKind kind, BlockId block, std::uintptr_t address, std::size_t bytes = 100) {
  return {.kind = kind,
          .block = block,
          .bytes = bytes,
          .address = reinterpret_cast<void const*>(address)};
}

/// `1:+a@100` says that record 1 shows block a taking address 100.
std::vector<std::string> told(std::vector<Record> const& records) {
  std::vector<std::string> lines;
  for (RangeChange const& change : range_changes(records)) {
    lines.push_back(std::to_string(change.record) + ':' + (change.is_taken ? '+' : '-') +
                    static_cast<char>('a' + static_cast<int>(change.block) - 1) + '@' +
                    std::to_string(change.address));
  }
  return lines;
}

using Lines = std::vector<std::string>;

}  // namespace

TEST_SUITE("range_history") {
  TEST_CASE("range_changes: a block beside another one leaves it where it is") {
    CHECK(told({record(RecordKind::make_resident, b, 200),
                record(RecordKind::make_resident, a, 100),
                record(RecordKind::drop, a, 100),
                record(RecordKind::make_resident, a, 300)}) ==
          Lines{"0:+b@200", "1:+a@100", "2:-a@100", "3:+a@300"});
  }

  TEST_CASE("range_changes: records show when a block takes a range and gives it up") {
    CHECK(told({record(RecordKind::allocate, a, 0),
                record(RecordKind::make_resident, a, 100),
                record(RecordKind::swap_out, a, 100),
                record(RecordKind::prefetch, a, 300),
                record(RecordKind::copy_out, a, 300),
                record(RecordKind::drop, a, 300),
                record(RecordKind::swap_in, a, 200),
                record(RecordKind::move, a, 500),
                record(RecordKind::deallocate, a, 500)}) == Lines{"1:+a@100",
                                                                  "2:-a@100",
                                                                  "3:+a@300",
                                                                  "5:-a@300",
                                                                  "6:+a@200",
                                                                  "7:-a@200",
                                                                  "7:+a@500",
                                                                  "8:-a@500"});
  }

  TEST_CASE("range_changes: a block that never had a range gives none up") {
    CHECK(told({record(RecordKind::allocate, a, 0), record(RecordKind::deallocate, a, 0)}).empty());
  }

  TEST_CASE("range_changes: a block gives up its range if another one takes an overlapping range") {
    CHECK(told({record(RecordKind::make_resident, a, 100),
                record(RecordKind::make_resident, b, 199),
                record(RecordKind::deallocate, a, 0)}) ==
          Lines{"0:+a@100", "1:-a@100", "1:+b@199"});
    CHECK(told({record(RecordKind::make_resident, a, 100),
                record(RecordKind::make_resident, b, 200)}) == Lines{"0:+a@100", "1:+b@200"});
    CHECK(told({record(RecordKind::make_resident, a, 300),
                record(RecordKind::make_resident, b, 200, 101)}) ==
          Lines{"0:+a@300", "1:-a@300", "1:+b@200"});
  }

  TEST_CASE("range_changes: a range given up without being taken was there from the start") {
    CHECK(told({record(RecordKind::drop, a, 100),
                record(RecordKind::drop, b, 200),
                record(RecordKind::drop, a, 100)}) == Lines{"0:-a@100", "1:-b@200"});
    CHECK(told({record(RecordKind::deallocate, a, 0)}).empty());
    CHECK(told({record(RecordKind::deallocate, a, 100)}) == Lines{"0:-a@100"});
    CHECK(told({record(RecordKind::move, a, 100), record(RecordKind::drop, a, 100)}) ==
          Lines{"0:-a@0", "0:+a@100", "1:-a@100"});
    CHECK(told({record(RecordKind::copy_out, a, 100), record(RecordKind::drop, a, 100)}) ==
          Lines{"1:-a@100"});
  }

  TEST_CASE("range_changes: records without a block change nothing") {
    CHECK(told({record(RecordKind::grow, {}, 100),
                record(RecordKind::trim, {}, 100),
                record(RecordKind::step, {}, 0),
                record(RecordKind::host_wait, {}, 0),
                record(RecordKind::out_of_memory, a, 0)})
              .empty());
  }
}
