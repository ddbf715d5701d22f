// SPDX-License-Identifier: Apache-2.0
#include <spillway/core/types.hpp>
#include <spillway/interop/torch/context_table.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <memory>
#include <string>

using namespace spillway;
using namespace spillway::torch;

TEST_SUITE("context_table") {
  TEST_CASE("ContextTable: keeps the entries of a limited number of freed blocks, and drops the "
            "oldest first") {
    ContextTable<std::string> table;
    table.set_limit(1);
    auto const block = [](std::uint32_t i) { return make_block_id(i, 1); };
    for (std::uint32_t i = 0; i < 3; ++i) {
      table.add(block(i), std::make_shared<std::string>(std::to_string(i)));
    }
    table.on_freed(block(0));
    CHECK(*table.find(block(0)) == "0");

    table.on_freed(block(1));

    CHECK(table.find(block(0)) == nullptr);
    CHECK(*table.find(block(1)) == "1");
    CHECK(*table.find(block(2)) == "2");
    table.set_limit(0);
    CHECK(table.size() == 1);
  }
}
