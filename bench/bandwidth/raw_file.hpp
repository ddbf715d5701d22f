// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/host_mapping.hpp>
#include <spillway/host/posix_file_io.hpp>
#include <spillway/host/swap_file.hpp>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <new>
#include <stdexcept>
#include <string>

namespace bandwidth {

/// Plain sequential I/O: what a program does that has the bytes in memory and wants them in a file.
/// In large pages, as ours are: the kernel then makes larger requests of the same calls.
class RawFile {
 public:
  /// As large and as direct as the file tier it is compared with. `chunk_bytes` goes into one call.
  RawFile(std::filesystem::path const& folder,
          std::size_t bytes,
          std::size_t chunk_bytes,
          bool is_direct)
      : file_{folder, is_direct, {}},
        chunk_bytes_{chunk_bytes},
        buffer_{spillway::detail::HostMapping::try_map(chunk_bytes, any_numa_node)} {
    if (!file_.try_extend(bytes)) {
      throw std::runtime_error{"no room for " + std::to_string(bytes) + " bytes in " +
                               folder.string()};
    }
    if (buffer_.data() == nullptr) {
      throw std::bad_alloc{};
    }
    std::memset(buffer_.data(), 0x5A, chunk_bytes);
  }

  void write(std::size_t offset, std::size_t bytes) {
    for_each_chunk(offset, bytes, [this](std::size_t at, std::size_t n) {
      return file_.write(buffer_.data(), n, at);
    });
  }
  void read(std::size_t offset, std::size_t bytes) {
    for_each_chunk(offset, bytes, [this](std::size_t at, std::size_t n) {
      return file_.read(buffer_.data(), n, at);
    });
  }

 private:
  using File = spillway::detail::SwapFile<spillway::PosixFileIo>;

  static constexpr int any_numa_node = -1;

  template <class Use>
  void for_each_chunk(std::size_t offset, std::size_t bytes, Use const& use) {
    for (std::size_t const end = offset + bytes; offset < end; offset += chunk_bytes_) {
      if (int const error = use(offset, std::min(chunk_bytes_, end - offset)); error != 0) {
        throw std::runtime_error{std::string{"plain file I/O failed: "} + std::strerror(error)};
      }
    }
  }

  File file_;
  std::size_t chunk_bytes_;
  spillway::detail::HostMapping buffer_;
};

}  // namespace bandwidth
