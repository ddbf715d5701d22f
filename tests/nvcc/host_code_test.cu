// SPDX-License-Identifier: Apache-2.0
// Tests of host code as one unit: most of what they take to compile is the library's headers.
#include "../observe/snapshot_test.cpp"
#include "../pager/laws_test.cpp"
#include "../policy/eviction/eviction_quality_test.cpp"
