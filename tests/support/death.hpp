// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <doctest/doctest.h>

#include <array>
#include <csignal>
#include <cstddef>
#include <cstdio>
#include <string>

#include <sys/wait.h>
#include <unistd.h>

namespace spillway::test {

struct Death {
  int signal = 0;
  std::string message;
};

/// Runs `act` in a process of its own; returns the signal that ended the process and its output.
template <class Act>
Death death_of(Act act) {
  std::array<int, 2> ends{};
  REQUIRE(::pipe(ends.data()) == 0);
  std::fflush(nullptr);  // or the child would print it again
  pid_t const child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    for (int const signal : {SIGABRT, SIGSEGV, SIGBUS}) {
      std::signal(signal, SIG_DFL);
    }
    ::dup2(ends[1], STDERR_FILENO);
    act();
    ::_exit(0);
  }
  ::close(ends[1]);
  Death death;
  std::array<char, 512> piece{};
  for (ssize_t n = 0; (n = ::read(ends[0], piece.data(), piece.size())) > 0;) {
    death.message.append(piece.data(), static_cast<std::size_t>(n));
  }
  ::close(ends[0]);
  int status = 0;
  ::waitpid(child, &status, 0);
  death.signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
  return death;
}

}  // namespace spillway::test
