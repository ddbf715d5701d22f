// SPDX-License-Identifier: Apache-2.0
#include <spillway/device/sim_api.hpp>

#include <doctest/doctest.h>

#include <support/device_api_contract.hpp>
#include <support/virtual_memory_api_contract.hpp>

using spillway::ModelApi;
using spillway::SimApi;
using spillway::SteppedSimApi;

TEST_SUITE("sim_api") {
  TEST_CASE_TEMPLATE_INVOKE(device_memory_contract, SimApi, SteppedSimApi, ModelApi);
  TEST_CASE_TEMPLATE_INVOKE(device_copy_contract, SimApi, SteppedSimApi, ModelApi);
  TEST_CASE_TEMPLATE_INVOKE(device_order_contract, SimApi, SteppedSimApi, ModelApi);
  TEST_CASE_TEMPLATE_INVOKE(device_progress_contract, SimApi);
  TEST_CASE_TEMPLATE_INVOKE(virtual_memory_contract, SimApi, SteppedSimApi, ModelApi);
}
