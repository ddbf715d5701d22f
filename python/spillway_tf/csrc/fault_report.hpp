// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <csignal>
#include <cstddef>
#include <cstring>

#include <unistd.h>

namespace spillway_tf {

/// Writes a message when code uses the address of a tensor that is swapped out, whose pages are not
/// accessible. The program then ends as it would have without this: the handlers that were there
/// before are called.
template <class Site>
class FaultReport {
 public:
  /// Puts the report before the handler that is there now, if that is another one. Called again, it
  /// is the first one again.
  static void install() {
    struct sigaction action {};
    action.sa_sigaction = &report;
    action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
    sigemptyset(&action.sa_mask);
    struct sigaction before {};
    ::sigaction(SIGSEGV, &action, &before);
    if (before.sa_sigaction == &report) {
      return;
    }
    Others& others = Others::of_process();
    if (!others.is_known) {
      others = {.is_known = true, .first = before, .latest = before};
    }
    others.latest = before;
  }

 private:
  /// Handlers of others. The latest may have been put in front of the report, and then calls that
  /// when it is done; the first is called in the end.
  struct Others {
    bool is_known = false;
    struct sigaction first {};
    struct sigaction latest {};

    static Others& of_process() {
      static Others the_others;
      return the_others;
    }
  };

  // Calls only functions that a signal handler may call.
  static void report(int signal, siginfo_t* info, void* /*context*/) {
    Others& others = Others::of_process();
    bool const is_fault = info->si_code > 0;
    if (is_fault && Site::may_own(info->si_addr)) {
      constexpr char const* text =
          "\nspillway_tf: the memory of a tensor was used outside of any operation while the "
          "tensor "
          "was swapped out, or after it was freed. Call spillway_tf.keep(tensor) before its "
          "address is "
          "given to other code, or use it inside spillway_tf.hold(tensor).\n\n";
      (void)!::write(2, text, std::strlen(text));
    }
    ::sigaction(SIGSEGV, &others.latest, nullptr);
    others.latest = others.first;
    if (!is_fault) {
      (void)::raise(signal);  // a fault comes again by itself, when the access is tried again
    }
  }
};

}  // namespace spillway_tf
