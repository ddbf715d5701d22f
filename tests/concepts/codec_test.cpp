// SPDX-License-Identifier: Apache-2.0
#include <spillway/concepts/codec.hpp>
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

  TEST_CASE_TEMPLATE_INVOKE(codec_contract, CodecArchetype, Identity, AsBfloat16, ZeroBitmap);
}
