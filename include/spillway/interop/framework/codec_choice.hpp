// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/types.hpp>
#include <spillway/policy/codec/as_bfloat16.hpp>
#include <spillway/policy/codec/identity.hpp>
#include <spillway/policy/codec/zero_bitmap.hpp>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>

namespace spillway::framework {

/// How tensors are written while they are away, as users of a framework choose it.
enum class CodecChoice : std::uint8_t { none, lossless, bfloat16 };

/// The codec that a user means; no name means none.
///
/// @param is_by_tensor  whether the user says for which tensors: a codec that loses bits is never
///                      chosen for others
/// @throws std::invalid_argument, which says what is allowed
[[nodiscard]] inline CodecChoice codec_named(std::optional<std::string> const& name,
                                             bool is_by_tensor) {
  if (!name) {
    return CodecChoice::none;
  }
  if (*name == "lossless") {
    return CodecChoice::lossless;
  }
  if (*name != "bfloat16") {
    throw std::invalid_argument{R"(set_codec: the codec is "lossless", "bfloat16" or None, not ")" +
                                *name + '"'};
  }
  if (!is_by_tensor) {
    throw std::invalid_argument{"set_codec(\"bfloat16\") loses bits, so it has to be asked for by "
                                "tensor: set_codec(\"bfloat16\", for_=tensors)"};
  }
  return CodecChoice::bfloat16;
}

/// What carries out a choice on a device. An adapter specialises it where the device has codecs of
/// its own.
template <class Device>
struct CodecsOn {
  using lossless = ZeroBitmap;
  using bfloat16 = AsBfloat16;
};

/// Chooses how a block of a `DeviceAllocator` is written in the host pool from its next swap-out
/// on. Blocks whose sizes differ by less than an eighth count as alike: an adapter seldom knows
/// more of them, and a lossless codec is given up for those that it does not make smaller.
///
/// @throws as `DeviceAllocator::set_codec`
template <class Allocator>
void set_codec(Allocator& memory, BlockId block, std::size_t bytes, CodecChoice choice) {
  using Codecs = CodecsOn<typename Allocator::device_type>;
  switch (choice) {
  case CodecChoice::none:
    memory.template set_codec<Identity>(block);
    break;
  case CodecChoice::lossless: {
    auto const digits = static_cast<unsigned>(std::bit_width(bytes | 8U));
    auto const tag = digits << 3U | (bytes >> (digits - 4) & 7U);
    memory.template set_codec<typename Codecs::lossless>(block, tag);
    break;
  }
  case CodecChoice::bfloat16:
    memory.template set_codec<typename Codecs::bfloat16>(block);
    break;
  }
}

}  // namespace spillway::framework
