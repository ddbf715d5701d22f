// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/device_api.hpp>
#include <spillway/concepts/file_io_api.hpp>
#include <spillway/core/config.hpp>
#include <spillway/core/error.hpp>
#include <spillway/core/fence.hpp>
#include <spillway/core/types.hpp>
#include <spillway/host/host_slot.hpp>
#include <spillway/host/host_store.hpp>
#include <spillway/host/host_tier.hpp>

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

namespace spillway::detail {

/// What transfers of one tier hold while they are being enqueued together. Books all of them under one
/// lock, and what was enqueued of them under another one.
///
/// Transfers of a slower tier share one staging chunk, in which each piece has a place of its own.
///
/// Threads  thread-compatible.
template <DeviceApi Device, FileIoApi FileIo>
class HostBatch {
 public:
  using Store = HostStore<Device, FileIo>;
  using Direction = typename Store::Direction;
  using job_type = typename Store::job_type;

  HostBatch(Store& store, Direction way) : store_{&store}, is_read_{way == Direction::in} {}
  HostBatch(HostBatch const&) = delete;
  HostBatch& operator=(HostBatch const&) = delete;
  ~HostBatch() { close(); }

  /// Begins those transfers at the front that can go together.
  ///
  /// @pre     they are unanswered
  /// @returns how many; 0 if the first one has to go alone
  /// @throws  std::bad_alloc; those that were begun are ended by `close`
  [[nodiscard]] std::size_t open(std::span<TransferRequest> requests);

  /// Ends them: each with the `done` that is in its request. Does nothing if none are open.
  void close() noexcept;

  [[nodiscard]] HostTier tier() const noexcept { return entries_.front().slot->tier; }
  /// The jobs for the pieces, in their order and linked; none in the pinned tier.
  [[nodiscard]] job_type* jobs() const noexcept { return jobs_; }
  /// The jobs have been enqueued: whoever runs them gives them back.
  void forget_jobs() noexcept { jobs_ = nullptr; }
  /// Where in the staging chunk the bytes of each piece begin.
  [[nodiscard]] std::span<std::size_t const> chunk_offsets() const noexcept { return offsets_; }

  /// Calls `use(Fence const&)` for what the first access to each slot comes after.
  template <class Use>
  void for_each_fence(Use use) const {
    for (Entry const& entry : entries_) {
      use(entry.before);
    }
  }
  /// Calls `use(TransferRequest const&, std::byte* device, HostPiece const&)` for each piece.
  template <class Use>
  void for_each_piece(Use use) const {
    auto piece = pieces_.begin();
    for (std::size_t i = 0; i < entries_.size(); ++i) {
      std::byte* device = requests_[i].device;
      for (std::size_t n = entries_[i].pieces; n > 0; --n, ++piece) {
        use(requests_[i], device, *piece);
        device += piece->bytes;
      }
    }
  }
  /// Says what became of all of them.
  void answer(TransferState state, Transfer const& done) noexcept {
    for (TransferRequest& request : requests_) {
      request.state = state;
      request.done = done;
    }
  }

 private:
  struct Entry {
    HostSlot* slot = nullptr;
    Fence before;
    std::uint32_t pieces = 0;
    std::uint32_t jobs = 0;
  };

  [[nodiscard]] bool can_join(HostSlot const* slot, TransferRequest const& request) const noexcept;
  void add(HostSlot& slot, std::size_t bytes);

  Store* store_;
  bool is_read_;
  std::span<TransferRequest> requests_;
  std::vector<Entry> entries_;
  std::vector<HostPiece> pieces_;
  std::vector<std::size_t> offsets_;
  std::size_t chunk_bytes_ = 0;  // taken of the staging chunk
  job_type* jobs_ = nullptr;
  job_type* last_job_ = nullptr;
};

template <DeviceApi Device, FileIoApi FileIo>
std::size_t HostBatch<Device, FileIo>::open(std::span<TransferRequest> requests) {
  SPILLWAY_ASSERT(entries_.empty());
  if (requests.size() < 2) {
    return 0;
  }
  entries_.reserve(requests.size());
  requests_ = requests;
  std::scoped_lock const lock{store_->mutex_};
  for (TransferRequest const& request : requests) {
    HostSlot* const slot = store_->ledger_.find(request.slot);
    if (!can_join(slot, request)) {
      break;  // what is wrong with it is found when it goes alone
    }
    add(*slot, request.bytes);
  }
  requests_ = requests.first(entries_.size());
  return entries_.size();
}

template <DeviceApi Device, FileIoApi FileIo>
bool HostBatch<Device, FileIo>::can_join(HostSlot const* slot,
                                         TransferRequest const& request) const noexcept {
  return slot != nullptr && !slot->failure && slot->refusal(request.bytes, is_read_) == nullptr &&
         (entries_.empty() || slot->tier == tier()) &&
         (slot->tier == HostTier::pinned || chunk_bytes_ + slot->bytes <= store_->chunk_bytes_);
}

/// @pre the lock is held
template <DeviceApi Device, FileIoApi FileIo>
void HostBatch<Device, FileIo>::add(HostSlot& slot, std::size_t bytes) {
  std::size_t const granule = store_->ledger_.granule(slot.tier);
  std::uint32_t count = 0;
  store_->ledger_.for_each_piece(slot, bytes, [&](HostPiece const& piece) {
    pieces_.push_back(piece);
    offsets_.push_back(chunk_bytes_);
    chunk_bytes_ += round_up(piece.bytes, granule);
    ++count;
  });
  std::uint32_t const jobs = slot.tier == HostTier::pinned ? 0 : count;
  if (job_type* const first = jobs == 0 ? nullptr : store_->jobs_.take(jobs); first != nullptr) {
    (jobs_ == nullptr ? jobs_ : last_job_->next) = first;
    for (last_job_ = first; last_job_->next != nullptr;) {
      last_job_ = last_job_->next;
    }
    auto piece = pieces_.end() - static_cast<std::ptrdiff_t>(count);
    for (job_type* job = first; job != nullptr; job = job->next, ++piece) {
      job->slot = &slot;
      job->piece = *piece;
    }
  }
  entries_.push_back({&slot, slot.before(is_read_), count, jobs});
  slot.begin_call(is_read_, jobs);
}

template <DeviceApi Device, FileIoApi FileIo>
void HostBatch<Device, FileIo>::close() noexcept {
  pieces_.clear();
  offsets_.clear();
  chunk_bytes_ = 0;
  if (entries_.empty()) {
    return;
  }
  std::scoped_lock const lock{store_->mutex_};
  bool const are_jobs_unused = jobs_ != nullptr;
  while (jobs_ != nullptr) {
    store_->jobs_.give_back(std::exchange(jobs_, jobs_->next));
  }
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    TransferRequest const& request = requests_[i];
    entries_[i].slot->end_call(is_read_,
                               are_jobs_unused ? entries_[i].jobs : 0,
                               request.done.host_done,
                               request.state == TransferState::enqueued ? request.bytes : 0);
  }
  entries_.clear();
}

}  // namespace spillway::detail
