// SPDX-License-Identifier: Apache-2.0
#include "../unit/laws_test.cpp"
