// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/types.hpp>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <c10/core/ScalarType.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/intrusive_ptr.h>

namespace spillway::torch {

/// The type and shape of the first tensor that was seen to use a storage, for reports.
struct TensorDescription {
  std::array<std::int64_t, 5> extents{};
  std::uint8_t rank = 0;
  c10::ScalarType type = c10::ScalarType::Undefined;

  /// Sets the members one by one. Copying an object right after it was written in parts would stall
  /// the processor, and this runs for each result of an operation.
  ///
  /// The sizes are those that the tensor itself stores. If its class has sizes of its own,
  /// `sizes()` may call code of the program, and the caller of this function holds the lock.
  void describe(c10::TensorImpl const& tensor) {
    type = c10::typeMetaToScalarType(tensor.dtype());
    rank = 0;
    if (!tensor.has_symbolic_sizes_strides() && !tensor.is_nested()) {
      auto const sizes = tensor.sizes_default();
      rank = static_cast<std::uint8_t>(std::min<std::size_t>(sizes.size(), 255));
      std::copy_n(
          sizes.begin(), std::min<std::size_t>(sizes.size(), extents.size()), extents.begin());
    }
  }
  void clear() noexcept { type = c10::ScalarType::Undefined; }

  [[nodiscard]] std::string text() const {
    if (type == c10::ScalarType::Undefined) {
      return "?";
    }
    std::string out = c10::toString(type) + std::string{"["};
    for (std::size_t i = 0; i < std::min<std::size_t>(rank, extents.size()); ++i) {
      out += (i == 0 ? "" : ", ") + std::to_string(extents[i]);
    }
    return out + (rank > extents.size() ? ", ...]" : "]");
  }
};

/// The leases of one block: one on the stream that it was acquired on, and one on each other stream
/// that has used it since. They end together, so that the next use of the block's range is ordered
/// after all of these streams.
///
/// Threads  thread-compatible.
template <class Lease, class Stream>
class StreamLeases {
 public:
  StreamLeases() = default;
  StreamLeases(Lease lease, Stream stream) : stream_{stream}, first_{std::move(lease)} {}

  [[nodiscard]] explicit operator bool() const noexcept { return static_cast<bool>(first_); }
  [[nodiscard]] void* data() const noexcept { return first_.data(); }
  /// Whether `stream` is the one that the block was acquired on.
  [[nodiscard]] bool is_first(Stream stream) const noexcept { return stream_ == stream; }
  /// Whether there is a lease on `stream`.
  [[nodiscard]] bool covers(Stream stream) const noexcept {
    return is_first(stream) || std::any_of(others_.begin(), others_.end(), [&](auto const& one) {
             return one.second == stream;
           });
  }

  /// Whether `is_true(stream)` holds for the stream of any lease.
  template <class Predicate>
  [[nodiscard]] bool any_stream(Predicate const& is_true) const noexcept {
    return (first_ && is_true(stream_)) ||
           std::any_of(others_.begin(), others_.end(), [&](auto const& one) {
             return is_true(one.second);
           });
  }

  void add(Lease lease, Stream stream) { others_.emplace_back(std::move(lease), stream); }
  /// Replaces the first lease by another one on the same block and stream, and returns the old one.
  [[nodiscard]] Lease exchange_first(Lease lease) noexcept {
    return std::exchange(first_, std::move(lease));
  }
  /// Moves all leases to `leases`, for the caller to end them.
  void move_to(std::vector<Lease>& leases) {
    leases.reserve(leases.size() + 1 + others_.size());
    leases.push_back(std::move(first_));
    for (auto& one : others_) {
      leases.push_back(std::move(one.first));
    }
    others_.clear();
  }
  void release() noexcept {
    first_.release();
    others_.clear();
  }

 private:
  Stream stream_{};
  Lease first_{};
  std::vector<std::pair<Lease, Stream>> others_;
};

/// The state of one allocation of `StorageLeases`. Once an operation has been seen to use the
/// allocation, the entry is the context of the storage's `DataPtr`, for as long as the storage
/// lives.
///
/// While there are `leases`, the storage's pointer is their address. Otherwise it is null, and the
/// block may be swapped out. All members but `pinner` are guarded by the lock of `StorageLeases`.
/// `storage` does not change while the entry is pinned. The members that every operation reads come
/// first, in one cache line.
template <class Lease, class Stream>
struct alignas(64) StorageEntry {
  /// The list of pins of the thread that pinned the entry last, until that thread unpins it. A
  /// thread that finds its own list here knows, without the lock, that it has pinned the entry.
  std::atomic<void const*> pinner{nullptr};
  std::uint32_t pins = 0;        // by frames and loans; it is not swapped out while there are any
  std::uint32_t loans = 0;       // pins that outlive the operation in which they began
  bool is_kept = false;          // other code knows the address: it stays resident
  bool is_frozen = false;        // its owner promised that operations only read it
  bool is_arriving = false;      // one thread is acquiring the lease
  bool is_dead = false;          // the storage is gone; the last unpin deletes this
  bool is_read_leased = false;   // the leases, if there are any, are for reading
  bool is_shared = false;        // it has had two pins at once since it last had none
  bool may_have_recipe = false;  // a recipe was set, and it has not been leased for writing since
  StreamLeases<Lease, Stream> leases{};
  BlockId block{};
  std::size_t bytes = 0;
  std::uint64_t grants_to_write = 0;  // how often operations were granted leases for writing
  bool is_fixed = false;  // allocated by `allocate_fixed`, for a private pool and not for a storage
  bool is_captured = false;  // a graph accesses it whenever the graph is launched
  TensorDescription description{};
  StorageEntry* previous = this;
  StorageEntry* next = this;
  /// A weak reference, which does not keep the storage alive; null before an operation has been
  /// seen to use it.
  c10::weak_intrusive_ptr<c10::StorageImpl> storage{c10::intrusive_ptr<c10::StorageImpl>{}};

  [[nodiscard]] bool has_lease() const noexcept { return static_cast<bool>(leases); }
};

/// The allocations that no operation has been seen to use, by address. It also keeps spare entries,
/// since most results live for only a few operations, so that entries are made and dropped all the
/// time.
///
/// Threads  thread-compatible.
template <class Entry>
class StorageTable {
 public:
  /// Adds an allocation at `p`. @throws std::bad_alloc; nothing has changed then
  [[nodiscard]] Entry& add(void* p) {
    auto const added = entries_.try_emplace(p);
    try {
      added.first->second = make_entry();
    } catch (...) {
      entries_.erase(added.first);
      throw;
    }
    return *added.first->second;
  }
  /// Returns null if there is no allocation at `p`.
  [[nodiscard]] Entry* find(void* p) const {
    auto const found = entries_.find(p);
    return found == entries_.end() ? nullptr : found->second.get();
  }
  /// Removes the allocation at `p` from the table and returns its entry. Returns null if there is
  /// none or `may_remove(entry)` is false.
  template <class Predicate>
  [[nodiscard]] std::unique_ptr<Entry> remove(void* p, Predicate const& may_remove) noexcept {
    auto const found = entries_.find(p);
    if (found == entries_.end() || !may_remove(std::as_const(*found->second))) {
      return nullptr;
    }
    std::unique_ptr<Entry> entry = std::move(found->second);
    entries_.erase(found);
    return entry;
  }
  template <class Visit>
  void for_each(Visit const& visit) const {
    for (auto const& [p, entry] : entries_) {
      visit(std::as_const(*entry));
    }
  }
  [[nodiscard]] std::size_t size() const noexcept { return entries_.size(); }

  /// Keeps an entry that has no leases and no storage, for a later `add`.
  ///
  /// @returns false if there are enough spare entries; the caller then deletes it
  [[nodiscard]] bool try_recycle(Entry& entry) noexcept {
    if (spares_.size() == spares_.capacity()) {
      return false;
    }
    entry.description.clear();
    entry.pinner.store(nullptr, std::memory_order_relaxed);
    entry.is_arriving = entry.is_dead = entry.is_kept = entry.is_frozen = false;
    entry.is_captured = entry.may_have_recipe = false;
    spares_.emplace_back(&entry);
    return true;
  }

 private:
  static constexpr std::size_t most_spares = 64;

  [[nodiscard]] std::unique_ptr<Entry> make_entry() {
    if (spares_.empty()) {
      spares_.reserve(most_spares);
      return std::make_unique<Entry>();
    }
    std::unique_ptr<Entry> entry = std::move(spares_.back());
    spares_.pop_back();
    return entry;
  }

  std::unordered_map<void*, std::unique_ptr<Entry>> entries_;
  std::vector<std::unique_ptr<Entry>> spares_;
};

/// The state of one storage or allocation, for reports.
struct StorageView {
  BlockId block{};
  std::size_t bytes = 0;
  bool is_enrolled = false;  ///< an operation has been seen to use it
  bool is_leased = false;
  bool is_in_use = false;
  bool is_kept = false;
  bool is_lent = false;  ///< kept for a limited time
  bool is_frozen = false;
  TensorDescription description{};
};

/// Says why no tensor can be swapped out. Empty if one can be, or if operations use all of them
/// just now.
[[nodiscard]] inline std::string why_nothing_can_leave(std::span<StorageView const> all) {
  std::size_t kept = 0;
  std::size_t unseen = 0;
  for (StorageView const& one : all) {
    if (!one.is_leased) {
      return {};
    }
    kept += one.is_kept || one.is_lent ? one.bytes : 0;
    unseen += one.is_enrolled ? 0 : one.bytes;
  }
  return kept + unseen == 0 ? std::string{}
                            : "spillway_torch: no tensor can leave: " + std::to_string(kept) +
                                  " bytes are kept because their addresses were given out "
                                  "(numpy, DLPack, data_ptr, collectives, captures), " +
                                  std::to_string(unseen) +
                                  " bytes have not been seen by an operation since support was "
                                  "switched on in their thread.";
}

/// Lists the largest storages that are resident, for an error message that says what to release.
///
/// @param all  largest first
[[nodiscard]] inline std::string describe_residents(std::span<StorageView const> all) {
  std::string text;
  std::size_t shown = 0;
  std::size_t bytes = 0;
  for (StorageView const& one : all) {
    if (!one.is_leased && !one.is_in_use) {
      continue;
    }
    bytes += one.bytes;
    if (++shown <= 5) {
      text +=
          (shown == 1 ? " In use together or held, largest first: " : "; ") +
          std::to_string(one.bytes) + " bytes " +
          (one.is_enrolled ? one.description.text() : std::string{"not yet seen by an operation"}) +
          (one.is_kept || one.is_lent ? " (kept: its address is known outside of operations)"
           : one.is_in_use            ? " (an operation or a hold needs it)"
                                      : "");
    }
  }
  return text + (shown == 0 ? "" : "; " + std::to_string(bytes) + " bytes in all.");
}

}  // namespace spillway::torch
