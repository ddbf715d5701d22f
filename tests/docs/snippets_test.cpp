// SPDX-License-Identifier: Apache-2.0
// The short pieces of code that pages show and that no example holds. check_docs.py compares them.
#include <spillway/interop/dlpack.hpp>
#include <spillway/interop/leased_memory.hpp>
#include <spillway/observe/timeline.hpp>
// [codec_headers]
#include <spillway/policy/codec/as_bfloat16.hpp>
#include <spillway/policy/codec/byte_planes.hpp>  // BytePlanes, Zstd, Lz4
#include <spillway/policy/codec/identity.hpp>
#include <spillway/policy/codec/zero_bitmap.hpp>
// [codec_headers end]
#include <spillway/policy/eviction/ranked_eviction.hpp>
#include <spillway/policy/prefetch/schedule_lookahead.hpp>
#include <spillway/sim.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace {

// [choose]
using namespace spillway::literals;

struct MyPolicies : spillway::SimPolicies {  // or CudaPolicies, or PoliciesFor<YourDevice>
  using eviction = spillway::CostEviction;   // all else stays the default
};
// [choose end]

struct Observed {
  // [observer]
  struct MyPolicies : spillway::SimPolicies {  // or CudaPolicies
    using observer = spillway::Timeline;       // or NvtxMarks
  };
  // [observer end]
};

struct Bench {
  spillway::SimApi device{{.capacity_bytes = 64_MiB}};
  spillway::DeviceAllocator<> memory{device, {.capacity_bytes = 16_MiB}};
  spillway::Stream<spillway::DeviceAllocator<>> stream = memory.create_stream();
};

}  // namespace

TEST_SUITE("snippets") {
  TEST_CASE("concepts: a bundle with another policy, and one with a parameter") {
    // [made]
    spillway::DeviceAllocator<MyPolicies> memory{{.capacity_bytes = 8_MiB}};
    // [made end]
    CHECK(memory.stats().capacity_bytes == 8_MiB);
    // [instance]
    spillway::DeviceAllocator<> looking_ahead{
        {.capacity_bytes = 8_MiB, .prefetch = spillway::ScheduleLookahead{{.lookahead_ops = 8}}}};
    // [instance end]
    CHECK(looking_ahead.stats().capacity_bytes == 8_MiB);
  }

  TEST_CASE("concepts: codecs of tensors") {
    Bench bench;
    auto activation = spillway::make_tensor<float>(bench.memory, {10'000});
    auto moment = spillway::make_tensor<float>(bench.memory, {10'000});
    std::uint64_t const layer = 3;
    // [codec]
    activation.set_codec<spillway::ZeroBitmap>(layer);  // lossless: a zero takes one bit
    moment.set_codec<spillway::AsBfloat16>();           // loses bits: half the bytes
    // [codec end]
    std::vector<float> ones(10'000, 1);
    moment.copy_from_host_sync(ones, bench.stream);
    moment.swap_out();
    bench.memory.synchronize();
    CHECK(bench.memory.host_stats().encoded_stored_bytes == 20'016);
  }

  TEST_CASE("streams: operands of one operation, some of which are counted at run time") {
    Bench bench;
    auto& memory = bench.memory;
    auto& device = bench.device;
    auto& stream = bench.stream;
    std::vector<float> const ones(4, 1.0F);
    // [acquire_all]
    std::vector<spillway::Tensor<float, 1>> parts(3);
    for (auto& part : parts) {
      part = spillway::Tensor<float, 1>::from_host_sync(memory, {4}, ones, stream);
    }
    auto sum = spillway::make_tensor<float>(memory, {4});
    {
      // `from` is a vector of leases.
      auto const [from, to] =
          memory.acquire_all(stream, spillway::reads(parts), spillway::writes(sum));
      std::vector<spillway::TensorView<float const, 1>> views;
      for (auto const& lease : from) {
        views.push_back(lease.view());
      }
      device.launch(stream, [views, out = to.view()] {
        for (std::size_t i = 0; i < out.size(); ++i) {
          out(i) = 0;
          for (auto const& view : views) {
            out(i) += view(i);
          }
        }
      });
    }
    // [acquire_all end]
    std::vector<float> result(4);
    sum.copy_to_host_sync(result, stream);
    CHECK(result == std::vector<float>(4, 3.0F));
  }

  TEST_CASE("streams: uploads through pinned memory, for which the host need not wait") {
    Bench bench;
    auto& device = bench.device;
    auto& memory = bench.memory;
    auto& stream = bench.stream;
    constexpr std::size_t count = 10'000;
    auto const read_batch = [](std::size_t batch, float* to) {
      std::fill_n(to, count, static_cast<float>(batch));
    };
    std::vector<spillway::Tensor<float, 1>> tensors;
    for (std::size_t batch = 0; batch < 5; ++batch) {
      tensors.push_back(spillway::make_tensor<float>(memory, {count}));
    }
    // [upload]
    constexpr std::size_t bytes = count * sizeof(float);
    std::array<void*, 2> pinned{};                  // while one is copied, the other is filled
    std::array<spillway::SimEvent, 2> is_copied{};  // CudaApi::event_type on a GPU
    for (std::size_t i = 0; i < 2; ++i) {
      pinned[i] = device.try_allocate_pinned(bytes, -1);  // null if there is no more
      is_copied[i] = device.create_event();               // complete until it is recorded
    }
    for (std::size_t batch = 0; batch < tensors.size(); ++batch) {
      std::size_t const i = batch % 2;
      device.synchronize(is_copied[i]);  // for the batch before the last one
      read_batch(batch, static_cast<float*>(pinned[i]));
      auto const to = tensors[batch].acquire_write(stream);
      device.copy(to.data(), pinned[i], bytes, spillway::CopyKind::to_device, stream);
      device.record(is_copied[i], stream);
    }
    for (std::size_t i = 0; i < 2; ++i) {
      device.synchronize(is_copied[i]);
      device.destroy_event(is_copied[i]);
      device.free_pinned(pinned[i], bytes);
    }
    // [upload end]
    for (std::size_t batch = 0; batch < tensors.size(); ++batch) {
      std::vector<float> values(count);
      tensors[batch].copy_to_host_sync(values, stream);
      CHECK(values == std::vector<float>(count, static_cast<float>(batch)));
    }
  }

  TEST_CASE("adapters: memory for code that knows addresses") {
    Bench bench;
    auto& memory = bench.memory;
    auto& stream = bench.stream;
    std::size_t const bytes = 1000;
    // [leased]
    spillway::LeasedMemory scratch{memory};          // memory: a DeviceAllocator
    void* p = scratch.allocate(bytes, 256, stream);  // for work on stream, from now on
    scratch.deallocate(p, stream);                   // reused after the work that is on stream now
    // [leased end]
    CHECK(scratch.allocation_count() == 0);
  }

  TEST_CASE("adapters: a lease becomes a DLPack tensor") {
    Bench bench;
    auto& memory = bench.memory;
    auto& stream = bench.stream;
    auto tensor = spillway::make_tensor<float>(memory, {4, 4});
    // [dlpack]
    auto* exported =
        spillway::dlpack::export_tensor(tensor.acquire(spillway::Access::write, stream),
                                        spillway::dlpack::device_of(memory.device()));
    // [dlpack end]
    CHECK(memory.stats().leased.blocks.current == 1);
    // [import]
    auto const imported =
        spillway::dlpack::import_sync<float, 2>(memory, exported->dl_tensor, stream);
    exported->deleter(exported);
    // [import end]
    CHECK(imported.extents() == tensor.extents());
    CHECK(memory.stats().leased.blocks.current == 0);
  }

  TEST_CASE("adapters: an observer is a member of the bundle") {
    spillway::DeviceAllocator<Observed::MyPolicies> memory{{.capacity_bytes = 1_MiB}};
    CHECK(memory.observer().records().empty());
  }
}
