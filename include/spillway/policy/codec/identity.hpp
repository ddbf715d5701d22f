// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/codec.hpp>

#include <algorithm>
#include <cstddef>
#include <span>
#include <string_view>

namespace spillway {

/// The codec that changes nothing. Every block has it until another one is chosen. The pool copies
/// the bytes of such blocks and never calls this codec.
struct Identity {
  static constexpr bool is_lossless = true;
  static constexpr bool is_identity = true;

  [[nodiscard]] static constexpr std::string_view name() noexcept { return "identity"; }
  [[nodiscard]] static constexpr std::size_t worst_bytes(std::size_t bytes) noexcept {
    return bytes;
  }

  [[nodiscard]] std::size_t encode(std::span<std::byte const> from,
                                   std::span<std::byte> to) const noexcept {
    std::copy(from.begin(), from.end(), to.begin());
    return from.size();
  }
  [[nodiscard]] bool decode(std::span<std::byte const> from,
                            std::span<std::byte> to) const noexcept {
    if (from.size() != to.size()) {
      return false;
    }
    std::copy(from.begin(), from.end(), to.begin());
    return true;
  }
};

}  // namespace spillway
