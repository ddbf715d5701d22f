// SPDX-License-Identifier: Apache-2.0
#include <spillway/core/types.hpp>
#include <spillway/device/cuda/copy_kernel.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include <support/stripes_on_host.hpp>

TEST_SUITE("copy_kernel") {
  namespace {

  using spillway::CopyKind;
  using spillway::detail::FewCopyBlocks;
  using spillway::detail::ManyCopyBlocks;
  using spillway::detail::most_copy_teams;
  using spillway::test::HostTeam;

  template <class Blocks>
  void run(Blocks& blocks, std::uint32_t most_teams) {
    typename Blocks::Memory memory;
    std::uint32_t const teams = blocks.share_among(most_teams);
    for (std::uint32_t team = 0; team < teams; ++team) {
      blocks(HostTeam{}, memory, team);
    }
  }

  }  // namespace

  TEST_CASE_TEMPLATE(
      "CopyBlocks: blocks of any length and alignment are copied, and no other bytes are written",
      CopyBlocks,
      FewCopyBlocks,
      ManyCopyBlocks) {
    for (std::uint32_t seed = 1; seed <= 6; ++seed) {
      CAPTURE(seed);
      std::mt19937 random{seed};
      CopyBlocks blocks{};
      std::size_t const count = 1 + random() % CopyBlocks::most_blocks;
      constexpr std::size_t stride = 3 * CopyBlocks::piece_bytes;
      std::vector<std::byte> from(count * stride);
      std::generate(from.begin(), from.end(), [&] { return static_cast<std::byte>(random()); });
      std::vector<std::byte> to(from.size(), std::byte{0xEE});
      std::vector<std::byte> expected = to;
      for (std::size_t i = 0; i < count; ++i) {
        std::size_t const unit = std::size_t{1} << random() % 9;
        std::size_t const at = i * stride + random() % 64 / unit * unit;
        std::size_t const bytes = 1 + random() % (stride - 64) / unit * unit;
        std::copy_n(from.begin() + static_cast<std::ptrdiff_t>(at),
                    bytes,
                    expected.begin() + static_cast<std::ptrdiff_t>(at));
        REQUIRE(blocks.takes(bytes));
        blocks.add(to.data() + at, from.data() + at, bytes);
      }
      run(blocks, most_copy_teams(seed % 2 == 0 ? CopyKind::on_device : CopyKind::to_host));
      CHECK(to == expected);
    }
  }

  TEST_CASE_TEMPLATE(
      "CopyBlocks: a launch has limits on blocks and pieces, but takes any single block",
      CopyBlocks,
      FewCopyBlocks,
      ManyCopyBlocks) {
    CopyBlocks blocks{};
    std::byte byte{};
    for (unsigned i = 0; i < CopyBlocks::most_blocks; ++i) {
      CHECK(blocks.takes(1));
      blocks.add(&byte, &byte, 1);
    }
    CHECK_FALSE(blocks.takes(1));

    constexpr std::uint64_t half =
        std::uint64_t{CopyBlocks::most_pieces} / 2 * CopyBlocks::piece_bytes;
    CopyBlocks large{};
    large.add(&byte, &byte, half);
    CHECK(large.takes(half));
    CHECK_FALSE(large.takes(half + 1));
    CHECK(large.share_among(64) == 64);
    CHECK(CopyBlocks{}.takes(2 * half + 1));
  }
}
