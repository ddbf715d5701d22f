// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <iostream>

#include <unistd.h>

namespace command_line {

/// Shows on standard error how far a program is. On a terminal it overwrites one line, which is
/// removed at the end.
class Progress {
 public:
  /// @param is_logged  whether to print a line now and then if there is no terminal
  explicit Progress(bool is_logged)
      : is_terminal_{isatty(STDERR_FILENO) != 0}, is_logged_{is_logged} {}
  Progress(Progress const&) = delete;
  Progress& operator=(Progress const&) = delete;
  ~Progress() { clear(); }

  /// Shows what `text()` returns, unless the last one was shown a moment ago.
  template <class Text>
  void show(Text text) {
    using namespace std::chrono_literals;
    auto const now = std::chrono::steady_clock::now();
    if ((!is_terminal_ && !is_logged_) || now - last_ < (is_terminal_ ? 100ms : 5s)) {
      return;
    }
    clear();
    last_ = now;
    std::cerr << text() << (is_terminal_ ? "" : "\n") << std::flush;
    has_line_ = is_terminal_;
  }

  /// Removes the line, so that something else can be printed. The next call of `show` is never
  /// skipped.
  void clear() {
    last_ = {};
    if (has_line_) {
      std::cerr << "\r\x1b[K" << std::flush;
      has_line_ = false;
    }
  }

 private:
  bool is_terminal_;
  bool is_logged_;
  bool has_line_ = false;
  std::chrono::steady_clock::time_point last_;
};

}  // namespace command_line
