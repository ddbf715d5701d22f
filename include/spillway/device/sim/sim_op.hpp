// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/types.hpp>
#include <spillway/device/sim/sim_options.hpp>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace spillway::detail {

/// One copy of a batch.
struct SimCopy {
  void* to = nullptr;
  void const* from = nullptr;
  std::size_t bytes = 0;

  /// True if it reads or writes in `[p, p + n)`.
  [[nodiscard]] bool touches(void const* p, std::size_t n) const noexcept {
    auto const overlaps = [this, p, n](void const* mine) {
      auto const a = reinterpret_cast<std::uintptr_t>(mine);
      auto const b = reinterpret_cast<std::uintptr_t>(p);
      return a < b + n && b < a + bytes;
    };
    return bytes != 0 && (overlaps(to) || overlaps(from));
  }
};

/// One operation in the queue of a simulated stream.
struct SimOp {
  enum class Kind : std::uint8_t { copy, batch, fill, host, compute, record, wait, stop };

  Kind what = Kind::stop;
  CopyKind direction = CopyKind::on_device;
  bool is_free = false;  // does not use a copy engine, so takes no time
  unsigned char byte = 0;
  void* to = nullptr;
  void const* from = nullptr;
  std::size_t bytes = 0;  // for a batch, the sum of its copies
  // the copies of a batch; the owner of the operation keeps them alive
  std::span<SimCopy const> copies = {};
  HostFunction function = nullptr;
  void* argument = nullptr;
  std::uint64_t duration_ns = 0;

  [[nodiscard]] static SimOp
  copy(void* to, void const* from, std::size_t bytes, CopyKind direction) noexcept {
    return {.what = Kind::copy, .direction = direction, .to = to, .from = from, .bytes = bytes};
  }
  [[nodiscard]] static SimOp
  batch(std::span<SimCopy const> copies, std::size_t bytes, CopyKind direction) noexcept {
    return {.what = Kind::batch, .direction = direction, .bytes = bytes, .copies = copies};
  }
  [[nodiscard]] static SimOp fill(void* p, unsigned char byte, std::size_t bytes) noexcept {
    return {.what = Kind::fill, .byte = byte, .to = p, .bytes = bytes};
  }
  [[nodiscard]] static SimOp host(HostFunction function, void* argument) noexcept {
    return {.what = Kind::host, .function = function, .argument = argument};
  }
  [[nodiscard]] static SimOp compute(std::uint64_t duration_ns) noexcept {
    return {.what = Kind::compute, .duration_ns = duration_ns};
  }

  /// True if it reads or writes in `[p, p + n)`.
  [[nodiscard]] bool touches(void const* p, std::size_t n) const noexcept {
    if (what == Kind::batch) {
      return std::any_of(
          copies.begin(), copies.end(), [p, n](SimCopy const& c) { return c.touches(p, n); });
    }
    return SimCopy{to, what == Kind::copy ? from : to, bytes}.touches(p, n);
  }

  /// Carries out a copy, a batch, a fill or a host call. The executor carries out the other kinds.
  void perform() const noexcept {
    switch (what) {
    case Kind::copy:
      if (bytes != 0) {
        std::memcpy(to, from, bytes);
      }
      return;
    case Kind::batch:
      for (SimCopy const& c : copies) {
        std::memcpy(c.to, c.from, c.bytes);
      }
      return;
    case Kind::fill:
      if (bytes != 0) {
        std::memset(to, byte, bytes);
      }
      return;
    case Kind::host:
      function(argument);
      return;
    case Kind::compute:
    case Kind::record:
    case Kind::wait:
    case Kind::stop:
      return;
    }
  }
};

/// The speed and latency of a copy engine.
struct SimRate {
  double ns_per_byte = 0;
  std::uint64_t latency_ns = 0;

  SimRate() = default;
  SimRate(std::uint64_t bytes_per_second, std::uint64_t latency) noexcept
      : ns_per_byte{bytes_per_second == 0 ? 0 : 1e9 / static_cast<double>(bytes_per_second)},
        latency_ns{latency} {}

  [[nodiscard]] bool is_instant() const noexcept { return ns_per_byte == 0 && latency_ns == 0; }
  [[nodiscard]] std::uint64_t duration_ns(std::size_t bytes) const noexcept {
    double const nearest_ns = static_cast<double>(bytes) * ns_per_byte + 0.5;
    return latency_ns + static_cast<std::uint64_t>(nearest_ns);
  }
};

/// Returns the rate of the engine for copies in `direction`. Fills count as `on_device`.
[[nodiscard]] inline SimRate rate_of(SimOptions const& options, CopyKind direction) noexcept {
  return {direction == CopyKind::on_device ? options.on_device_bytes_per_second
                                           : options.link_bytes_per_second,
          options.copy_latency_ns};
}

[[nodiscard]] inline std::uint64_t steady_ns() noexcept {
  auto const now = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
}

}  // namespace spillway::detail
