// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/config.hpp>

#include <concepts>
#include <cstddef>
#include <span>
#include <string_view>

namespace spillway {

/// How the bytes of a block are written while it is away: a policy that is chosen for each block,
/// by `DeviceAllocator::set_codec`.
///
/// Given `c` of type `C`, `from` and `to`, spans of bytes that do not overlap, and `n` bytes:
///
/// | expression           | must                                                                  |
/// |----------------------|-----------------------------------------------------------------------|
/// | `C::name()`          | name the codec, for statistics                                        |
/// | `C::is_lossless`     | tell whether `decode` gives back what `encode` was given, bit by bit  |
/// | `C::worst_bytes(n)`  | the most that `encode` writes for `n` bytes, and the room that it     |
/// |                      | needs                                                                 |
/// | `c.encode(from, to)` | write `from` to the front of `to`, which has `worst_bytes` of it.     |
/// |                      | Returns the bytes written                                             |
/// | `c.decode(from, to)` | write to all of `to` what `encode` made `from` of. Returns false,     |
/// |                      | with `to` undefined, if `encode` makes no such bytes for that many    |
///
/// `from` and `to` are of any size and alignment. A codec that loses bits must give back the same
/// bytes for what it has given back once: a block that leaves twice is not worse than one that left
/// once. `decode` is told how many bytes there are to be and trusts nothing else: it reads and
/// writes nothing outside the spans, whatever `from` holds.
///
/// One thread at a time uses an instance, which may keep scratch memory from call to call.
// clang-format off
template <class C>
concept Codec =
    std::default_initializable<C> &&
    requires(C c, std::size_t n, std::span<std::byte const> from, std::span<std::byte> to) {
      { C::name()          } noexcept -> std::same_as<std::string_view>;
      { C::is_lossless     }          -> std::convertible_to<bool>;
      { C::worst_bytes(n)  } noexcept -> std::same_as<std::size_t>;
      { c.encode(from, to) } noexcept -> std::same_as<std::size_t>;
      { c.decode(from, to) } noexcept -> std::same_as<bool>;
    };

/// A codec whose `C::is_identity` is true. It is never called: the bytes are copied.
template <class C>
concept IdentityCodec = Codec<C> && requires { requires C::is_identity; };
// clang-format on

}  // namespace spillway
