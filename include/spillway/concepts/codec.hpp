// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/device_api.hpp>

#include <concepts>
#include <cstddef>
#include <span>
#include <string_view>
#include <type_traits>

namespace spillway {

/// A codec encodes the bytes of a block when it is swapped out, and decodes them when it is swapped
/// in. It is a policy that is chosen for each block, by `DeviceAllocator::set_codec`.
///
/// Given `c` of type `C`, `from` and `to`, spans of bytes that do not overlap, and `n` bytes:
///
/// | expression           | must                                                                  |
/// |----------------------|-----------------------------------------------------------------------|
/// | `C::name()`          | name the codec, for statistics                                        |
/// | `C::is_lossless`     | tell whether `decode` gives back what `encode` was given, bit by bit; |
/// |                      | a constant expression                                                 |
/// | `C::element_type`    | optional: the type of elements that it changes; tensors of others     |
/// |                      | refuse it                                                             |
/// | `C::worst_bytes(n)`  | the most that `encode` writes for `n` bytes, and the room that it     |
/// |                      | needs                                                                 |
/// | `c.encode(from, to)` | write `from` to the front of `to`, which has `worst_bytes` of it.     |
/// |                      | Returns the bytes written                                             |
/// | `c.decode(from, to)` | write to all of `to` what `encode` made `from` of. Returns false,     |
/// |                      | with `to` undefined, if `encode` makes no such bytes for that many    |
///
/// `from` and `to` have any size and alignment. A codec that loses bits must be idempotent:
/// encoding and decoding what `decode` has returned must give the same bytes, so that a block that
/// is swapped out twice loses no more than one that is swapped out once. `decode` must not trust
/// `from`: whatever it contains, `decode` reads and writes nothing outside the spans.
///
/// An instance is used by one thread at a time, and may keep scratch memory from call to call.
// clang-format off
template <class C>
concept Codec =
    std::default_initializable<C> &&
    requires(C c, std::size_t n, std::span<std::byte const> from, std::span<std::byte> to) {
      { C::name()          } noexcept -> std::same_as<std::string_view>;
      { C::is_lossless     }          -> std::convertible_to<bool>;
      typename std::bool_constant<C::is_lossless>;
      { C::worst_bytes(n)  } noexcept -> std::same_as<std::size_t>;
      { c.encode(from, to) } noexcept -> std::same_as<std::size_t>;
      { c.decode(from, to) } noexcept -> std::same_as<bool>;
    };

/// A codec that changes nothing (`C::is_identity` is true). It is never called: bytes are copied.
template <class C>
concept IdentityCodec = Codec<C> && requires { requires C::is_identity; };
// clang-format on

/// The memory of a host slot: its pieces in order, at most `most_slot_pieces`. Each is aligned to
/// `granule_bytes`, and its length is a multiple of that.
using SlotMemory = std::span<std::span<std::byte> const>;
inline constexpr std::size_t most_slot_pieces = 64;

/// A codec that the device runs, in stream order, between its memory and pinned host memory. So
/// only the encoded bytes cross the link.
///
/// Given a device `d` of type `D`, its stream `s`, `n` bytes, `from` and `to`, spans of bytes in
/// device memory, a `slot` of pinned memory, and `scratch`, a span of device memory:
///
/// | expression                        | must                                                     |
/// |-----------------------------------|----------------------------------------------------------|
/// | `C::stream_bytes(n)`              | the room that `encode_on` needs in a slot for `n` bytes  |
/// | `C::scratch_bytes(d)`             | the device memory that a transfer works in, whatever its |
/// |                                   | size                                                     |
/// | `C::encode_on(d, s, from, slot,   | enqueue work that writes `from` to the front of `slot`   |
/// |   scratch)`                       |                                                          |
/// | `C::decode_on(d, s, slot, to,     | enqueue work that writes to all of `to`, which may be    |
/// |   scratch)`                       | shorter, what `encode_on` made that of                   |
/// | `C::stored_bytes(slot)`           | tell, on the host, when that work has ended, how many    |
/// |                                   | bytes of `slot` are in use: 0 if `encode_on` did not     |
/// |                                   | write them, or if `decode_on` could not read them        |
///
/// When `decode_on` is called the slot may have been shortened to `stored_bytes(slot)`. The
/// enqueued work reads nothing outside the slot and writes nothing outside `to`, `scratch` and the
/// slot, whatever the slot contains. `scratch` has at least `scratch_bytes(d)` bytes, is aligned to
/// 256 bytes, and is not used by anything else before the work has ended. No function waits on the
/// host. Thread-safe. `scratch_bytes`, `encode_on` and `decode_on` may throw `DeviceError`; the
/// last two may then have enqueued a part of their work.
// clang-format off
template <class C, class D>
concept StreamCodec =
    Codec<C> && DeviceApi<D> &&
    requires(D d, typename D::stream_type s, std::span<std::byte const> from,
             std::span<std::byte> to, SlotMemory slot, std::span<std::byte> scratch,
             std::size_t n) {
      { C::stream_bytes(n)                      } noexcept -> std::same_as<std::size_t>;
      { C::scratch_bytes(d)                     }          -> std::same_as<std::size_t>;
      { C::encode_on(d, s, from, slot, scratch) }          -> std::same_as<void>;
      { C::decode_on(d, s, slot, to, scratch)   }          -> std::same_as<void>;
      { C::stored_bytes(slot)                   } noexcept -> std::same_as<std::size_t>;
    };
// clang-format on

}  // namespace spillway
