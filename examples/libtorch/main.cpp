// SPDX-License-Identifier: Apache-2.0
// Trains a network in C++ (LibTorch) whose tensors need more memory than they get.
//
//   libtorch [LIMIT]
//
// LIMIT is the most MiB that tensors may take up. Without it, it is nine tenths of what is free.
#include <spillway/interop/torch.hpp>

#include <cstddef>
#include <cstdio>
#include <cstdlib>

#include <torch/torch.h>

int main(int count, char** arguments) {
  char* end = nullptr;
  std::size_t const limit_mib = count > 1 ? std::strtoul(arguments[1], &end, 10) : 0;
  if (count > 2 || (end != nullptr && (end == arguments[1] || *end != '\0'))) {
    std::fprintf(
        stderr, "usage: %s [LIMIT]: the most MiB that tensors may take up\n", arguments[0]);
    return 2;
  }

  // [install]
  using Support = spillway::torch::HostSupport;  // on a GPU: CudaSupport of torch_cuda.hpp

  spillway::torch::InstallOptions options;
  options.limit = limit_mib << 20U;
  Support::install(options);  // before the first large tensor
  // [install end]

  torch::manual_seed(7);
  torch::set_num_threads(1);  // the same sums in the same order, whatever the machine
  torch::nn::Sequential model;
  for (int i = 0; i < 8; ++i) {
    model->push_back(torch::nn::Linear(512, 512));
    model->push_back(torch::nn::ReLU());
    model->push_back(torch::nn::LayerNorm(torch::nn::LayerNormOptions({512})));
  }
  model->push_back(torch::nn::Linear(512, 10));
  torch::optim::Adam optimizer{model->parameters(), torch::optim::AdamOptions(1e-3)};
  auto const inputs = torch::randn({1024, 512});
  auto const labels = torch::randint(10, {1024});

  // [step]
  for (int step = 0; step < 6; ++step) {
    Support::begin_step();  // so that the order in which a step uses tensors is learned
    optimizer.zero_grad();
    auto const loss = torch::nn::functional::cross_entropy(model->forward(inputs), labels);
    loss.backward();
    optimizer.step();
    std::printf("step %d: loss %a\n", step, loss.item<double>());
  }
  // [step end]

  spillway::Stats const stats = Support::stats();
  std::printf("at most %zu of %zu MiB were on the device; %zu MiB were swapped out\n",
              static_cast<std::size_t>(stats.resident.bytes.peak) >> 20U,
              static_cast<std::size_t>(stats.allocated.bytes.peak) >> 20U,
              static_cast<std::size_t>(stats.swap_outs.bytes) >> 20U);
}
