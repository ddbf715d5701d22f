// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/codec.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <span>
#include <string_view>

#if defined(SPILLWAY_WITH_LZ4) && SPILLWAY_WITH_LZ4
#  include <lz4.h>
#endif
#if defined(SPILLWAY_WITH_ZSTD) && SPILLWAY_WITH_ZSTD
#  include <zstd.h>
#endif

namespace spillway {

class Zstd;  // defined below in programs that link spillway::zstd
class Lz4;

namespace detail {
template <class T>
concept CompleteType = requires {
  sizeof(T);
};
}  // namespace detail

/// A lossless codec for float32 and bfloat16. It suits the file tier and pageable memory, where
/// transfers cost more than processor time. No block has it by default.
///
/// It divides the bytes into four planes: the first bytes of all groups of four, the second bytes,
/// and so on. Each plane is compressed by itself. A plane of exponents becomes much smaller; one of
/// low mantissa bits hardly does and is then stored unchanged. A group is one float32 or two
/// bfloat16. Bytes after the last whole group are stored unchanged, too.
///
/// A `Compressor` has `name()`, `compress(from, to)`, which returns the bytes written or 0 if `to`
/// has no room for them, and `decompress(from, to)`, which returns whether it has filled `to`.
/// There are `Zstd` and `Lz4`, in programs that link `spillway::zstd` and `spillway::lz4` or,
/// without CMake, are compiled with `-DSPILLWAY_WITH_ZSTD=1` and `-DSPILLWAY_WITH_LZ4=1`.
template <class Compressor>
class BytePlanes {
  static_assert(detail::CompleteType<Compressor>,
                "Zstd and Lz4 need the targets spillway::zstd and spillway::lz4 or, without CMake, "
                "-DSPILLWAY_WITH_ZSTD=1 -lzstd and -DSPILLWAY_WITH_LZ4=1 -llz4");

 public:
  static constexpr bool is_lossless = true;

  BytePlanes() : scratch_{std::make_unique<std::byte[]>(plane_count * most_plane_bytes)} {}

  [[nodiscard]] static constexpr std::string_view name() noexcept { return Compressor::name(); }
  /// In the worst case all planes are stored unchanged, with four lengths for each 64 KiB.
  [[nodiscard]] static constexpr std::size_t worst_bytes(std::size_t bytes) noexcept {
    return bytes + (bytes + most_bytes - 1) / most_bytes * sizeof(Lengths);
  }

  [[nodiscard]] std::size_t encode(std::span<std::byte const> from,
                                   std::span<std::byte> to) noexcept {
    std::byte* out = to.data();
    while (!from.empty()) {
      out += encode_part(take_front(from, std::min(from.size(), most_bytes)), out);
    }
    return static_cast<std::size_t>(out - to.data());
  }

  [[nodiscard]] bool decode(std::span<std::byte const> from, std::span<std::byte> to) noexcept {
    while (!to.empty()) {
      if (!decode_part(from, take_front(to, std::min(to.size(), most_bytes)))) {
        return false;
      }
    }
    return from.empty();
  }

 private:
  static constexpr std::size_t plane_count = 4;
  static constexpr std::size_t most_plane_bytes = std::size_t{16} << 10U;
  static constexpr std::size_t most_bytes = plane_count * most_plane_bytes;

  /// The stored size of each plane, at the front of a part. A plane that takes all of its bytes is
  /// kept.
  using Lengths = std::array<std::uint32_t, plane_count>;
  using Planes = std::array<std::byte const*, plane_count>;

  template <class Byte>
  [[nodiscard]] static std::span<Byte> take_front(std::span<Byte>& of, std::size_t bytes) noexcept {
    auto const front = of.first(bytes);
    of = of.subspan(bytes);
    return front;
  }

  [[nodiscard]] std::span<std::byte> scratch(std::size_t plane, std::size_t bytes) noexcept {
    return {scratch_.get() + plane * most_plane_bytes, bytes};
  }

  [[nodiscard]] std::size_t encode_part(std::span<std::byte const> from, std::byte* to) noexcept {
    std::size_t const bytes = from.size() / plane_count;  // of a plane
    split(from.data(), bytes);
    Lengths lengths{};
    std::byte* out = to + sizeof(Lengths);
    for (std::size_t plane = 0; plane < plane_count; ++plane) {
      std::span<std::byte const> const whole = scratch(plane, bytes);
      std::size_t length = bytes < 2 ? 0 : compressor_.compress(whole, {out, bytes - 1});
      if (length == 0) {
        std::copy(whole.begin(), whole.end(), out);
        length = bytes;
      }
      lengths[plane] = static_cast<std::uint32_t>(length);
      out += length;
    }
    std::memcpy(to, lengths.data(), sizeof(Lengths));
    auto const rest = from.subspan(plane_count * bytes);
    out = std::copy(rest.begin(), rest.end(), out);
    return static_cast<std::size_t>(out - to);
  }

  /// Takes the part from the front of `from`.
  [[nodiscard]] bool decode_part(std::span<std::byte const>& from,
                                 std::span<std::byte> to) noexcept {
    Lengths lengths{};
    if (from.size() < sizeof(Lengths)) {
      return false;
    }
    std::memcpy(lengths.data(), take_front(from, sizeof(Lengths)).data(), sizeof(Lengths));
    std::size_t const bytes = to.size() / plane_count;
    Planes planes{};
    for (std::size_t plane = 0; plane < plane_count; ++plane) {
      if (lengths[plane] > bytes || lengths[plane] > from.size()) {
        return false;
      }
      auto const stored = take_front(from, lengths[plane]);
      planes[plane] = stored.data();
      if (stored.size() != bytes) {
        auto const whole = scratch(plane, bytes);
        if (stored.empty() || !compressor_.decompress(stored, whole)) {
          return false;
        }
        planes[plane] = whole.data();
      }
    }
    auto const rest = to.subspan(plane_count * bytes);
    if (from.size() < rest.size()) {
      return false;
    }
    join(planes, bytes, to.data());
    auto const kept = take_front(from, rest.size());
    std::copy(kept.begin(), kept.end(), rest.begin());
    return true;
  }

  void split(std::byte const* in, std::size_t bytes) noexcept {
    std::byte* const out = scratch_.get();
    for (std::size_t i = 0; i < bytes; ++i, in += plane_count) {
      out[i] = in[0];
      out[most_plane_bytes + i] = in[1];
      out[2 * most_plane_bytes + i] = in[2];
      out[3 * most_plane_bytes + i] = in[3];
    }
  }
  static void join(Planes const& planes, std::size_t bytes, std::byte* out) noexcept {
    for (std::size_t i = 0; i < bytes; ++i, out += plane_count) {
      out[0] = planes[0][i];
      out[1] = planes[1][i];
      out[2] = planes[2][i];
      out[3] = planes[3][i];
    }
  }

  Compressor compressor_;
  std::unique_ptr<std::byte[]> scratch_;  // the planes of one part, each with room for the longest
};

#if defined(SPILLWAY_WITH_ZSTD) && SPILLWAY_WITH_ZSTD

/// A compressor for `BytePlanes`: Zstandard at level 1, its fastest regular level.
class Zstd {
 public:
  /// @throws std::bad_alloc
  Zstd() {
    if (coder_ == nullptr || decoder_ == nullptr) {
      throw std::bad_alloc{};
    }
  }

  [[nodiscard]] static constexpr std::string_view name() noexcept { return "byte_planes_zstd"; }

  [[nodiscard]] std::size_t compress(std::span<std::byte const> from,
                                     std::span<std::byte> to) noexcept {
    std::size_t const bytes =
        ZSTD_compressCCtx(coder_.get(), to.data(), to.size(), from.data(), from.size(), level);
    return ZSTD_isError(bytes) != 0 ? 0 : bytes;
  }
  [[nodiscard]] bool decompress(std::span<std::byte const> from, std::span<std::byte> to) noexcept {
    return ZSTD_decompressDCtx(decoder_.get(), to.data(), to.size(), from.data(), from.size()) ==
           to.size();
  }

 private:
  static constexpr int level = 1;

  struct Free {
    void operator()(ZSTD_CCtx* coder) const noexcept { ZSTD_freeCCtx(coder); }
    void operator()(ZSTD_DCtx* decoder) const noexcept { ZSTD_freeDCtx(decoder); }
  };
  std::unique_ptr<ZSTD_CCtx, Free> coder_{ZSTD_createCCtx()};
  std::unique_ptr<ZSTD_DCtx, Free> decoder_{ZSTD_createDCtx()};
};

static_assert(Codec<BytePlanes<Zstd>>);

#endif

#if defined(SPILLWAY_WITH_LZ4) && SPILLWAY_WITH_LZ4

/// A compressor for `BytePlanes`: LZ4, which is faster than Zstandard, in particular when it
/// decompresses, and compresses repeated byte sequences only.
class Lz4 {
 public:
  /// @throws std::bad_alloc
  Lz4() : state_{std::make_unique<std::byte[]>(static_cast<std::size_t>(LZ4_sizeofState()))} {}

  [[nodiscard]] static constexpr std::string_view name() noexcept { return "byte_planes_lz4"; }

  [[nodiscard]] std::size_t compress(std::span<std::byte const> from,
                                     std::span<std::byte> to) noexcept {
    return static_cast<std::size_t>(LZ4_compress_fast_extState(
        state_.get(), chars(from), chars(to), length(from), length(to), acceleration));
  }
  [[nodiscard]] bool decompress(std::span<std::byte const> from, std::span<std::byte> to) noexcept {
    return LZ4_decompress_safe(chars(from), chars(to), length(from), length(to)) == length(to);
  }

 private:
  static constexpr int acceleration = 1;

  [[nodiscard]] static char const* chars(std::span<std::byte const> of) noexcept {
    return reinterpret_cast<char const*>(of.data());
  }
  [[nodiscard]] static char* chars(std::span<std::byte> of) noexcept {
    return reinterpret_cast<char*>(of.data());
  }
  [[nodiscard]] static int length(std::span<std::byte const> of) noexcept {
    return static_cast<int>(of.size());
  }

  std::unique_ptr<std::byte[]> state_;  // of the compressor, 16 KiB
};

static_assert(Codec<BytePlanes<Lz4>>);

#endif

}  // namespace spillway
