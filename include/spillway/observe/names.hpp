// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/record.hpp>
#include <spillway/core/stats.hpp>
#include <spillway/core/types.hpp>
#include <spillway/host/host_tier.hpp>

#include <cstddef>

namespace spillway {

/// What is printed for a value of one of our enumerations: in lower case, words joined by `_`.
[[nodiscard]] constexpr char const* name_of(RecordKind kind) noexcept {
  switch (kind) {
  case RecordKind::allocate:
    return "allocate";
  case RecordKind::deallocate:
    return "deallocate";
  case RecordKind::make_resident:
    return "make_resident";
  case RecordKind::swap_out:
    return "swap_out";
  case RecordKind::copy_out:
    return "copy_out";
  case RecordKind::swap_in:
    return "swap_in";
  case RecordKind::prefetch:
    return "prefetch";
  case RecordKind::drop:
    return "drop";
  case RecordKind::move:
    return "move";
  case RecordKind::grow:
    return "grow";
  case RecordKind::trim:
    return "trim";
  case RecordKind::host_wait:
    return "host_wait";
  case RecordKind::out_of_memory:
    return "out_of_memory";
  case RecordKind::step:
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
