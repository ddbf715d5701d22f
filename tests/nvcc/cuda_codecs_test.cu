// SPDX-License-Identifier: Apache-2.0
// What launches the codecs of GPUs, on the stand-in for a CUDA device: it has no cores, and runs on
// the host what each thread of their kernels does.
#include <spillway/device/cuda/cuda_api.hpp>
#include <spillway/testing/stream_codec_contract.hpp>
#if defined(SPILLWAY_WITH_NVCOMP)
#  include <spillway/nvcomp_codecs.cuh>
#else
#  include <spillway/cuda_codecs.cuh>
#endif

#include <doctest/doctest.h>

TEST_SUITE("cuda_codecs") {
  namespace {

  using namespace spillway;
  using spillway::testing::CodecOnDevice;

  }  // namespace

  TEST_CASE_TEMPLATE_INVOKE(stream_codec_contract,
                            CodecOnDevice<CudaZeroBitmap, CudaApi>,
                            CodecOnDevice<CudaAsBfloat16, CudaApi>);
#if defined(SPILLWAY_WITH_NVCOMP)
  TEST_CASE_TEMPLATE_INVOKE(stream_codec_contract,
                            CodecOnDevice<CudaBytePlanes<NvcompAns>, CudaApi>,
                            CodecOnDevice<CudaBytePlanes<NvcompLz4>, CudaApi>);
#endif
}
