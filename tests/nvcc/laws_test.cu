// SPDX-License-Identifier: Apache-2.0
#include "../pager/laws_test.cpp"
