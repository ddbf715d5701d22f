// SPDX-License-Identifier: Apache-2.0
// What the programs share that check large-model support in C++.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>

#include <c10/util/Exception.h>
#include <c10/util/Logging.h>

inline void check(bool is_right, char const* what, int line) {
  if (!is_right) {
    std::fprintf(stderr, "line %d: not so: %s\n", line, what);
    std::exit(1);
  }
}
#undef CHECK  // that of PyTorch's Logging.h
#define CHECK(...) check(static_cast<bool>(__VA_ARGS__), #__VA_ARGS__, __LINE__)

/// Returns the error that a call throws; an empty text if it throws none.
template <class Error = c10::Error, class Act>
[[nodiscard]] std::string error_of(Act act) {
  try {
    act();
  } catch (Error const& error) {
    return error.what();
  }
  return {};
}
[[nodiscard]] inline bool has(std::string const& text, char const* part) {
  return text.find(part) != std::string::npos;
}
