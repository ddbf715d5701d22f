// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/types.hpp>
#include <spillway/interop/torch/storage_entry.hpp>
#include <spillway/interop/torch/torch_version.hpp>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include <c10/core/Allocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/SmallVector.h>

namespace spillway::torch {

/// What one thread has in use: the entries pinned by its outermost operation.
template <class StorageEntry>
struct Frames {
  using Pins = std::vector<StorageEntry*>;

  int depth = 0;   ///< of operations that hold their operands
  int beside = 0;  ///< of operations that hold some of them beside the frames of those inside
  int held = 0;    ///< of pieces of a program that count as one operation whatever is called inside
  bool keeps_new = false;   ///< what is allocated now is for code that remembers addresses
  bool is_counted = false;  ///< among the threads inside an operation that others may wait for
  Pins pins{};

  [[nodiscard]] bool is_inside() const noexcept { return depth > 0 || beside > 0; }
};

/// What an operation does with an operand beside reading it: use its address outside of operations, too, and
/// say that it writes it. One word, since reading a word that was written in pieces stalls the processor.
class OperandUse {
 public:
  OperandUse() = default;
  OperandUse(bool keeps, bool writes) noexcept
      : bits_{(keeps ? keeps_bit : 0) | (writes ? writes_bit : 0)} {}

  [[nodiscard]] bool keeps() const noexcept { return (bits_ & keeps_bit) != 0; }
  [[nodiscard]] bool writes() const noexcept { return (bits_ & writes_bit) != 0; }

 private:
  static constexpr std::uintptr_t keeps_bit = 1;
  static constexpr std::uintptr_t writes_bit = 2;
  std::uintptr_t bits_ = 0;
};

/// A storage among the operands of an operation, and a tensor that uses it.
struct Operand {
  c10::StorageImpl* storage = nullptr;
  c10::TensorImpl const* tensor = nullptr;
  OperandUse use{};
};
using Operands = c10::SmallVector<Operand, 12>;

/// What the parts of a `StorageLeases` share.
///
/// Threads  `mutex` guards the members that are not atomic; it is held for bookkeeping alone.
template <class Site>
struct DeskState {
  using Allocator = typename Site::allocator_type;
  using stream_type = typename Allocator::stream_type;
  using Lease = typename Allocator::lease_type;
  using Leases = StreamLeases<Lease, stream_type>;
  using StorageEntry = torch::StorageEntry<Lease, stream_type>;
  using Frames = torch::Frames<StorageEntry>;
  using Pins = typename Frames::Pins;
  using Guard = std::unique_lock<std::mutex>;
  using Strong = c10::intrusive_ptr<c10::StorageImpl>;
  using Weak = c10::weak_intrusive_ptr<c10::StorageImpl>;

  explicit DeskState(Allocator& the_memory) : memory{&the_memory} {}
  DeskState(DeskState const&) = delete;
  DeskState& operator=(DeskState const&) = delete;

  /// The deleters that say whose a storage's memory is.
  static void drop_entry(void* context) {
    Site::leases().on_storage_gone(*static_cast<StorageEntry*>(context));
  }
  static void drop_raw(void* p) {
    if (p != nullptr && !Site::leases().free_raw(p)) {
      Site::drop_foreign(p);
    }
  }

  [[nodiscard]] static StorageEntry* entry_of(c10::StorageImpl& storage) noexcept {
    c10::DataPtr const& data = storage._mutable_data_ptr_no_checks();
    return data.get_deleter() == &drop_entry ? static_cast<StorageEntry*>(data.get_context())
                                               : nullptr;
  }

  /// Made without a strong one, whose count might need the interpreter's lock.
  [[nodiscard]] static Weak weak_reference(c10::StorageImpl& storage) {
    c10::raw::weak_intrusive_ptr::incref(&storage);
    return Weak::reclaim(&storage);
  }

  /// Makes a entry the context of a pointer, whose context has another owner or is that entry already.
  static void wrap(c10::DataPtr& data, StorageEntry& entry, void* p) noexcept {
    c10::Device const device = data.device();
    (void)data.release_context();
    data = c10::DataPtr{p, &entry, &drop_entry, device};
  }
  /// Changes only the pointer; the context stays. The lock is held, and a reference to the storage.
  static void point(c10::StorageImpl& storage, StorageEntry& entry, void* p) {
    wrap(storage._mutable_data_ptr_no_checks(), entry, p);
    if constexpr (has_named_access_error) {
      p == nullptr ? forbid_access(storage) : allow_access(storage);
    }
  }

  /// A entry as new, often one that was of use before: results come and go with every operation. Under
  /// the lock.
  [[nodiscard]] std::unique_ptr<StorageEntry> make_entry() {
    if (spares.empty()) {
      spares.reserve(most_spares);
      return std::make_unique<StorageEntry>();
    }
    std::unique_ptr<StorageEntry> entry = std::move(spares.back());
    spares.pop_back();
    return entry;
  }
  /// Takes back one that nobody points to, without its leases and storage. Under the lock. @returns false
  /// if there are enough
  [[nodiscard]] bool put_aside(StorageEntry& entry) noexcept {
    if (spares.size() == spares.capacity()) {
      return false;
    }
    entry.likeness.forget();
    entry.pinner.store(nullptr, std::memory_order_relaxed);
    entry.is_arriving = entry.is_dead = entry.is_kept = entry.is_frozen = false;
    spares.emplace_back(&entry);
    return true;
  }

  void link(StorageEntry& entry) noexcept {
    entry.previous = all.previous;
    entry.next = &all;
    all.previous->next = &entry;
    all.previous = &entry;
    ++entries;
  }
  void unlink(StorageEntry& entry) noexcept {
    entry.previous->next = entry.next;
    entry.next->previous = entry.previous;
    --entries;
  }

  /// A thread that is inside an operation may let go of something when that ends. Under the lock.
  void count(Frames& frames) noexcept {
    if (!frames.is_counted) {
      frames.is_counted = true;
      ++active;
    }
  }
  void uncount(Frames& frames) noexcept {
    if (frames.is_counted) {
      frames.is_counted = false;
      --active;
      ends.store(ends.load(std::memory_order_relaxed) + 1, std::memory_order_release);
      if (waiters.load() != 0) {
        changed.notify_all();
      }
    }
  }

  /// Something was let go, or has arrived. Called without the lock.
  void tell_waiters() noexcept {
    releases.fetch_add(1);
    if (waiters.load() != 0) {
      std::scoped_lock const lock{mutex};
      changed.notify_all();
    }
  }

  /// Grows whenever something may have been let go, or has arrived.
  [[nodiscard]] std::uint64_t changes() const noexcept { return releases.load() + ends.load(); }

  static constexpr std::size_t most_spares = 64;

  Allocator* memory;
  mutable std::mutex mutex;
  std::condition_variable changed;
  std::unordered_map<void*, std::unique_ptr<StorageEntry>>
      raw;      // those that no operation has been seen to use
  StorageEntry all;  // head of a ring of the others
  std::size_t entries = 0;
  std::vector<std::unique_ptr<StorageEntry>> spares;
  std::uint64_t frames_ended = 0;
  int active = 0;  // threads inside an operation that uses what is ours
  std::atomic<bool> is_enabled{true};
  std::atomic<bool> is_under_pressure{false};
  std::atomic<bool> ends_frames_early{false};
  std::atomic<bool> has_warned{false};
  std::atomic<int> waiters{0};  // threads that sleep
  std::atomic<std::uint64_t> releases{0};
  std::atomic<std::uint64_t> ends{0};  // of operations; written under the lock
  std::atomic<std::uint64_t> waits{0};
  std::atomic<std::uint64_t> out_of_memory{0};
  std::atomic<std::uint64_t> pressures{0};
  std::atomic<std::uint64_t> strays{0};
};

}  // namespace spillway::torch
