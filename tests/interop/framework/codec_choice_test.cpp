// SPDX-License-Identifier: Apache-2.0
#include <spillway/core/types.hpp>
#include <spillway/interop/framework/buffer_leases.hpp>
#include <spillway/interop/framework/codec_choice.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <stdexcept>
#include <vector>

#include <support/buffer_leases_bench.hpp>

using namespace spillway;
using namespace spillway::framework;
using spillway::test::LeasesBench;

TEST_SUITE("codec_choice") {
  TEST_CASE("CodecChoice: a name selects a codec; a lossy one can be chosen only by tensor") {
    CHECK(codec_named({}, false) == CodecChoice::none);
    CHECK(codec_named("lossless", false) == CodecChoice::lossless);
    CHECK(codec_named("lossless", true) == CodecChoice::lossless);
    CHECK(codec_named("bfloat16", true) == CodecChoice::bfloat16);
    CHECK_THROWS_AS((void)codec_named("bfloat16", false), std::invalid_argument);
    for (bool const is_by_tensor : {false, true}) {
      CHECK_THROWS_WITH((void)codec_named("zstd", is_by_tensor),
                        R"(set_codec: the codec is "lossless", "bfloat16" or None, not "zstd")");
    }
  }

  TEST_CASE("BufferLeases: the default codec applies to buffers made afterwards") {
    LeasesBench bench{512_KiB};
    auto const encoded = [&] { return bench.memory.host_stats().encoded_raw_bytes; };
    auto* const before = bench.make(128_KiB, 1);
    bench.leases.set_default_codec(CodecChoice::lossless);
    auto* const after = bench.make(128_KiB, 2);
    (void)bench.leases.reclaim();
    CHECK(encoded() == 128_KiB);
    bench.leases.set_default_codec(CodecChoice::none);
    auto* const last = bench.make(128_KiB, 3);
    (void)bench.leases.reclaim();
    CHECK(encoded() == 128_KiB);
    CHECK(bench.read({before, after, last}) == std::vector<unsigned char>{1, 2, 3});
  }

  TEST_CASE("BufferLeases: a buffer uses the codec chosen for it") {
    LeasesBench bench{512_KiB};
    auto* const plain = bench.make(128_KiB, 0);
    auto* const sparse = bench.make(128_KiB, 0);
    auto* const halved = bench.make(128_KiB, 0);
    bench.leases.set_codec(sparse, CodecChoice::lossless);
    bench.leases.set_codec(halved, CodecChoice::bfloat16);
    bench.leases.set_codec(nullptr, CodecChoice::bfloat16);  // of no buffer
    (void)bench.leases.reclaim();
    CHECK(bench.memory.host_stats().encoded_raw_bytes == 256_KiB);
    CHECK(bench.memory.host_stats().encoded_stored_bytes < 200_KiB);
    CHECK(bench.read({plain, sparse, halved}) == std::vector<unsigned char>{0, 0, 0});
  }
}
