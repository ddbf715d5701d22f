// SPDX-License-Identifier: Apache-2.0
#include "../unit/snapshot_test.cpp"
