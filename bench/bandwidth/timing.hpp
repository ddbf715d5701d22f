// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <vector>

#include "bandwidth.hpp"
#include <sys/resource.h>

namespace bandwidth {

/// Seconds that `work` takes, once.
template <class Work>
[[nodiscard]] double seconds_of(Work const& work) {
  auto const start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// Processor time of all threads so far.
[[nodiscard]] inline double cpu_seconds() {
  rusage used{};
  ::getrusage(RUSAGE_SELF, &used);
  auto const seconds = [](timeval const& time) {
    return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
  };
  return seconds(used.ru_utime) + seconds(used.ru_stime);
}

/// Times of one kind of transfer.
class Times {
 public:
  template <class Work>
  void add(Work const& work) {
    double const cpu = cpu_seconds();
    seconds_.push_back(seconds_of(work));
    cpu_seconds_.push_back(cpu_seconds() - cpu);
  }

  [[nodiscard]] Rate rate(std::size_t bytes) const {
    if (seconds_.empty()) {
      return {};
    }
    std::vector<double> sorted = seconds_;
    std::sort(sorted.begin(), sorted.end());
    std::vector<double> cpu = cpu_seconds_;
    std::sort(cpu.begin(), cpu.end());
    double const gigabytes = static_cast<double>(bytes) / 1e9;
    return {gigabytes / sorted[sorted.size() / 2],
            gigabytes / sorted.front(),
            cpu[cpu.size() / 2] / gigabytes};
  }

 private:
  std::vector<double> seconds_;
  std::vector<double> cpu_seconds_;
};

}  // namespace bandwidth
