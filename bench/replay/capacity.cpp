// SPDX-License-Identifier: Apache-2.0
#include "capacity.hpp"

#include <spillway/core/types.hpp>

#include <array>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace replay {

namespace {

constexpr std::array<std::pair<std::string_view, double>, 6> units{
    {{"", 1}, {"B", 1}, {"KiB", 0x1p10}, {"MiB", 0x1p20}, {"GiB", 0x1p30}, {"TiB", 0x1p40}}};

constexpr std::size_t most_capacities = 1000;
constexpr double most_arena_bytes = 0x1p40 - spillway::granule_bytes;

}  // namespace

std::size_t
parse_capacity(std::string_view option, std::string_view text, std::size_t whole_bytes) {
  double value = 0;
  auto const [past, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  std::string_view const unit{past, static_cast<std::size_t>(text.data() + text.size() - past)};
  double factor = unit == "x" ? static_cast<double>(whole_bytes) : 0;
  for (auto const& [name, bytes] : units) {
    factor = unit == name ? bytes : factor;
  }
  double const bytes = std::floor(value * factor);
  if (error != std::errc{} || factor == 0 || !(bytes >= 1)) {
    throw std::invalid_argument{std::string{option} + " '" + std::string{text} +
                                "': expected a positive number of bytes with an optional suffix "
                                "KiB, MiB or GiB, or a factor such as 0.5x"};
  }
  return arena_capacity(std::string{option} + " '" + std::string{text} + "'", bytes);
}

std::size_t arena_capacity(std::string const& what, double bytes) {
  if (!(bytes <= most_arena_bytes)) {
    throw std::invalid_argument{what + ": expected less than 1 TiB"};
  }
  return spillway::round_up(static_cast<std::size_t>(bytes), spillway::granule_bytes);
}

std::vector<std::size_t> parse_sweep(std::string_view text, std::size_t whole_bytes) {
  std::size_t const first_colon = text.find(':');
  std::size_t const last_colon = text.rfind(':');
  std::size_t count = 0;
  bool has_count = false;
  if (first_colon != last_colon) {
    std::string_view const last = text.substr(last_colon + 1);
    auto const [past, error] = std::from_chars(last.data(), last.data() + last.size(), count);
    has_count = error == std::errc{} && past == last.data() + last.size();
  }
  if (!has_count || count < 2 || count > most_capacities) {
    throw std::invalid_argument{"--sweep '" + std::string{text} +
                                "': expected two capacities and how many to try, such as "
                                "0.2x:1.0x:9 or 8GiB:24GiB:5"};
  }
  auto const from =
      static_cast<double>(parse_capacity("--sweep", text.substr(0, first_colon), whole_bytes));
  auto const to = static_cast<double>(parse_capacity(
      "--sweep", text.substr(first_colon + 1, last_colon - first_colon - 1), whole_bytes));
  std::vector<std::size_t> capacities;
  capacities.reserve(count);
  for (std::size_t i = 0; i < count; ++i) {
    double const part = static_cast<double>(i) / static_cast<double>(count - 1);
    capacities.push_back(
        spillway::round_up(static_cast<std::size_t>(std::llround(from + part * (to - from))),
                           spillway::granule_bytes));
  }
  return capacities;
}

std::string text_of(std::size_t bytes) {
  std::size_t unit = 1;
  while (unit + 1 < units.size() && static_cast<double>(bytes) >= units[unit + 1].second) {
    ++unit;
  }
  auto const value = static_cast<double>(bytes) / units[unit].second;
  std::array<char, 32> text{};
  std::snprintf(text.data(),
                text.size(),
                unit == 1 ? "%.0f %s" : "%.1f %s",
                value,
                std::string{units[unit].first}.c_str());
  return text.data();
}

}  // namespace replay
