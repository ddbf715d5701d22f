// SPDX-License-Identifier: Apache-2.0
// The source of a target whose precompiled headers all tests share.
