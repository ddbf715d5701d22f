// SPDX-License-Identifier: Apache-2.0
// How well the eviction policies do on programs made up at random, on an ideal device.
#include <spillway/policy/eviction/queue_eviction.hpp>
#include <spillway/policy/eviction/ranked_eviction.hpp>
#include <spillway/policy/eviction/schedule_eviction.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <random>
#include <set>
#include <vector>

#include "../../../bench/order_changes.hpp"
#include "../../../bench/residency_model.hpp"
#include "../../../bench/swap_bound.hpp"

namespace {

using namespace spillway;
using bench::Operand;
using bench::ResidencyModel;
using bench::Step;
using bench::SwapBound;
using Random = std::mt19937_64;

std::uint64_t size_between(Random& random, double least, double most) {
  double const part = static_cast<double>(random() % 10000) / 10000.0;
  return round_up(static_cast<std::size_t>(least * std::pow(most / least, part)), granule_bytes);
}

bool happens(Random& random, double probability) {
  return static_cast<double>(random() % 10000) < probability * 10000.0;
}

/// A training step: layers with weights, workspaces and skip connections, forwards and backwards.
struct Net {
  Net(Random& random, std::uint32_t depth) : layers{depth} {
    for (std::uint32_t i = 0; i <= depth; ++i) {
      output.push_back(size_between(random, 1e6, 1e9));
      weight.push_back(size_between(random, 1e5, 2e8));
      workspace.push_back(size_between(random, 1e6, 3e8));
      skip.push_back(i > 2 && happens(random, 0.2) ? static_cast<std::uint32_t>(random() % (i - 1))
                                                   : i);
    }
  }

  [[nodiscard]] Step step(std::set<std::uint32_t> const& left_out = {}) const {
    auto const input = [&](std::uint32_t layer) {
      do {
        --layer;
      } while (layer != 0 && left_out.count(layer) != 0);
      return layer;
    };
    auto const out = [&](std::uint32_t i) { return Operand{100000 + i, output[i]}; };
    auto const gradient = [&](std::uint32_t i) { return Operand{200000 + i, output[i]}; };
    auto const space = [&](std::uint32_t first, std::uint32_t i) {
      return Operand{first + i, workspace[i]};
    };
    Step step{{out(0)}};
    std::uint32_t last = 0;
    for (std::uint32_t i = 1; i <= layers; ++i) {
      if (left_out.count(i) != 0) {
        continue;
      }
      step.push_back({out(input(i)), {i, weight[i], true, Access::read}, space(300000, i), out(i)});
      if (skip[i] != i && skip[i] != input(i) && left_out.count(skip[i]) == 0) {
        step.back().push_back(out(skip[i]));
      }
      last = i;
    }
    step.push_back({out(last), gradient(last)});
    for (std::uint32_t i = layers; i != 0; --i) {
      if (left_out.count(i) == 0) {
        step.push_back(
            {gradient(i), out(input(i)), out(i), {i, weight[i], true}, space(400000, i)});
        if (input(i) != 0) {
          step.back().push_back(gradient(input(i)));
        }
      }
    }
    return step;
  }

  std::uint32_t layers;
  std::vector<std::uint64_t> output;
  std::vector<std::uint64_t> weight;
  std::vector<std::uint64_t> workspace;
  std::vector<std::uint32_t> skip;
};

/// Operations on blocks that live on, each of which uses one block.
Step uses_at_random(Random& random, std::uint32_t blocks, std::size_t operations) {
  std::vector<std::uint64_t> sizes;
  for (std::uint32_t i = 0; i < blocks; ++i) {
    sizes.push_back(size_between(random, 1e6, 1e9));
  }
  Step step;
  for (std::size_t i = 0; i < operations; ++i) {
    auto const block = static_cast<std::uint32_t>(random() % blocks);
    step.push_back({{block, sizes[block], true}});
  }
  return step;
}

struct Result {
  std::uint64_t in_bytes = 0;  // from the second step on
  std::uint64_t late = 0;
  bool has_fitted = false;
};

template <class Policy>
Result
run(std::vector<Step> const& steps, std::uint64_t capacity_bytes, std::size_t prefetch_ops = 0) {
  ResidencyModel<Policy> model{capacity_bytes};
  model.prefetch_ops = prefetch_ops;
  Result warm;
  for (Step const& step : steps) {
    model.begin_step();
    model.run(step);
    REQUIRE(model.resident_bytes() <= capacity_bytes);
    if (&step == &steps.front()) {
      warm = {model.swapped_in_bytes, model.late};
    }
  }
  return {model.swapped_in_bytes - warm.in_bytes, model.late - warm.late, model.failures == 0};
}

std::uint64_t part_of(double part, std::uint64_t bytes) {
  return static_cast<std::uint64_t>(part * static_cast<double>(bytes));
}

/// Checks that a program whose order changes costs at most `most` times what it costs with LRU.
void check_against_lru(std::vector<Step> const& steps, double most) {
  SwapBound const bound{steps};
  bool has_compared = false;
  for (double const part : {0.9, 0.6, 0.4}) {
    std::uint64_t const capacity = part_of(part, bound.peak_bytes());
    Result const lru = run<LruEviction>(steps, capacity);
    Result const schedule = run<ScheduleEviction>(steps, capacity);
    if (lru.has_fitted && schedule.has_fitted) {
      CAPTURE(part);
      CHECK(static_cast<double>(schedule.in_bytes) <= most * static_cast<double>(lru.in_bytes));
      has_compared = has_compared || lru.in_bytes != 0;
    }
  }
  CHECK(has_compared);
}

}  // namespace

TEST_SUITE("eviction") {
  TEST_CASE("SwapBound: with blocks of one size it equals evicting the block used last") {
    std::uint64_t const seed = 11;
    INFO("seed ", seed);
    Random random{seed};
    for (int round = 0; round < 20; ++round) {
      std::vector<Step> steps(3);
      for (Step& step : steps) {
        for (int i = 0; i < 60; ++i) {
          step.push_back({{static_cast<std::uint32_t>(random() % 12), 1, true}});
        }
      }
      std::vector<std::uint32_t> uses;
      for (Step const& step : steps) {
        for (auto const& operation : step) {
          uses.push_back(operation.front().block);
        }
      }
      std::uint64_t const capacity = 2 + random() % 8;
      // The oracle: at each use evict the block whose next use is farthest. The first step counts
      // here, too, so the bound is computed for one long step.
      std::set<std::uint32_t> resident;
      std::set<std::uint32_t> known;
      std::uint64_t swap_ins = 0;
      auto const next_use = [&](std::uint32_t block, std::size_t from) {
        return std::find(uses.begin() + static_cast<std::ptrdiff_t>(from), uses.end(), block) -
               uses.begin();
      };
      for (std::size_t t = 0; t < uses.size(); ++t) {
        if (resident.count(uses[t]) == 0) {
          swap_ins += known.count(uses[t]);
          while (resident.size() >= capacity) {
            resident.erase(*std::max_element(resident.begin(), resident.end(), [&](auto a, auto b) {
              return next_use(a, t) < next_use(b, t);
            }));
          }
          resident.insert(uses[t]);
          known.insert(uses[t]);
        }
        std::erase_if(resident, [&](std::uint32_t block) {
          return next_use(block, t + 1) == static_cast<std::ptrdiff_t>(uses.size());
        });
      }
      Step whole;
      for (Step const& step : steps) {
        whole.insert(whole.end(), step.begin(), step.end());
      }
      std::vector<Step> const one{whole};
      CHECK(SwapBound{one}.least_swap_in(capacity) == swap_ins);
    }
  }

  TEST_CASE("SwapBound: no policy swaps in fewer bytes") {
    std::uint64_t const seed = 12;
    INFO("seed ", seed);
    Random random{seed};
    for (int round = 0; round < 5; ++round) {
      std::vector<Step> const steps(3, Net{random, 30}.step());
      SwapBound const bound{steps};
      std::uint64_t const capacity =
          std::max(part_of(0.7, bound.peak_bytes()), bound.working_set_bytes());
      std::uint64_t const least = bound.least_swap_in(capacity).value();
      CHECK(run<LruEviction>(steps, capacity).in_bytes >= least);
      CHECK(run<FifoEviction>(steps, capacity).in_bytes >= least);
      CHECK(run<SizeEviction>(steps, capacity).in_bytes >= least);
      CHECK(run<CostEviction>(steps, capacity).in_bytes >= least);
      CHECK(run<ScheduleEviction>(steps, capacity).in_bytes >= least);
    }
  }

  TEST_CASE(
      "ScheduleEviction: training steps cost no more than necessary from the second step on") {
    std::uint64_t const seed = 13;
    INFO("seed ", seed);
    Random random{seed};
    double over_sum = 0;
    int cases = 0;
    for (int round = 0; round < 12; ++round) {
      std::vector<Step> const steps(
          4, Net{random, 20 + static_cast<std::uint32_t>(random() % 60)}.step());
      SwapBound const bound{steps};
      for (double const part : {0.9, 0.75, 0.6, 0.5}) {
        std::uint64_t const capacity = part_of(part, bound.peak_bytes());
        auto const least = bound.least_swap_in(capacity);
        if (!least || *least == 0 || capacity < bound.working_set_bytes()) {
          continue;
        }
        Result const result = run<ScheduleEviction>(steps, capacity);
        REQUIRE(result.has_fitted);
        CAPTURE(round);
        CAPTURE(part);
        // One block can be as large as a tenth of the bytes that must be swapped in.
        CHECK(result.in_bytes * 10 <= *least * 12);
        over_sum += static_cast<double>(result.in_bytes) / static_cast<double>(*least) - 1;
        ++cases;
      }
    }
    MESSAGE("over the bound by ", over_sum / cases, " on average of ", cases);
    CHECK(cases > 30);
    CHECK(over_sum / cases < 0.02);
  }

  TEST_CASE("ScheduleEviction: prefetched blocks cost nothing extra and are in time") {
    std::uint64_t const seed = 14;
    INFO("seed ", seed);
    Random random{seed};
    for (int round = 0; round < 4; ++round) {
      std::vector<Step> const steps(4, Net{random, 60}.step());
      SwapBound const bound{steps};
      std::uint64_t const capacity =
          std::max(part_of(0.6, bound.peak_bytes()), part_of(1.5, bound.working_set_bytes()));
      Result const without = run<ScheduleEviction>(steps, capacity);
      Result const with = run<ScheduleEviction>(steps, capacity, 16);
      REQUIRE(without.late > 0);
      CHECK(with.in_bytes * 100 <= without.in_bytes * 102);
      CHECK(with.late * 20 <= without.late);
    }
  }

  TEST_CASE(
      "ScheduleEviction: a loop over weights swaps in little more than the bytes that do not fit") {
    // LRU brings in all of them each time.
    Step loop;
    for (std::uint32_t i = 0; i < 100; ++i) {
      loop.push_back({{i, 1000000, true, Access::read}});
    }
    std::vector<Step> const steps(5, loop);
    CHECK(run<LruEviction>(steps, 75000000).in_bytes == 4 * 100 * 1000000);
    CHECK(run<ScheduleEviction>(steps, 75000000).in_bytes <= 4 * 28 * 1000000);
  }

  TEST_CASE("ScheduleEviction: steps that change cost at most a twentieth more than with LRU") {
    for (std::uint64_t seed = 151; seed != 157; ++seed) {
      INFO("seed ", seed);
      Random random{seed};
      for (Step const& step : {uses_at_random(random, 100, 800), Net{random, 60}.step()}) {
        for (auto const& order : bench::order_changes) {
          INFO(order.second);
          check_against_lru(bench::changing_steps(step, order.first, 6, seed), 1.05);
        }
        INFO("rows of ten");
        std::vector<Step> steps;
        for (int i = 0; i < 6; ++i) {
          steps.push_back(bench::rows_in_random_order(step, 10, random));
        }
        check_against_lru(steps, 1.05);
      }
    }
  }

  TEST_CASE("ScheduleEviction: steps that differ a little are predicted well enough to gain") {
    std::uint64_t const seed = 16;
    INFO("seed ", seed);
    Random random{seed};
    Step const step = uses_at_random(random, 150, 1500);
    std::vector<Step> left_out;
    std::vector<Step> changed_round;
    for (int i = 0; i < 5; ++i) {
      left_out.push_back(step);
      std::erase_if(left_out.back(), [&](auto const&) { return happens(random, 0.01); });
      changed_round.push_back(step);
      for (std::size_t k = 0; k + 1 < step.size(); k += 2) {
        if (happens(random, 0.5)) {
          std::swap(changed_round.back()[k], changed_round.back()[k + 1]);
        }
      }
    }
    check_against_lru(left_out, 0.8);
    check_against_lru(changed_round, 0.8);
  }

  TEST_CASE("ScheduleEviction: nets that skip layers at random gain on the whole") {
    std::uint64_t const seed = 17;
    INFO("seed ", seed);
    Random random{seed};
    double lru_bytes = 0;
    double schedule_bytes = 0;
    for (int round = 0; round < 9; ++round) {
      Net const net{random, 80};
      std::vector<Step> steps;
      for (int i = 0; i < 5; ++i) {
        std::set<std::uint32_t> left_out;
        for (std::uint32_t layer = 1; layer <= net.layers; ++layer) {
          if (happens(random, round % 3 == 0 ? 0.02 : 0.1)) {
            left_out.insert(layer);
          }
        }
        steps.push_back(net.step(left_out));
      }
      SwapBound const bound{steps};
      for (double const part : {0.9, 0.7, 0.5}) {
        std::uint64_t const capacity = part_of(part, bound.peak_bytes());
        Result const lru = run<LruEviction>(steps, capacity);
        Result const schedule = run<ScheduleEviction>(steps, capacity);
        if (lru.has_fitted && schedule.has_fitted) {
          lru_bytes += static_cast<double>(lru.in_bytes);
          schedule_bytes += static_cast<double>(schedule.in_bytes);
        }
      }
    }
    MESSAGE("of what LRU swaps in: ", schedule_bytes / lru_bytes);
    CHECK(schedule_bytes < lru_bytes);
  }
}
