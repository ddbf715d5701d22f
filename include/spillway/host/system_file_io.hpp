// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/host/posix_file_io.hpp>
#include <spillway/host/ring_file_io.hpp>
#if defined(SPILLWAY_WITH_IO_URING)
#  if defined(SPILLWAY_COMPILED)
#    error "spillway::compiled has single file calls: link spillway::spillway instead"
#  endif
#  include <spillway/host/io_uring_file_io.hpp>
#endif

namespace spillway {

/// The file calls of a host pool that is told nothing else. Programs that link
/// `spillway::io_uring` use the kernel's ring where it has one.
#if defined(SPILLWAY_WITH_IO_URING)
using SystemFileIo = IoUringFileIo;
#else
using SystemFileIo = PosixFileIo;
#endif

}  // namespace spillway
