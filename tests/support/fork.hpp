// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <type_traits>

#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

namespace spillway::test {

#if defined(__SANITIZE_ADDRESS__)
#  define SPILLWAY_HAS_ADDRESS_SANITIZER 1
#elif defined(__has_feature)
#  if __has_feature(address_sanitizer)
#    define SPILLWAY_HAS_ADDRESS_SANITIZER 1
#  endif
#endif

/// Whether a forked child may allocate memory although another thread of its parent was allocating
/// when the parent forked. The C library's allocator takes its own locks before a fork.
/// AddressSanitizer's of LLVM 14 does not, so that such a child waits for ever: with it, tests fork
/// while no other thread works.
#if defined(SPILLWAY_HAS_ADDRESS_SANITIZER)
inline constexpr bool children_may_allocate = false;
#else
inline constexpr bool children_may_allocate = true;
#endif

/// A forked child that calls `work()` and ends. `work` returns whether all is right, or nothing; an
/// exception means that it is not.
class ForkedChild {
 public:
  template <class Work>
  explicit ForkedChild(Work work) : id_{::fork()} {
    if (id_ == 0) {
      ::alarm(100);  // a child that waits for a thread of its parent waits for ever
      bool is_right = false;
      try {
        if constexpr (std::is_void_v<decltype(work())>) {
          work();
          is_right = true;
        } else {
          is_right = work();
        }
      } catch (...) {  // NOLINT(bugprone-empty-catch): that is wrong, too
      }
      ::_exit(is_right ? 0 : 1);
    }
  }

  /// Waits until the child has ended. @returns its status: 0 if all was right
  [[nodiscard]] int status() const {
    int status = -1;
    return id_ > 0 && ::waitpid(id_, &status, 0) == id_ ? status : -1;
  }

 private:
  pid_t id_;
};

}  // namespace spillway::test
