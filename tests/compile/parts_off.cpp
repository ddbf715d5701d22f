// SPDX-License-Identifier: Apache-2.0
// A macro with the value 0 switches its part off, as if it were not defined. The libraries of these
// parts need not be there to compile this file.
#define SPILLWAY_WITH_CUFILE 0
#define SPILLWAY_WITH_IO_URING 0
#define SPILLWAY_WITH_LZ4 0
#define SPILLWAY_WITH_XXHASH 0
#define SPILLWAY_WITH_ZSTD 0
#undef NDEBUG
#define NDEBUG
#undef SPILLWAY_CHECKED
#define SPILLWAY_CHECKED 0

#include <spillway/host/file_checksums.hpp>
#include <spillway/host/system_file_io.hpp>
#include <spillway/policy/codec/byte_planes.hpp>

#include <type_traits>

namespace {

// A constant expression cannot contain an assertion that fails.
constexpr bool ignores_assertions() {
  SPILLWAY_ASSERT(false);
  return true;
}

static_assert(ignores_assertions());
static_assert(std::is_same_v<spillway::SystemFileIo, spillway::PosixFileIo>);
static_assert(!spillway::detail::FileChecksums::is_available);
static_assert(!spillway::detail::CompleteType<spillway::Zstd>);
static_assert(!spillway::detail::CompleteType<spillway::Lz4>);

}  // namespace
