// SPDX-License-Identifier: Apache-2.0
#define DOCTEST_CONFIG_IMPLEMENT
#include <cuda_runtime_api.h>

#include <doctest/doctest.h>

#include <cstdio>
#include <cstdlib>

#include <support/empty_runs.hpp>

// Exit code 77 tells CTest "skipped", so a machine without a GPU never reports a pass.
int main(int argc, char** argv) {
  // Streams that share a hardware queue, and kernels that are loaded at their first launch, would
  // wait for kernels that tests hold up on purpose.
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
  setenv("CUDA_MODULE_LOADING", "EAGER", 0);
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::puts("no CUDA device");
    return std::getenv("SPILLWAY_REQUIRE_GPU") != nullptr ? EXIT_FAILURE : 77;
  }
  return spillway::test::EmptyRuns::fail(doctest::Context(argc, argv).run());
}
