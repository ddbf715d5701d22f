// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <charconv>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <ostream>
#include <string_view>

namespace spillway::detail {

/// Writes JSON member by member, so that a large trace is never in memory as a whole.
///
/// It puts commas and quotes where they belong. The caller must close what it opens, and give a key
/// to each member of an object. Numbers are written alike in every locale. To learn whether
/// everything was written, ask the stream at the end.
///
/// Threads  thread-compatible.
class JsonStream {
 public:
  /// `out` is not owned and must outlive this object.
  explicit JsonStream(std::ostream& out) : out_{&out} {}

  JsonStream& begin_object() { return open('{'); }
  JsonStream& end_object() { return close('}'); }
  JsonStream& begin_array() { return open('['); }
  JsonStream& end_array() { return close(']'); }
  /// Begins a new line in the file, for people and tools that read it line by line.
  JsonStream& new_line() {
    is_line_wanted_ = true;
    return *this;
  }

  JsonStream& key(std::string_view name) {
    separate();
    write_string(name);
    out_->put(':');
    needs_comma_ = false;
    return *this;
  }

  JsonStream& value(std::string_view text) {
    separate();
    write_string(text);
    return *this;
  }
  JsonStream& value(char const* text) { return value(std::string_view{text}); }
  JsonStream& value(bool truth) { return literal(truth ? "true" : "false"); }
  /// Writes `null` for a number that JSON cannot represent, such as NaN.
  JsonStream& value(double number) {
    constexpr double most = std::numeric_limits<double>::max();
    return number >= -most && number <= most ? print(number) : literal("null");
  }
  template <std::integral Number>
  JsonStream& value(Number number) {
    return print(number);
  }
  /// Writes a value with `write_value(json, value)`.
  template <class Value>
    requires requires(JsonStream& json, Value const& it) {
      write_value(json, it);
    }
  JsonStream& value(Value const& it) {
    write_value(*this, it);
    return *this;
  }
  /// Writes a time in microseconds, with three decimals.
  JsonStream& microseconds(std::uint64_t ns) {
    print(ns / 1000);
    std::uint64_t const rest = ns % 1000;
    if (rest != 0) {
      std::array<char, 4> const digits{'.',
                                       static_cast<char>('0' + rest / 100),
                                       static_cast<char>('0' + rest / 10 % 10),
                                       static_cast<char>('0' + rest % 10)};
      out_->write(digits.data(), digits.size());
    }
    return *this;
  }

  template <class Value>
  JsonStream& member(std::string_view name, Value const& of_it) {
    return key(name).value(of_it);
  }

 private:
  JsonStream& open(char bracket) {
    separate();
    out_->put(bracket);
    needs_comma_ = false;
    return *this;
  }
  JsonStream& close(char bracket) {
    needs_comma_ = false;
    separate();
    out_->put(bracket);
    return *this;
  }
  JsonStream& literal(std::string_view text) {
    separate();
    *out_ << text;
    return *this;
  }
  template <class Number>
  JsonStream& print(Number number) {
    std::array<char, 32> digits{};
    char* const end = std::to_chars(digits.data(), digits.data() + digits.size(), number).ptr;
    return literal({digits.data(), static_cast<std::size_t>(end - digits.data())});
  }

  /// Writes a comma if one is due, and remembers that the next value needs one.
  void separate() {
    if (needs_comma_) {
      out_->put(',');
    }
    if (is_line_wanted_) {
      out_->put('\n');
    }
    is_line_wanted_ = false;
    needs_comma_ = true;
  }

  void write_string(std::string_view text) {
    constexpr std::string_view hex = "0123456789abcdef";
    out_->put('"');
    for (char const c : text) {
      auto const byte = static_cast<unsigned char>(c);
      if (c == '"' || c == '\\') {
        out_->put('\\').put(c);
      } else if (byte < 0x20) {
        *out_ << "\\u00";
        out_->put(hex[byte >> 4U]).put(hex[byte & 0xFU]);
      } else {
        out_->put(c);
      }
    }
    out_->put('"');
  }

  std::ostream* out_;
  bool needs_comma_ = false;
  bool is_line_wanted_ = false;
};

}  // namespace spillway::detail
