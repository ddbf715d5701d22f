// SPDX-License-Identifier: Apache-2.0
// CuFileIo and the allocator over it, on stand-ins for cuFile and the CUDA runtime. On a GPU:
// tests/gpu/.
#include <spillway/concepts/file_io_api.hpp>
#include <spillway/core/error.hpp>
#include <spillway/cuda.hpp>
#include <spillway/device/sim/sim_api.hpp>
#include <spillway/device_allocator.hpp>
#include <spillway/host/cufile_io.hpp>
#include <spillway/host/posix_file_io.hpp>
#include <spillway/swappable_buffer.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include <support/fake_cudart.hpp>
#include <support/fake_cufile.hpp>
#include <support/host_work.hpp>
#include <support/temporary_folder.hpp>

TEST_SUITE("cufile_io") {
  using namespace spillway;
  using namespace spillway::literals;

  namespace {

  using Allocator = DeviceAllocator<CudaPolicies>;
  using Buffer = SwappableBuffer<Allocator>;

  static_assert(DeviceFileQueueApi<CuFileIo<>::Queue, CudaApi>);
  static_assert(!DeviceFileQueueApi<CuFileIo<>::Queue, SimApi>);

  struct FakeMachine {
    explicit FakeMachine(FakeCufile::State const& state) {
      FakeCufile::state() = state;
      FakeCufile::reads = FakeCufile::writes = 0;
    }
    FakeCudart cuda{{.capacity_bytes = 64_MiB, .numa_node = 0}};
  };

  /// Three blocks on a device with room for one, and a file behind it.
  struct Bench : FakeMachine {
    static constexpr std::size_t block_bytes = 1_MiB;

    explicit Bench(FakeCufile::State const& state = {}) : FakeMachine{state} {
      for (std::uint32_t i = 0; i < 3; ++i) {
        buffers.emplace_back(allocator, block_bytes);
        write(i, i + 1);
      }
    }
    ~Bench() {
      buffers.clear();
      device.synchronize(stream);
      allocator.retire_stream(stream);
      device.destroy_stream(stream);
    }

    Allocator::Options options() const {
      Allocator::Options options{.capacity_bytes = block_bytes};
      options.host.file_bytes = 16_MiB;
      options.host.file = folder.path();
      options.host.slab_bytes = 4_MiB;
      options.host.file_checksums = false;
      return options;
    }
    void write(std::size_t i, std::uint32_t tag) {
      auto const lease = buffers[i].acquire(Access::write, stream);
      work.write(lease.data(), block_bytes, tag, stream);
    }
    void check(std::size_t i, std::uint32_t tag) {
      auto const lease = buffers[i].acquire(Access::read, stream);
      work.check(lease.data(), block_bytes, tag, stream);
    }
    void check_all() {
      for (int round = 0; round < 2; ++round) {
        for (std::uint32_t i = 0; i < 3; ++i) {
          check(i, i + 1);
        }
      }
      device.synchronize(stream);
      CHECK(work.wrong() == 0);
    }

    TemporaryFolder folder;
    CudaApi device{1};  // which is not the current one
    test::HostWork<CudaApi> work{device};
    cudaStream_t stream = device.create_stream();
    Allocator allocator{device, options()};
    std::vector<Buffer> buffers;
  };

  }  // namespace

  TEST_CASE("CuFileIo: blocks go directly between device and file, and keep their bytes") {
    {
      Bench bench;
      CHECK(FakeCufile::open_files() == 2);  // one for each direction
      bench.check_all();
      CHECK(bench.allocator.host_stats().file_calls == "cuFile");
      CHECK(FakeCufile::writes > 0);
      CHECK(FakeCufile::reads > 0);
    }
    CHECK(FakeCufile::open_files() == 0);
  }

  TEST_CASE(
      "CuFileIo: where cuFile refuses, bytes go through host memory, and the statistics count it") {
    FakeCufile::State state;
    SUBCASE("cuFile has no driver") {
      state.has_driver = false;
    }
    SUBCASE("cuFile refuses the file") {
      state.takes_files = false;
    }
    SUBCASE("cuFile has no calls on streams") {
      state.has_streams = false;
    }
    Bench bench{state};
    bench.check_all();
    CHECK(bench.allocator.host_stats().file_calls == HostFileIo{}.make_queue(0, {}).name());
    CHECK(FakeCufile::writes == 0);
    CHECK(FakeCufile::reads == 0);
  }

  TEST_CASE("CuFileIo: a failed transfer is an error of its own block") {
    for (ssize_t const result : {ssize_t{-1}, ssize_t{-28}, ssize_t{-5011}, ssize_t{4096}}) {
      CAPTURE(result);
      Bench bench;
      bench.check_all();
      FakeCufile::state().result = result;
      auto const acquire_twice = [&] {  // the first mostly comes before the failure
        (void)bench.buffers[0].acquire(Access::read, bench.stream);
        bench.device.synchronize(bench.stream);
        (void)bench.buffers[0].acquire(Access::read, bench.stream);
      };
      CHECK_THROWS_AS(acquire_twice(), FileTierError);
      FakeCufile::state().result = 0;
      bench.check(1, 2);
      bench.check(2, 3);
      bench.write(0, 9);
      bench.check(0, 9);
      bench.device.synchronize(bench.stream);
      CHECK(bench.work.wrong() == 0);
    }
  }
}
