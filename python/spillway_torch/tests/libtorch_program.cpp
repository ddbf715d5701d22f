// SPDX-License-Identifier: Apache-2.0
// A program that uses much of PyTorch's C++ interface, and knows nothing of the library. It prints
// a digest of each part's results, so that two runs can be compared bit by bit.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include <ATen/autocast_mode.h>
#include <torch/script.h>
#include <torch/torch.h>

namespace {

namespace nn = torch::nn;
namespace F = torch::nn::functional;
using torch::Tensor;
using Tensors = std::vector<Tensor>;

/// Returns the sum and the weighted sum of a tensor's bytes, computed by operations.
[[nodiscard]] std::uint64_t digest(Tensor const& tensor) {
  Tensor const bytes = tensor.detach().contiguous().flatten().view(torch::kByte).to(torch::kLong);
  Tensor const weights = torch::arange(bytes.numel(), torch::kLong).remainder(8191) + 1;
  return static_cast<std::uint64_t>((bytes * weights).sum().item<std::int64_t>());
}

/// Trains a model for a few steps and returns the losses and parameters.
template <class Optimizer>
[[nodiscard]] Tensors train(nn::Sequential model, Optimizer& optimizer, Tensor const& inputs) {
  Tensors results;
  for (int step = 0; step < 3; ++step) {
    auto const closure = [&] {
      optimizer.zero_grad();
      Tensor loss = model->forward(inputs).square().mean();
      loss.backward();
      return loss;
    };
    results.push_back(optimizer.step(closure));
  }
  Tensors const parameters = model->parameters();
  results.insert(results.end(), parameters.begin(), parameters.end());
  return results;
}

[[nodiscard]] Tensors optimizers() {
  Tensors results;
  Tensor const inputs = torch::randn({64, 128});
  auto const run = [&](auto const& make) {
    nn::Sequential model{
        nn::Linear(128, 256), nn::Tanh(), nn::BatchNorm1d(256), nn::Linear(256, 8)};
    auto optimizer = make(model->parameters());
    nn::utils::clip_grad_norm_(model->parameters(), 1.0);
    Tensors const some = train(model, optimizer, inputs);
    results.insert(results.end(), some.begin(), some.end());
  };
  using Parameters = std::vector<Tensor>;
  run([](Parameters p) {
    return torch::optim::SGD(p, torch::optim::SGDOptions(0.1).momentum(0.9));
  });
  run([](Parameters p) {
    return torch::optim::Adam(p, torch::optim::AdamOptions(0.01).amsgrad(true));
  });
  run([](Parameters p) { return torch::optim::AdamW(p, torch::optim::AdamWOptions(0.01)); });
  run([](Parameters p) { return torch::optim::RMSprop(p, torch::optim::RMSpropOptions(0.01)); });
  run([](Parameters p) { return torch::optim::Adagrad(p, torch::optim::AdagradOptions(0.01)); });
  run([](Parameters p) { return torch::optim::LBFGS(p, torch::optim::LBFGSOptions(0.1)); });
  return results;
}

[[nodiscard]] Tensors convolutions() {
  nn::Sequential model{nn::Conv2d(nn::Conv2dOptions(3, 16, 3).padding(1)),
                       nn::BatchNorm2d(16),
                       nn::ReLU(nn::ReLUOptions(true)),
                       nn::MaxPool2d(2),
                       nn::ConvTranspose2d(nn::ConvTranspose2dOptions(16, 8, 2).stride(2)),
                       nn::GroupNorm(nn::GroupNormOptions(4, 8)),
                       nn::Dropout2d(0.3),
                       nn::AdaptiveAvgPool2d(4),
                       nn::Flatten(),
                       nn::Linear(128, 10)};
  torch::optim::SGD optimizer{model->parameters(), 0.01};
  return train(model, optimizer, torch::randn({8, 3, 32, 32}));
}

[[nodiscard]] Tensors recurrent_networks() {
  nn::LSTM lstm{nn::LSTMOptions(32, 64).num_layers(2).bidirectional(true).dropout(0.1)};
  nn::GRU gru{nn::GRUOptions(128, 32).batch_first(true)};
  Tensor const inputs = torch::randn({20, 8, 32});
  auto const [steps, state] = lstm->forward(inputs);
  auto const [more, last] = gru->forward(steps.transpose(0, 1));
  auto const packed = nn::utils::rnn::pack_padded_sequence(
      inputs, torch::tensor({20, 18, 15, 12, 9, 6, 3, 1}, torch::kLong));
  auto const [ragged, states] = lstm->forward_with_packed_input(packed);
  Tensor const padded = std::get<0>(nn::utils::rnn::pad_packed_sequence(ragged));
  (more.sum() + padded.square().sum() + std::get<0>(state).sum() + last.sum()).backward();
  Tensors results = {more, padded, std::get<1>(states)};
  for (Tensor const& p : lstm->parameters()) {
    results.push_back(p.grad());
  }
  return results;
}

[[nodiscard]] Tensors transformers() {
  nn::Embedding embedding{500, 64};
  nn::Transformer model{nn::TransformerOptions(64, 4, 2, 2).dim_feedforward(128).dropout(0.1)};
  Tensor const source = embedding->forward(torch::randint(500, {12, 4}));
  Tensor const target = embedding->forward(torch::randint(500, {9, 4}));
  Tensor const out = model->forward(source,
                                    target,
                                    torch::zeros({12, 12}),
                                    nn::TransformerImpl::generate_square_subsequent_mask(9));
  out.square().mean().backward();
  Tensor const attended = at::scaled_dot_product_attention(
      torch::randn({2, 4, 64, 32}), torch::randn({2, 4, 64, 32}), torch::randn({2, 4, 64, 32}));
  return {out, embedding->weight.grad(), attended};
}

struct Cube : torch::autograd::Function<Cube> {
  static Tensor forward(torch::autograd::AutogradContext* context, Tensor const& x) {
    context->save_for_backward({x});
    return x * x * x;
  }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* context,
                                               torch::autograd::tensor_list const& gradients) {
    Tensor const x = context->get_saved_variables()[0];
    return {3 * x * x * gradients[0]};
  }
};

[[nodiscard]] Tensors gradients() {
  Tensor const x = torch::randn({64, 64}, torch::requires_grad());
  Tensor const y = Cube::apply(x).sum();
  auto const first = torch::autograd::grad({y}, {x}, {}, true, true);
  first[0].register_hook([](Tensor const& gradient) { return gradient * 2; });
  auto const second = torch::autograd::grad({first[0].square().sum()}, {x});
  Tensor const w = torch::randn({64, 64}, torch::requires_grad());
  torch::linalg_solve(w, x.detach()).sum().backward();
  Tensor const rank = std::get<1>(torch::linalg_svd(w.detach()));
  torch::NoGradGuard const without;
  return {first[0], second[0], w.grad(), rank, torch::fft_fft(x).abs()};
}

[[nodiscard]] Tensors indexing() {
  using namespace torch::indexing;
  Tensor x = torch::randn({32, 48, 8});
  x.index_put_({Slice(0, 4), Ellipsis}, 2.0);
  x.index_put_({x > 1.5}, 0.25);
  Tensor const rows = torch::randint(32, {100});
  Tensor const values = x.index({rows, Slice(None, None, 3)});
  Tensor const sparse =
      torch::sparse_coo_tensor(torch::randint(50, {2, 200}), torch::randn({200}), {50, 50})
          .coalesce();
  Tensor const product = torch::mm(sparse, torch::randn({50, 20}));
  auto const [sorted, order] = x.flatten().sort();
  return {values,
          product,
          sorted,
          order,
          x.argmax(1),
          std::get<0>(torch::unique_consecutive(rows.div(3, "floor"))),
          torch::einsum("abc,dbc->ad", {x, x}),
          torch::stack({x[0], x[1]}).cumsum(0)};
}

[[nodiscard]] Tensors scripts() {
  auto const unit = torch::jit::compile(R"(def mix(x, y):
    z = x
    for i in range(4):
        z = torch.relu(z) * y + float(i)
        if bool(z.sum() > 100000.0):
            z = z / 2.0
    return z

def both(x, y):
    return mix(x, y) + mix(y, x)
)");
  Tensor const x = torch::randn({128, 128}, torch::requires_grad());
  Tensor const y = torch::randn({128, 128});
  Tensors results;
  for (int i = 0; i < 4; ++i) {  // from the third call on, the optimized graph
    Tensor const z = unit->run_method("both", x, y).toTensor();
    z.mean().backward();
    results.push_back(z);
  }
  torch::jit::Module module{"scripted"};
  module.register_parameter("weight", torch::randn({64, 64}), false);
  module.define("def forward(self, x):\n    return torch.gelu(x @ self.weight)\n");
  std::stringstream stream;
  module.save(stream);
  torch::jit::Module loaded = torch::jit::load(stream);
  loaded.eval();
  Tensor const in = torch::randn({32, 64});
  results.push_back(loaded.forward({in}).toTensor());
  results.push_back(torch::jit::freeze(loaded).forward({in}).toTensor());
  results.push_back(x.grad());
  return results;
}

[[nodiscard]] Tensors saved() {
  nn::Sequential model{nn::Linear(64, 256), nn::ReLU(), nn::Linear(256, 64)};
  torch::optim::Adam optimizer{model->parameters()};
  Tensors results = train(model, optimizer, torch::randn({16, 64}));
  std::stringstream stream;
  std::stringstream state;
  torch::save(model, stream);
  torch::save(optimizer, state);
  nn::Sequential copy{nn::Linear(64, 256), nn::ReLU(), nn::Linear(256, 64)};
  torch::load(copy, stream);
  torch::optim::Adam other{copy->parameters()};
  torch::load(other, state);
  for (Tensor const& p : copy->parameters()) {
    results.push_back(p);
  }
  auto const clone = std::dynamic_pointer_cast<nn::SequentialImpl>(model->clone());
  clone->to(torch::kDouble);
  results.push_back(clone->forward(torch::randn({4, 64}, torch::kDouble)));
  std::vector<char> const bytes = torch::pickle_save(torch::randn({64, 64}));
  results.push_back(torch::pickle_load(bytes).toTensor());
  return results;
}

struct Examples : torch::data::datasets::Dataset<Examples> {
  Tensor inputs = torch::randn({3000, 64});
  torch::data::Example<> get(std::size_t i) override {
    Tensor const input = inputs[static_cast<std::int64_t>(i)];
    return {input, (input.sum() > 0).to(torch::kLong)};
  }
  [[nodiscard]] torch::optional<std::size_t> size() const override { return inputs.size(0); }
};

[[nodiscard]] Tensors loaded(std::size_t workers) {
  nn::Sequential model{nn::Linear(64, 512), nn::ReLU(), nn::Linear(512, 2)};
  torch::optim::SGD optimizer{model->parameters(), 0.1};
  auto loader = torch::data::make_data_loader<torch::data::samplers::RandomSampler>(
      Examples{}.map(torch::data::transforms::Stack<>()),
      torch::data::DataLoaderOptions(100).workers(workers).enforce_ordering(true));
  Tensors results;
  for (auto const& batch : *loader) {
    optimizer.zero_grad();
    Tensor const loss = F::cross_entropy(model->forward(batch.data), batch.target);
    loss.backward();
    optimizer.step();
    results.push_back(loss.detach());
  }
  return results;
}

[[nodiscard]] Tensors threads() {
  Tensors results(4);
  Tensors inputs;
  for (std::size_t i = 0; i < results.size(); ++i) {
    inputs.push_back(torch::randn({256, 256}));
  }
  std::vector<std::thread> all;
  for (std::size_t i = 0; i < results.size(); ++i) {
    all.emplace_back([&, i] {
      Tensor const weight = (inputs[i] / 16).requires_grad_();
      Tensor x = inputs[(i + 1) % inputs.size()];
      for (int layer = 0; layer < 6; ++layer) {
        x = torch::tanh(x.mm(weight));
      }
      x.sum().backward();
      results[i] = weight.grad();
    });
  }
  for (std::thread& one : all) {
    one.join();
  }
  return results;
}

[[nodiscard]] Tensors precisions() {
  nn::Linear model{128, 128};
  Tensor const x = torch::randn({64, 128});
  at::autocast::set_autocast_enabled(at::kCPU, true);
  at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
  Tensor const low = model->forward(x);
  low.to(torch::kFloat).sum().backward();
  at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(at::kCPU, false);
  c10::InferenceMode const inference;
  return {low.to(torch::kFloat), model->weight.grad().clone(), model->forward(x)};
}

[[nodiscard]] Tensors addresses() {
  std::vector<float> values(4096, 2.5F);
  Tensor const borrowed = torch::from_blob(values.data(), {64, 64});
  Tensor own = torch::empty({64, 64});
  std::memcpy(own.data_ptr(), values.data(), own.nbytes());
  auto elements = own.accessor<float, 2>();
  elements[3][4] = 7.0F;
  std::ostringstream text;
  text << own.slice(0, 0, 4).slice(1, 0, 5) << own.sizes() << own.options();
  Tensor const sum = (borrowed + own).contiguous();
  return {sum, torch::tensor(static_cast<double>(text.str().size())).unsqueeze(0)};
}

}  // namespace

int main() {
  torch::set_num_threads(1);
  std::vector<std::pair<std::string, std::function<Tensors()>>> const parts = {
      {"optimizers", &optimizers},
      {"convolutions", &convolutions},
      {"recurrent networks", &recurrent_networks},
      {"transformers", &transformers},
      {"gradients", &gradients},
      {"indexing", &indexing},
      {"scripts", &scripts},
      {"saved", &saved},
      {"loaded", [] { return loaded(0); }},
      {"loaded by threads", [] { return loaded(2); }},
      {"threads", &threads},
      {"precisions", &precisions},
      {"addresses", &addresses}};
  for (auto const& [name, part] : parts) {
    torch::manual_seed(7);
    try {
      std::uint64_t all = 0;
      for (Tensor const& result : part()) {
        all = all * 31 + digest(result);
      }
      std::printf("%s: %016llx\n", name.c_str(), static_cast<unsigned long long>(all));
    } catch (std::exception const& error) {
      std::string const text = error.what();
      std::printf("%s: error: %s\n", name.c_str(), text.substr(0, text.find('\n', 1)).c_str());
    }
  }
}
