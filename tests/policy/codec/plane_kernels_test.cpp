// SPDX-License-Identifier: Apache-2.0
#include <spillway/device/sim/sim_api.hpp>
#include <spillway/policy/codec/plane_kernels.hpp>
#include <spillway/testing/policy_contracts.hpp>
#include <spillway/testing/stream_codec_contract.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include <support/planes_on_host.hpp>

TEST_SUITE("plane_kernels") {
  namespace {

  using namespace spillway;
  using spillway::test::PlanesOnStream;
  using spillway::testing::CodecOnDevice;
  using Rig = spillway::testing::StreamCodecRig<PlanesOnStream, SimApi>;

  /// Float32 of one exponent: three planes of random bytes, and one of a single byte.
  std::vector<std::byte> floats(std::size_t count) {
    std::vector<std::byte> made(count * sizeof(std::uint32_t));
    for (std::size_t i = 0; i < count; ++i) {
      auto const random = static_cast<std::uint32_t>(i) * 2654435761U;
      std::uint32_t const word = 0x3F000000U | (random >> 9U & 0x7FFFFFU);
      std::memcpy(made.data() + 4 * i, &word, 4);
    }
    return made;
  }

  }  // namespace

  TEST_CASE("plane kernels: a plane that becomes shorter is packed, others are kept") {
    // 16 planes of 16 KiB, of which each fourth becomes pairs for 255 bytes each.
    auto const from = floats(65'536);
    Rig rig{from.size()};
    rig.encode(from);
    std::size_t const packed = detail::in_units(2 * ((16'384 + 254) / 255));
    CHECK(rig.stored_bytes() == 32 + 16 * std::size_t{16} + 12 * std::size_t{16'384} + 4 * packed);
    CHECK(rig.decode(from.size()) == from);
  }

  TEST_CASE("plane kernels: random bytes take no more than they are, with their entries") {
    for (std::size_t const bytes : {65'536UL, 65'537UL, 100'000UL}) {
      CAPTURE(bytes);
      Rig rig{bytes};
      rig.encode(spillway::testing::codec_input(bytes, -1, 1));
      CHECK(rig.stored_bytes() == detail::most_planed_bytes(bytes));
      CHECK(rig.stored_bytes() <= bytes + 32 + 16 * (bytes / 16'384 + 8) + 64);
    }
  }

  TEST_CASE("plane kernels: what a compressor refuses is found") {
    auto const from = floats(65'536);
    Rig rig{from.size()};
    rig.encode(from);
    detail::SlotEntry entry{};
    std::memcpy(&entry, rig.slot().front().data() + detail::first_part_at(3), sizeof(entry));
    REQUIRE(entry.stored_bytes < 16'384);
    std::byte& length = rig.slot().front()[entry.at];
    std::byte const before = length;
    for (int const wrong : {0, 254}) {  // a pair that says nothing, and too few bytes of all
      CAPTURE(wrong);
      length = static_cast<std::byte>(wrong);
      static_cast<void>(rig.decode(from.size()));
      CHECK(rig.stored_bytes() == 0);
      length = before;
      rig.encode(from);
    }
    CHECK(rig.decode(from.size()) == from);
  }

  TEST_CASE_TEMPLATE_INVOKE(stream_codec_contract, CodecOnDevice<PlanesOnStream, SimApi>);
}
