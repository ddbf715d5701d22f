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

/// The codecs that users of a framework can choose for tensors that are swapped out.
enum class CodecChoice : std::uint8_t { none, lossless, bfloat16 };

/// Returns the codec that a user has named; without a name, none.
///
/// @param is_by_tensor  whether the user has named the tensors, too. Only then may the codec be one
///                      that loses bits
/// @throws std::invalid_argument with a message that says what is allowed
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

/// Maps a choice to the codec classes of a device. An adapter specialises it for devices that have
/// codecs of their own.
template <class Device>
struct CodecsOn {
  using lossless = ZeroBitmap;
  using bfloat16 = AsBfloat16;
};

/// Sets the codec of a block of a `DeviceAllocator`, from its next swap-out on. The tag of the
/// block is made from its size: blocks whose sizes differ by less than an eighth have the same tag,
/// since an adapter seldom knows more about their contents. A lossless codec is given up for all
/// blocks of a tag if it does not make them smaller.
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
