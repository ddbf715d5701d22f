// SPDX-License-Identifier: Apache-2.0
#include "data.hpp"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <iterator>
#include <string_view>

namespace beyond {
namespace {

namespace fs = std::filesystem;

constexpr int digit_classes = 10;
constexpr int csv_highest_pixel = 16;
constexpr std::size_t test_share = 5;  // one picture in so many

[[noreturn]] void fail(fs::path const& file, std::string const& what) {
  throw DataError{file.string() + ": " + what};
}

std::string read_all(fs::path const& file) {
  std::ifstream in{file, std::ios::binary};
  if (!in) {
    fail(file, "cannot be opened");
  }
  std::string bytes{std::istreambuf_iterator<char>{in}, {}};
  if (in.bad()) {
    fail(file, "cannot be read");
  }
  return bytes;
}

/// The numbers of one line, each from 0 to `csv_highest_pixel`.
std::vector<int> parse_line(fs::path const& file, std::size_t line_number, std::string_view line) {
  std::string const where = "line " + std::to_string(line_number) + ": ";
  std::vector<int> numbers;
  char const* at = line.data();
  char const* const end = at + line.size();
  while (true) {
    int number = 0;
    auto const [next, error] = std::from_chars(at, end, number);
    if (error != std::errc{} || number < 0 || number > csv_highest_pixel ||
        (next != end && *next != ',')) {
      fail(file, where + "expected whole numbers from 0 to 16 with commas between them");
    }
    numbers.push_back(number);
    if (next == end) {
      return numbers;
    }
    at = next + 1;
  }
}

Dataset load_csv(fs::path const& file) {
  std::string const text = read_all(file);
  Dataset data;
  data.name = file.filename().string();
  std::size_t columns = 0;
  std::size_t line_number = 0;
  std::size_t pictures = 0;
  for (std::string_view rest = text; !rest.empty();) {
    std::size_t const length = std::min(rest.find('\n'), rest.size());
    std::string_view line = rest.substr(0, length);
    rest.remove_prefix(std::min(length + 1, rest.size()));
    ++line_number;
    if (line.ends_with('\r')) {
      line.remove_suffix(1);
    }
    if (line.empty()) {
      continue;
    }
    std::vector<int> const numbers = parse_line(file, line_number, line);
    if (columns == 0) {
      columns = numbers.size();
    }
    if (numbers.size() != columns || columns < 2) {
      fail(file,
           "line " + std::to_string(line_number) + ": has " + std::to_string(numbers.size()) +
               " columns; expected " +
               (columns < 2 ? "pixels and a label" : std::to_string(columns)));
    }
    if (numbers.back() >= digit_classes) {
      fail(file, "line " + std::to_string(line_number) + ": the label is not a digit");
    }
    Images& images = pictures++ % test_share == 0 ? data.test : data.train;
    images.labels.push_back(numbers.back());
    for (std::size_t i = 0; i + 1 < columns; ++i) {
      images.values.push_back(static_cast<float>(numbers[i]) / csv_highest_pixel);
    }
  }
  if (data.train.count() == 0) {
    fail(file, "holds " + std::to_string(pictures) + " pictures; at least 2 are needed");
  }
  data.train.pixels = data.test.pixels = columns - 1;
  return data;
}

/// An IDX file of unsigned bytes: its extents and where its bytes begin.
struct Idx {
  std::vector<std::size_t> extents;
  std::string bytes;
  std::size_t begin = 0;

  [[nodiscard]] unsigned char at(std::size_t i) const {
    return static_cast<unsigned char>(bytes[begin + i]);
  }
};

std::uint32_t big_endian_32(std::string const& bytes, std::size_t at) {
  std::uint32_t value = 0;
  for (std::size_t i = 0; i < 4; ++i) {
    value = value << 8U | static_cast<unsigned char>(bytes[at + i]);
  }
  return value;
}

Idx load_idx(fs::path const& file, std::size_t dimensions) {
  Idx idx{.extents = {}, .bytes = read_all(file), .begin = 4 + 4 * dimensions};
  if (idx.bytes.starts_with("\x1f\x8b")) {
    fail(file, "is compressed; unpack it with gunzip");
  }
  constexpr std::uint32_t unsigned_bytes = 0x0800;
  if (idx.bytes.size() < idx.begin ||
      big_endian_32(idx.bytes, 0) != (unsigned_bytes | dimensions)) {
    fail(file, "is not an IDX file of bytes with " + std::to_string(dimensions) + " dimension(s)");
  }
  std::size_t expected = 1;
  for (std::size_t d = 0; d < dimensions; ++d) {
    idx.extents.push_back(big_endian_32(idx.bytes, 4 + 4 * d));
    if (__builtin_mul_overflow(expected, idx.extents.back(), &expected)) {
      fail(file, "its extents are too large");
    }
  }
  if (idx.bytes.size() - idx.begin != expected) {
    fail(file,
         "holds " + std::to_string(idx.bytes.size() - idx.begin) +
             " bytes of data; its header says " + std::to_string(expected));
  }
  return idx;
}

/// `stem-suffix` as MNIST is published, or `stem.suffix` as some archives unpack it.
fs::path find_idx(fs::path const& folder, std::string const& stem, std::string const& suffix) {
  fs::path const published = folder / (stem + "-" + suffix);
  fs::path const dotted = folder / (stem + "." + suffix);
  if (fs::exists(published) || !fs::exists(dotted)) {
    fs::path const compressed = published.string() + ".gz";
    if (!fs::exists(published) && fs::exists(compressed)) {
      fail(compressed, "is compressed; unpack it with gunzip");
    }
    return published;
  }
  return dotted;
}

Images load_idx_pair(fs::path const& folder, std::string const& part) {
  fs::path const images_file = find_idx(folder, part + "-images", "idx3-ubyte");
  fs::path const labels_file = find_idx(folder, part + "-labels", "idx1-ubyte");
  Idx const pictures = load_idx(images_file, 3);
  Idx const labels = load_idx(labels_file, 1);
  Images images;
  images.pixels = pictures.extents[1] * pictures.extents[2];
  if (images.pixels == 0 || pictures.extents[0] == 0) {
    fail(images_file, "holds no pictures");
  }
  if (pictures.extents[0] != labels.extents[0]) {
    fail(labels_file,
         "holds " + std::to_string(labels.extents[0]) + " labels for " +
             std::to_string(pictures.extents[0]) + " pictures");
  }
  constexpr float highest_pixel = 255;
  images.values.resize(pictures.extents[0] * images.pixels);
  for (std::size_t i = 0; i < images.values.size(); ++i) {
    images.values[i] = static_cast<float>(pictures.at(i)) / highest_pixel;
  }
  images.labels.resize(labels.extents[0]);
  for (std::size_t i = 0; i < images.labels.size(); ++i) {
    images.labels[i] = labels.at(i);
    if (images.labels[i] >= digit_classes) {
      fail(labels_file, "label " + std::to_string(i) + " is not a digit");
    }
  }
  return images;
}

Dataset load_folder(fs::path const& folder) {
  Dataset data;
  data.name = folder.filename().empty() ? folder.parent_path().filename().string()
                                        : folder.filename().string();
  data.train = load_idx_pair(folder, "train");
  data.test = load_idx_pair(folder, "t10k");
  if (data.train.pixels != data.test.pixels) {
    fail(folder, "the pictures for training and for the test differ in size");
  }
  return data;
}

}  // namespace

Dataset load_dataset(fs::path const& path) {
  std::error_code error;
  fs::file_status const status = fs::status(path, error);
  if (!fs::exists(status)) {
    fail(path, "there is no such file or folder");
  }
  return fs::is_directory(status) ? load_folder(path) : load_csv(path);
}

}  // namespace beyond
