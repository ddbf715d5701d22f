// SPDX-License-Identifier: Apache-2.0
// Tests the codecs of those of zstd and LZ4 that were found.
#include <spillway/policy/codec/byte_planes.hpp>
#include <spillway/testing/policy_contracts.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <span>
#include <vector>

namespace {

using namespace spillway;
using Bytes = std::vector<std::byte>;

/// float32 as weights have them, or the same numbers in bfloat16.
[[nodiscard]] Bytes weights(std::size_t bytes, bool is_bfloat16) {
  std::mt19937 random{5};
  std::normal_distribution<float> value{0, 0.05F};
  Bytes made(bytes);
  std::size_t const element_bytes = is_bfloat16 ? 2 : 4;
  for (std::size_t at = 0; at < bytes; at += element_bytes) {
    float const x = value(random);
    std::uint32_t bits = 0;
    std::memcpy(&bits, &x, 4);
    bits >>= is_bfloat16 ? 16U : 0U;
    std::memcpy(made.data() + at, &bits, std::min(element_bytes, bytes - at));
  }
  return made;
}

template <class Compressor>
void check_size_and_lengths() {
  using Codec = BytePlanes<Compressor>;
  Codec codec;
  CHECK(Codec::worst_bytes(0) == 0);
  CHECK(Codec::worst_bytes(65536) == 65552);
  CHECK(Codec::worst_bytes(65537) == 65569);

  CHECK(testing::encode_checked(codec, Bytes(200'000)).size() < 2000);
  // Four lengths, and then the planes: none of noise becomes smaller.
  Bytes const noise = testing::codec_input(65536, -1, 3);
  Bytes encoded = testing::encode_checked(codec, noise);
  CHECK(encoded.size() == 65552);
  std::uint32_t length = 0;
  std::memcpy(&length, encoded.data(), 4);
  CHECK(length == 16384);

  Bytes to(noise.size());
  for (std::uint32_t const wrong : {0U, 1U, 16383U, 16385U, 0x80004000U, 0xFFFFFFFFU}) {
    std::memcpy(encoded.data() + 8, &wrong, 4);
    CHECK_FALSE(codec.decode(encoded, to));
  }
}

/// Checks that damaged bytes are refused, or decoded to the right number of bytes, and that nothing
/// is read or written outside. The bytes around `to` show writes inside the libraries, which
/// sanitizers do not see.
template <class Compressor>
void check_damaged() {
  BytePlanes<Compressor> codec;
  constexpr std::size_t bytes = 70'003;
  constexpr std::byte guard{0xA5};
  std::mt19937 random{11};
  std::size_t refused = 0;
  for (bool const is_bfloat16 : {false, true}) {
    Bytes const good = testing::encode_checked(codec, weights(bytes, is_bfloat16));
    for (int round = 0; round < 1000; ++round) {
      CAPTURE(round);
      Bytes bad = good;
      switch (round % 4) {
      case 0:  // one bit
        bad[random() % bad.size()] ^= static_cast<std::byte>(1U << random() % 8);
        break;
      case 1:  // noise
        for (std::size_t i = 0; i < 64; ++i) {
          bad[random() % bad.size()] = static_cast<std::byte>(random());
        }
        break;
      case 2: {  // in the lengths, or near them
        bad[random() % 24] = static_cast<std::byte>(random());
        break;
      }
      default:  // only the first bytes
        bad.resize(random() % bad.size());
      }
      bad.shrink_to_fit();
      Bytes to(bytes + 128, guard);
      refused += codec.decode(bad, std::span{to}.subspan(64, bytes)) ? 0U : 1U;
      bool const is_whole = std::count(to.begin(), to.begin() + 64, guard) +
                                std::count(to.end() - 64, to.end(), guard) ==
                            128;
      REQUIRE(is_whole);
    }
  }
  CHECK(refused > 500);
}

}  // namespace

TEST_SUITE("byte_planes") {
#if defined(SPILLWAY_WITH_ZSTD) && SPILLWAY_WITH_ZSTD
  TEST_CASE_TEMPLATE_INVOKE(codec_contract, BytePlanes<Zstd>);

  TEST_CASE("BytePlanes: zstd: impossible lengths of planes are refused") {
    check_size_and_lengths<Zstd>();
  }
  TEST_CASE("BytePlanes: zstd: planes of exponents become smaller, in both widths") {
    BytePlanes<Zstd> codec;
    CHECK(testing::encode_checked(codec, weights(200'000, false)).size() < 180'000);
    CHECK(testing::encode_checked(codec, weights(200'000, true)).size() < 150'000);
  }
  TEST_CASE("BytePlanes: zstd: damaged bytes are refused or decoded to other bytes") {
    check_damaged<Zstd>();
  }
#endif
#if defined(SPILLWAY_WITH_LZ4) && SPILLWAY_WITH_LZ4
  TEST_CASE_TEMPLATE_INVOKE(codec_contract, BytePlanes<Lz4>);

  TEST_CASE("BytePlanes: LZ4: impossible lengths of planes are refused") {
    check_size_and_lengths<Lz4>();
  }
  TEST_CASE("BytePlanes: LZ4: damaged bytes are refused or decoded to other bytes") {
    check_damaged<Lz4>();
  }
#endif
}
