// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <charconv>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <functional>
#include <iostream>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <system_error>

#include "error_message.hpp"
#include <CLI/CLI.hpp>

/// What the command lines of the tools have in common.
namespace command_line {

enum Exit : int { done = 0, failed = 1, bad_input = 2 };

/// A finite number above 0. `CLI::PositiveNumber` accepts NaN and infinity.
inline CLI::Validator positive_number() {
  return {[](std::string& text) {
            double number = 0;
            bool const is_number = CLI::detail::lexical_cast(text, number);
            return is_number && std::isfinite(number) && number > 0
                       ? std::string{}
                       : "expected a finite number above 0, not '" + text + "'";
          },
          "NUMBER > 0"};
}

inline CLI::Validator not_empty() {
  return {[](std::string& text) { return text.empty() ? "expected a value" : std::string{}; }, ""};
}

/// Whether a device can simulate a host link of so many GB/s: the link must carry at least one byte
/// per second.
inline bool is_link(double gbps) {
  return gbps >= 1e-9 && gbps <= 1e9;
}

/// The bandwidth of a host link in GB/s.
inline CLI::Validator link_gbps() {
  return {[](std::string& text) {
            double number = 0;
            return CLI::detail::lexical_cast(text, number) && is_link(number)
                       ? std::string{}
                       : "expected GB/s from 1e-9 to 1e9, not '" + text + "'";
          },
          "GB/s in [1e-9 - 1e9]"};
}

/// A number of the range. `CLI::Range` accepts NaN.
inline CLI::Validator number_from(double least, double most) {
  auto const shown = [](double number) {
    std::ostringstream text;
    text << number;
    return text.str();
  };
  return {[=](std::string& text) {
            double number = 0;
            bool const is_number = CLI::detail::lexical_cast(text, number);
            return is_number && number >= least && number <= most
                       ? std::string{}
                       : "expected a number from " + shown(least) + " to " + shown(most) +
                             ", not '" + text + "'";
          },
          "NUMBER in [" + shown(least) + " - " + shown(most) + "]"};
}

/// A whole number of 64 bits, such as a seed. CLI itself takes -1 for the largest one, and so a
/// number that is too large.
inline CLI::Validator whole_number() {
  return {[](std::string& text) {
            std::uint64_t number = 0;
            char const* const end = text.data() + text.size();
            auto const [past, error] = std::from_chars(text.data(), end, number);
            return error == std::errc{} && past == end
                       ? std::string{}
                       : "expected a whole number from 0 to 2^64 - 1, not '" + text + "'";
          },
          ""};
}

/// A number of bytes that is a multiple of `unit`.
inline CLI::Validator multiple_of(std::size_t unit) {
  return {[unit](std::string& text) {
            std::size_t number = 0;
            bool const is_number = CLI::detail::lexical_cast(text, number);
            return is_number && number % unit == 0
                       ? std::string{}
                       : "expected a multiple of " + std::to_string(unit) + ", not '" + text + "'";
          },
          "MULTIPLE OF " + std::to_string(unit)};
}

/// Accepts the names of an enumeration's values. `CLI::CheckedTransformer` would also show the
/// values, as bytes.
template <class Value>
CLI::Validator one_of(std::map<std::string, Value> const& names) {
  std::string shown;
  for (auto const& [name, value] : names) {
    shown += (shown.empty() ? "" : "|") + name;
  }
  return {[names, shown](std::string& text) {
            auto const found = names.find(text);
            if (found == names.end()) {
              return "expected one of " + shown + ", not '" + text + "'";
            }
            text = std::to_string(static_cast<int>(found->second));
            return std::string{};
          },
          shown};
}

/// Whether two names are those of one regular file, as with links, or would be if it were written.
inline bool is_same_file(std::filesystem::path const& one, std::filesystem::path const& other) {
  std::error_code error;  // of a file that does not exist
  if (std::filesystem::exists(one, error) || std::filesystem::exists(other, error)) {
    return std::filesystem::equivalent(one, other, error) &&
           std::filesystem::is_regular_file(one, error);
  }
  return !one.empty() && std::filesystem::weakly_canonical(one, error) ==
                             std::filesystem::weakly_canonical(other, error);
}

/// Flushes standard output. @throws std::runtime_error if it did not take all of the bytes
inline void finish_output() {
  std::cout.flush();
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0 || !std::cout) {
    throw std::runtime_error{"standard output cannot be written to: the result is incomplete"};
  }
}

/// Parses the command line, runs `work`, and turns what goes wrong into a message and an exit
/// status: `bad_input` for std::invalid_argument, `failed` for other exceptions. `work` returns a
/// status of its own.
inline int run(CLI::App& app, int argc, char** argv, std::function<int()> const& work) {
  app.set_version_flag("--version", app.get_name() + " " SPILLWAY_VERSION);
  try {
    int status = Exit::done;
    try {
      app.parse(argc, argv);
      status = work();
    } catch (CLI::ParseError const& error) {  // for CLI, --help and --version are errors, too
      status = app.exit(error) == 0 ? Exit::done : Exit::bad_input;
    }
    finish_output();
    return status;
  } catch (std::invalid_argument const& error) {
    std::fprintf(stderr, "%s: %s\n", app.get_name().c_str(), error.what());
    return Exit::bad_input;
  } catch (std::exception const& error) {
    std::fprintf(stderr, "%s: %s\n", app.get_name().c_str(), message_of(error));
    return Exit::failed;
  }
}

}  // namespace command_line
