// SPDX-License-Identifier: Apache-2.0
#include <spillway/policy/codec/zero_bitmap.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace {

using spillway::ZeroBitmap;

[[nodiscard]] std::vector<std::byte> encoded(std::vector<std::uint32_t> const& elements) {
  std::vector<std::byte> to(ZeroBitmap::worst_bytes(4 * elements.size()));
  to.resize(ZeroBitmap{}.encode(std::as_bytes(std::span{elements}), to));
  return to;
}

}  // namespace

TEST_SUITE("zero_bitmap") {
  TEST_CASE("ZeroBitmap: takes a bit for each element, and four bytes for each that is not 0") {
    std::vector<std::uint32_t> elements(16384);
    CHECK(encoded(elements).size() == 2048);
    for (std::size_t i = 0; i < elements.size(); i += 2) {
      elements[i] = 1;
    }
    CHECK(encoded(elements).size() == 2048 + 32768);
    elements[1] = 0x8000'0000U;  // -0.0 is not 0
    CHECK(encoded(elements).size() == 2048 + 32768 + 4);
  }

  TEST_CASE("ZeroBitmap: a bitmap whose count of elements does not match is refused") {
    std::vector<std::uint32_t> elements(100);
    elements[7] = elements[99] = 5;
    std::vector<std::uint32_t> to(100);
    auto const decodes = [&](std::vector<std::byte> const& from) {
      return ZeroBitmap{}.decode(from, std::as_writable_bytes(std::span{to}));
    };
    std::vector<std::byte> const good = encoded(elements);
    REQUIRE(decodes(good));
    CHECK(to == elements);
    auto one_more = good;
    one_more[0] = std::byte{0x81};
    CHECK_FALSE(decodes(one_more));
    auto behind_the_end = good;
    behind_the_end[0] = std::byte{0};
    behind_the_end[15] = std::byte{0x80};  // element 127 of 100, instead of element 7
    CHECK_FALSE(decodes(behind_the_end));
  }
}
