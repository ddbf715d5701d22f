// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/block/posix_file_io.hpp>
#include <spillway/block/swap_file.hpp>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>

namespace bandwidth {

/// Plain sequential I/O: what a program does that has the bytes in memory and wants them in a file.
class RawFile {
 public:
  /// As large and as direct as the file tier it is compared with. `chunk_bytes` goes into one call.
  RawFile(std::filesystem::path const& folder,
          std::size_t bytes,
          std::size_t chunk_bytes,
          bool is_direct)
      : file_{folder, is_direct, {}}, chunk_bytes_{chunk_bytes} {
    if (!file_.try_extend(bytes)) {
      throw std::runtime_error{"no room for " + std::to_string(bytes) + " bytes in " +
                               folder.string()};
    }
    buffer_.reset(static_cast<std::byte*>(::operator new(chunk_bytes, alignment)));
    std::memset(buffer_.get(), 0x5A, chunk_bytes);
  }

  void write(std::size_t offset, std::size_t bytes) {
    for_each_chunk(offset, bytes, [this](std::size_t at, std::size_t n) {
      return file_.write(buffer_.get(), n, at);
    });
  }
  void read(std::size_t offset, std::size_t bytes) {
    for_each_chunk(offset, bytes, [this](std::size_t at, std::size_t n) {
      return file_.read(buffer_.get(), n, at);
    });
  }

 private:
  using File = spillway::SwapFile<spillway::PosixFileIo>;

  static constexpr std::align_val_t alignment{File::direct_alignment_bytes};
  struct Free {
    void operator()(std::byte* p) const noexcept { ::operator delete(p, alignment); }
  };

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
  std::unique_ptr<std::byte, Free> buffer_;
};

}  // namespace bandwidth
