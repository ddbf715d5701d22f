// SPDX-License-Identifier: Apache-2.0
// The target of the headers that the tests share: CMake precompiles them for it, once for all.
