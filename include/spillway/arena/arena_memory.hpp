// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/device_api.hpp>
#include <spillway/concepts/device_capabilities.hpp>
#include <spillway/core/error.hpp>
#include <spillway/core/range.hpp>
#include <spillway/core/types.hpp>

#include <algorithm>
#include <cstddef>
#include <map>
#include <vector>

namespace spillway::detail {

/// Takes memory from a device for an arena, and gives it back: in reservations, each with addresses
/// of its own, or in pieces that are mapped into one range of addresses, the line.
///
/// Pieces can be added and removed one by one, so an arena on a line grows and shrinks without
/// being split into segments. The device must then model `VirtualMemoryApi`. PyTorch's expandable
/// segments work in the same way. One device call maps, or unmaps, pieces that are adjacent.
///
/// Threads  thread-compatible.
template <DeviceApi Device>
class ArenaMemory {
 public:
  static constexpr bool is_thread_safe = false;

  /// If `line_bytes` is not 0, reserves a line of that many bytes of addresses, for pieces of at
  /// most `piece_bytes`; else memory is taken in reservations. `device` is not owned and must
  /// outlive this object.
  ///
  /// @throws DeviceError; ContractViolation if the device has no virtual memory
  ArenaMemory(Device& device, std::size_t line_bytes, std::size_t piece_bytes) : device_{&device} {
    if constexpr (VirtualMemoryApi<Device>) {
      if (line_bytes != 0) {
        granularity_bytes_ = device.granularity_bytes();
        line_bytes_ = round_up(line_bytes, granularity_bytes_);
        // Limited to the line, since rounding up a number near the largest would overflow.
        piece_bytes_ =
            round_up(std::clamp<std::size_t>(piece_bytes, 1, line_bytes_), granularity_bytes_);
        base_ = static_cast<std::byte*>(device.reserve_address(line_bytes_));
      }
    } else {
      expects(
          line_bytes == 0, "grows_in_place needs a device with virtual memory", {}, "DefragArena");
    }
  }
  ArenaMemory(ArenaMemory const&) = delete;
  ArenaMemory& operator=(ArenaMemory const&) = delete;
  /// @pre reservations have been released
  ~ArenaMemory() {
    if constexpr (VirtualMemoryApi<Device>) {
      if (base_ != nullptr) {
        release_pieces(base_, base_ + line_bytes_);
        device_->free_address(base_, line_bytes_);
      }
    }
  }

  [[nodiscard]] bool is_one_line() const noexcept { return base_ != nullptr; }
  [[nodiscard]] std::byte* base() const noexcept { return base_; }
  [[nodiscard]] std::size_t line_bytes() const noexcept { return line_bytes_; }
  /// Returns the number of which the sizes of pieces are multiples.
  [[nodiscard]] std::size_t granularity_bytes() const noexcept { return granularity_bytes_; }

  /// Takes memory from the device: at `segment.address` on a line, else anywhere, which sets the
  /// address. @returns false if the device is full, or if there are still pieces in that part of
  /// the line; nothing has been taken then
  ///
  /// @throws DeviceError, std::bad_alloc; nothing has been taken then
  [[nodiscard]] bool try_reserve(Segment& segment) {
    if constexpr (VirtualMemoryApi<Device>) {
      if (is_one_line()) {
        auto* const begin = static_cast<std::byte*>(segment.address);
        if (pieces_.lower_bound(begin) != pieces_.lower_bound(begin + segment.bytes)) {
          return false;
        }
        try {
          if (try_add_pieces(begin, begin + segment.bytes)) {
            return true;
          }
        } catch (...) {
          release_pieces(begin, begin + segment.bytes);
          throw;
        }
        release_pieces(begin, begin + segment.bytes);
        return false;
      }
    }
    segment.address = device_->try_reserve(segment.bytes);
    return segment.address != nullptr;
  }

  /// Gives memory that no work uses any more back to the device: whole pieces of a line, else a
  /// whole reservation.
  void release(Segment const& segment) noexcept {
    if constexpr (VirtualMemoryApi<Device>) {
      if (is_one_line()) {
        auto* const begin = static_cast<std::byte*>(segment.address);
        release_pieces(begin, begin + segment.bytes);
        return;
      }
    }
    device_->release(segment.address, segment.bytes);
  }

  /// Returns the whole pieces at the upper end of the mapped addresses [begin, end): as many as
  /// contain `bytes`, or all.
  [[nodiscard]] Segment
  top_pieces(std::byte* begin, std::byte* end, std::size_t bytes) const noexcept {
    Segment top;
    for (auto piece = pieces_.lower_bound(end); piece != pieces_.begin() && top.bytes < bytes;) {
      --piece;
      if (piece->first < begin) {
        break;
      }
      if (piece->first + piece->second.bytes <= end) {
        top.address = piece->first;
        top.bytes += piece->second.bytes;
      }
    }
    return top;
  }

 private:
  struct Nothing {};
  template <class D>
  struct PhysicalOf {
    using type = Nothing;
  };
  template <VirtualMemoryApi D>
  struct PhysicalOf<D> {
    using type = typename D::physical_type;
  };
  struct Piece {
    std::size_t bytes = 0;
    [[no_unique_address]] typename PhysicalOf<Device>::type physical{};
  };

  using Pieces = std::map<std::byte*, Piece>;  // by address

  /// Maps new pieces of `piece_bytes_` to [begin, end); the last one may be smaller.
  bool try_add_pieces(std::byte* begin, std::byte* end) requires VirtualMemoryApi<Device> {
    while (begin != end) {
      auto const left = static_cast<std::size_t>(end - begin);
      std::size_t const bytes = std::min(piece_bytes_, left);
      std::size_t const count = left / bytes;
      if (!try_add_pieces(begin, bytes, count)) {
        return false;
      }
      begin += count * bytes;
    }
    return true;
  }
  bool try_add_pieces(std::byte* begin,
                      std::size_t bytes,
                      std::size_t count) requires VirtualMemoryApi<Device> {
    Pieces added;
    auto const release_added = [&]() noexcept {
      for (auto const& [address, piece] : added) {
        if (piece.bytes != 0) {  // 0: it could not be created
          device_->release_physical(piece.physical);
        }
      }
    };
    try {
      std::vector<typename Device::physical_type> run;
      run.reserve(count);
      while (run.size() < count) {
        Piece& piece = added[begin + run.size() * bytes];
        auto const physical = device_->try_create_physical(bytes);
        if (!physical) {
          release_added();
          return false;
        }
        piece = {bytes, *physical};
        run.push_back(*physical);
      }
      if (!device_->try_map(begin, bytes, run)) {
        release_added();
        return false;
      }
    } catch (...) {
      release_added();
      throw;
    }
    pieces_.merge(added);
    return true;
  }
  void release_pieces(std::byte* begin, std::byte* end) noexcept requires VirtualMemoryApi<Device> {
    auto const first = pieces_.lower_bound(begin);
    auto const last = pieces_.lower_bound(end);
    for (auto piece = first; piece != last;) {
      std::byte* const address = piece->first;
      std::size_t bytes = 0;
      for (; piece != last && piece->first == address + bytes; ++piece) {
        bytes += piece->second.bytes;
      }
      device_->unmap(address, bytes);
    }
    for (auto piece = first; piece != last; piece = pieces_.erase(piece)) {
      device_->release_physical(piece->second.physical);
    }
  }

  Device* device_;
  std::size_t granularity_bytes_ = granule_bytes;
  std::size_t line_bytes_ = 0;
  std::size_t piece_bytes_ = 0;
  std::byte* base_ = nullptr;
  Pieces pieces_;
};

}  // namespace spillway::detail
