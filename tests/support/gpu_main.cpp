// SPDX-License-Identifier: Apache-2.0
#define DOCTEST_CONFIG_IMPLEMENT
#include <cuda_runtime_api.h>

#include <doctest/doctest.h>

#include <cstdio>
#include <cstdlib>

// Exit code 77 tells CTest "skipped", so a machine without a GPU never reports a pass it did not earn.
int main(int argc, char** argv) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::puts("no CUDA device");
    return std::getenv("SPILLWAY_REQUIRE_GPU") != nullptr ? EXIT_FAILURE : 77;
  }
  return doctest::Context(argc, argv).run();
}
