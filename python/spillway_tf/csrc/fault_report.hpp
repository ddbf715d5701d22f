// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <csignal>
#include <cstddef>
#include <cstring>

#include <unistd.h>

namespace spillway_tf {

/// Writes a message when code uses the address of a tensor that is swapped out, whose pages are not
/// accessible. The program then ends as it would have without this.
template <class Site>
class FaultReport {
 public:
  /// To be called once in a process.
  static void install() {
    struct sigaction action {};
    action.sa_sigaction = &report;
    action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
    sigemptyset(&action.sa_mask);
    ::sigaction(SIGSEGV, &action, &before());
  }

 private:
  static struct sigaction& before() {
    static struct sigaction the_one {};
    return the_one;
  }

  // Calls only functions that a signal handler may call.
  static void report(int /*signal*/, siginfo_t* info, void* /*context*/) {
    if (Site::may_own(info->si_addr)) {
      constexpr char const* text =
          "\nspillway_tf: the memory of a tensor was used outside of any operation while the "
          "tensor "
          "was swapped out, or after it was freed. Call spillway_tf.keep(tensor) before its "
          "address is "
          "given to other code, or use it inside spillway_tf.hold(tensor).\n\n";
      (void)!::write(2, text, std::strlen(text));
    }
    ::sigaction(SIGSEGV, &before(), nullptr);  // the access is tried again, and faults again
  }
};

}  // namespace spillway_tf
