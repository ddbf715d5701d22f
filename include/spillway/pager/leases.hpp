// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/device_capabilities.hpp>
#include <spillway/concepts/pager.hpp>
#include <spillway/concepts/policy_set.hpp>
#include <spillway/core/error.hpp>
#include <spillway/core/fence.hpp>
#include <spillway/core/types.hpp>
#include <spillway/lease.hpp>
#include <spillway/pager/arrivals.hpp>
#include <spillway/pager/lease_book.hpp>
#include <spillway/pager/blocks.hpp>
#include <spillway/pager/reclaimer.hpp>
#include <spillway/schedule/use.hpp>

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

namespace spillway::detail {

/// Gives out leases: brings in what is asked for, and orders streams after earlier uses.
///
/// Every function is entered with the lock, which is let go for device calls.
template <PolicySet Policies>
class LeaseDesk {
 public:
  using State = PagerState<Policies>;
  using Guard = typename State::Guard;
  using stream_type = typename State::stream_type;

  LeaseDesk(State& state,
            LeaseBook<Policies>& book,
            RoomMaker<Policies>& rooms,
            Arrivals<Policies>& arrivals)
      : state_{state}, book_{book}, rooms_{rooms}, arrivals_{arrivals} {}

  /// Holds all operands, then brings in those that are away, and calls
  /// `give(position, LeaseRecord, BlockRecord const&)` for each. @throws as `SwapPager::acquire`
  template <class Give>
  void open(Guard& guard, std::span<LeaseRequest const> requests, stream_type stream, Give give);

  /// Brings a block's bytes in without a lease. @throws as `open`
  void bring_in(Guard& guard, BlockId id);

 private:
  using Turn = typename State::Turn;
  using Unlocked = typename State::Unlocked;

  /// Leases counted but not handed out yet; taken back unless `keep` is called.
  class Holds {
   public:
    Holds(LeaseDesk& desk, Guard& guard, std::span<LeaseRequest const> requests)
        : desk_{desk}, guard_{guard}, requests_{requests} {}
    Holds(Holds const&) = delete;
    Holds& operator=(Holds const&) = delete;
    ~Holds() {
      if (!guard_.owns_lock()) {
        guard_.lock();
      }
      for (; count_ != 0; --count_) {
        desk_.undo_hold(requests_[count_ - 1].id, *this);
      }
    }
    void add(BlockRecord& block) noexcept {
      desk_.book_.count(block);
      ++count_;
    }
    void keep() noexcept { count_ = 0; }

   private:
    LeaseDesk& desk_;
    Guard& guard_;
    std::span<LeaseRequest const> requests_;
    std::size_t count_ = 0;
  };

  template <class Give>
  [[gnu::noinline]] void open_with_device_calls(Guard& guard,
                                                std::span<LeaseRequest const> requests,
                                                stream_type stream,
                                                StreamIndex on,
                                                Give const& give);
  void refuse_capture(Guard& guard, stream_type stream);
  [[nodiscard]] bool is_settled(BlockId id) noexcept {
    BlockRecord const& block = *state_.blocks.find(id);
    return block.is_resident() && !block.is_busy && block.filler == nullptr;
  }
  void make_resident(Guard& guard, LeaseRequest request, Use use, Holds const& group);
  void prove_contents(Guard& guard, LeaseRequest request);
  void judge_prefetch(Guard& guard, BlockRecord& block);
  void order_after_earlier_uses(Guard& guard,
                                std::span<LeaseRequest const> requests,
                                StreamIndex on,
                                Holds const& group);
  void undo_hold(BlockId id, Holds const& group) noexcept;

  State& state_;
  LeaseBook<Policies>& book_;
  RoomMaker<Policies>& rooms_;
  Arrivals<Policies>& arrivals_;
};

template <PolicySet Policies>
template <class Give>
void LeaseDesk<Policies>::open(Guard& guard,
                               std::span<LeaseRequest const> requests,
                               stream_type stream,
                               Give give) {
  StreamIndex const on = state_.index_of(guard, stream);
  if (requests.size() == 1) {
    if (BlockRecord* const block = book_.at_hand(requests.front(), on)) {
      give(0, book_.grant_at_once(*block, requests.front(), on), *block);
      return;
    }
  } else if (std::all_of(requests.begin(), requests.end(), [&](LeaseRequest request) {
               return book_.at_hand(request, on) != nullptr;
             })) {
    for (std::size_t i = 0; i < requests.size(); ++i) {
      BlockRecord& block = *state_.blocks.find(requests[i].id);
      give(i, book_.grant_at_once(block, requests[i], on), block);
    }
    return;
  }
  open_with_device_calls(guard, requests, stream, on, give);
}

/// The rest of `open`, apart from it so that what most leases run through stays small.
template <PolicySet Policies>
template <class Give>
void LeaseDesk<Policies>::open_with_device_calls(Guard& guard,
                                                 std::span<LeaseRequest const> requests,
                                                 stream_type stream,
                                                 StreamIndex on,
                                                 Give const& give) {
  refuse_capture(guard, stream);
  for (LeaseRequest const& request : requests) {  // all are known before any is held
    if (state_.record(request.id).is_lost && request.access != Access::write) {
      throw BlockLost{"the bytes of this block were lost when the device failed: write it anew"};
    }
  }
  Holds holds{*this, guard, requests};
  for (LeaseRequest const& request : requests) {
    holds.add(*state_.blocks.find(request.id));
  }
  for (LeaseRequest const& request : requests) {
    Use const use = book_.note_access(request);
    if (is_settled(request.id)) {
      state_.eviction.on_access(request.id, use);
    } else {
      make_resident(guard, request, use, holds);
    }
  }
  for (LeaseRequest const& request : requests) {
    BlockRecord& block = *state_.blocks.find(request.id);
    if (block.is_unproven) {
      prove_contents(guard, request);
    }
    if (block.is_prefetched) {
      judge_prefetch(guard, block);
    }
  }
  order_after_earlier_uses(guard, requests, on, holds);
  for (std::size_t i = 0; i < requests.size(); ++i) {
    BlockRecord& block = *state_.blocks.find(requests[i].id);
    give(i, book_.grant(block, requests[i], on), block);
  }
  holds.keep();
}

/// What is enqueued on a stream that is being captured does not run now: a swap-in would be repeated by
/// every launch of the graph, from a host slot that is another block's by then.
template <PolicySet Policies>
void LeaseDesk<Policies>::refuse_capture(Guard& guard, stream_type stream) {
  if constexpr (CapturingApi<typename Policies::device>) {
    bool is_capturing = false;
    {
      Unlocked const unlocked{guard};
      is_capturing = state_.device.is_capturing(stream);
    }
    expects(
        !is_capturing,
        "the stream is being captured into a graph, and not all operands are at hand: acquire them "
        "before the capture, and hold the leases for as long as the graph is launched");
  }
}

template <PolicySet Policies>
void LeaseDesk<Policies>::bring_in(Guard& guard, BlockId id) {
  LeaseRequest const request{id, Access::read};
  BlockRecord& block = state_.record(id);
  state_.await_transition(guard, block, nullptr);
  if (!block.is_resident() && block.has_contents) {
    Holds hold{*this, guard, {&request, 1}};
    hold.add(block);
    make_resident(guard, request, state_.prefetcher.schedule().use_of(id), hold);
  }
}

/// Makes later work on `on` run after whatever conflicts with the operands. All of them are resident
/// and held on return, and the lock has not been let go since that was seen.
template <PolicySet Policies>
void LeaseDesk<Policies>::order_after_earlier_uses(Guard& guard,
                                                   std::span<LeaseRequest const> requests,
                                                   StreamIndex on,
                                                   Holds const& group) {
  std::vector<Fence> waits;
  for (;;) {
    // An operand that is held may still move until its address is handed out.
    bool has_slept = false;
    for (LeaseRequest const& request : requests) {
      BlockRecord const& block = *state_.blocks.find(request.id);
      has_slept = state_.await_transition(guard, block, &group) || has_slept;
    }
    if (has_slept) {
      continue;  // what was settled before may be on the move again
    }
    waits.clear();
    for (LeaseRequest const& request : requests) {
      BlockRecord const& block = *state_.blocks.find(request.id);
      Fence const fence = request.access == Access::read ? block.written : block.last_uses();
      if (!state_.order.is_ordered(fence, on)) {
        waits.push_back(fence);
      }
    }
    if (waits.empty()) {
      return;
    }
    Unlocked const unlocked{guard};
    for (Fence const& fence : waits) {
      state_.order.wait(on, fence);
    }
  }
}

/// Waits for other threads' transitions of the block, and brings it in. The block is held.
template <PolicySet Policies>
void LeaseDesk<Policies>::make_resident(Guard& guard,
                                        LeaseRequest request,
                                        Use use,
                                        Holds const& group) {
  BlockRecord& block = *state_.blocks.find(request.id);
  state_.await_transition(guard, block, &group);
  if (!block.is_resident()) {
    Turn const turn{state_, guard};
    state_.await_transition(guard, block, &group);
    if (!block.is_resident()) {
      auto const placement = rooms_.take(guard, block.bytes, request.id);
      if (block.has_contents && request.access != Access::write) {
        arrivals_.begin(request.id, placement, use, false);
        arrivals_.carry_in(guard);
        return;
      }
      arrivals_.place(request.id, placement, use);
      if (block.has_contents) {
        block.filler = &group;
      }
      return;
    }
  }
  state_.eviction.on_access(request.id, use);
}

/// Asks, once they have arrived, whether a file gave back the bytes of a block that is held: it was
/// read after its swap-in was enqueued, and a failure could not be reported there.
template <PolicySet Policies>
void LeaseDesk<Policies>::prove_contents(Guard& guard, LeaseRequest request) {
  BlockRecord& block = *state_.blocks.find(request.id);
  if (request.access == Access::write) {
    return;
  }
  Fence const arrival = block.written;
  bool has_arrived = false;
  {
    Unlocked const unlocked{guard};
    has_arrived = state_.order.is_complete(arrival);
  }
  if (has_arrived) {
    state_.prove_contents(block);
  }
}

/// Counts what a prefetch of the block was worth: done before it was needed, or not.
template <PolicySet Policies>
void LeaseDesk<Policies>::judge_prefetch(Guard& guard, BlockRecord& block) {
  block.is_prefetched = false;
  state_.prefetched_bytes -= block.bytes;
  Fence const arrival = block.written;
  bool is_done = false;
  {
    Unlocked const unlocked{guard};
    is_done = state_.order.is_complete(arrival);
  }
  ++(is_done ? state_.stats.prefetch_hits : state_.stats.prefetch_late);
}

/// Takes back a hold that did not become a lease. A range taken to be overwritten was not: the bytes
/// are still on the host and nowhere else.
template <PolicySet Policies>
void LeaseDesk<Policies>::undo_hold(BlockId id, Holds const& group) noexcept {
  BlockRecord& block = *state_.blocks.find(id);
  if (block.filler == &group) {
    block.filler = nullptr;
    state_.eviction.on_erase(id);
    state_.log(RecordKind::drop, id, block.bytes, block.address);
    state_.on_range_left(block, block.last_uses(), State::Leaves::parked);
    ++state_.swapped_out_blocks;
  }
  book_.end(id, block);
}

}  // namespace spillway::detail
