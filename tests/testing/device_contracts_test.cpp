// SPDX-License-Identifier: Apache-2.0
#include <spillway/core/types.hpp>
#include <spillway/device/sim/sim_api.hpp>
#include <spillway/testing/device_contracts.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <span>
#include <vector>

#include <support/wrong_models.hpp>

// Each device here breaks one promise of its concept, and its contract suite must notice it.
namespace {

using namespace spillway;

/// Copies whole words only.
struct CopiesWords : SimApi {
  using SimApi::SimApi;

  void copy(void* to, void const* from, std::size_t bytes, CopyKind kind, stream_type stream) {
    SimApi::copy(to, from, bytes < 1000 ? round_up(bytes, 4) : bytes, kind, stream);
  }
};

struct MapsInAnyOrder : SimApi {
  using SimApi::SimApi;

  [[nodiscard]] bool
  try_map(void* address, std::size_t bytes, std::span<physical_type const> pieces) {
    std::vector<physical_type> const reversed(pieces.rbegin(), pieces.rend());
    return SimApi::try_map(address, bytes, reversed);
  }
};

spillway::test::ExpectedFailures const before_wrong_devices{true};

}  // namespace

TEST_CASE_TEMPLATE_INVOKE(device_copy_contract, CopiesWords);
TEST_CASE_TEMPLATE_INVOKE(virtual_memory_contract, MapsInAnyOrder);

namespace {

spillway::test::ExpectedFailures const after_wrong_devices{false};

}  // namespace
