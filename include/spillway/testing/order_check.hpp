// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/error.hpp>
#include <spillway/device/sim/sim_handles.hpp>
#include <spillway/device/sim/sim_op.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace spillway::testing {

/// A vector clock: how many operations of each stream have finished, indexed by the stream's
/// number.
using OrderClock = std::vector<std::uint64_t>;

inline void join(OrderClock& clock, OrderClock const& other) {
  clock.resize(std::max(clock.size(), other.size()));
  for (std::size_t i = 0; i < other.size(); ++i) {
    clock[i] = std::max(clock[i], other[i]);
  }
}

/// How an operation uses a range of memory.
struct MemoryUse {
  void const* p = nullptr;
  std::size_t bytes = 0;
  bool is_write = false;
};

/// A race detector for device memory. It finds operations on different streams that use the same
/// bytes, at least one of them writing, and that nothing orders. `SteppedSimApi` checks all its
/// work with one. A test of a device of your own can report to one what it enqueues.
///
/// Each stream has a vector clock: how many operations of every stream are known to have finished
/// before the next operation of this one. Recording an event saves the stream's clock; a wait joins
/// the saved clock into that of the waiting stream (Lamport 1978, Mattern 1988). For each range of
/// bytes the checker remembers the last write and, for each stream, the last read since then. The
/// clock of new work must include everything that it conflicts with. So order means what streams,
/// events and waits of the host promise, and not what happened to run first: a race is found
/// whether or not it would have had an effect this time.
///
/// Threads  thread-compatible; all calls come from one host thread.
/// Streams  are numbers from 0 on. A clock has an entry for each number up to the largest one, and
///          a number that was given to a second stream would hide races with the first one.
/// Cost     O(log ranges + ranges touched * streams) for each operation.
class OrderCheck {
 public:
  /// Notes an operation on `stream` that uses `first` and `second`. Empty uses are ignored.
  ///
  /// @throws ContractViolation if it is not ordered after earlier work on the same bytes; the
  ///         operation is then not noted
  void enqueue(std::uint64_t stream, char const* what, MemoryUse first = {}, MemoryUse second = {});

  /// Notes copies on `stream` that may run in any order. Empty copies are ignored.
  ///
  /// @throws ContractViolation as `enqueue`, and if one of the copies writes what another one uses;
  ///         those before the one at fault have been noted then
  void enqueue_batch(std::uint64_t stream, std::span<detail::SimCopy const> copies);

  /// Returns the clock of a stream. Who joins it runs after everything that was enqueued on
  /// `stream` so far.
  [[nodiscard]] OrderClock const& clock(std::uint64_t stream) {
    OrderClock& clock = streams_[stream];
    join(clock, host_);
    return clock;
  }
  void stream_sees(std::uint64_t stream, OrderClock const& clock) { join(streams_[stream], clock); }
  void host_sees(OrderClock const& clock) { join(host_, clock); }
  void forget_stream(std::uint64_t stream) { streams_.erase(stream); }

  /// Forgets earlier uses of memory that was freed or is new.
  void forget(void const* p, std::size_t bytes);

 private:
  struct Moment {
    std::uint64_t stream = 0;
    std::uint64_t time = 0;
  };
  struct History {
    std::uintptr_t end = 0;
    Moment write;               // at time 0, if it was never written
    std::vector<Moment> reads;  // since that write, at most one for each stream
  };
  using Histories = std::map<std::uintptr_t, History>;

  [[nodiscard]] static bool has_seen(OrderClock const& clock, Moment moment) noexcept {
    return moment.time == 0 ||
           (moment.stream < clock.size() && clock[moment.stream] >= moment.time);
  }
  void check(OrderClock const& clock, std::uint64_t stream, char const* what, MemoryUse const& use);
  void note(MemoryUse const& use, Moment moment);
  Histories::iterator split(std::uintptr_t at);

  std::map<std::uint64_t, OrderClock> streams_;
  OrderClock host_;
  Histories histories_;  // of disjoint ranges, by their first byte
};

inline void
OrderCheck::enqueue(std::uint64_t stream, char const* what, MemoryUse first, MemoryUse second) {
  OrderClock& mine = streams_[stream];
  join(mine, host_);
  check(mine, stream, what, first);
  check(mine, stream, what, second);
  mine.resize(std::max<std::size_t>(mine.size(), stream + 1));
  Moment const now{stream, ++mine[stream]};
  note(first, now);
  note(second, now);
}

inline void OrderCheck::enqueue_batch(std::uint64_t stream,
                                      std::span<detail::SimCopy const> copies) {
  std::vector<MemoryUse> uses;
  uses.reserve(2 * copies.size());
  for (detail::SimCopy const& c : copies) {
    if (c.bytes != 0) {
      uses.push_back({c.from, c.bytes, false});
      uses.push_back({c.to, c.bytes, true});
    }
  }
  std::sort(uses.begin(), uses.end(), [](MemoryUse const& a, MemoryUse const& b) {
    return detail::address_of(a.p) < detail::address_of(b.p);
  });
  // among the uses seen so far, the one that ends last; below, the same among writes
  MemoryUse furthest{};
  MemoryUse furthest_write{};
  auto const end = [](MemoryUse const& use) { return detail::address_of(use.p) + use.bytes; };
  for (MemoryUse const& use : uses) {
    MemoryUse const& other = use.is_write ? furthest : furthest_write;
    if (end(other) > detail::address_of(use.p)) {
      throw ContractViolation{"SimApi: race: copies of one batch both touch " +
                              detail::describe_range(use.p, use.bytes) + " and " +
                              detail::describe_range(other.p, other.bytes) +
                              ", and nothing orders them"};
    }
    furthest = end(use) > end(furthest) ? use : furthest;
    furthest_write = use.is_write && end(use) > end(furthest_write) ? use : furthest_write;
  }
  for (detail::SimCopy const& c : copies) {
    enqueue(stream, "copy of a batch", {c.from, c.bytes, false}, {c.to, c.bytes, true});
  }
}

inline void OrderCheck::check(OrderClock const& clock,
                              std::uint64_t stream,
                              char const* what,
                              MemoryUse const& use) {
  if (use.bytes == 0) {
    return;
  }
  std::uintptr_t const begin = detail::address_of(use.p);
  auto it = histories_.upper_bound(begin);
  if (it != histories_.begin() && std::prev(it)->second.end > begin) {
    --it;
  }
  for (; it != histories_.end() && it->first < begin + use.bytes; ++it) {
    Moment culprit = it->second.write;
    bool is_read = false;
    if (has_seen(clock, culprit) && use.is_write) {
      auto const unseen = std::find_if(it->second.reads.begin(),
                                       it->second.reads.end(),
                                       [&](Moment read) { return !has_seen(clock, read); });
      is_read = unseen != it->second.reads.end();
      culprit = is_read ? *unseen : culprit;
    }
    if (!has_seen(clock, culprit)) {
      throw ContractViolation{
          std::string{"SimApi: race: a "} + what + " on stream number " + std::to_string(stream) +
          (use.is_write ? " writes " : " reads ") + detail::describe_range(use.p, use.bytes) +
          " and is not ordered after the " + (is_read ? "read" : "write") + " of " +
          detail::describe_range(it->first, it->second.end - it->first) + " by operation " +
          std::to_string(culprit.time) + " of stream number " + std::to_string(culprit.stream)};
    }
  }
}

inline OrderCheck::Histories::iterator OrderCheck::split(std::uintptr_t at) {
  auto const next = histories_.lower_bound(at);
  if (next == histories_.begin() || (next != histories_.end() && next->first == at)) {
    return next;
  }
  auto const before = std::prev(next);
  if (before->second.end <= at) {
    return next;
  }
  History rest = before->second;
  before->second.end = at;
  return histories_.emplace_hint(next, at, std::move(rest));
}

inline void OrderCheck::note(MemoryUse const& use, Moment moment) {
  std::uintptr_t const begin = detail::address_of(use.p);
  std::uintptr_t const end = begin + use.bytes;
  if (use.bytes == 0) {
    return;
  }
  if (use.is_write) {
    forget(use.p, use.bytes);
    histories_.emplace(begin, History{end, moment, {}});
    return;
  }
  auto const last = split(end);
  auto it = split(begin);
  std::uintptr_t at = begin;
  while (at != end) {
    if (it == last || it->first != at) {
      std::uintptr_t const until = it == last ? end : it->first;
      it = histories_.emplace_hint(it, at, History{until, {}, {}});
    }
    auto& reads = it->second.reads;
    auto const mine = std::find_if(
        reads.begin(), reads.end(), [&](Moment read) { return read.stream == moment.stream; });
    if (mine != reads.end()) {
      *mine = moment;
    } else {
      reads.push_back(moment);
    }
    at = it->second.end;
    ++it;
  }
}

inline void OrderCheck::forget(void const* p, std::size_t bytes) {
  std::uintptr_t const begin = detail::address_of(p);
  auto const last = split(begin + bytes);
  histories_.erase(split(begin), last);
}

}  // namespace spillway::testing
