// SPDX-License-Identifier: Apache-2.0
// An eviction policy of your own: one alias puts it into the bundle of policies.
#include <spillway/spillway.hpp>

#include <cstddef>
#include <cstdio>
#include <optional>
#include <vector>

// [policy]
using spillway::BlockId;
using namespace spillway::literals;

/// Blocks below 1 MiB stay as long as a larger one can leave.
class LargeFirst : public spillway::LruEviction {
 public:
  template <class Inspect>
  [[nodiscard]] std::optional<BlockId> victim(std::size_t short_bytes,
                                              Inspect inspect) const noexcept {
    auto const if_large = [&](BlockId id) noexcept {
      auto const candidate = inspect(id);
      return candidate && candidate->bytes >= 1_MiB ? candidate : std::nullopt;
    };
    auto const large = LruEviction::victim(short_bytes, if_large);
    return large ? large : LruEviction::victim(short_bytes, inspect);
  }
};
static_assert(spillway::EvictionPolicy<LargeFirst>);

struct MyPolicies : spillway::SimPolicies {
  using eviction = LargeFirst;
};
// [policy end]

int main() {
  spillway::DeviceAllocator<MyPolicies> memory{{.capacity_bytes = 16_MiB}};
  auto const stream = memory.create_stream();
  using Buffer = spillway::SwappableBuffer<decltype(memory)>;

  // The small block is the one used longest ago: `LruEviction` alone would send it away first.
  Buffer small{memory, 64_KiB};
  (void)small.acquire_write(stream);
  std::vector<Buffer> large;
  for (int i = 0; i < 8; ++i) {
    large.emplace_back(memory, 4_MiB);
    (void)large.back().acquire_write(stream);
  }

  bool const has_stayed = small.residency() == spillway::Residency::device;
  std::printf("the small block %s; %zu blocks swapped out\n",
              has_stayed ? "stayed" : "was swapped out",
              static_cast<std::size_t>(memory.stats().swap_outs.count));
  return has_stayed ? 0 : 1;
}
