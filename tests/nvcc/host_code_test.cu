// SPDX-License-Identifier: Apache-2.0
// Tests of host code as one unit: most of what they take to compile is the library's headers. They
// have no kernels, so the pass that compiles for GPUs need not read them.
#if !defined(__CUDA_ARCH__)
#  include "../observe/snapshot_test.cpp"
#  include "../pager/laws_test.cpp"
#  include "../policy/eviction/eviction_quality_test.cpp"
#endif
