// SPDX-License-Identifier: Apache-2.0
// The code that launches the library's kernels, on the stand-in for a CUDA device, which runs each
// thread of a kernel on the host.
#include <spillway/device/cuda/cuda_api.hpp>
#include <spillway/testing/device_contracts.hpp>
#include <spillway/testing/stream_codec_contract.hpp>
#if defined(SPILLWAY_WITH_NVCOMP) && SPILLWAY_WITH_NVCOMP
#  include <spillway/nvcomp_codecs.cuh>
#else
#  include <spillway/cuda_kernels.cuh>
#endif

#include <doctest/doctest.h>

#include <cstddef>
#include <vector>

#include <support/copy_kernel_device.hpp>
#include <support/fake_cuda_call.hpp>

TEST_SUITE("cuda_codecs") {
  namespace {

  using namespace spillway;
  using spillway::test::CudaApiWithCopyKernel;
  using spillway::testing::CodecOnDevice;

  }  // namespace

  TEST_CASE("CudaCopyKernel: a launch takes many blocks and skips empty ones") {
    CudaApiWithCopyKernel device;
    spillway::testing::DeviceRig<CudaApi> rig{device};
    auto const stream = rig.stream();
    std::size_t const before = fake_cuda::fake->calls("cudaLaunchHostFunc");
    // As many as one launch takes, and a few more for another; one in eleven is empty.
    constexpr std::size_t blocks = spillway::detail::ManyCopyBlocks::most_blocks * 11 / 10 + 50;
    constexpr std::size_t launches = 2;
    unsigned char* const from = rig.device_memory(blocks * granule_bytes);
    unsigned char* const to = rig.device_memory(blocks * granule_bytes);
    std::vector<void*> targets;
    std::vector<void const*> sources;
    std::vector<std::size_t> sizes;
    for (std::size_t i = 0; i < blocks; ++i) {
      targets.push_back(to + i * granule_bytes);
      sources.push_back(from + i * granule_bytes);
      sizes.push_back(i % 11 == 0 ? 0 : granule_bytes);
    }
    device.copy_batch(targets, sources, sizes, CopyKind::on_device, stream);
    CHECK(fake_cuda::fake->calls("cudaLaunchHostFunc") - before == launches);
    device.copy_batch(
        targets, sources, std::vector<std::size_t>(blocks, 0), CopyKind::on_device, stream);
    CHECK(fake_cuda::fake->calls("cudaLaunchHostFunc") - before == launches);
    device.synchronize(stream);
  }

  TEST_CASE("CudaStripes: kernels are loaded while a stream is being captured") {
    CudaApi device;
    spillway::testing::DeviceRig<CudaApi> rig{device};
    auto const stream = rig.stream();
    fake_cuda::fake->begin_capture(stream);
    CHECK(CudaZeroBitmap::runs_on(device));
    CHECK(CudaApiWithCopyKernel{}.has_copy_kernel());
    CHECK_FALSE(fake_cuda::fake->is_capture_broken());
    fake_cuda::fake->end_capture(stream);
  }

  TEST_CASE_TEMPLATE_INVOKE(stream_codec_contract,
                            CodecOnDevice<CudaZeroBitmap, CudaApi>,
                            CodecOnDevice<CudaAsBfloat16, CudaApi>);
#if defined(SPILLWAY_WITH_NVCOMP) && SPILLWAY_WITH_NVCOMP
  TEST_CASE_TEMPLATE_INVOKE(stream_codec_contract,
                            CodecOnDevice<CudaBytePlanes<NvcompAns>, CudaApi>,
                            CodecOnDevice<CudaBytePlanes<NvcompLz4>, CudaApi>);
#endif
}
