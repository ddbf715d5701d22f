// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/host_mapping.hpp>
#include <spillway/host/posix_file_io.hpp>
#include <spillway/host/swap_file.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <new>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

namespace bandwidth {

/// Plain I/O, call by call: what a program does that has the bytes in memory and wants them in a
/// file. In large pages, as ours are: the kernel then makes larger requests of the same calls.
class RawFile {
 public:
  /// As large and as direct as the file tier it is compared with. `chunk_bytes` goes into one call,
  /// one after the other in the file or in random order.
  RawFile(std::filesystem::path const& folder,
          std::size_t bytes,
          std::size_t chunk_bytes,
          bool is_direct,
          bool is_random,
          std::uint64_t seed)
      : file_{folder, is_direct, {}},
        queue_{file_.make_queue({})},
        chunk_bytes_{chunk_bytes},
        buffer_{spillway::detail::HostMapping::try_map(chunk_bytes, any_numa_node)} {
    if (!file_.try_reserve(bytes)) {
      throw std::runtime_error{"no room for " + std::to_string(bytes) + " bytes in " +
                               folder.string()};
    }
    if (buffer_.data() == nullptr) {
      throw std::bad_alloc{};
    }
    std::memset(buffer_.data(), 0x5A, chunk_bytes);
    for (std::size_t at = 0; at < bytes; at += chunk_bytes) {
      offsets_.push_back(at);
    }
    if (is_random) {
      std::shuffle(offsets_.begin(), offsets_.end(), std::mt19937_64{seed});
    }
  }

  void write(std::size_t bytes) {
    for_each_chunk(bytes, [this](std::size_t at, std::size_t n) {
      return queue_.write(buffer_.data(), n, at);
    });
  }
  void read(std::size_t bytes) {
    for_each_chunk(bytes, [this](std::size_t at, std::size_t n) {
      return queue_.read(buffer_.data(), n, at);
    });
  }

 private:
  using File = spillway::detail::SwapFile<spillway::PosixFileIo>;

  static constexpr int any_numa_node = -1;

  template <class Use>
  void for_each_chunk(std::size_t bytes, Use const& use) {
    for (std::size_t const offset : offsets_) {
      if (int const error = use(offset, std::min(chunk_bytes_, bytes - offset)); error != 0) {
        throw std::runtime_error{std::string{"plain file I/O failed: "} + std::strerror(error)};
      }
    }
  }

  File file_;
  File::Queue queue_;
  std::size_t chunk_bytes_;
  spillway::detail::HostMapping buffer_;
  std::vector<std::size_t> offsets_;
};

}  // namespace bandwidth
