// SPDX-License-Identifier: Apache-2.0
#include <spillway/policy/codec/as_bfloat16.hpp>

#include <doctest/doctest.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

namespace {

using spillway::AsBfloat16;

/// The encoded float32 numbers. They are encoded one by one and also in groups longer than a vector
/// register, which must give the same result.
[[nodiscard]] std::uint32_t through(std::uint32_t bits) {
  AsBfloat16 const codec;
  std::vector<std::uint32_t> const many(20, bits);
  std::vector<std::byte> encoded(AsBfloat16::worst_bytes(80));
  std::vector<std::uint32_t> decoded(20);
  REQUIRE(codec.encode(std::as_bytes(std::span{many}), encoded) == 40);
  REQUIRE(codec.decode(encoded, std::as_writable_bytes(std::span{decoded})));
  for (std::uint32_t const each : decoded) {
    REQUIRE(each == decoded.back());  // which was encoded alone
  }
  return decoded.back();
}

[[nodiscard]] float through(float x) {
  return std::bit_cast<float>(through(std::bit_cast<std::uint32_t>(x)));
}

}  // namespace

TEST_SUITE("as_bfloat16") {
  TEST_CASE("AsBfloat16: takes half the bytes, and keeps bytes after the last element") {
    CHECK(AsBfloat16::worst_bytes(0) == 0);
    CHECK(AsBfloat16::worst_bytes(4096) == 2048);
    CHECK(AsBfloat16::worst_bytes(4099) == 2051);
  }

  TEST_CASE("AsBfloat16: rounds to the nearest, ties to even") {
    CHECK(through(0x3F80'0000U) == 0x3F80'0000U);
    CHECK(through(0x3F80'7FFFU) == 0x3F80'0000U);
    CHECK(through(0x3F80'8000U) == 0x3F80'0000U);  // a tie, and 3F80 is even
    CHECK(through(0x3F80'8001U) == 0x3F81'0000U);
    CHECK(through(0x3F81'8000U) == 0x3F82'0000U);  // a tie, and 3F81 is odd
    CHECK(through(0xBF81'8000U) == 0xBF82'0000U);
    CHECK(through(0x0000'8001U) == 0x0001'0000U);  // denormal numbers, too
  }

  TEST_CASE("AsBfloat16: keeps zeros with their signs, infinities and NaNs") {
    float const infinity = std::numeric_limits<float>::infinity();
    CHECK(through(0U) == 0U);
    CHECK(through(0x8000'0000U) == 0x8000'0000U);
    CHECK(through(infinity) == infinity);
    CHECK(through(-infinity) == -infinity);
    CHECK(through(std::numeric_limits<float>::max()) == infinity);  // infinity is the nearest value
    std::array const nans{0x7F80'0001U, 0x7FBF'FFFFU, 0x7FC0'0000U, 0x7FFF'FFFFU, 0xFF80'0001U};
    for (std::uint32_t const nan : nans) {
      CAPTURE(nan);
      CHECK(std::isnan(std::bit_cast<float>(through(nan))));
      CHECK((through(nan) & 0x8000'0000U) == (nan & 0x8000'0000U));
    }
  }
}
