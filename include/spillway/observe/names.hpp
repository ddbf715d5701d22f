// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/event.hpp>
#include <spillway/core/stats.hpp>
#include <spillway/core/types.hpp>
#include <spillway/host/host_tier.hpp>

#include <cstddef>

namespace spillway {

/// What is printed for a value of one of our enumerations: in lower case, words joined by `_`.
[[nodiscard]] constexpr char const* name_of(EventKind kind) noexcept {
  switch (kind) {
  case EventKind::allocate:
    return "allocate";
  case EventKind::deallocate:
    return "deallocate";
  case EventKind::make_resident:
    return "make_resident";
  case EventKind::swap_out:
    return "swap_out";
  case EventKind::copy_out:
    return "copy_out";
  case EventKind::swap_in:
    return "swap_in";
  case EventKind::prefetch:
    return "prefetch";
  case EventKind::drop:
    return "drop";
  case EventKind::move:
    return "move";
  case EventKind::grow:
    return "grow";
  case EventKind::trim:
    return "trim";
  case EventKind::host_wait:
    return "host_wait";
  case EventKind::out_of_memory:
    return "out_of_memory";
  case EventKind::step:
    return "step";
  }
  return "?";
}

[[nodiscard]] constexpr char const* name_of(EvictionReason reason) noexcept {
  switch (reason) {
  case EvictionReason::pressure:
    return "pressure";
  case EvictionReason::watermark:
    return "watermark";
  case EvictionReason::speculative:
    return "speculative";
  case EvictionReason::prefetch:
    return "prefetch";
  case EvictionReason::requested:
    return "requested";
  }
  return "?";
}

[[nodiscard]] constexpr char const* name_of(RangeSource source) noexcept {
  switch (source) {
  case RangeSource::free_range:
    return "free_range";
  case RangeSource::growth:
    return "growth";
  case RangeSource::after_drop:
    return "after_drop";
  case RangeSource::after_swap_out:
    return "after_swap_out";
  case RangeSource::after_compaction:
    return "after_compaction";
  case RangeSource::retry:
    return "retry";
  }
  return "?";
}

[[nodiscard]] constexpr char const* name_of(HostTier tier) noexcept {
  switch (tier) {
  case HostTier::pinned:
    return "pinned";
  case HostTier::pageable:
    return "pageable";
  case HostTier::file:
    return "file";
  }
  return "?";
}

[[nodiscard]] constexpr char const* name_of(Residency residency) noexcept {
  switch (residency) {
  case Residency::none:
    return "none";
  case Residency::device:
    return "device";
  case Residency::host:
    return "host";
  case Residency::moving_out:
    return "moving_out";
  case Residency::moving_in:
    return "moving_in";
  }
  return "?";
}

}  // namespace spillway
