// SPDX-License-Identifier: Apache-2.0
#include <spillway/core/types.hpp>
#include <spillway/device/sim/sim_api.hpp>
#include <spillway/policy/codec/as_bfloat16.hpp>
#include <spillway/policy/codec/stripe_kernels.hpp>
#include <spillway/testing/policy_contracts.hpp>
#include <spillway/testing/stream_codec_contract.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include <support/stripes_on_host.hpp>

TEST_SUITE("stripe_kernels") {
  namespace {

  using namespace spillway;
  using spillway::test::AsBfloat16OnStream;
  using spillway::test::ZeroBitmapOnStream;
  using spillway::testing::CodecOnDevice;
  using spillway::testing::StreamCodecRig;

  }  // namespace

  TEST_CASE("stripe kernels: a slot consists of its header, its entries and its stripes") {
    StreamCodecRig<ZeroBitmapOnStream, SimApi> rig{100'000};
    std::vector<std::byte> bytes(100'000);
    rig.encode(bytes);
    std::size_t const stripes = 7;
    std::size_t const map_bytes = 6 * 512 + 64;  // of the last stripe: 53 bytes, in units of 16
    CHECK(rig.stored_bytes() == 32 + 16 * stripes + map_bytes);

    std::uint32_t const one = 1;
    std::memcpy(bytes.data() + 40'000, &one, 4);
    rig.encode(bytes);
    CHECK(rig.stored_bytes() == 32 + 16 * stripes + map_bytes + 16);
  }

  TEST_CASE("stripe kernels: a stripe that packing does not make smaller is copied") {
    StreamCodecRig<ZeroBitmapOnStream, SimApi> rig{100'000};
    rig.encode(spillway::testing::codec_input(100'000, 0, 1));
    CHECK(rig.stored_bytes() == detail::most_striped_bytes(100'000));
  }

  TEST_CASE("stripe kernels: float32 are rounded as by AsBfloat16") {
    for (std::size_t const bytes : {40'000UL, 40'001UL, 40'004UL, 40'007UL}) {
      CAPTURE(bytes);
      auto const from = spillway::testing::codec_input(bytes, 0.1, 5);
      StreamCodecRig<AsBfloat16OnStream, SimApi> rig{bytes};
      rig.encode(from);
      CHECK(rig.stored_bytes() < bytes / 2 + 200);
      AsBfloat16 on_host;
      std::vector<std::byte> expected(bytes);
      REQUIRE(on_host.decode(spillway::testing::encode_checked(on_host, from), expected));
      CHECK(rig.decode(bytes) == expected);
    }
  }

  TEST_CASE_TEMPLATE_INVOKE(stream_codec_contract,
                            CodecOnDevice<ZeroBitmapOnStream, SimApi>,
                            CodecOnDevice<AsBfloat16OnStream, SimApi>);
}
