// SPDX-License-Identifier: Apache-2.0
// Stands for the headers that the tests share: CMake compiles those for it, and the tests use the result.
