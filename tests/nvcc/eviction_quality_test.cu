// SPDX-License-Identifier: Apache-2.0
#include "../model/eviction_quality_test.cpp"
