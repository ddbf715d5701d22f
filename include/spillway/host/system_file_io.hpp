// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/host/posix_file_io.hpp>
#include <spillway/host/ring_file_io.hpp>
#if defined(SPILLWAY_WITH_IO_URING) && SPILLWAY_WITH_IO_URING
#  if defined(SPILLWAY_COMPILED)
#    error "spillway::compiled has single file calls: link spillway::spillway instead"
#  endif
#  include <spillway/host/io_uring_file_io.hpp>
#endif
#if defined(SPILLWAY_WITH_CUFILE) && SPILLWAY_WITH_CUFILE
#  if defined(SPILLWAY_COMPILED)
#    error "spillway::compiled has single file calls: link spillway::spillway instead"
#  endif
#  include <spillway/host/cufile_io.hpp>
#endif

namespace spillway {

#if defined(SPILLWAY_WITH_IO_URING) && SPILLWAY_WITH_IO_URING
using HostFileIo = IoUringFileIo;
#else
using HostFileIo = PosixFileIo;
#endif

/// The default `FileIoApi` of a host pool. Programs that link `spillway::io_uring` use io_uring if
/// the kernel has it. Those that link `spillway::cufile` transfer directly between file and GPU if
/// the machine supports that.
#if defined(SPILLWAY_WITH_CUFILE) && SPILLWAY_WITH_CUFILE
using SystemFileIo = CuFileIo<HostFileIo>;
#else
using SystemFileIo = HostFileIo;
#endif

}  // namespace spillway
