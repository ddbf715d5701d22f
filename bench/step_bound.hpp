// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/types.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "residency_model.hpp"

namespace spillway::bench {

/// A lower bound of the time of a step under a capacity, for any plan of copies.
///
/// Between the begins of two operations there is at least enough time for
/// - the kernels between them;
/// - the copies out of blocks that were born since the first and are alive at the second, as far as
///   they exceed the capacity;
/// - the copies in of blocks that existed before the first and are used up to the second, as far as
///   they, with those born at the first, exceed the capacity.
///
/// The bound is the longest path through the step along such intervals. Blocks are taken to be
/// divisible, and copies in the two directions to run at the same time. A weight existed before the
/// step, unless its first use writes it: in the first of several steps it is born, but not freed.
/// The bound counts no recomputation, so a step that recomputes blocks may take less time.
class StepBound {
 public:
  /// `kernel_ns` has one time for each operation.
  StepBound(Step step, std::vector<std::uint64_t> kernel_ns)
      : step_{std::move(step)}, kernel_ns_{std::move(kernel_ns)} {
    for (std::size_t now = 0; now < step_.size(); ++now) {
      for (Operand const& operand : step_[now]) {
        if (operand.block >= lives_.size()) {
          lives_.resize(operand.block + 1);
        }
        Life& life = lives_[operand.block];
        if (now < life.first) {
          life.first = now;
          life.is_born = !operand.is_weight || operand.access == Access::write;
        }
        life.last = now;
      }
    }
  }

  /// Returns the bound in nanoseconds, for a link of `link_gbps` GB/s each way. Each operation must
  /// fit into the capacity.
  [[nodiscard]] double least_ns(std::uint64_t capacity_bytes, double link_gbps) const {
    auto const copy_ns = [=](std::uint64_t bytes) {
      return static_cast<double>(bytes - std::min(bytes, capacity_bytes)) / link_gbps;
    };
    // The earliest begin of each operation; the last element is the end of the step.
    std::vector<double> begin_ns(step_.size() + 1);
    std::vector<std::size_t> counted_from(lives_.size(), step_.size());
    for (std::size_t from = 0; from < step_.size(); ++from) {
      double kernels_ns = 0;
      std::uint64_t born_bytes = 0;  // of blocks born since `from` that are alive
      // of blocks that existed before `from` and have been used since, and of those born at `from`
      std::uint64_t needed_bytes = 0;
      for (std::size_t to = from; to < step_.size(); ++to) {
        for (Operand const& operand : step_[to]) {
          bool const is_birth = is_born(operand, to);
          born_bytes += is_birth ? operand.bytes : 0;
          bool const is_needed = is_birth ? to == from : is_old(operand, from);
          if (is_needed && std::exchange(counted_from[operand.block], from) != from) {
            needed_bytes += operand.bytes;
          }
        }
        reach(begin_ns[to],
              begin_ns[from] + std::max({kernels_ns, copy_ns(born_bytes), copy_ns(needed_bytes)}));
        for (Operand const& operand : step_[to]) {
          Life const& life = lives_[operand.block];
          born_bytes -=
              !operand.is_weight && life.first >= from && life.last == to ? operand.bytes : 0;
        }
        kernels_ns += static_cast<double>(kernel_ns_[to]);
      }
      reach(begin_ns.back(), begin_ns[from] + std::max(kernels_ns, copy_ns(needed_bytes)));
    }
    return begin_ns.back();
  }

 private:
  struct Life {
    std::size_t first = std::numeric_limits<std::size_t>::max();
    std::size_t last = 0;
    bool is_born = false;  // in this step
  };

  static void reach(double& begin_ns, double at_ns) noexcept {
    begin_ns = std::max(begin_ns, at_ns);
  }
  [[nodiscard]] bool is_born(Operand const& operand, std::size_t at) const noexcept {
    Life const& life = lives_[operand.block];
    return life.is_born && life.first == at;
  }
  [[nodiscard]] bool is_old(Operand const& operand, std::size_t at) const noexcept {
    Life const& life = lives_[operand.block];
    return !life.is_born || life.first < at;
  }

  Step step_;
  std::vector<std::uint64_t> kernel_ns_;
  std::vector<Life> lives_;  // by block
};

}  // namespace spillway::bench
