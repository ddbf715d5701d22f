// SPDX-License-Identifier: Apache-2.0
#include <spillway/device/sim/sim_api.hpp>
#include <spillway/policy/codec/plane_kernels.hpp>
#include <spillway/testing/policy_contracts.hpp>
#include <spillway/testing/stream_codec_contract.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
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

  /// A decompressor that reports for all planes that it failed, or a length that is too short.
  struct FaultyRunLengths : spillway::test::RunLengths {
    static inline bool refuses = true;

    template <class Launch>
    static void
    decompress(Launch const& launch, detail::PlaneBatch const& batch, std::span<std::byte> work) {
      RunLengths::decompress(launch, batch, work);
      launch(Spoil{batch}, batch.count);
    }

   private:
    struct Spoil {
      using Memory = detail::NoMemory;

      void operator()(spillway::test::HostTeam const& /*team*/,
                      Memory& /*memory*/,
                      std::uint64_t i) const {
        if (refuses) {
          batch.statuses[i] = 12;  // nvcompErrorCannotDecompress
        } else {
          --batch.done_bytes[i];
        }
      }

      detail::PlaneBatch batch;
    };
  };

  }  // namespace

  TEST_CASE("plane kernels: a plane that becomes smaller is packed, others are copied") {
    // 16 planes of 16 KiB, of which each fourth becomes pairs for 255 bytes each.
    auto const from = floats(65'536);
    Rig rig{from.size()};
    rig.encode(from);
    std::size_t const packed = detail::in_units(2 * ((16'384 + 254) / 255));
    CHECK(rig.stored_bytes() == 32 + 16 * std::size_t{16} + 12 * std::size_t{16'384} + 4 * packed);
    CHECK(rig.decode(from.size()) == from);
  }

  TEST_CASE("plane kernels: random bytes take only their own size and the entries") {
    for (std::size_t const bytes : {65'536UL, 65'537UL, 100'000UL}) {
      CAPTURE(bytes);
      Rig rig{bytes};
      rig.encode(spillway::testing::codec_input(bytes, -1, 1));
      CHECK(rig.stored_bytes() == detail::most_planed_bytes(bytes));
      CHECK(rig.stored_bytes() <= bytes + 32 + 16 * (bytes / 16'384 + 8) + 64);
    }
  }

  TEST_CASE("plane kernels: a decompressor gets only bytes that its compressor made") {
    auto const from = floats(65'536);
    Rig rig{from.size()};
    rig.encode(from);
    std::byte* const memory = rig.slot().front().data();
    auto* const entry = reinterpret_cast<detail::SlotEntry*>(memory + detail::first_part_at(3));
    REQUIRE(entry->stored_bytes < 16'384);
    std::vector<std::byte> const sound(memory, memory + rig.stored_bytes());

    SUBCASE("one byte changed") {
      memory[entry->at] ^= std::byte{1};
    }
    SUBCASE("two pieces exchanged") {
      std::byte* const last = memory + entry->at + entry->stored_bytes - 4;
      std::swap_ranges(memory + entry->at, memory + entry->at + 4, last);
    }
    SUBCASE("a shorter piece of as many units") {
      entry->stored_bytes -= 2;
    }
    SUBCASE("another plane's entry") {
      entry->at = entry[1].at;
    }
    SUBCASE("another checksum") {
      entry->checksum ^= 1;
    }

    static_cast<void>(rig.decode(from.size()));
    CHECK(rig.stored_bytes() == 0);
    std::copy(sound.begin(), sound.end(), memory);
    CHECK(rig.decode(from.size()) == from);
  }

  TEST_CASE(
      "plane kernels: planes that the decompressor refuses or leaves too short are detected") {
    auto const from = floats(65'536);
    for (bool const refuses : {true, false}) {
      CAPTURE(refuses);
      FaultyRunLengths::refuses = refuses;
      spillway::testing::StreamCodecRig<spillway::test::PlanesOnHost<FaultyRunLengths>, SimApi> rig{
          from.size()};
      rig.encode(from);
      CHECK(rig.stored_bytes() != 0);
      static_cast<void>(rig.decode(from.size()));
      CHECK(rig.stored_bytes() == 0);
    }
  }

  TEST_CASE_TEMPLATE_INVOKE(stream_codec_contract, CodecOnDevice<PlanesOnStream, SimApi>);
}
