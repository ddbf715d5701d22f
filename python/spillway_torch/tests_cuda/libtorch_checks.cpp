// SPDX-License-Identifier: Apache-2.0
// Checks of large-model support for CUDA tensors in a program in C++, which test_libtorch.py
// compiles and runs. An argument makes it install the kernels of kernels.cpp, for a device that
// cannot run GPU code.
#include "../tests/libtorch_checks.hpp"

#include <spillway/interop/torch_cuda.hpp>

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include <ATen/ATen.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

extern "C" void spillway_install_kernels(bool waits);

namespace {

using namespace spillway::literals;
using Support = spillway::torch::CudaSupport;

constexpr std::size_t limit = 64_MiB;

/// Returns a tensor of 4 MiB whose elements are `value`.
[[nodiscard]] at::Tensor filled(int value) {
  return at::full({1024, 1024}, static_cast<float>(value), at::TensorOptions(at::kCUDA));
}
[[nodiscard]] float first_of(at::Tensor const& tensor) {
  return tensor.flatten().slice(0, 0, 1).cpu().item<float>();
}

void tensors_beyond_the_limit_keep_their_values() {
  std::vector<at::Tensor> all;
  for (int i = 0; i < 40; ++i) {
    all.push_back(filled(i));
  }
  for (int i = 0; i < 40; ++i) {
    CHECK(first_of(all[static_cast<std::size_t>(i)] + 1) == static_cast<float>(i + 1));
  }
  CHECK(Support::stats().swap_outs.count > 0);
  CHECK(Support::stats().resident.bytes.peak <= limit);
}

void work_of_the_program_can_use_an_address_inside_of_a_hold() {
  at::Tensor const tensor = filled(3);
  CHECK(Support::reclaim() >= 4_MiB);
  std::vector<float> const values(1_MiB, 9.0F);
  {
    Support::Hold const hold{{tensor}};
    cudaStream_t const stream = c10::cuda::getCurrentCUDAStream().stream();
    CHECK(cudaMemcpyAsync(tensor.data_ptr<float>(),
                          values.data(),
                          tensor.nbytes(),
                          cudaMemcpyHostToDevice,
                          stream) == cudaSuccess);
  }
  CHECK(Support::reclaim() >= 4_MiB);  // ordered after the copy
  CHECK(first_of(tensor) == 9.0F);
}

void a_kept_tensor_stays_at_its_address() {
  at::Tensor const tensor = filled(4);
  (void)Support::reclaim();
  Support::keep(tensor);
  void const* const address = tensor.const_data_ptr();
  (void)Support::reclaim();
  CHECK(address != nullptr && tensor.const_data_ptr() == address && first_of(tensor) == 4.0F);
}

void a_thread_with_the_hook_uses_what_is_away() {
  at::Tensor const tensor = filled(5);
  (void)Support::reclaim();
  float first = 0;
  std::thread{[&] {
    CHECK(!Support::has_hook());
    Support::Hook const hook;
    first = first_of(tensor * 2);
  }}.join();
  CHECK(first == 10.0F);
}

void parked_tensors_come_back() {
  at::Tensor const tensor = filled(6);
  CHECK(Support::park() >= 4_MiB);
  CHECK(Support::wake() >= 4_MiB);
  CHECK(first_of(tensor) == 6.0F);
}

void the_limit_can_be_lowered_and_raised_again() {
  at::Tensor const tensor = filled(8);
  Support::set_limit(limit / 2);
  CHECK(Support::limit() == limit / 2);
  Support::set_limit(limit);
  CHECK(first_of(tensor) == 8.0F);
}

}  // namespace

int main(int count, char**) {
  spillway::torch::InstallOptions options;
  options.limit = limit;
  Support::install(options);
  CHECK(!error_of([] { Support::install(); }).empty());
  if (count > 1) {
    spillway_install_kernels(false);
  }
  tensors_beyond_the_limit_keep_their_values();
  work_of_the_program_can_use_an_address_inside_of_a_hold();
  a_kept_tensor_stays_at_its_address();
  a_thread_with_the_hook_uses_what_is_away();
  parked_tensors_come_back();
  the_limit_can_be_lowered_and_raised_again();
  c10::cuda::device_synchronize();
  std::puts("all checks passed");
}
