// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <atomic>
#include <csignal>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <exception>
#include <string>
#include <thread>

#include "held.hpp"
#include <semaphore.h>
#include <unistd.h>

namespace spillway_tf {

/// Handles accesses to a tensor's address, outside of operations, while the tensor is swapped out.
/// Its pages are not there then, so the access raises SIGBUS, or SIGSEGV if pages are made
/// inaccessible. The handler swaps the tensor in, and the access is repeated. The tensor then stays
/// resident for good, as after `keep`. The first time, a message on standard error says so.
///
/// Since a signal handler may call few functions, a thread of its own swaps the tensor in, while
/// the thread with the fault waits. That takes as long as a copy of the tensor.
///
/// It fails if the tensor was freed, if there is no room, if its bytes are lost, or if the process
/// is a forked child, which does not have the thread. A message says so then, and the handlers that
/// were installed before are called, so that the program ends as it would have without this one.
template <class Site>
class FaultHandler {
 public:
  /// Installs the handler. If another handler was installed in front of it since the last call,
  /// installs it again in front of that one.
  static void install() {
    struct sigaction action {};
    action.sa_sigaction = &handle;
    action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
    sigemptyset(&action.sa_mask);
    for (int const signal : {SIGSEGV, SIGBUS}) {
      struct sigaction before {};
      ::sigaction(signal, &action, &before);
      if (before.sa_sigaction == &handle) {
        continue;
      }
      Others& others = Others::of_signal(signal);
      if (!others.is_known) {
        others = {.is_known = true, .first = before, .latest = before};
        Rescue::of_process().start();
      }
      others.latest = before;
    }
  }

 private:
  /// The handlers of others for one signal. The latest one may have been installed in front of this
  /// handler, and then calls that when it is done. The first one is called last.
  struct Others {
    bool is_known = false;
    struct sigaction first {};
    struct sigaction latest {};

    static Others& of_signal(int signal) {
      static std::array<Others, 2> the_others;
      return the_others[signal == SIGBUS ? 1 : 0];
    }
  };

  /// The thread that swaps tensors in, and the requests to it.
  class Rescue {
   public:
    static Rescue& of_process() {
      static auto* const the_rescue = new Rescue;  // its thread does not end
      return *the_rescue;
    }

    void start() {
      if (process_ != 0 || ::sem_init(&asked_, 0, 0) != 0) {
        return;
      }
      std::thread thread{[this] { serve(); }};
      thread_ = thread.native_handle();
      process_ = ::getpid();
      thread.detach();
    }
    /// Requests the tensor at an address and waits for it. Calls only functions that a signal
    /// handler may call. @returns false if a repeated access would fault again
    [[nodiscard]] bool try_bring_in(void* address) noexcept {
      if (process_ != ::getpid() || ::pthread_equal(thread_, ::pthread_self()) != 0) {
        return false;
      }
      Request* const request = try_take();
      if (request == nullptr) {
        return false;
      }
      request->address = address;
      request->state.store(State::asked);
      (void)::sem_post(&asked_);
      for (int i = 0; i < most_naps; ++i) {
        State const state = request->state.load();
        if (state != State::asked) {
          request->state.store(State::unused);
          return state == State::done;
        }
        nap();
      }
      return false;  // the request probably waits for something that this thread holds
    }

   private:
    enum class State { unused, taken, asked, done, refused };
    struct Request {
      std::atomic<State> state{State::unused};
      void* address = nullptr;
    };

    static constexpr std::size_t most_requests = 64;
    static constexpr long nap_ns = 50'000;
    // about 30 s, since the request may have to wait for operations
    static constexpr int most_naps = 600'000;
    static constexpr int most_vain_requests = 1000;  // in a row, for tensors that are kept already

    [[nodiscard]] Request* try_take() noexcept {
      for (int i = 0; i < most_naps; ++i) {
        for (Request& request : requests_) {
          State expected = State::unused;
          if (request.state.compare_exchange_strong(expected, State::taken)) {
            return &request;
          }
        }
        nap();
      }
      return nullptr;
    }
    static void nap() noexcept {
      timespec const time{.tv_sec = 0, .tv_nsec = nap_ns};
      (void)::nanosleep(&time, nullptr);
    }
    void serve() {
      for (;;) {
        while (::sem_wait(&asked_) != 0) {
        }
        for (Request& request : requests_) {
          if (request.state.load() == State::asked) {
            request.state.store(bring_in(request.address) ? State::done : State::refused);
          }
        }
      }
    }
    [[nodiscard]] bool bring_in(void* address) noexcept {
      try {
        auto& leases = Site::leases();
        void* const base = leases.base_of(address);
        if (base == nullptr) {
          std::fputs("\nspillway_tf: the memory of a tensor was used after it was freed.\n\n",
                     stderr);
          return false;
        }
        // Several threads may request the same tensor, but not without end.
        bool const is_vain = !leases.view(base).is_swappable;
        vain_requests_ = is_vain ? vain_requests_ + 1 : 0;
        if (vain_requests_ > most_vain_requests) {
          return false;
        }
        Held<Site>::keep(base, /*may_write=*/true);
        if (!has_warned_) {
          has_warned_ = true;
          std::fputs(
              "\nspillway_tf: the memory of a tensor was used outside of any operation while the "
              "tensor was swapped out. It was brought back and stays, as do others of which that "
              "is found out. To write there is not safe before that: call "
              "spillway_tf.keep(tensor) before its address is given to other code, or use it "
              "inside spillway_tf.hold(tensor).\n\n",
              stderr);
        }
        return true;
      } catch (std::exception const& error) {
        std::string const text =
            std::string{"\nspillway_tf: the memory of a tensor was used outside of any operation "
                        "while the tensor was swapped out, and it cannot be brought back: "} +
            error.what() + "\n\n";
        std::fputs(text.c_str(), stderr);
        return false;
      }
    }

    sem_t asked_{};
    pthread_t thread_{};
    pid_t process_ = 0;
    std::array<Request, most_requests> requests_{};
    int vain_requests_ = 0;
    bool has_warned_ = false;
  };

  // Calls only functions that a signal handler may call.
  static void handle(int signal, siginfo_t* info, void* /*context*/) {
    Others& others = Others::of_signal(signal);
    bool const is_fault = info->si_code > 0;
    if (is_fault && Site::may_own(info->si_addr)) {
      if (Rescue::of_process().try_bring_in(info->si_addr)) {
        return;
      }
      constexpr char const* text =
          "\nspillway_tf: the memory of a tensor was used outside of any operation, and is not "
          "there. Call spillway_tf.keep(tensor) before its address is given to other code, or use "
          "it inside spillway_tf.hold(tensor).\n\n";
      (void)!::write(2, text, std::strlen(text));
    }
    ::sigaction(signal, &others.latest, nullptr);
    others.latest = others.first;
    if (!is_fault) {
      (void)::raise(signal);  // a fault occurs again by itself, when the access is repeated
    }
  }
};

}  // namespace spillway_tf
