// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/types.hpp>
#include <spillway/interop/torch/holding.hpp>
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

namespace spillway::pytorch {

/// What one thread has in use: the holdings pinned by its outermost operation.
template <class Holding>
struct Frames {
  int depth = 0;   ///< of operations that hold their operands
  int beside = 0;  ///< of operations that hold some of them beside the frames of those inside
  int held = 0;    ///< of pieces of a program that count as one operation whatever is called inside
  bool keeps_new = false;  ///< what is allocated now is for code that remembers addresses
  std::vector<Holding*> pins;
};

/// What an operation does with an operand beside reading it.
struct OperandUse {
  bool keeps = false;   ///< its address is used outside of operations, too
  bool writes = false;  ///< the operation says that it writes it
};

/// A storage among the operands of an operation, and a tensor that uses it.
struct Operand {
  c10::StorageImpl* storage = nullptr;
  c10::TensorImpl const* tensor = nullptr;
  OperandUse use{};
};
using Operands = c10::SmallVector<Operand, 12>;

/// What the parts of a `StorageDesk` share.
///
/// Threads  `mutex` guards the members that are not atomic; it is held for bookkeeping alone.
template <class Site>
struct DeskState {
  using Allocator = typename Site::allocator_type;
  using stream_type = typename Allocator::stream_type;
  using Lease = typename Allocator::lease_type;
  using Leases = StreamLeases<Lease, stream_type>;
  using Holding = pytorch::Holding<Lease, stream_type>;
  using Frames = pytorch::Frames<Holding>;
  using Guard = std::unique_lock<std::mutex>;
  using Strong = c10::intrusive_ptr<c10::StorageImpl>;
  using Weak = c10::weak_intrusive_ptr<c10::StorageImpl>;

  /// Memory of a storage that no operation has been seen to use.
  struct Raw {
    BlockId block{};
    Leases leases{};
    std::size_t bytes = 0;
    bool is_kept = false;
    bool is_lent = false;  // to somebody who gives it back by name; never enrolled
  };

  explicit DeskState(Allocator& the_memory) : memory{&the_memory} {}
  DeskState(DeskState const&) = delete;
  DeskState& operator=(DeskState const&) = delete;

  /// The deleters that say whose a storage's memory is.
  static void drop_holding(void* context) {
    Site::desk().on_storage_gone(*static_cast<Holding*>(context));
  }
  static void drop_raw(void* p) {
    if (p != nullptr && !Site::desk().free_raw(p)) {
      Site::drop_foreign(p);
    }
  }

  [[nodiscard]] static Holding* holding_of(c10::StorageImpl& storage) noexcept {
    c10::DataPtr const& data = storage._mutable_data_ptr_no_checks();
    return data.get_deleter() == &drop_holding ? static_cast<Holding*>(data.get_context())
                                               : nullptr;
  }

  /// Made without a strong one, whose count might need the interpreter's lock.
  [[nodiscard]] static Weak weak_reference(c10::StorageImpl& storage) {
    c10::raw::weak_intrusive_ptr::incref(&storage);
    return Weak::reclaim(&storage);
  }

  /// Changes only the pointer; the context stays. The lock is held, and a reference to the storage.
  static void point(c10::StorageImpl& storage, Holding& holding, void* p) {
    c10::DataPtr& data = storage._mutable_data_ptr_no_checks();
    (void)data.release_context();
    data = c10::DataPtr{p, &holding, &drop_holding, holding.device};
    if constexpr (has_named_access_error) {
      p == nullptr ? forbid_access(storage) : allow_access(storage);
    }
  }

  /// A holding as new, often one that was of use before: results come and go with every operation. Under
  /// the lock.
  [[nodiscard]] std::unique_ptr<Holding> make_holding(c10::StorageImpl& storage) {
    if (spares.empty()) {
      spares.reserve(most_spares);
      return std::make_unique<Holding>(weak_reference(storage));
    }
    std::unique_ptr<Holding> holding = std::move(spares.back());
    spares.pop_back();
    holding->storage = weak_reference(storage);
    return holding;
  }
  /// Takes back one that nobody points to, without its leases and storage. Under the lock. @returns false
  /// if there are enough
  [[nodiscard]] bool put_aside(Holding& holding) noexcept {
    if (spares.size() == spares.capacity()) {
      return false;
    }
    holding.likeness = {};
    holding.pinner = nullptr;
    holding.is_arriving = holding.is_dead = holding.is_kept = holding.is_frozen = false;
    spares.emplace_back(&holding);
    return true;
  }

  void link(Holding& holding) noexcept {
    holding.previous = all.previous;
    holding.next = &all;
    all.previous->next = &holding;
    all.previous = &holding;
    ++holdings;
  }
  void unlink(Holding& holding) noexcept {
    holding.previous->next = holding.next;
    holding.next->previous = holding.previous;
    --holdings;
  }

  /// Something was let go, or has arrived. Called without the lock.
  void tell_waiters() noexcept {
    releases.fetch_add(1);
    if (waiters.load() != 0) {
      std::scoped_lock const lock{mutex};
      changed.notify_all();
    }
  }

  static constexpr std::size_t most_spares = 64;

  Allocator* memory;
  mutable std::mutex mutex;
  std::condition_variable changed;
  std::unordered_map<void*, Raw> raw;
  Holding all{Weak{Strong{}}};  // head of a ring
  std::size_t holdings = 0;
  std::vector<std::unique_ptr<Holding>> spares;
  std::uint64_t frames_ended = 0;
  std::atomic<bool> is_enabled{true};
  std::atomic<bool> is_under_pressure{false};
  std::atomic<bool> ends_frames_early{false};
  std::atomic<bool> has_warned{false};
  std::atomic<int> active{0};   // threads inside an outermost frame
  std::atomic<int> waiters{0};  // threads that sleep
  std::atomic<std::uint64_t> releases{0};
  std::atomic<std::uint64_t> waits{0};
  std::atomic<std::uint64_t> out_of_memory{0};
  std::atomic<std::uint64_t> pressures{0};
  std::atomic<std::uint64_t> strays{0};
};

}  // namespace spillway::pytorch
