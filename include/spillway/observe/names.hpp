// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/record.hpp>
#include <spillway/core/stats.hpp>
#include <spillway/core/types.hpp>
#include <spillway/host/host_tier.hpp>

#include <array>
#include <cstddef>

namespace spillway {

namespace detail {

template <std::size_t Count>
[[nodiscard]] constexpr char const* name_at(std::array<char const*, Count> const& names,
                                            std::size_t i) noexcept {
  return i < Count ? names[i] : "?";
}

}  // namespace detail

/// Returns the name of an enumerator as it is spelled in the code, for logs, tables and JSON.
[[nodiscard]] constexpr char const* name_of(RecordKind kind) noexcept {
  constexpr std::array names{"allocate",
                             "deallocate",
                             "make_resident",
                             "swap_out",
                             "copy_out",
                             "swap_in",
                             "prefetch",
                             "drop",
                             "recompute",
                             "move",
                             "grow",
                             "trim",
                             "host_wait",
                             "out_of_memory",
                             "step"};
  static_assert(names.size() == static_cast<std::size_t>(RecordKind::step) + 1);
  return detail::name_at(names, static_cast<std::size_t>(kind));
}

[[nodiscard]] constexpr char const* name_of(SpanKind kind) noexcept {
  constexpr std::array names{"copy_to_host", "copy_to_device", "copy_on_device", "kernel"};
  static_assert(names.size() == static_cast<std::size_t>(SpanKind::kernel) + 1);
  return detail::name_at(names, static_cast<std::size_t>(kind));
}

[[nodiscard]] constexpr char const* name_of(EvictionReason reason) noexcept {
  constexpr std::array names{"pressure", "watermark", "speculative", "prefetch", "requested"};
  static_assert(names.size() == static_cast<std::size_t>(EvictionReason::requested) + 1);
  return detail::name_at(names, static_cast<std::size_t>(reason));
}

[[nodiscard]] constexpr char const* name_of(RangeSource source) noexcept {
  constexpr std::array names{
      "free_range", "growth", "after_drop", "after_swap_out", "after_compaction", "retry"};
  static_assert(names.size() == static_cast<std::size_t>(RangeSource::retry) + 1);
  return detail::name_at(names, static_cast<std::size_t>(source));
}

[[nodiscard]] constexpr char const* name_of(HostTier tier) noexcept {
  constexpr std::array names{"pinned", "pageable", "file"};
  static_assert(names.size() == static_cast<std::size_t>(HostTier::file) + 1);
  return detail::name_at(names, static_cast<std::size_t>(tier));
}

[[nodiscard]] constexpr char const* name_of(Residency residency) noexcept {
  constexpr std::array names{"none", "device", "host", "moving_out", "moving_in"};
  static_assert(names.size() == static_cast<std::size_t>(Residency::moving_in) + 1);
  return detail::name_at(names, static_cast<std::size_t>(residency));
}

}  // namespace spillway
