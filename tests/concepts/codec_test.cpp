// SPDX-License-Identifier: Apache-2.0
#include <spillway/concepts/codec.hpp>
#include <spillway/device/sim/sim_api.hpp>
#include <spillway/device/sim/sim_handles.hpp>
#include <spillway/host_swap_pool.hpp>
#include <spillway/policy/codec/as_bfloat16.hpp>
#include <spillway/policy/codec/identity.hpp>
#include <spillway/policy/codec/zero_bitmap.hpp>
#include <spillway/stream/stream_order.hpp>
#include <spillway/testing/policy_contracts.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>
#include <type_traits>

#include <support/archetypes/policy_archetypes.hpp>
#include <support/concept_checks.hpp>
#include <support/pool_bench.hpp>

namespace {

using namespace spillway;
using spillway::test::CodecArchetype;
using In = std::span<std::byte const>;
using Out = std::span<std::byte>;

struct NotMadeByDefault : Identity {
  explicit NotMadeByDefault(int) {}
};

static_assert(Codec<CodecArchetype>);
static_assert(Codec<spillway::test::NotMovable<Identity>>);  // the pool makes each in place
static_assert(!Codec<NotMadeByDefault>);
static_assert(!Codec<int>);

struct NotIdentity : Identity {
  static constexpr bool is_identity = false;
};

static_assert(IdentityCodec<Identity>);
static_assert(!IdentityCodec<NotIdentity>);
static_assert(!IdentityCodec<CodecArchetype>);

struct KnownAtRunTime : CodecArchetype {
  static inline bool is_lossless = true;
};

static_assert(!Codec<KnownAtRunTime>);

template <class C>
concept SimStreamCodec = StreamCodec<C, SimApi>;

/// Encodes on streams of the simulated device, and has only what the concept requires.
struct StreamCodecArchetype : CodecArchetype {
  static std::size_t stream_bytes(std::size_t bytes) noexcept { return bytes; }
  static std::size_t stored_bytes(SlotMemory /*slot*/) noexcept { return 0; }
  static std::size_t scratch_bytes(SimApi& /*device*/) { return 0; }
  static void encode_on(
      SimApi& /*device*/, SimStream /*stream*/, In /*from*/, SlotMemory /*to*/, Out /*scratch*/) {}
  static void decode_on(
      SimApi& /*device*/, SimStream /*stream*/, SlotMemory /*from*/, Out /*to*/, Out /*scratch*/) {}
};

static_assert(SimStreamCodec<StreamCodecArchetype>);
static_assert(!SimStreamCodec<CodecArchetype>);
static_assert(!StreamCodec<StreamCodecArchetype, spillway::test::DeviceArchetype>);
static_assert(!StreamCodec<StreamCodecArchetype, int>);

/// Has members that can be called as the concept says and are not plain functions of those types.
struct OtherSignatures : CodecArchetype {
  static constexpr std::true_type is_lossless{};
  static std::size_t worst_bytes(std::uint64_t bytes, int padding = 0) noexcept {
    return bytes + static_cast<std::size_t>(padding);
  }
};

/// The same on a stream. Copies the bytes unchanged.
struct OtherStreamSignatures : OtherSignatures {
  static constexpr auto stream_bytes = [](auto bytes) noexcept { return bytes; };
  static constexpr auto stored_bytes = [](SlotMemory const& slot, int /*unused*/ = 0) noexcept {
    std::size_t bytes = 0;
    for (Out const piece : slot) {
      bytes += piece.size();
    }
    return bytes;
  };
  static std::size_t scratch_bytes(SimApi const& /*device*/) { return 256; }
  template <class Device>
  static void
  encode_on(Device& device, SimStream stream, In from, SlotMemory slot, Out const& /*scratch*/) {
    for (Out const piece : slot) {
      std::size_t const part = std::min(piece.size(), from.size());
      device.copy(piece.data(), from.data(), part, CopyKind::to_host, stream);
      from = from.subspan(part);
    }
  }
  static void decode_on(SimApi& device,
                        SimStream const& stream,
                        SlotMemory slot,
                        Out to,
                        Out /*scratch*/,
                        CopyKind kind = CopyKind::to_device) {
    for (Out const piece : slot) {
      std::size_t const part = std::min(piece.size(), to.size());
      device.copy(to.data(), piece.data(), part, kind, stream);
      to = to.subspan(part);
    }
  }
};

static_assert(SimStreamCodec<OtherStreamSignatures> && !SimStreamCodec<OtherSignatures>);

/// Checks that a block is unchanged after a round trip through a pool with that codec.
template <Codec C>
void check_round_trip() {
  std::size_t const bytes = 100'000;
  SimApi device;
  StreamOrder<SimApi> order{device};
  auto const stream = device.create_stream();
  auto* const block = static_cast<std::byte*>(device.try_reserve(bytes));
  put_pattern(block, bytes, 3);
  {
    HostSwapPool<SimApi> pool{
        device, order, {.pinned_bytes = 1 << 20, .initial_pinned_bytes = 1 << 20}};
    HostSlotId const slot = pool.try_take(bytes, pool.coding<C>()).value();
    order.synchronize(pool.write(slot, block, bytes, stream).host_done);
    std::memset(block, 0, bytes);
    order.synchronize(pool.read(slot, block, bytes, stream).device_done);

    CHECK(has_pattern(block, bytes, 3));
    CHECK(pool.stats().encoded_raw_bytes == bytes);
  }
  device.release(block, bytes);
}

}  // namespace

TEST_SUITE("codec") {
  TEST_CASE("Codec: the concept requires each member, as noexcept") {
    CHECK_NEEDS(Codec, CodecArchetype, name);
    CHECK_NEEDS(Codec, CodecArchetype, worst_bytes);
    CHECK_NEEDS(Codec, CodecArchetype, encode);
    CHECK_NEEDS(Codec, CodecArchetype, decode);
    CHECK_NEEDS(Codec, CodecArchetype, is_lossless);
    CHECK_REFUSES(Codec, CodecArchetype, std::string_view name() noexcept);  // not static
    CHECK_REFUSES(Codec, CodecArchetype, static std::size_t worst_bytes(std::size_t));
    CHECK_REFUSES(Codec, CodecArchetype, std::size_t encode(In, Out));  // may throw
    CHECK_REFUSES(Codec, CodecArchetype, int encode(In, Out) noexcept);
    CHECK_REFUSES(Codec, CodecArchetype, bool decode(In, Out));
    CHECK_REFUSES(Codec, CodecArchetype, void decode(In, Out) noexcept);
  }

  TEST_CASE("StreamCodec: the concept requires each member, as noexcept") {
    CHECK_NEEDS(SimStreamCodec, StreamCodecArchetype, name);  // it is a Codec, too
    CHECK_NEEDS(SimStreamCodec, StreamCodecArchetype, stream_bytes);
    CHECK_NEEDS(SimStreamCodec, StreamCodecArchetype, scratch_bytes);
    CHECK_NEEDS(SimStreamCodec, StreamCodecArchetype, stored_bytes);
    CHECK_NEEDS(SimStreamCodec, StreamCodecArchetype, encode_on);
    CHECK_NEEDS(SimStreamCodec, StreamCodecArchetype, decode_on);
    CHECK_REFUSES(SimStreamCodec, StreamCodecArchetype, std::size_t stream_bytes(std::size_t));
    CHECK_REFUSES(SimStreamCodec, StreamCodecArchetype, static int stored_bytes(SlotMemory));
    CHECK_REFUSES(SimStreamCodec,
                  StreamCodecArchetype,
                  void encode_on(SimApi&, SimStream, In, SlotMemory, Out));
  }

  TEST_CASE("Codec: a pool calls each member with the types that the concept names") {
    check_round_trip<OtherSignatures>();
    check_round_trip<OtherStreamSignatures>();
  }

  TEST_CASE_TEMPLATE_INVOKE(codec_contract, CodecArchetype, Identity, AsBfloat16, ZeroBitmap);
}
