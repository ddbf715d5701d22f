// SPDX-License-Identifier: Apache-2.0
#include "trace.hpp"

#include <spillway/core/types.hpp>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <fstream>
#include <optional>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <utility>

namespace replay {

namespace {

constexpr std::string_view lifetimes_header = "id,lower,upper,size";
constexpr std::string_view accesses_header = "step,id,size,weight,kernel_ns";
constexpr std::string_view byte_order_mark = "\xEF\xBB\xBF";  // of UTF-8: spreadsheets write it
// More live bytes than this cannot be added up, nor has any machine them. The same is true of
// nanoseconds.
constexpr std::size_t most_bytes = std::size_t{1} << 60U;
constexpr std::uint64_t most_ns = std::uint64_t{1} << 60U;
// Input without an end stops here: the rows of a trace are kept in memory.
constexpr std::size_t most_lines = std::size_t{1} << 28U;

/// The lines of a file, with their numbers.
class Lines {
 public:
  explicit Lines(std::filesystem::path file) : file_{std::move(file)}, stream_{file_} {
    if (!stream_) {
      fail("cannot be opened for reading");
    }
  }

  [[nodiscard]] std::optional<std::string_view> next() {
    stream_.getline(line_.data(), static_cast<std::streamsize>(line_.size()));
    if (stream_.bad()) {
      fail("cannot be read");
    }
    auto const count = static_cast<std::size_t>(stream_.gcount());
    if (count == 0) {
      return std::nullopt;
    }
    ++number_;
    if (stream_.fail()) {
      fail("a line of more than " + std::to_string(line_.size() - 1) + " characters");
    }
    if (number_ > most_lines) {
      fail("more than " + std::to_string(most_lines) + " lines");
    }
    std::string_view line{line_.data(), stream_.eof() ? count : count - 1};  // without its end
    if (number_ == 1 && line.starts_with(byte_order_mark)) {
      line.remove_prefix(byte_order_mark.size());
    }
    if (line.ends_with('\r')) {
      line.remove_suffix(1);
    }
    return line;
  }

  [[noreturn]] void fail(std::string const& what) const { fail_at(number_, what); }
  [[noreturn]] void fail_at(std::size_t number, std::string const& what) const {
    throw TraceError{file_, number, what};
  }
  [[nodiscard]] std::size_t number() const noexcept { return number_; }

 private:
  std::filesystem::path file_;
  std::ifstream stream_;
  std::array<char, 4096> line_{};
  std::size_t number_ = 0;
};

/// The numbers of one line.
template <std::size_t Columns>
std::array<std::uint64_t, Columns> parse(Lines const& lines, std::string_view line) {
  std::array<std::uint64_t, Columns> values{};
  char const* at = line.data();
  char const* const end = line.data() + line.size();
  auto const columns = static_cast<std::size_t>(std::count(at, end, ',')) + 1;
  if (columns != Columns) {
    lines.fail("expected " + std::to_string(Columns) + " columns, not " + std::to_string(columns) +
               ", in '" + std::string{line.substr(0, 80)} + "'");
  }
  for (std::size_t column = 0; column < Columns; ++column) {
    auto const [past, error] = std::from_chars(at, end, values[column]);
    bool const is_last = column + 1 == Columns;
    bool const is_ended = is_last ? past == end : past != end && *past == ',';
    if (error == std::errc::result_out_of_range) {
      lines.fail("column " + std::to_string(column + 1) + " is too large for 64 bits");
    }
    if (error != std::errc{} || !is_ended) {
      lines.fail("expected " + std::to_string(Columns) +
                 " numbers, not negative, separated by commas; column " +
                 std::to_string(column + 1) + " is not one in '" + std::string{line.substr(0, 80)} +
                 "'");
    }
    at = is_last ? past : past + 1;
  }
  return values;
}

std::size_t scaled(Lines const& lines, std::uint64_t size, double scale) {
  double const bytes = std::ceil(static_cast<double>(size) * scale);
  if (size == 0) {
    lines.fail("a size of 0");
  }
  if (bytes > static_cast<double>(most_bytes)) {
    lines.fail("a size of " + std::to_string(size) + " times the scale is beyond 2^60 bytes");
  }
  return std::max<std::size_t>(1, static_cast<std::size_t>(bytes));
}

std::size_t rounded(std::size_t bytes) {
  return spillway::round_up(bytes, spillway::granule_bytes);
}

/// `line` has the buffer that begins to live.
void add_live(Lines const& lines, std::size_t line, std::size_t& live, std::size_t bytes) {
  live += rounded(bytes);
  if (live > most_bytes) {
    lines.fail_at(line, "with this buffer more than 2^60 bytes live at once");
  }
}

Trace read_lifetimes(Lines& lines, double scale) {
  struct Point {
    std::uint64_t time;
    bool is_start;
    std::uint32_t tensor;
  };
  Trace trace;
  std::unordered_map<std::uint64_t, std::size_t> seen;  // id -> line
  std::vector<Point> points;
  while (auto const line = lines.next()) {
    if (line->empty()) {
      continue;
    }
    auto const [id, lower, upper, size] = parse<4>(lines, *line);
    if (lower >= upper) {
      lines.fail("a buffer must live: lower " + std::to_string(lower) + " is not below upper " +
                 std::to_string(upper));
    }
    if (auto const [at, is_new] = seen.emplace(id, lines.number()); !is_new) {
      lines.fail("id " + std::to_string(id) + " was used in line " + std::to_string(at->second));
    }
    auto const tensor = static_cast<std::uint32_t>(trace.tensors.size());
    trace.tensors.push_back({id, scaled(lines, size, scale), false});
    points.push_back({lower, true, tensor});
    points.push_back({upper, false, tensor});
  }
  // At equal time frees come first; otherwise the order of the file decides.
  std::sort(points.begin(), points.end(), [](Point const& a, Point const& b) {
    return std::tie(a.time, a.is_start, a.tensor) < std::tie(b.time, b.is_start, b.tensor);
  });
  std::size_t live = 0;
  for (Point const& point : points) {
    std::size_t const bytes = trace.tensors[point.tensor].bytes;
    if (point.is_start) {
      add_live(lines, seen.at(trace.tensors[point.tensor].id), live, bytes);
    } else {
      live -= rounded(bytes);
    }
    trace.peak_live_bytes = std::max(trace.peak_live_bytes, live);
    trace.working_set_bytes = std::max(trace.working_set_bytes, rounded(bytes));
    trace.operations.push_back({trace.operands.size(), 1, 0});
    trace.operands.push_back({point.tensor, point.is_start, !point.is_start});
  }
  return trace;
}

Trace read_accesses(Lines& lines, double scale) {
  struct Row {
    std::uint64_t step;
    std::uint64_t kernel_ns;
    std::uint32_t line;
    std::uint32_t tensor;
  };
  Trace trace;
  trace.form = Trace::Form::accesses;
  std::unordered_map<std::uint64_t, std::uint32_t> index;  // id -> tensor
  std::vector<std::uint32_t> first_line;                   // by tensor
  std::vector<Row> rows;
  while (auto const line = lines.next()) {
    if (line->empty()) {
      continue;
    }
    auto const [step, id, size, weight, kernel_ns] = parse<5>(lines, *line);
    if (weight > 1) {
      lines.fail("weight is 0 or 1, not " + std::to_string(weight));
    }
    auto const [at, is_new] = index.emplace(id, static_cast<std::uint32_t>(trace.tensors.size()));
    Tensor const tensor{id, scaled(lines, size, scale), weight == 1};
    if (is_new) {
      trace.tensors.push_back(tensor);
      first_line.push_back(static_cast<std::uint32_t>(lines.number()));
    } else if (trace.tensors[at->second].bytes != tensor.bytes ||
               trace.tensors[at->second].is_weight != tensor.is_weight) {
      lines.fail("buffer " + std::to_string(id) + " had another size or weight before");
    }
    rows.push_back({step, kernel_ns, static_cast<std::uint32_t>(lines.number()), at->second});
  }
  index = {};
  std::sort(rows.begin(), rows.end(), [](Row const& a, Row const& b) {
    return std::tie(a.step, a.line) < std::tie(b.step, b.line);
  });
  for (std::size_t i = 1; i < rows.size(); ++i) {
    if (rows[i].step == rows[i - 1].step && rows[i].kernel_ns != rows[i - 1].kernel_ns) {
      lines.fail_at(rows[i].line,
                    "step " + std::to_string(rows[i].step) + " had another kernel_ns before");
    }
  }
  // An operand that an operation names twice is one operand.
  std::vector<std::size_t> last_row(trace.tensors.size(), rows.size());
  std::size_t kept = 0;
  std::size_t operations = 0;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    std::size_t& last = last_row[rows[i].tensor];
    if (last == rows.size() || rows[last].step != rows[i].step) {
      operations += kept == 0 || rows[kept - 1].step != rows[i].step ? 1U : 0U;
      last = kept;
      rows[kept++] = rows[i];
    }
  }
  rows.resize(kept);
  trace.operations.reserve(operations);
  trace.operands.reserve(kept);
  std::size_t live = 0;
  for (std::size_t i = 0; i < trace.tensors.size(); ++i) {
    if (trace.tensors[i].is_weight) {
      add_live(lines, first_line[i], live, trace.tensors[i].bytes);
    }
  }
  trace.peak_live_bytes = live;
  std::vector<bool> is_born(trace.tensors.size());
  for (std::size_t i = 0; i < rows.size();) {
    Operation operation{trace.operands.size(), 0, rows[i].kernel_ns};
    std::size_t working_set = 0;
    std::size_t dying = 0;
    for (std::uint64_t const step = rows[i].step; i < rows.size() && rows[i].step == step; ++i) {
      Row const& row = rows[i];
      Tensor const& tensor = trace.tensors[row.tensor];
      bool const is_first = !is_born[row.tensor];
      bool const is_last = !tensor.is_weight && last_row[row.tensor] == i;
      is_born[row.tensor] = true;
      trace.operands.push_back({row.tensor, is_first, is_last});
      working_set += rounded(tensor.bytes);
      if (is_first && !tensor.is_weight) {
        add_live(lines, row.line, live, tensor.bytes);
      }
      dying += is_last ? rounded(tensor.bytes) : 0;
    }
    operation.operand_count = trace.operands.size() - operation.first_operand;
    trace.operations.push_back(operation);
    if (operation.kernel_ns > most_ns - trace.compute_ns) {
      lines.fail_at(rows[i - 1].line, "kernels of more than 2^60 ns in all");
    }
    trace.compute_ns += operation.kernel_ns;
    trace.peak_live_bytes = std::max(trace.peak_live_bytes, live);
    trace.working_set_bytes = std::max(trace.working_set_bytes, working_set);
    live -= dying;
  }
  return trace;
}

}  // namespace

Trace read_trace(std::filesystem::path const& file, double scale) {
  Lines lines{file};
  auto const header = lines.next();
  if (!header) {
    lines.fail("the file is empty");
  }
  Trace trace;
  if (*header == lifetimes_header) {
    trace = read_lifetimes(lines, scale);
  } else if (*header == accesses_header) {
    trace = read_accesses(lines, scale);
  } else {
    lines.fail("the first line must be '" + std::string{lifetimes_header} + "' or '" +
               std::string{accesses_header} + "'");
  }
  if (trace.tensors.empty()) {
    lines.fail("the trace has no rows");
  }
  return trace;
}

}  // namespace replay
