// SPDX-License-Identifier: Apache-2.0
#include <spillway/concepts/codec.hpp>
#include <spillway/device/sim/sim_api.hpp>
#include <spillway/device/sim/sim_handles.hpp>
#include <spillway/policy/codec/as_bfloat16.hpp>
#include <spillway/policy/codec/identity.hpp>
#include <spillway/policy/codec/zero_bitmap.hpp>
#include <spillway/testing/policy_contracts.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <span>
#include <string_view>

#include <support/archetypes/policy_archetypes.hpp>
#include <support/concept_checks.hpp>

namespace {

using namespace spillway;
using spillway::test::CodecArchetype;
using In = std::span<std::byte const>;
using Out = std::span<std::byte>;

struct NotMadeByDefault : Identity {
  explicit NotMadeByDefault(int) {}
};

static_assert(Codec<CodecArchetype>);
static_assert(Codec<spillway::test::NotMovable<Identity>>);  // the pool makes each in its place
static_assert(!Codec<NotMadeByDefault>);
static_assert(!Codec<int>);

struct NotIdentity : Identity {
  static constexpr bool is_identity = false;
};

static_assert(IdentityCodec<Identity>);
static_assert(!IdentityCodec<NotIdentity>);
static_assert(!IdentityCodec<CodecArchetype>);

template <class C>
concept SimStreamCodec = StreamCodec<C, SimApi>;

/// Encodes on streams of the simulated device, and has nothing but what it must have.
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

}  // namespace

TEST_SUITE("codec") {
  TEST_CASE("Codec: each member is asked for, and may not throw") {
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

  TEST_CASE("StreamCodec: each member is asked for, in the same way") {
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

  TEST_CASE_TEMPLATE_INVOKE(codec_contract, CodecArchetype, Identity, AsBfloat16, ZeroBitmap);
}
