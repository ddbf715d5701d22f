// SPDX-License-Identifier: Apache-2.0
#include <spillway/observe/json_stream.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <locale>
#include <sstream>
#include <string>

#include <nlohmann/json.hpp>

using spillway::detail::JsonStream;

namespace {

struct Point {
  int x = 0;
  int y = 0;
};
void write_value(JsonStream& json, Point const& point) {
  json.begin_array().value(point.x).value(point.y).end_array();
}

/// Thousands apart and a decimal comma, as some locales have them.
class Continental : public std::numpunct<char> {
  char do_thousands_sep() const override { return '.'; }
  std::string do_grouping() const override { return "\3"; }
  char do_decimal_point() const override { return ','; }
};

template <class Write>
std::string written(Write write) {
  std::ostringstream out;
  out.imbue(std::locale{out.getloc(), new Continental});
  JsonStream json{out};
  write(json);
  return out.str();
}

}  // namespace

TEST_SUITE("json_stream") {
  TEST_CASE("JsonStream: commas are written only between values") {
    auto const text = written([](JsonStream& json) {
      json.begin_object().key("a").begin_array().value(1).value(2).end_array();
      json.key("b").begin_array().end_array().key("c").begin_object().end_object();
      json.member("d", true).member("e", "text").key("f").begin_array();
      json.begin_object().end_object().begin_object().member("g", false).end_object();
      json.end_array().end_object();
    });

    CHECK(text == R"({"a":[1,2],"b":[],"c":{},"d":true,"e":"text","f":[{},{"g":false}]})");
  }

  TEST_CASE("JsonStream: new lines are written between values and do not change them") {
    auto const text = written([](JsonStream& json) {
      json.begin_array().new_line().value(1).new_line().value(2).new_line().end_array();
    });

    CHECK(text == "[\n1,\n2\n]");
  }

  TEST_CASE("JsonStream: a string of any bytes below 128 is read back unchanged") {
    std::string all;
    for (int byte = 0; byte < 128; ++byte) {
      all += static_cast<char>(byte);
    }
    auto const text = written([&](JsonStream& json) {
      json.begin_object().member(all, std::string_view{all}).end_object();
    });

    auto const read = nlohmann::json::parse(text);
    REQUIRE(read.size() == 1);
    CHECK(read.begin().key() == all);
    CHECK(read.begin().value() == all);
  }

  TEST_CASE("JsonStream: numbers are exact in any locale") {
    constexpr auto most = std::numeric_limits<std::uint64_t>::max();
    constexpr auto least = std::numeric_limits<std::int64_t>::min();
    auto const read = nlohmann::json::parse(written([](JsonStream& json) {
      json.begin_array().value(most).value(least).value(1234567).value(0.1).value(1e300);
      json.value(-2.5).value(std::numeric_limits<double>::quiet_NaN());
      json.value(std::numeric_limits<double>::infinity()).end_array();
    }));

    CHECK(read[0].get<std::uint64_t>() == most);
    CHECK(read[1].get<std::int64_t>() == least);
    CHECK(read[2] == 1234567);
    CHECK(read[3].get<double>() == 0.1);
    CHECK(read[4].get<double>() == 1e300);
    CHECK(read[5].get<double>() == -2.5);
    CHECK(read[6].is_null());
    CHECK(read[7].is_null());
  }

  TEST_CASE("JsonStream: nanoseconds become microseconds without rounding") {
    auto const text = written([](JsonStream& json) {
      json.begin_array();
      for (std::uint64_t const ns : {0U, 1U, 20U, 300U, 999U, 1000U, 1050U, 4'000'000'007U}) {
        json.microseconds(ns);
      }
      json.microseconds(std::numeric_limits<std::uint64_t>::max()).end_array();
    });

    CHECK(text == "[0,0.001,0.020,0.300,0.999,1,1.050,4000000.007,18446744073709551.615]");
  }

  TEST_CASE("JsonStream: `write_value` defines how a type is written") {
    CHECK(written([](JsonStream& json) {
            json.begin_object().member("p", Point{3, 4}).member("q", Point{}).end_object();
          }) == R"({"p":[3,4],"q":[0,0]})");
  }
}
