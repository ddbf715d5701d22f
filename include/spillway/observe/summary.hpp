// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/config.hpp>
#include <spillway/core/stats.hpp>
#include <spillway/host/host_tier.hpp>
#include <spillway/observe/names.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>

namespace spillway {

/// Returns a size for people: exact below 1 KiB, otherwise with one decimal, such as `1.5 MiB`.
[[nodiscard]] inline std::string human_bytes(std::uint64_t bytes) {
  constexpr std::array units{"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  std::size_t unit = 0;
  std::uint64_t whole = bytes;
  std::uint64_t tenths = 0;
  for (std::uint64_t divisor = 1024; whole >= 1024; divisor <<= 10U) {
    ++unit;
    whole = bytes / divisor;
    // The remainder is below 2^60, so ten times it still fits into 64 bits.
    tenths = (bytes % divisor * 10 + divisor / 2) / divisor;
    if (tenths == 10) {
      ++whole;
      tenths = 0;
    }
  }
  std::string text = std::to_string(whole);
  if (unit > 0) {
    text += '.';
    text += std::to_string(tenths);
  }
  return text + ' ' + units[unit];
}

namespace detail {

/// Builds the text of `summary`: a table with one wide column and four narrow ones.
class SummaryTable {
 public:
  static constexpr std::size_t first_width = 28;
  static constexpr std::size_t other_width = 12;
  static constexpr std::size_t others = 4;
  static constexpr std::size_t inner_width = first_width + 2 + others * (other_width + 3);

  void title(std::string_view text) {
    rule('=');
    std::size_t const left = (inner_width - text.size()) / 2;
    text_ += '|' + std::string(left, ' ');
    text_ += text;
    text_ += std::string(inner_width - left - text.size(), ' ') + "|\n";
    rule('=');
  }
  /// Begins a section with a header.
  void section(std::initializer_list<std::string> cells) {
    if (has_section_) {
      rule('-');
    }
    has_section_ = true;
    row(cells);
    rule('-');
  }
  /// Adds a row. Cells that are left out stay empty.
  void row(std::initializer_list<std::string> cells) {
    text_ += '|';
    for (std::size_t i = 0; i <= others; ++i) {
      std::string const cell = i < cells.size() ? cells.begin()[i] : std::string{};
      std::size_t const width = i == 0 ? first_width : other_width;
      std::string const space(width - std::min(width, cell.size()), ' ');
      text_.append(1, ' ').append(i == 0 ? cell : space).append(i == 0 ? space : cell).append(" |");
    }
    text_ += '\n';
  }
  [[nodiscard]] std::string finish() && {
    rule('=');
    return std::move(text_);
  }

 private:
  void rule(char line) { text_ += '|' + std::string(inner_width, line) + "|\n"; }

  std::string text_;
  bool has_section_ = false;
};

template <class = Lazily>
void summarize_memory(SummaryTable& table, Stats const& stats) {
  auto const blocks = [&](char const* name, BlockGauge const& gauge) {
    table.row({name,
               human_bytes(gauge.bytes.current),
               human_bytes(gauge.bytes.peak),
               human_bytes(gauge.bytes.total),
               std::to_string(gauge.blocks.current)});
  };
  table.section({"Memory", "Current", "Peak", "Total", "Blocks now"});
  blocks("Allocated", stats.allocated);
  table.row({"Requested",
             human_bytes(stats.requested_bytes.current),
             human_bytes(stats.requested_bytes.peak),
             human_bytes(stats.requested_bytes.total)});
  blocks("Resident", stats.resident);
  blocks("Leased", stats.leased);
  table.row({"Inactive",
             human_bytes(stats.inactive_bytes()),
             "",
             "",
             std::to_string(stats.resident.blocks.current - stats.leased.blocks.current)});
  table.row(
      {"Reserved", human_bytes(stats.reserved_bytes), human_bytes(stats.peak_reserved_bytes)});
  table.row({"Capacity (limit)", human_bytes(stats.capacity_bytes)});
  table.row({"Free", human_bytes(stats.free_bytes)});
  table.row({"Largest free range", human_bytes(stats.largest_free_bytes)});
  auto const permille = (static_cast<int>(stats.external_fragmentation() * 2000.0) + 1) / 2;
  table.row({"External fragmentation",
             std::to_string(permille / 10) + '.' + std::to_string(permille % 10) + " %"});
}

template <class = Lazily>
void summarize_traffic(SummaryTable& table, Stats const& stats) {
  auto const tally = [&](std::string const& name, Tally const& it) {
    table.row({name, std::to_string(it.count), human_bytes(it.bytes)});
  };
  table.section({"Traffic", "Count", "Bytes"});
  tally("Swap-outs", stats.swap_outs);
  tally("Swap-ins", stats.swap_ins);
  tally("Drops", stats.drops);
  for (std::size_t i = 0; i < eviction_reason_count; ++i) {
    tally(std::string{"Evicted: "} + name_of(static_cast<EvictionReason>(i)), stats.evictions[i]);
  }
  tally("Moves", stats.moves);
}

template <class = Lazily>
void summarize_counts(SummaryTable& table, Stats const& stats) {
  auto const count = [&](std::string const& name, std::uint64_t n) {
    table.row({name, std::to_string(n)});
  };
  table.section({"Events", "Count"});
  count("Compaction passes", stats.compaction_passes);
  for (std::size_t i = 0; i < range_source_count; ++i) {
    count(std::string{"Range from: "} + name_of(static_cast<RangeSource>(i)),
          stats.range_sources[i]);
  }
  count("Prefetch hits", stats.prefetch_hits);
  count("Prefetches late", stats.prefetch_late);
  count("Prefetches wasted", stats.prefetch_wasted);
  count("Mispredictions", stats.mispredictions);
  count("Steps", stats.steps);
  count("Host waits", stats.host_waits);
  table.row({"Host wait time", std::to_string(stats.host_wait_ns / 1'000'000) + " ms"});
  count("Out of memory", stats.out_of_memory);
}

template <class = Lazily>
void summarize_host(SummaryTable& table, HostPoolStats const& host) {
  table.section({"Host pool", "Used", "Peak", "Capacity", "Slots"});
  for (std::size_t i = 0; i < host_tier_count; ++i) {
    HostTierStats const& tier = host.tiers[i];
    table.row({std::string{name_of(static_cast<HostTier>(i))} + (tier.is_failed ? " (failed)" : ""),
               human_bytes(tier.used_bytes),
               human_bytes(tier.peak_used_bytes),
               human_bytes(tier.capacity_bytes),
               std::to_string(tier.slot_count)});
  }
  table.row({"Staging waits", std::to_string(host.staging_waits)});
  if (host.encoded_raw_bytes != 0) {
    table.row({"Encoded",
               human_bytes(host.encoded_stored_bytes),
               "of",
               human_bytes(host.encoded_raw_bytes)});
  }
  if (host.failed_writes != 0 || host.failed_reads != 0) {
    table.row({"Failed writes", std::to_string(host.failed_writes)});
    table.row({"Failed reads", std::to_string(host.failed_reads)});
    table.row({"Rescued", human_bytes(host.rescued_bytes)});
  }
}

SPILLWAY_COMPILED_PART(void summarize_memory<>(SummaryTable&, Stats const&));
SPILLWAY_COMPILED_PART(void summarize_traffic<>(SummaryTable&, Stats const&));
SPILLWAY_COMPILED_PART(void summarize_counts<>(SummaryTable&, Stats const&));
SPILLWAY_COMPILED_PART(void summarize_host<>(SummaryTable&, HostPoolStats const&));

}  // namespace detail

/// Returns the statistics as a table for people, in the style of `torch.cuda.memory_summary()`.
///
/// Sizes are rounded up to the granule, as everywhere in `Stats`; only the row `Requested` says
/// what callers asked for. `Total` is the sum of all that was ever added, so it grows whenever a
/// block is allocated, comes back or is leased again.
///
/// @throws std::bad_alloc
[[nodiscard]] inline std::string summary(Stats const& stats, HostPoolStats const& host) {
  detail::SummaryTable table;
  table.title("spillway memory summary");
  detail::summarize_memory(table, stats);
  detail::summarize_traffic(table, stats);
  detail::summarize_counts(table, stats);
  detail::summarize_host(table, host);
  return std::move(table).finish();
}

}  // namespace spillway
