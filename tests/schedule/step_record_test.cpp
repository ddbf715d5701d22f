// SPDX-License-Identifier: Apache-2.0
#include <spillway/core/types.hpp>
#include <spillway/schedule/step_record.hpp>
#include <spillway/schedule/use.hpp>

#include <doctest/doctest.h>

#include <cstdint>

namespace {

using namespace spillway;
using spillway::detail::StepRecord;

StepRecord::Entry entry_of(std::uint32_t block, Access access) {
  return {block, never_entry, 0, static_cast<std::uint32_t>(access) & 3U};
}

}  // namespace

TEST_SUITE("schedule") {
  TEST_CASE("StepRecord: an entry beyond the length is the same entry of the next step") {
    StepRecord record;
    record.entries = {entry_of(0, Access::write), entry_of(0, Access::read)};
    CHECK(record.length() == 2);
    CHECK(record.access_at(0) == Access::write);
    CHECK(record.access_at(1) == Access::read);
    CHECK(record.access_at(2) == Access::write);
    CHECK(record.access_at(3) == Access::read);
  }

  TEST_CASE("StepRecord: the mean distance of uses is 0 where no block is used twice") {
    StepRecord record;
    CHECK(record.mean_reuse() == 0);
    record.reuses = 4;
    record.reuse_sum = 10;
    CHECK(record.mean_reuse() == 2);
  }

  TEST_CASE("StepRecord: a block that lives on keeps its role") {
    StepRecord record;
    record.blocks = {{.id = BlockId{7}, .bytes = 64}};
    record.born_from = 1;
    CHECK(!record.is_birth(0));
    CHECK(record.role_after(0) == 0);
    CHECK(record.block_after(0) == BlockId{7});
  }

  TEST_CASE("StepRecord: a block made in one step and freed in the next passes on its roles") {
    // Role 0 is the block left over from the step before, role 1 the one born in this step.
    StepRecord record;
    record.blocks = {{.id = BlockId{7}, .bytes = 64, .freed = 3, .successor = 1},
                     {.id = BlockId{8}, .bytes = 64, .successor_of = 0}};
    record.born_from = 1;
    CHECK(record.is_birth(1));
    CHECK(record.role_after(1) == 0);
    CHECK(record.block_after(0) == BlockId{8});
    CHECK(record.block_after(1) == BlockId{});  // to be born in the step after
  }

  TEST_CASE("StepRecord: the role of a freed block without a successor is free") {
    StepRecord record;
    record.blocks = {{.id = BlockId{7}, .bytes = 64, .freed = 3}};
    CHECK(record.block_after(0) == BlockId{});
  }

  TEST_CASE("StepRecord: a cleared record is empty") {
    StepRecord record;
    record.entries = {entry_of(0, Access::read)};
    record.blocks = {{.id = BlockId{7}}};
    record.born_from = 1;
    record.reuses = 1;
    record.reuse_sum = 1;
    record.clear();
    CHECK(record.length() == 0);
    CHECK(record.blocks.empty());
    CHECK(record.is_birth(0));
    CHECK(record.reuses == 0);
    CHECK(record.reuse_sum == 0);
  }
}
