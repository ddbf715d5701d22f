// SPDX-License-Identifier: Apache-2.0
#include "../observe/snapshot_test.cpp"
