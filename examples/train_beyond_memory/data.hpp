// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace beyond {

/// Thrown when a data file is missing, cut short or not what it should be; names the file.
class DataError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

/// Pictures and what they show. Pixels are scaled to [0, 1], one picture after the other.
struct Images {
  std::size_t pixels = 0;  // of one picture
  std::vector<float> values;
  std::vector<std::int32_t> labels;

  [[nodiscard]] std::size_t count() const { return labels.size(); }
  [[nodiscard]] std::span<float const> picture(std::size_t i) const {
    return std::span{values}.subspan(i * pixels, pixels);
  }
};

struct Dataset {
  std::string name;
  std::size_t classes = 10;
  Images train;
  Images test;
};

/// Loads a CSV file in the form of the shipped digits, or a folder with the four files of MNIST.
///
/// CSV: one picture a line, its pixels from 0 to 16, then its label; every fifth picture, from the
/// first on, is kept for the test. Folder: `train-images-idx3-ubyte`, `train-labels-idx1-ubyte` and
/// the same with `t10k`.
///
/// @throws DataError
[[nodiscard]] Dataset load_dataset(std::filesystem::path const& path);

}  // namespace beyond
