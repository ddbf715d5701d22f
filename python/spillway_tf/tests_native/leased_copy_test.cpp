// SPDX-License-Identifier: Apache-2.0
// Tests what the module does when TensorFlow's devices copy and allocate tensors, with a device in
// host memory. Compiled with TensorFlow's CUDA headers, it also tests code for GPUs without a GPU.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#define DOCTEST_CONFIG_NO_SHORT_MACRO_NAMES  // TensorFlow has macros of the same names
#include <spillway/device/host/host_paged_api.hpp>
#include <spillway/device_allocator.hpp>
#include <spillway/interop/framework/buffer_leases.hpp>
#include <spillway/interop/tensorflow.hpp>
#include <spillway/page_arena.hpp>
#include <spillway/sim.hpp>

#include <doctest/doctest.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include <absl/status/status.h>
#include <tensorflow/core/common_runtime/process_state.h>
#include <tensorflow/core/framework/tensor.h>
#if GOOGLE_CUDA
#  include <spillway/interop/tensorflow/gpu_device.hpp>
#endif

namespace tf = ::tensorflow;
using namespace spillway;
using namespace spillway::framework;

namespace {

constexpr std::size_t capacity_bytes = std::size_t{1} << 20U;
constexpr int half = 1 << 17;  // floats: half of the capacity

/// The same interface as for a GPU, but with a device in host memory.
struct TestSite {
  struct Policies : SimPolicies {
    using device = HostPagedApi;
    using arena = StableAddresses;
  };
  using allocator_type = DeviceAllocator<Policies>;
  using Leases = BufferLeases<allocator_type>;
  struct State {
    HostPagedApi device;
    allocator_type memory{device, options()};
    Leases leases{memory, HostStream::caller};
    spillway::tensorflow::TensorAllocator<TestSite> tensors{
        *tf::ProcessState::singleton()->GetCPUAllocator(tf::port::kNUMANoAffinity), 4096};

    static allocator_type::Options options() {
      allocator_type::Options options;
      options.capacity_bytes = capacity_bytes;
      options.host.pinned_bytes = 8 * capacity_bytes;
      options.paging.lease_wait = std::chrono::milliseconds{0};
      return options;
    }
  };
  static State& state() {
    static auto* const the_state = new State;
    return *the_state;
  }

  static constexpr bool is_whole_device = true;
  static bool is_ready() { return ready(); }
  static bool& ready() {
    static bool is = true;
    return is;
  }
  static Leases& leases() { return state().leases; }
  static auto& tensors() { return state().tensors; }
  static Leases::Frame*& frame() {
    thread_local Leases::Frame* mine = nullptr;
    return mine;
  }
  static bool may_own(void const* p) { return state().device.may_own(p); }
  static std::size_t limit_bytes() { return capacity_bytes; }
};

tf::Tensor on_device(int floats = half) {
  return tf::Tensor{&TestSite::tensors(), tf::DT_FLOAT, tf::TensorShape{floats}};
}
TestSite::Leases::View view(tf::Tensor const& tensor) {
  return TestSite::leases().view(spillway::tensorflow::base_of(tensor));
}

/// Copies at once, but reports the end of the copy only when `after` is called.
struct LateCopy {
  tf::StatusCallback after;
  int calls = 0;

  void run(tf::Tensor const& from, tf::Tensor& to, absl::Status& result) {
    spillway::tensorflow::copy_leased<TestSite>(
        from,
        to,
        [&result](absl::Status const& status) { result = status; },
        [&](tf::StatusCallback done) {
          ++calls;
          to.flat<float>() = from.flat<float>();
          after = std::move(done);
        });
  }
};

}  // namespace

DOCTEST_TEST_CASE("copy_leased: both tensors stay until the copy is done, and may leave then") {
  tf::Tensor from = on_device();
  tf::Tensor to = on_device();
  from.flat<float>().setConstant(3);
  absl::Status result = absl::UnknownError("not yet");
  LateCopy copy;
  copy.run(from, to, result);
  DOCTEST_CHECK(view(from).is_in_use);
  DOCTEST_CHECK(view(to).is_in_use);
  DOCTEST_CHECK_FALSE(view(to).is_swappable);
  DOCTEST_CHECK(TestSite::leases().reclaim() == 0);
  DOCTEST_CHECK_FALSE(result.ok());
  copy.after(absl::OkStatus());
  DOCTEST_CHECK(result.ok());
  DOCTEST_CHECK_FALSE(view(from).is_in_use);
  DOCTEST_CHECK(view(to).is_swappable);
  DOCTEST_CHECK_FALSE(view(from).is_swappable);  // it is not the result of an operation
  DOCTEST_CHECK(TestSite::leases().reclaim() == capacity_bytes / 2);
  DOCTEST_CHECK_FALSE(view(to).is_resident);

  tf::Tensor back{tf::DT_FLOAT, tf::TensorShape{half}};
  LateCopy second;
  second.run(to, back, result);  // swaps `to` in
  second.after(absl::OkStatus());
  DOCTEST_CHECK(back.flat<float>()(half - 1) == 3);
}

DOCTEST_TEST_CASE("copy_leased: what cannot be brought in is an error, and nothing is copied") {
  tf::Tensor to = on_device();
  tf::Tensor const from{tf::DT_FLOAT, tf::TensorShape{half}};
  absl::Status result;
  LateCopy first;
  first.run(from, to, result);
  first.after(absl::OkStatus());
  DOCTEST_CHECK(TestSite::leases().reclaim() == capacity_bytes / 2);
  tf::Tensor const a = on_device();
  tf::Tensor const b = on_device();  // not the result of an operation, so it cannot leave
  LateCopy second;
  second.run(from, to, result);
  DOCTEST_CHECK(second.calls == 0);
  DOCTEST_CHECK(absl::IsResourceExhausted(result));
  DOCTEST_CHECK(std::string{result.message()}.starts_with(
      "OOM when swapping in a tensor that is to be copied"));
  DOCTEST_CHECK_FALSE(view(to).is_in_use);
}

DOCTEST_TEST_CASE(
    "copy_leased: other tensors are copied without more ado, and errors are handed on") {
  tf::Tensor const from{tf::DT_FLOAT, tf::TensorShape{4}};
  tf::Tensor to{tf::DT_FLOAT, tf::TensorShape{4}};
  auto const frames = TestSite::leases().counts().frames;
  absl::Status result;
  LateCopy copy;
  copy.run(from, to, result);
  copy.after(absl::InternalError("broken"));
  DOCTEST_CHECK(result.message() == "broken");
  DOCTEST_CHECK(TestSite::leases().counts().frames == frames);
}

DOCTEST_TEST_CASE(
    "TensorAllocator: of a whole device what no operation made counts, and too much is refused") {
  auto const before = TestSite::leases().counts().fixed_bytes;
  tf::Tensor const a = on_device();
  DOCTEST_CHECK(TestSite::leases().counts().fixed_bytes == before + capacity_bytes / 2);
  DOCTEST_CHECK(TestSite::tensors().AllocateRaw(64, 2 * capacity_bytes) == nullptr);
  void* const small = TestSite::tensors().AllocateRaw(64, 100);
  DOCTEST_CHECK(small != nullptr);
  DOCTEST_CHECK_FALSE(TestSite::leases().owns(small));
  TestSite::tensors().DeallocateRaw(small);
  DOCTEST_CHECK(TestSite::tensors().GetStats()->bytes_limit == std::int64_t{capacity_bytes});

  TestSite::ready() = false;  // as long as the device has no stream yet
  void* const early = TestSite::tensors().AllocateRaw(64, 8192);
  DOCTEST_CHECK(early != nullptr);
  DOCTEST_CHECK_FALSE(TestSite::leases().owns(early));
  TestSite::tensors().DeallocateRaw(early);
  DOCTEST_CHECK(TestSite::tensors().GetStats()->bytes_limit == std::int64_t{capacity_bytes});
  TestSite::ready() = true;
}

DOCTEST_TEST_CASE("TensorAllocator: the other allocator learns the stream that the device tells") {
  struct Recorder final : tf::Allocator {
    std::string Name() override { return "recorder"; }
    void* AllocateRaw(std::size_t /*alignment*/, std::size_t /*bytes*/) override { return nullptr; }
    void DeallocateRaw(void* /*p*/) override {}
    void SetStreamAndPreallocateMemory(void* of_device) override { stream = of_device; }
    void SetSafeFrontier(std::uint64_t count) override { frontier = count; }
    void* stream = nullptr;
    std::uint64_t frontier = 0;
  };
  Recorder others;
  spillway::tensorflow::TensorAllocator<TestSite> tensors{others, 4096};
  tf::Allocator& seen_by_device = tensors;
  int place = 0;
  seen_by_device.SetStreamAndPreallocateMemory(&place);
  seen_by_device.SetSafeFrontier(7);
  DOCTEST_CHECK(others.stream == &place);
  DOCTEST_CHECK(others.frontier == 7);
}

#if GOOGLE_CUDA
DOCTEST_TEST_CASE("SwappingGpuContext: it has the streams of the one it replaces, and its errors") {
  std::array<int, 5> places{};
  auto const stream = [&places](std::size_t i) {
    return reinterpret_cast<stream_executor::Stream*>(&places.at(i));  // never dereferenced
  };
  tf::core::RefCountPtr<tf::GPUDeviceContext> const other{new tf::GPUDeviceContext{
      0, stream(0), stream(1), stream(2), {stream(3), stream(4)}, nullptr}};
  tf::core::RefCountPtr<spillway::tensorflow::SwappingGpuContext<TestSite>> const context{
      new spillway::tensorflow::SwappingGpuContext<TestSite>{*other}};
  DOCTEST_CHECK(context->stream() == stream(0));
  DOCTEST_CHECK(context->host_to_device_stream() == stream(1));
  DOCTEST_CHECK(context->device_to_host_stream() == stream(2));
  for (int i = 0; i < 4; ++i) {
    DOCTEST_CHECK(context->device_to_device_stream(i) == other->device_to_device_stream(i));
  }

  tf::Tensor const from{tf::DT_FLOAT, tf::TensorShape{half}};
  tf::Tensor to = on_device();
  absl::Status result;
  int calls = 0;
  auto const done = [&](absl::Status const& status) {
    result = status;
    ++calls;
  };
  auto const frames = TestSite::leases().counts().frames;
  context->CopyCPUTensorToDevice(&from, nullptr, &to, done, false);
  DOCTEST_CHECK(absl::IsInternal(result));
  DOCTEST_CHECK_FALSE(view(to).is_in_use);
  tf::Tensor host{tf::DT_FLOAT, tf::TensorShape{half}};
  context->CopyDeviceTensorToCPU(&to, "edge", nullptr, &host, done);
  context->CopyTensorInSameDevice(&to, nullptr, &to, done);
  DOCTEST_CHECK(calls == 3);
  DOCTEST_CHECK(TestSite::leases().counts().frames == frames + 3);
  DOCTEST_CHECK(TestSite::leases().counts().active_bytes == 0);
}
#endif
