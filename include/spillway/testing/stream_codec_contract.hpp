// SPDX-License-Identifier: Apache-2.0
#pragma once

/// A contract suite for codecs that run on a device: doctest cases that check what every model of
/// `StreamCodec` must do.
///
/// ```
/// TEST_CASE_TEMPLATE_INVOKE(stream_codec_contract,
///                           spillway::testing::CodecOnDevice<MyCodec, MyApi>);
/// ```
/// The device must be default-constructible. For codecs that run on the host see
/// policy_contracts.hpp.

#include <spillway/concepts/codec.hpp>
#include <spillway/concepts/device_api.hpp>
#include <spillway/core/types.hpp>
#include <spillway/testing/device_contracts.hpp>
#include <spillway/testing/policy_contracts.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <span>
#include <vector>

namespace spillway::testing {

/// The parameters of `stream_codec_contract`: a codec and the device that it runs on.
template <Codec C, DeviceApi D>
  requires StreamCodec<C, D>
struct CodecOnDevice {
  using codec = C;
  using device = D;
};

/// Runs a codec on a device for a test: encodes bytes into a slot, decodes them, and checks that
/// nothing else is written. Around the block, the scratch memory and the slot are bytes that must
/// not change.
template <Codec C, DeviceApi D>
class StreamCodecRig {
 public:
  explicit StreamCodecRig(std::size_t bytes, std::size_t pieces = 1) : bytes_{bytes} {
    std::size_t const room = round_up(C::stream_bytes(bytes), granule_bytes);
    std::size_t const part = round_up(room / pieces + 1, granule_bytes);
    for (std::size_t at = 0; at < room; at += part) {
      std::size_t const length = std::min(part, room - at);
      auto* const memory =
          reinterpret_cast<std::byte*>(rig_.pinned(length + 2 * granule_bytes, guard));
      slot_.emplace_back(memory + granule_bytes, length);
    }
    whole_slot_ = slot_;
    staging_ = reinterpret_cast<std::byte*>(rig_.pinned(bytes + 2 * granule_bytes));
    block_ = reinterpret_cast<std::byte*>(rig_.device_memory(bytes + 2 * granule_bytes));
    block_ += granule_bytes;
    std::size_t const scratch = round_up(C::scratch_bytes(device_), granule_bytes);
    if (scratch != 0) {
      scratch_guards_ = reinterpret_cast<std::byte*>(rig_.pinned(2 * granule_bytes, guard));
      scratch_ = {reinterpret_cast<std::byte*>(rig_.device_memory(scratch + 2 * granule_bytes)) +
                      granule_bytes,
                  scratch};
      copy_scratch_guards(CopyKind::to_device);
    }
  }

  [[nodiscard]] SlotMemory slot() const { return slot_; }
  [[nodiscard]] std::size_t stored_bytes() const { return C::stored_bytes(slot()); }

  /// Copies bytes into the block and encodes them.
  void encode(std::span<std::byte const> bytes) {
    std::copy(bytes.begin(), bytes.end(), staging_);
    device_.copy(block_, staging_, bytes.size(), CopyKind::to_device, stream_);
    C::encode_on(device_, stream_, {block_, bytes.size()}, slot(), scratch_);
    device_.synchronize(stream_);
    check_guards();
  }
  /// Shortens the slot to what is stored in it.
  void trim() {
    std::size_t left = round_up(stored_bytes(), granule_bytes);
    for (std::span<std::byte>& piece : slot_) {
      piece = piece.first(std::min(left, piece.size()));
      left -= piece.size();
    }
    slot_.erase(
        std::remove_if(slot_.begin(), slot_.end(), [](auto piece) { return piece.empty(); }),
        slot_.end());
  }
  /// Decodes and returns the first `bytes` bytes.
  [[nodiscard]] std::vector<std::byte> decode(std::size_t bytes) {
    std::size_t const around = bytes_ + 2 * granule_bytes;
    device_.fill(block_ - granule_bytes, guard, around, stream_);
    C::decode_on(device_, stream_, slot(), {block_, bytes}, scratch_);
    device_.copy(staging_, block_ - granule_bytes, around, CopyKind::to_host, stream_);
    device_.synchronize(stream_);
    check_guards();
    std::byte const* const front = staging_ + granule_bytes;
    CHECK(are_guards({staging_, granule_bytes}));
    CHECK(are_guards({front + bytes, bytes_ - bytes + granule_bytes}));
    return {front, front + bytes};
  }
  void check_guards() {
    for (std::span<std::byte> const piece : whole_slot_) {
      CHECK(are_guards({piece.data() - granule_bytes, granule_bytes}));
      CHECK(are_guards({piece.data() + piece.size(), granule_bytes}));
    }
    if (!scratch_.empty()) {
      copy_scratch_guards(CopyKind::to_host);
      CHECK(are_guards({scratch_guards_, 2 * granule_bytes}));
    }
  }

 private:
  static constexpr unsigned char guard = 0xA5;

  /// Copies the bytes before and behind the scratch memory.
  void copy_scratch_guards(CopyKind kind) {
    std::byte* host = scratch_guards_;
    for (std::byte* const device :
         {scratch_.data() - granule_bytes, scratch_.data() + scratch_.size()}) {
      kind == CopyKind::to_device ? device_.copy(device, host, granule_bytes, kind, stream_)
                                  : device_.copy(host, device, granule_bytes, kind, stream_);
      host += granule_bytes;
    }
    device_.synchronize(stream_);
  }

  [[nodiscard]] static bool are_guards(std::span<std::byte const> bytes) {
    return std::all_of(
        bytes.begin(), bytes.end(), [](std::byte byte) { return byte == std::byte{guard}; });
  }

  D device_;
  DeviceRig<D> rig_{device_};
  typename D::stream_type stream_ = rig_.stream();
  std::size_t bytes_;
  std::vector<std::span<std::byte>> slot_;  // its present extent
  std::vector<std::span<std::byte>> whole_slot_;
  std::byte* staging_ = nullptr;
  std::byte* block_ = nullptr;
  std::span<std::byte> scratch_;
  std::byte* scratch_guards_ = nullptr;
};

}  // namespace spillway::testing

TEST_CASE_TEMPLATE_DEFINE("StreamCodec: ", P, stream_codec_contract) {
  using namespace spillway;
  using namespace spillway::testing;
  using C = typename P::codec;
  using Rig = StreamCodecRig<C, typename P::device>;
  using Bytes = std::vector<std::byte>;

  SUBCASE("what goes in comes out, or the same as the time before, or the front of it") {
    for (double const zeros : {-1.0, 0.0, 0.5, 0.97, 1.0}) {
      for (std::size_t const bytes : {1UL, 2UL, 4UL, 7UL, 4096UL, 16384UL, 70'001UL, 2'200'002UL}) {
        CAPTURE(zeros);
        CAPTURE(bytes);
        Bytes const from = codec_input(bytes, zeros, 7);
        Rig rig{bytes, bytes % 2 == 0 ? 1U : 5U};
        rig.encode(from);
        std::size_t const stored = rig.stored_bytes();
        REQUIRE(stored > 0);
        REQUIRE(stored <= C::stream_bytes(bytes));
        rig.trim();
        Bytes const once = rig.decode(bytes);
        CHECK(rig.stored_bytes() == stored);
        if (C::is_lossless) {
          CHECK(once == from);
        }
        Bytes const front = rig.decode(bytes / 2);
        CHECK(std::equal(front.begin(), front.end(), once.begin()));
        Rig again{bytes};
        again.encode(once);
        CHECK(again.decode(bytes) == once);
      }
    }
  }

  SUBCASE("a slot that was not written, and one that ends early, are found") {
    Rig rig{100'000};
    CHECK(rig.stored_bytes() == 0);
    static_cast<void>(rig.decode(100'000));
    CHECK(rig.stored_bytes() == 0);

    rig.encode(codec_input(100'000, 0.5, 3));
    rig.trim();
    Rig shorter{20'000};
    std::size_t const length = shorter.slot().front().size();
    REQUIRE(length < rig.slot().front().size());
    std::memcpy(shorter.slot().front().data(), rig.slot().front().data(), length);
    static_cast<void>(shorter.decode(20'000));
    CHECK(shorter.stored_bytes() == 0);
  }

  SUBCASE("whatever the bytes are, nothing is touched outside of slot and block") {
    for (std::uint32_t seed = 0; seed < 100; ++seed) {
      CAPTURE(seed);
      Rig rig{60'000};
      rig.encode(codec_input(60'000, 0.5, seed));
      rig.trim();
      std::mt19937 random{seed};
      std::span<std::byte> const slot = rig.slot().front();
      for (int i = 0; i < 8; ++i) {
        // Mostly at the front, where the metadata is that a codec must not trust.
        std::size_t const reach = seed % 2 == 0 ? std::size_t{256} : slot.size();
        slot[random() % reach] = static_cast<std::byte>(random());
      }
      static_cast<void>(rig.decode(60'000));
    }
  }
}
