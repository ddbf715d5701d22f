// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/config.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

namespace spillway {

/// Names one stream inside one `StreamOrder`. 0 names no stream; 0xFFFF means every stream.
enum class StreamIndex : std::uint16_t { none = 0, every = 0xFFFF };

/// A point on a stream: all work enqueued there before the point was marked.
///
/// Sequence numbers are drawn from one counter for all streams of a `StreamOrder`, so a ticket on
/// `StreamIndex::every` is meaningful: all work on all streams marked up to that number.
class Ticket {
 public:
  constexpr Ticket() noexcept = default;
  constexpr Ticket(StreamIndex stream, std::uint64_t sequence) noexcept
      : bits_{(std::uint64_t{static_cast<std::uint16_t>(stream)} << sequence_bits) | sequence} {}
  /// All work on all streams, whenever it was marked.
  [[nodiscard]] static constexpr Ticket everything() noexcept {
    return {StreamIndex::every, last_sequence};
  }

  [[nodiscard]] constexpr StreamIndex stream() const noexcept {
    return StreamIndex{static_cast<std::uint16_t>(bits_ >> sequence_bits)};
  }
  [[nodiscard]] constexpr std::uint64_t sequence() const noexcept { return bits_ & last_sequence; }
  [[nodiscard]] constexpr bool is_none() const noexcept { return bits_ == 0; }

  friend constexpr bool operator==(Ticket, Ticket) noexcept = default;

 private:
  static constexpr unsigned sequence_bits = 48;
  static constexpr std::uint64_t last_sequence = (std::uint64_t{1} << sequence_bits) - 1;

  std::uint64_t bits_ = 0;
};

/// The work that must have finished before a range, a host slot or a block may be touched: a set of
/// tickets, at most one for each stream.
///
/// Holds four tickets without allocating, so it can be merged where nothing may fail. Four are
/// enough for a program with one stream, since swap-outs, swap-ins and moves use three more. A
/// fifth stream folds all of them into one ticket on `StreamIndex::every`, which waits for more
/// than is needed, never for less.
class Fence {
 public:
  static constexpr std::size_t max_tickets = 4;

  constexpr Fence() noexcept = default;
  constexpr Fence(Ticket ticket) noexcept  // NOLINT(google-explicit-constructor)
      : tickets_{ticket} {}

  [[nodiscard]] constexpr bool is_empty() const noexcept { return tickets_[0].is_none(); }

  constexpr void add(Ticket ticket) noexcept {
    if (ticket.is_none()) {
      return;
    }
    for (Ticket& mine : tickets_) {
      if (mine.is_none() || mine.stream() == ticket.stream()) {
        if (mine.is_none() || mine.sequence() < ticket.sequence()) {
          mine = ticket;
        }
        return;
      }
    }
    std::uint64_t latest = ticket.sequence();
    for (Ticket const mine : tickets_) {
      latest = std::max(latest, mine.sequence());
    }
    tickets_ = {Ticket{StreamIndex::every, latest}};
  }

  constexpr void add(Fence const& other) noexcept {
    for (Ticket const ticket : other.tickets_) {
      if (ticket.is_none()) {
        return;  // empty tickets come last
      }
      add(ticket);
    }
  }

  constexpr void clear() noexcept { tickets_ = {}; }

  /// The tickets; empty ones, if any, come last.
  [[nodiscard]] constexpr std::array<Ticket, max_tickets> const& tickets() const noexcept {
    return tickets_;
  }

  friend constexpr bool operator==(Fence const&, Fence const&) noexcept = default;

 private:
  std::array<Ticket, max_tickets> tickets_{};
};

}  // namespace spillway
