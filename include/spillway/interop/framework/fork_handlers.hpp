// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <new>

#include <pthread.h>

namespace spillway::framework {

/// Installs handlers that let a process fork while its threads use a framework's leases. No other
/// thread is inside of a call to them when the child is made, and the child can continue to use the
/// leases.
///
/// The handlers are installed with `pthread_atfork`, so the system calls them immediately before
/// and after the child is made. Python's own handlers (`os.register_at_fork`) would not do: other
/// Python code runs between them and `fork`. The garbage collector may free storages there, which
/// takes the lock of the leases. The same thread would hold that lock already.
///
/// `Site` names the leases, with static functions:
/// - `leases_if_any()`: a pointer to an `OperandLeases`, or null while there are none.
/// - `frame_of_thread()`: the frame that the calling thread is inside of, as
///   `OperandLeases::after_fork_in_child` takes it.
template <class Site>
class ForkHandlers {
 public:
  /// Registers the handlers, for as long as the process lives. To be called once.
  ///
  /// @throws std::bad_alloc
  static void install() {
    if (::pthread_atfork(&before, &after_in_parent, &after_in_child) != 0) {
      throw std::bad_alloc{};
    }
  }

 private:
  /// The leases that this thread has locked. Other ones may have been installed by the time that
  /// `fork` returns.
  static auto& locked() {
    thread_local decltype(Site::leases_if_any()) leases = nullptr;
    return leases;
  }
  static void before() {
    locked() = Site::leases_if_any();
    if (locked() != nullptr) {
      locked()->before_fork();
    }
  }
  static void after_in_parent() {
    if (locked() != nullptr) {
      locked()->after_fork_in_parent();
    }
  }
  static void after_in_child() {
    if (locked() != nullptr) {
      locked()->after_fork_in_child(Site::frame_of_thread());
    }
  }
};

}  // namespace spillway::framework
