// SPDX-License-Identifier: Apache-2.0
#include <spillway/core/streaming_store.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <vector>

using namespace spillway::detail;

TEST_SUITE("streaming_store") {
  TEST_CASE("copy_streaming: gives the result of memcpy at any size and alignment") {
    constexpr std::size_t room = 40'000;
    std::vector<std::byte> source(room);
    for (std::size_t i = 0; i < room; ++i) {
      source[i] = static_cast<std::byte>(i * 31 + i / 256);
    }
    for (std::size_t const bytes : {0U, 1U, 15U, 16'383U, 16'384U, 16'399U, 16'400U, 39'000U}) {
      for (std::size_t const to : {0U, 1U, 8U, 15U}) {
        for (std::size_t const from : {0U, 3U}) {
          CAPTURE(bytes);
          CAPTURE(to);
          CAPTURE(from);
          std::vector<std::byte> target(room, std::byte{0x5A});
          copy_streaming(target.data() + to, source.data() + from, bytes);

          auto const begin = target.begin() + static_cast<std::ptrdiff_t>(to);
          auto const end = begin + static_cast<std::ptrdiff_t>(bytes);
          auto const is_untouched = [](std::byte byte) { return byte == std::byte{0x5A}; };
          CHECK(std::equal(begin, end, source.begin() + static_cast<std::ptrdiff_t>(from)));
          CHECK(std::all_of(target.begin(), begin, is_untouched));
          CHECK(std::all_of(end, target.end(), is_untouched));
        }
      }
    }
  }

  TEST_CASE("is_streamable: true for large copies to an aligned address, on processors with SSE2") {
    alignas(streaming_unit_bytes) std::byte aligned[2 * streaming_unit_bytes] = {};
    CHECK_FALSE(is_streamable(aligned + 1, 1U << 20U));
    CHECK_FALSE(is_streamable(aligned, 64));
#if defined(__SSE2__)
    CHECK(is_streamable(aligned, 1U << 20U));
#else
    CHECK_FALSE(is_streamable(aligned, 1U << 20U));
#endif
  }
}
