// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

// Divides a device's memory among programs.
//
// Rule      Weighted max-min fairness (Bertsekas and Gallager, "Data Networks", 1992, section 6.5):
//           if a program has less than it wants, its share can be raised only by lowering that of
//           a program that has no more for its weight. What an idle program wants comes last, as
//           with the idle memory tax of Waldspurger, "Memory Resource Management in VMware ESX
//           Server" (OSDI 2002), at a rate of 100 %.
// Order     1. what each program is promised, 2. claims, without which a program cannot go on,
//           3. what active programs want, 4. what idle programs want, 5. the rest, which goes to
//           active programs, so that they can grow without asking.
// Example   100 bytes; A wants 80, B wants 30, C, which is idle, wants 50, all of one weight. B
//           gets 30, A 70 and C nothing. When A ends, B gets 30 and C 50, and the 20 that are left
//           go to B.

namespace spillway::detail {

/// What one program asks of a device.
struct ShareRequest {
  std::uint64_t least_bytes = 0;    ///< promised, whatever others want
  std::uint64_t claimed_bytes = 0;  ///< with less a call of the program fails; 0: no claim
  std::uint64_t wanted_bytes = 0;   ///< with this much it would not have to swap out
  double weight = 1;                ///< greater than 0
  bool is_active = true;            ///< false: it is idle
};

/// Writes to `shares`, which is as long as `requests`, how many bytes each program may use. The sum
/// is at most `capacity_bytes`. If promises or claims exceed that, those of the first programs are
/// met. A few bytes may be left over by rounding.
///
/// Cost  O(n) for n programs; no allocation.
inline void fair_shares(std::span<ShareRequest const> requests,
                        std::uint64_t capacity_bytes,
                        std::span<std::uint64_t> shares) noexcept {
  std::uint64_t left = capacity_bytes;
  for (std::size_t i = 0; i < requests.size(); ++i) {
    shares[i] = std::min(requests[i].least_bytes, left);
    left -= shares[i];
  }
  for (std::size_t i = 0; i < requests.size(); ++i) {
    std::uint64_t const claimed = requests[i].claimed_bytes;
    std::uint64_t const more = claimed - std::min(claimed, shares[i]);
    if (more <= left) {  // a part of a claim would be of no use
      shares[i] += more;
      left -= more;
    }
  }

  // Raises the shares of the programs for which `takes_part(i)` is true to one common level in
  // bytes per unit of weight, each to at most `most(i)`. Shares above the level stay as they are.
  auto const fill = [&](auto takes_part, auto most) {
    auto const share_at = [&](double level, std::size_t i) {
      std::uint64_t const top = std::max(shares[i], most(i));
      double const bytes = level * requests[i].weight;
      // The conversion must not overflow.
      return bytes >= static_cast<double>(top)
                 ? top
                 : std::clamp(static_cast<std::uint64_t>(bytes), shares[i], top);
    };
    auto const taken_at = [&](double level) {
      std::uint64_t taken = 0;
      for (std::size_t i = 0; i < requests.size(); ++i) {
        taken += takes_part(i) ? share_at(level, i) - shares[i] : 0;
      }
      return taken;
    };
    double least_weight = 1;
    for (ShareRequest const& one : requests) {
      least_weight = std::min(least_weight, one.weight);
    }
    double low = 0;
    double high = static_cast<double>(capacity_bytes) / least_weight;
    if (taken_at(high) <= left) {
      low = high;
    }
    constexpr int bits_of_a_double = 53;
    for (int i = 0; i < bits_of_a_double + 11 && low < high; ++i) {
      double const middle = low + (high - low) / 2;
      (taken_at(middle) <= left ? low : high) = middle;
    }
    left -= taken_at(low);
    for (std::size_t i = 0; i < requests.size(); ++i) {
      shares[i] = takes_part(i) ? share_at(low, i) : shares[i];
    }
  };
  auto const wanted = [&](std::size_t i) { return requests[i].wanted_bytes; };
  fill([&](std::size_t i) { return requests[i].is_active; }, wanted);
  fill([&](std::size_t i) { return !requests[i].is_active; }, wanted);
  bool const is_one_active = std::any_of(
      requests.begin(), requests.end(), [](ShareRequest const& one) { return one.is_active; });
  fill([&](std::size_t i) { return requests[i].is_active || !is_one_active; },
       [&](std::size_t) { return capacity_bytes; });
}

}  // namespace spillway::detail
