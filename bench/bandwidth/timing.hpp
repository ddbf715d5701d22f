// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <vector>

#include "bandwidth.hpp"

namespace bandwidth {

/// Seconds that `work` takes, once.
template <class Work>
[[nodiscard]] double seconds_of(Work const& work) {
  auto const start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// Times of one kind of transfer.
class Times {
 public:
  template <class Work>
  void add(Work const& work) {
    seconds_.push_back(seconds_of(work));
  }

  [[nodiscard]] Rate rate(std::size_t bytes) const {
    if (seconds_.empty()) {
      return {};
    }
    std::vector<double> sorted = seconds_;
    std::sort(sorted.begin(), sorted.end());
    double const gigabytes = static_cast<double>(bytes) / 1e9;
    return {gigabytes / sorted[sorted.size() / 2], gigabytes / sorted.front()};
  }

 private:
  std::vector<double> seconds_;
};

}  // namespace bandwidth
