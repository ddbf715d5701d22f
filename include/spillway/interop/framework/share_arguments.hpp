// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/error.hpp>
#include <spillway/device_share.hpp>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

namespace spillway::framework {

/// Makes the options of a `DeviceShare` from the arguments of the Python function `share`.
///
/// @throws ContractViolation if a time is not a number; std::bad_alloc
[[nodiscard]] inline ShareOptions share_options(std::string const& file,
                                                std::size_t least_bytes,
                                                double weight,
                                                double idle_seconds,
                                                double patience_seconds) {
  expects(!std::isnan(idle_seconds), "idle_after is not a number", {}, "share");
  expects(!std::isnan(patience_seconds), "patience is not a number", {}, "share");
  auto const time = [](double seconds) {
    // `DeviceShare` allows no longer times. The conversion of infinity would be undefined.
    constexpr double most_seconds = 100.0 * 365 * 24 * 60 * 60;
    return std::chrono::duration_cast<std::chrono::milliseconds>(
        std::chrono::duration<double>{std::clamp(seconds, 0.0, most_seconds)});
  };
  return {.file = file,
          .least_bytes = least_bytes,
          .weight = weight,
          .idle_after = time(idle_seconds),
          .patience = time(patience_seconds)};
}

/// What `share_members` in Python returns of one program: process id, bytes held, fair and wanted,
/// weight, and whether the program is at work.
using ShareRow =
    std::tuple<std::int64_t, std::uint64_t, std::uint64_t, std::uint64_t, double, bool>;
[[nodiscard]] inline std::vector<ShareRow> share_rows(std::vector<ShareMember> const& members) {
  std::vector<ShareRow> rows;
  rows.reserve(members.size());
  for (ShareMember const& one : members) {
    rows.emplace_back(
        one.process, one.held_bytes, one.fair_bytes, one.wanted_bytes, one.weight, one.is_active);
  }
  return rows;
}

}  // namespace spillway::framework
