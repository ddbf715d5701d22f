// SPDX-License-Identifier: Apache-2.0
// spillway-bandwidth: how fast blocks leave the device and come back, beside a plain copy.
#include <spillway/core/types.hpp>

#include <cstddef>
#include <cstdio>
#include <iostream>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "../command_line.hpp"
#include "bandwidth.hpp"
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

namespace {

using bandwidth::CodecName;
using bandwidth::Direction;
using bandwidth::Layout;
using bandwidth::Row;
using bandwidth::Through;
using spillway::HostTier;

struct Arguments {
  std::string device = "sim";
  bool json = false;
  std::vector<HostTier> tiers;
  bandwidth::Settings settings;
};

template <class Value>
using Names = std::map<std::string, Value>;

Names<CodecName> const codecs{{"identity", CodecName::identity},
                              {"zero_bitmap", CodecName::zero_bitmap},
                              {"bfloat16", CodecName::bfloat16}};
Names<Direction> const directions{
    {"out", Direction::out}, {"in", Direction::in}, {"both", Direction::both}};
Names<HostTier> const tiers{
    {"pinned", HostTier::pinned}, {"pageable", HostTier::pageable}, {"file", HostTier::file}};
Names<Layout> const layouts{{"one", Layout::one},
                            {"packed", Layout::packed},
                            {"scattered", Layout::scattered},
                            {"apart", Layout::apart}};
Names<Through> const throughs{{"streams", Through::streams}, {"allocator", Through::allocator}};

template <class Value>
std::string const& name_of(Names<Value> const& names, Value value) {
  for (auto const& [name, mine] : names) {
    if (mine == value) {
      return name;
    }
  }
  throw std::logic_error{"a value without a name"};
}

double ratio(double ours, double peer) {
  return peer == 0 ? 0 : ours / peer;
}

nlohmann::ordered_json to_json(Arguments const& arguments, Row const& row) {
  nlohmann::ordered_json json{{"device", arguments.device},
                              {"through", name_of(throughs, arguments.settings.through)},
                              {"direction", name_of(directions, row.direction)},
                              {"tier", name_of(tiers, row.tier)},
                              {"layout", name_of(layouts, row.layout)},
                              {"size_bytes", row.size_bytes},
                              {"count", row.count},
                              {"gbps", row.ours.median},
                              {"raw_gbps", row.raw.median},
                              {"ratio", ratio(row.ours.median, row.raw.median)},
                              {"best_gbps", row.ours.best},
                              {"best_raw_gbps", row.raw.best},
                              {"best_ratio", ratio(row.ours.best, row.raw.best)}};
  if (row.naive.median != 0) {
    json["naive_gbps"] = row.naive.median;
    json["ratio_to_naive"] = ratio(row.ours.median, row.naive.median);
    json["best_ratio_to_naive"] = ratio(row.ours.best, row.naive.best);
  }
  if (row.memcpy_alone.median != 0) {
    json["memcpy_gbps"] = row.memcpy_alone.median;
  }
  if (arguments.settings.codec != CodecName::identity) {
    json["codec"] = name_of(codecs, arguments.settings.codec);
    json["zeros"] = arguments.settings.zeros;
    json["stored_share"] = row.stored_share;
    json["stored_gbps"] = row.stored_share * row.ours.median;
  }
  if (row.tier == HostTier::file) {
    json["file_direct_io"] = row.is_file_direct;
    json["file_checksums"] = row.is_file_checked;
    json["file_calls"] = row.file_calls;
    json["cpu_s_per_gb"] = row.ours.cpu_s_per_gb;
    json["raw_cpu_s_per_gb"] = row.raw.cpu_s_per_gb;
    json["copies_cpu_s_per_gb"] = row.copies.cpu_s_per_gb;
  }
  return json;
}

std::string size_text(std::size_t bytes) {
  using namespace spillway::literals;
  if (bytes >= 1_GiB) {
    return std::to_string(bytes / 1_GiB) + " GiB";
  }
  return bytes >= 1_MiB ? std::to_string(bytes / 1_MiB) + " MiB"
                        : std::to_string(bytes / 1_KiB) + " KiB";
}

void print_heading(Arguments const& arguments) {
  std::printf(
      "%s, through %s; GB/s at the median time, ratios of medians and of best times\n"
      "raw: one plain copy of the same bytes, or plain file I/O; naive: a copy and an event "
      "for each of several blocks\n",
      arguments.device.c_str(),
      name_of(throughs, arguments.settings.through).c_str());
  if (arguments.settings.codec != CodecName::identity) {
    std::printf("written by %s, %.0f %% of the float32 elements are zeros; stored: GB/s of what "
                "the codec makes of ours\n",
                name_of(codecs, arguments.settings.codec).c_str(),
                100 * arguments.settings.zeros);
  }
  std::printf("%8s %6s %-9s %-8s %-4s %8s %8s %6s %6s %8s %7s %6s\n",
              "size",
              "count",
              "layout",
              "tier",
              "way",
              "ours",
              "raw",
              "ratio",
              "best",
              "naive",
              "x naive",
              "best");
}

void print_row(Arguments const& arguments, Row const& row) {
  std::printf("%8s %6zu %-9s %-8s %-4s %8.2f %8.2f %6.3f %6.3f",
              size_text(row.size_bytes).c_str(),
              row.count,
              name_of(layouts, row.layout).c_str(),
              name_of(tiers, row.tier).c_str(),
              name_of(directions, row.direction).c_str(),
              row.ours.median,
              row.raw.median,
              ratio(row.ours.median, row.raw.median),
              ratio(row.ours.best, row.raw.best));
  if (row.naive.median != 0) {
    std::printf(" %8.2f %7.2f %6.2f",
                row.naive.median,
                ratio(row.ours.median, row.naive.median),
                ratio(row.ours.best, row.naive.best));
  }
  if (row.memcpy_alone.median != 0) {
    std::printf("  memcpy %.2f", row.memcpy_alone.median);
  }
  if (arguments.settings.codec != CodecName::identity) {
    std::printf(
        "  stored %.2f, %.3f of ours", row.stored_share * row.ours.median, row.stored_share);
  }
  if (row.tier == HostTier::file) {
    std::printf("  %s I/O by %s%s, CPU s/GB: %.3f, raw %.3f, the device's copies %.3f",
                row.is_file_direct ? "direct" : "buffered",
                row.file_calls.c_str(),
                row.is_file_checked ? " with checksums" : "",
                row.ours.cpu_s_per_gb,
                row.raw.cpu_s_per_gb,
                row.copies.cpu_s_per_gb);
  }
  std::printf("\n");
  std::fflush(stdout);
}

void add_options(CLI::App& app, Arguments& arguments) {
  bandwidth::Settings& settings = arguments.settings;
  CLI::Range const sizes{std::size_t{4096}, std::size_t{1} << 30U};
  CLI::Validator const granules = command_line::multiple_of(spillway::granule_bytes);
  app.add_option("--device", arguments.device, "sim: a simulated device of host memory; cuda")
      ->check(CLI::IsMember({"sim", "cuda"}))
      ->capture_default_str();
  app.add_option("--min-size", settings.min_size_bytes, "smallest block")
      ->transform(CLI::AsSizeValue(false))
      ->check(sizes)
      ->check(granules);
  app.add_option("--max-size",
                 settings.max_size_bytes,
                 "largest block; sizes grow by 4 (default: 1 GiB, on sim 64 MiB)")
      ->transform(CLI::AsSizeValue(false))
      ->check(sizes)
      ->check(granules);
  app.add_option("--bytes", settings.total_bytes, "bytes of one transfer of many blocks")
      ->transform(CLI::AsSizeValue(false))
      ->check(sizes);
  app.add_option("--direction", settings.directions, "which way; more than one")
      ->transform(command_line::one_of(directions));
  app.add_option("--tier", arguments.tiers, "where swapped-out bytes go; more than one")
      ->transform(command_line::one_of(tiers));
  app.add_option("--file-folder", settings.file_folder, "where the file tier's file goes")
      ->check(CLI::ExistingDirectory);
  app.add_flag("--file-checksums", settings.has_file_checksums, "compare what the file gives back");
  app.add_option("--through",
                 settings.through,
                 "streams: the host pool on copy streams; allocator: its swap_out and swap_in")
      ->transform(command_line::one_of(throughs));
  app.add_option(
         "--codec", settings.codec, "sim, through allocator: how blocks are written in host memory")
      ->transform(command_line::one_of(codecs));
  app.add_option("--zeros", settings.zeros, "share of zeros in what a codec is given")
      ->check(command_line::number_from(0, 1))
      ->capture_default_str();
  app.add_option(
         "--staging-bytes", settings.staging_bytes, "of one pinned chunk of the slower tiers")
      ->transform(CLI::AsSizeValue(false))
      ->check(sizes);
  app.add_option("--staging-chunks", settings.staging_chunks, "of each direction")
      ->check(CLI::Range(std::size_t{1}, std::size_t{1000}));
  app.add_option("--link-gbps", settings.link_gbps, "sim: GB/s of the host link, each way")
      ->check(command_line::link_gbps());
  app.add_option("--copy-latency-us", settings.copy_latency_us, "sim: added to each copy or batch")
      ->check(command_line::positive_number())
      ->check(CLI::Range(1e-3, 1e6));  // at least a nanosecond
  app.add_flag("--copy-kernel", settings.has_copy_kernel, "cuda: a kernel copies small blocks");
  app.add_option("--repetitions", settings.repetitions, "of which the median is shown")
      ->check(CLI::Range(std::size_t{1}, std::size_t{10'000}))
      ->capture_default_str();
  app.add_option("--seed", settings.seed, "of the order of scattered blocks")
      ->check(command_line::whole_number());
  app.add_flag("--json", arguments.json, "print an array of rows");
}

int measure(Arguments& arguments) {
  using namespace spillway::literals;
  bandwidth::Settings& settings = arguments.settings;
  if (!arguments.tiers.empty()) {
    settings.tiers = arguments.tiers;
  } else if (!settings.file_folder.empty()) {
    settings.tiers.push_back(HostTier::file);
  }
  if (settings.max_size_bytes == 0) {
    settings.max_size_bytes = arguments.device == "sim" ? 64_MiB : 1_GiB;
  }
  if (settings.min_size_bytes > settings.max_size_bytes) {
    throw std::invalid_argument{"--min-size is larger than --max-size"};
  }
  for (HostTier const tier : settings.tiers) {
    if (tier == HostTier::file && settings.file_folder.empty()) {
      throw std::invalid_argument{"--tier file needs --file-folder"};
    }
  }
  bool const has_link = settings.link_gbps != 0 || settings.copy_latency_us != 0;
  if (has_link && arguments.device != "sim") {
    throw std::invalid_argument{"--link-gbps and --copy-latency-us need --device sim"};
  }
  if (settings.has_copy_kernel && arguments.device != "cuda") {
    throw std::invalid_argument{"--copy-kernel needs --device cuda"};
  }
  if (settings.codec != CodecName::identity &&
      (arguments.device != "sim" || has_link || settings.through != Through::allocator)) {
    throw std::invalid_argument{
        "--codec needs --device sim, where it crosses no link, and --through allocator"};
  }
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  if (!arguments.json) {
    print_heading(arguments);
  }
  auto const report = [&](Row const& row) {
    if (arguments.json) {
      rows.push_back(to_json(arguments, row));
    } else {
      print_row(arguments, row);
    }
  };
  arguments.device == "sim" ? bandwidth::measure_on_sim(settings, report)
                            : bandwidth::measure_on_cuda(settings, report);
  if (arguments.json) {
    std::cout << rows.dump(1) << '\n';
  }
  return command_line::Exit::done;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Measures how fast blocks are swapped out and in, beside a plain copy.",
               "spillway-bandwidth"};
  Arguments arguments;
  add_options(app, arguments);
  return command_line::run(app, argc, argv, [&] { return measure(arguments); });
}
