// SPDX-License-Identifier: Apache-2.0
#include "../policy/eviction/eviction_quality_test.cpp"
