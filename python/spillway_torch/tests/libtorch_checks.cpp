// SPDX-License-Identifier: Apache-2.0
// Checks of large-model support in a program in C++, which test_libtorch.py compiles and runs.
#include "libtorch_checks.hpp"

#include <spillway/interop/torch.hpp>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <latch>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

namespace {

using namespace spillway::literals;
using Support = spillway::torch::HostSupport;
using spillway::framework::CodecChoice;

constexpr std::size_t limit = 64_MiB;

[[nodiscard]] bool is_refused(at::Tensor const& tensor) {
  return has(error_of([&] { (void)tensor.data_ptr<float>(); }), "Hold");
}
/// Returns a tensor of 4 MiB whose elements are `value`.
[[nodiscard]] at::Tensor filled(int value) {
  return torch::full({1024, 1024}, static_cast<float>(value));
}

void tensors_beyond_the_limit_keep_their_values() {
  std::vector<at::Tensor> all;
  for (int i = 0; i < 40; ++i) {
    all.push_back(filled(i));
  }
  for (int i = 0; i < 40; ++i) {
    CHECK(all[static_cast<std::size_t>(i)].mean().item<float>() == static_cast<float>(i));
  }
  CHECK(Support::stats().swap_outs.count > 0);
  CHECK(Support::stats().resident.bytes.peak <= limit);
}

void an_address_is_valid_inside_of_a_hold() {
  at::Tensor const tensor = filled(3);
  CHECK(Support::reclaim() >= 4_MiB);
  CHECK(is_refused(tensor) && !Support::is_resident(tensor));
  {
    Support::Hold const hold{{tensor}};
    CHECK(Support::is_inside() && Support::is_resident(tensor));
    CHECK(Support::unreclaimable().bytes >= 4_MiB);
    auto elements = tensor.accessor<float, 2>();
    CHECK(elements[5][7] == 3.0F);
    elements[5][7] = 9.0F;
    CHECK(Support::reclaim() == 0);
    CHECK(elements[5][7] == 9.0F);
  }
  CHECK(!Support::is_inside());
  (void)Support::reclaim();
  CHECK(is_refused(tensor));
  CHECK(tensor[5][7].item<float>() == 9.0F);
}

void a_kept_tensor_stays_at_its_address() {
  at::Tensor const tensor = filled(4);
  (void)Support::reclaim();
  Support::keep(tensor);
  float const* const address = tensor.const_data_ptr<float>();
  (void)Support::reclaim();
  CHECK(tensor.const_data_ptr<float>() == address && *address == 4.0F);
}

void a_small_tensor_that_was_just_used_can_be_read() {
  at::Tensor const tensor = torch::full({64, 64}, 3.0) * 2;
  (void)tensor.mean();
  std::ostringstream text;
  text << tensor;
  CHECK(has(text.str(), "6") && tensor.accessor<float, 2>()[5][7] == 6.0F);
  for (int i = 0; i < 100; ++i) {  // it is used again and again
    (void)(tensor * i).sum();
    CHECK(tensor.data_ptr<float>()[i] == 6.0F);
  }
  std::vector<at::Tensor> others;
  for (int i = 0; i < 100; ++i) {
    others.push_back(torch::full({64, 64}, 1.0));
  }
  CHECK(is_refused(tensor));
  CHECK(tensor.sum().item<float>() == 6.0F * 64 * 64);
  (void)Support::reclaim();
  CHECK(is_refused(tensor));
}

void small_tensors_of_idle_threads_give_way() {
  constexpr std::size_t threads = 100;
  std::vector<at::Tensor> small(threads);
  std::latch are_made{threads};
  std::latch is_done{1};
  std::vector<std::thread> all;
  for (std::size_t i = 0; i < threads; ++i) {
    all.emplace_back([&, i] {
      Support::Hook const hook;
      small[i] =
          torch::full({static_cast<std::int64_t>(limit / 64 / sizeof(float) / 1024), 1024}, 2.0);
      are_made.count_down();
      is_done.wait();
    });
  }
  are_made.wait();
  {
    std::vector<at::Tensor> const most(14, filled(1) + 1);
    Support::Hold const hold{most};
    at::Tensor const sum = most[0] + most[1];
    CHECK(sum.mean().item<float>() == 4.0F);
  }
  is_done.count_down();
  for (std::thread& one : all) {
    one.join();
  }
  for (at::Tensor const& one : small) {
    CHECK(one.mean().item<float>() == 2.0F);
  }
}

void a_hold_ends_with_its_thread() {
  at::Tensor const tensor = filled(7);
  std::unique_ptr<Support::Hold> hold;
  std::thread{[&] {
    Support::Hook const hook;
    hold = std::make_unique<Support::Hold>(std::vector<at::Tensor>{tensor});
  }}.join();
  (void)Support::reclaim();
  CHECK(is_refused(tensor));
  hold.reset();
  CHECK(tensor.mean().item<float>() == 7.0F);
}

void errors_are_pytorchs() {
  CHECK(has(error_of([] { (void)Support::park(spillway::HostTier::file); }), "no such tier"));
  CHECK(
      has(error_of([] { Support::share({.file = "/no/such/folder/share"}); }), "/no/such/folder"));
  CHECK(!Support::is_shared());
}

void a_hold_of_too_much_is_refused_and_loses_nothing() {
  std::vector<at::Tensor> all;
  for (int i = 0; i < 20; ++i) {
    all.push_back(filled(i));
  }
  CHECK(has(error_of<c10::OutOfMemoryError>([&] { Support::Hold const hold{all}; }), "spillway"));
  CHECK(!Support::is_inside() && Support::counts().out_of_memory > 0);
  CHECK(all[7].sum().item<float>() == 7.0F * 1024 * 1024);
}

void a_thread_needs_the_hook() {
  at::Tensor const tensor = filled(5);
  (void)Support::reclaim();
  std::string refusal;
  float mean = 0;
  std::thread{[&] {
    CHECK(!Support::has_hook());
    refusal = error_of([&] { (void)tensor.mean(); });
    Support::Hook const hook;
    mean = tensor.mean().item<float>();
  }}.join();
  CHECK(has(refusal, "Hook"));
  CHECK(mean == 5.0F);
}

void gradients_are_the_same() {
  auto const gradient = [](bool is_evicted) {
    torch::manual_seed(7);
    torch::nn::Sequential model{
        torch::nn::Linear(256, 256), torch::nn::GELU(), torch::nn::Linear(256, 10)};
    at::Tensor const loss = model->forward(torch::randn({512, 256})).logsumexp(1).mean();
    if (is_evicted) {
      CHECK(Support::reclaim() > 0);
    }
    loss.backward();
    return model->parameters()[0].grad();
  };
  CHECK(gradient(true).equal(gradient(false)));
}

void parked_tensors_come_back() {
  at::Tensor const tensor = filled(6);
  CHECK(Support::park() >= 4_MiB);
  CHECK(Support::stats().reserved_bytes == Support::stats().resident.bytes.current);
  CHECK(Support::wake() >= 4_MiB);
  CHECK(tensor.mean().item<float>() == 6.0F);
}

void the_limit_can_be_lowered_and_raised_again() {
  at::Tensor const tensor = filled(8);
  Support::set_limit(limit / 2);
  CHECK(Support::limit() == limit / 2);
  CHECK(has(error_of([] { Support::set_limit(2 * limit); }), "can be raised to 67108864 bytes"));
  Support::set_limit(limit);
  CHECK(tensor.mean().item<float>() == 8.0F);
}

void codecs_are_lossless_unless_asked_for_by_tensor() {
  auto const before = Support::host_stats().encoded_raw_bytes;
  at::Tensor const tensor = filled(0);
  Support::set_codec(CodecChoice::lossless, {tensor});
  (void)Support::reclaim();
  CHECK(tensor.count_nonzero().item<std::int64_t>() == 0);
  CHECK(Support::host_stats().encoded_raw_bytes >= before + 4_MiB);
  CHECK(has(error_of([] { Support::set_codec(CodecChoice::bfloat16); }), "by tensor"));
  at::Tensor const wide = torch::zeros({1024, 1024}, at::kDouble);
  CHECK(has(error_of([&] { Support::set_codec(CodecChoice::bfloat16, {wide}); }), "float32"));
}

void nothing_leaves_while_support_is_off() {
  at::Tensor const tensor = filled(1);
  Support::enable(false);
  CHECK(!Support::is_enabled());
  (void)tensor.mean();  // what no operation has used since then may still leave
  CHECK(Support::reclaim() == 0);
  Support::enable(true);
  CHECK(Support::reclaim() >= 4_MiB);
}

void results_are_recomputed() {
  Support::set_recompute(true);
  CHECK(Support::recomputes());
  at::Tensor const input = filled(2);
  at::Tensor expected;
  for (int i = 0; i < 20; ++i) {
    at::Tensor const result = input.exp();
    (void)Support::reclaim();
    expected = i == 0 ? result.clone() : expected;
    CHECK(result.equal(expected));
  }
  Support::set_recompute(false);
}

void a_forked_child_reads_what_is_away() {
  at::Tensor const tensor = filled(2);
  (void)Support::reclaim();
  pid_t const child = ::fork();
  if (child == 0) {
    std::_Exit(tensor.mean().item<float>() == 2.0F ? 0 : 1);
  }
  int status = 0;
  CHECK(::waitpid(child, &status, 0) == child && status == 0);
  CHECK(tensor.mean().item<float>() == 2.0F);
}

void a_held_model_can_be_saved(std::filesystem::path const& folder) {
  torch::nn::Linear model{512, 512};
  (void)Support::reclaim();
  std::string const file = folder / "model.pt";
  {
    Support::Hold const hold{model->parameters()};
    torch::save(model, file);
  }
  torch::nn::Linear copy{512, 512};
  torch::load(copy, file);
  CHECK(copy->weight.equal(model->weight));
}

void the_device_can_be_shared(std::filesystem::path const& folder) {
  spillway::ShareOptions options;
  options.file = folder / "share";
  options.least_bytes = 8_MiB;
  Support::share(options);
  CHECK(Support::is_shared() && Support::share_members().size() == 1);
  CHECK(has(error_of([] { Support::set_limit(limit / 2); }), "the device is shared"));
  Support::leave_share();
  CHECK(!Support::is_shared());
  Support::set_limit(limit);
}

/// Objects with static storage are destroyed after the main thread's thread-local variables.
void static_objects_may_hold_and_use_tensors() {
  struct Late {
    at::Tensor tensor = torch::full({64, 64}, 1.0);
    ~Late() { CHECK(tensor.add_(1).sum().item<float>() == 2.0F * 64 * 64); }
  };
  static Late const late;
  static Support::Hold const hold{{filled(1)}};
}

}  // namespace

int main(int, char** arguments) {
  std::filesystem::path const folder = arguments[1];
  torch::set_num_threads(1);  // OpenMP's threads do not survive a fork
  at::Tensor const earlier = filled(1);
  CHECK(!Support::is_installed() && !Support::has_hook());
  CHECK(has(error_of([] { (void)Support::stats(); }), "install() has not been called"));
  spillway::torch::InstallOptions options;
  options.limit = limit;
  Support::install(options);
  CHECK(has(error_of([] { Support::install(); }), "installed already"));
  CHECK(Support::is_enabled() && Support::has_hook());
  CHECK(!Support::is_ours(earlier) && Support::is_ours(filled(1)));

  tensors_beyond_the_limit_keep_their_values();
  an_address_is_valid_inside_of_a_hold();
  a_kept_tensor_stays_at_its_address();
  a_small_tensor_that_was_just_used_can_be_read();
  small_tensors_of_idle_threads_give_way();
  a_hold_ends_with_its_thread();
  errors_are_pytorchs();
  a_hold_of_too_much_is_refused_and_loses_nothing();
  a_thread_needs_the_hook();
  gradients_are_the_same();
  parked_tensors_come_back();
  the_limit_can_be_lowered_and_raised_again();
  codecs_are_lossless_unless_asked_for_by_tensor();
  nothing_leaves_while_support_is_off();
  results_are_recomputed();
  a_forked_child_reads_what_is_away();
  a_held_model_can_be_saved(folder);
  the_device_can_be_shared(folder);
  static_objects_may_hold_and_use_tensors();
  std::puts("all checks passed");
}
