// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace replay {

/// Bytes from "4096", "1.5GiB" or "0.5x", a factor of `whole_bytes`; rounded up to the arena's
/// granule, so that a factor of 1 is enough. Less than 1 TiB, as an arena is.
///
/// @throws std::invalid_argument that names `option`
[[nodiscard]] std::size_t
parse_capacity(std::string_view option, std::string_view text, std::size_t whole_bytes);

/// So many bytes, rounded up to the arena's granule.
///
/// @throws std::invalid_argument that begins with `what`, of 1 TiB and more, which no arena takes
[[nodiscard]] std::size_t arena_capacity(std::string const& what, double bytes);

/// Capacities from "0.2x:1.0x:9" or "8GiB:24GiB:5": the two ends, how many in all, evenly spaced.
///
/// @throws std::invalid_argument
[[nodiscard]] std::vector<std::size_t> parse_sweep(std::string_view text, std::size_t whole_bytes);

/// "1.5 GiB"; the largest unit that leaves at least one before the point.
[[nodiscard]] std::string text_of(std::size_t bytes);

}  // namespace replay
