// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>

namespace support {

/// Makes the system pass the calling thread's system calls through a filter, for as long as the
/// thread lives. Several filters add up. @returns false if the system allows no filters
template <std::size_t size>
[[nodiscard]] bool try_filter_calls(std::array<sock_filter, size> code) {
  sock_fprog const program{static_cast<unsigned short>(code.size()), code.data()};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

/// Makes the system answer a system call of the calling thread, such as SYS_fallocate, with
/// `error`. @returns as `try_filter_calls`
[[nodiscard]] inline bool try_fail_calls(unsigned call, int error) {
  return try_filter_calls(std::array<sock_filter, 4>{{
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<unsigned>(error)),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  }});
}

}  // namespace support
