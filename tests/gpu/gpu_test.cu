// SPDX-License-Identifier: Apache-2.0
// Tests on a GPU as one unit: most of what they take to compile is the library's headers.
#include "allocator_test.cu"
#include "codec_test.cu"
#include "copy_kernel_test.cu"
#include "graph_test.cu"
#include "interop_test.cu"
#if defined(SPILLWAY_WITH_NVCOMP) && SPILLWAY_WITH_NVCOMP
#  include "nvcomp_test.cu"
#endif
#include "share_test.cu"
#include "streams_test.cu"
