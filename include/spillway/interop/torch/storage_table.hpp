// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/interop/torch/desk/desk_state.hpp>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace spillway::torch {

/// Knows every storage whose memory is the desk's: those that no operation has been seen to use, by
/// address, and those that are enrolled.
///
/// Threads  thread-safe, but for `try_enrol`, which is called with the lock.
template <class Site>
class StorageTable {
 public:
  using State = DeskState<Site>;
  using Guard = typename State::Guard;
  using StorageEntry = typename State::StorageEntry;
  using Frames = typename State::Frames;
  using Leases = typename State::Leases;

  /// What is known of one storage or allocation.
  struct View {
    BlockId block{};
    std::size_t bytes = 0;
    bool is_enrolled = false;
    bool is_leased = false;
    bool is_in_use = false;
    bool is_kept = false;
    bool is_frozen = false;
    Likeness likeness{};
  };

  explicit StorageTable(State& state) : state_{state} {}

  /// What a thread has allocated. @throws std::bad_alloc; then `leases` are as they were
  void add_raw(Frames& frames, BlockId block, std::size_t bytes, Leases& leases, bool is_lent) {
    void* const p = leases.data();
    Guard const guard{state_.mutex};
    auto const added = state_.raw.try_emplace(p);
    try {
      added.first->second = state_.make_entry();
    } catch (...) {
      state_.raw.erase(added.first);
      throw;
    }
    StorageEntry& entry = *added.first->second;
    entry.block = block;
    entry.bytes = bytes;
    entry.leases = std::move(leases);
    entry.is_kept = frames.keeps_new;
    entry.is_lent = is_lent;
    if (frames.is_inside()) {
      state_.count(frames);
    }
  }

  /// @param is_lent  whether the memory is given back by whom it was lent to
  /// @returns false if there is nothing of that kind at that address
  [[nodiscard]] bool free_raw(void* p, bool is_lent) noexcept {
    Leases leases;
    BlockId block{};
    std::size_t bytes = 0;
    std::unique_ptr<StorageEntry> surplus;
    {
      Guard const guard{state_.mutex};
      auto const found = state_.raw.find(p);
      if (found == state_.raw.end() || found->second->is_lent != is_lent) {
        return false;
      }
      surplus = std::move(found->second);
      state_.raw.erase(found);
      block = surplus->block;
      bytes = surplus->bytes;
      leases = std::move(surplus->leases);
      if (state_.put_aside(*surplus)) {
        (void)surplus.release();
      }
    }
    leases.release();
    state_.memory->abandon(block);
    Site::on_freed(bytes, block);
    state_.tell_waiters();
    return true;
  }

  /// Size of an allocation that is not enrolled; 0 if there is none at that address.
  [[nodiscard]] std::size_t raw_bytes(void* p) const {
    Guard const guard{state_.mutex};
    auto const found = state_.raw.find(p);
    return found == state_.raw.end() ? 0 : found->second->bytes;
  }

  void on_storage_gone(StorageEntry& entry) noexcept {
    typename State::Leases leases;
    typename State::Weak storage{typename State::Strong{}};
    bool is_last = false;
    BlockId const block = entry.block;
    std::size_t const bytes = entry.bytes;
    {
      Guard const guard{state_.mutex};
      state_.unlink(entry);
      entry.is_dead = true;
      leases = std::move(entry.leases);
      if (entry.pins == 0) {
        storage = std::exchange(entry.storage, storage);
        is_last = !state_.put_aside(entry);
      }
    }
    leases.release();
    state_.memory->abandon(block);
    Site::on_freed(bytes, block);
    if (is_last) {
      delete &entry;
    }
    state_.tell_waiters();
  }

  /// Wraps a storage that has its memory from here and nothing else to do with it. Under the lock.
  /// @returns null if it is not one
  [[nodiscard]] StorageEntry* try_enrol(Operand const& operand) noexcept {
    c10::StorageImpl& storage = *operand.storage;
    c10::DataPtr& data = storage._mutable_data_ptr_no_checks();
    void* const p = data.get();
    if (data.get_deleter() != &State::drop_raw || p == nullptr || p != data.get_context() ||
        !Site::allocates_for(storage)) {
      return nullptr;
    }
    auto const found = state_.raw.find(p);
    if (found == state_.raw.end() || found->second->is_lent ||
        !Site::enrols(found->second->bytes)) {
      return nullptr;
    }
    StorageEntry& entry = *found->second.release();
    state_.raw.erase(found);
    entry.storage = State::weak_reference(storage);
    if (operand.tensor != nullptr) {
      entry.likeness.look_at(*operand.tensor);
    }
    State::wrap(data, entry, p);
    state_.link(entry);
    return &entry;
  }

  [[nodiscard]] View view(c10::StorageImpl& storage) const {
    Guard const guard{state_.mutex};
    if (StorageEntry const* const entry = State::entry_of(storage)) {
      return view_of(*entry);
    }
    auto const found = state_.raw.find(storage._mutable_data_ptr_no_checks().get_context());
    return found == state_.raw.end() ? View{} : view_of_raw(*found->second);
  }

  /// All of them, largest first.
  [[nodiscard]] std::vector<View> views() const {
    std::vector<View> all;
    {
      Guard const guard{state_.mutex};
      all.reserve(state_.entries + state_.raw.size());
      for (StorageEntry const* one = state_.all.next; one != &state_.all; one = one->next) {
        all.push_back(view_of(*one));
      }
      for (auto const& [p, raw] : state_.raw) {
        all.push_back(view_of_raw(*raw));
      }
    }
    std::stable_sort(
        all.begin(), all.end(), [](View const& a, View const& b) { return a.bytes > b.bytes; });
    return all;
  }

  /// Why nothing that is here can leave: empty if something can, or if all is in use just now.
  [[nodiscard]] std::string why_nothing_leaves() const {
    std::size_t kept = 0;
    std::size_t unseen = 0;
    for (View const& one : views()) {
      if (!one.is_leased) {
        return {};
      }
      kept += one.is_kept ? one.bytes : 0;
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

  /// What would have to be released, largest first.
  [[nodiscard]] std::string holders() const {
    std::string text =
        state_.is_enabled ? "" : " Support for large models is off: set_enabled_lms(True).";
    std::size_t shown = 0;
    std::size_t bytes = 0;
    for (View const& one : views()) {
      if (!one.is_leased && !one.is_in_use) {
        continue;
      }
      bytes += one.bytes;
      if (++shown <= 5) {
        text +=
            (shown == 1 ? " In use together or held, largest first: " : "; ") +
            std::to_string(one.bytes) + " bytes " +
            (one.is_enrolled ? one.likeness.text() : std::string{"not yet seen by an operation"}) +
            (one.is_kept     ? " (kept: its address is known outside of operations)"
             : one.is_in_use ? " (an operation needs it)"
                             : "");
      }
    }
    return text + (shown == 0 ? "" : "; " + std::to_string(bytes) + " bytes in all.");
  }

 private:
  [[nodiscard]] static View view_of(StorageEntry const& entry) {
    return {.block = entry.block,
            .bytes = entry.bytes,
            .is_enrolled = true,
            .is_leased = static_cast<bool>(entry.leases),
            .is_in_use = entry.pins != 0,
            .is_kept = entry.is_kept,
            .is_frozen = entry.is_frozen,
            .likeness = entry.likeness};
  }
  [[nodiscard]] static View view_of_raw(StorageEntry const& raw) {
    return {.block = raw.block, .bytes = raw.bytes, .is_leased = true, .is_in_use = true};
  }

  State& state_;
};

}  // namespace spillway::torch
