// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/block_table.hpp>
#include <spillway/core/config.hpp>
#include <spillway/core/types.hpp>
#include <spillway/pager/block_state.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace spillway::detail {

/// Stores the recipes: which blocks can be made again from which others, and may therefore leave
/// the device without a copy.
///
/// A recipe ends when its block is written, or when an operand is written, or is freed and has no
/// recipe itself. No bytes are lost by that: a block that only its recipe can make is recomputed
/// before an operand is written (`Leases` does that).
///
/// An operand that is freed stays as an *orphan*, a block without an owner. It keeps its bytes for
/// as long as a dropped block needs them. When no block needs the bytes of an orphan that has a
/// recipe, it is dropped, and stays without memory until the last block that is made from it is
/// gone. So blocks keep their recipes even if the program frees intermediate results. DTR (Kirisame
/// et al., ICLR 2021) evicts what a program frees in the same way.
///
/// A block that is changed in place keeps its recipe if the holder of the lease describes the
/// change. The recipe is *suspended* when the lease is granted; when the holder extends it, the
/// change is appended. A suspended recipe keeps its operands but cannot be run, since the block has
/// bytes that it does not make. It ends when an operand is written or freed, when another lease for
/// writing is granted, or, if the holder never extends it, when the block is next written or freed.
///
/// The callables belong to the user and may own objects whose destructors call the allocator, such
/// as buffers. So no callable is copied or destroyed here: those of recipes that have ended are
/// kept until `take_dead`, whose caller destroys them without the lock.
///
/// Changes links between records and never a block's state. Thread-unsafe: owned by `Blocks` and
/// used under the lock.
template <class = Lazily>
class BasicRecipes {
 public:
  /// The longest chain of dropped blocks, each of which is an operand of the one before.
  static constexpr std::uint32_t most_chained = 8;
  /// The most changes in place that a recipe repeats.
  static constexpr std::uint8_t most_extensions = 8;

  /// The table is not owned and must outlive this object.
  explicit BasicRecipes(BlockTable<BlockRecord>& table) noexcept : table_{table} {}

  /// Gives a block that is not dropped a recipe, in place of the one it may have.
  ///
  /// @throws std::bad_alloc; the block then has none, and `make` is as it was
  void
  give(BlockId id, std::span<BlockId const> operands, std::uint64_t cost_ns, Recipe::Make&& make) {
    forget(id);
    if (dead_.capacity() <= dead_.size() + nodes_) {  // all recipes may end before `take_dead`
      dead_.reserve(2 * (dead_.size() + nodes_) + 16);
    }
    link(id, operands);
    Recipe& recipe = node(id);
    recipe.cost_ns = cost_ns;
    recipe.make = std::move(make);
  }

  /// Suspends the recipe of a block until `extend`: a lease has been granted under which the block
  /// is changed. No effect if it is suspended for another lease already.
  void suspend(BlockId id, std::uint32_t lease_serial) noexcept {
    Recipe* const recipe = at(id).recipe.get();
    if (recipe == nullptr || !recipe->make || recipe->is_suspended ||
        recipe->extensions == most_extensions) {
      return forget(id);
    }
    recipe->is_suspended = true;
    recipe->changing_lease = lease_serial;
  }

  /// Appends a change to a suspended recipe: `make` does to the recipe's result what the holder of
  /// the lease has done to the block.
  ///
  /// @returns false if the block has no recipe that is suspended for this lease
  /// @throws  std::bad_alloc; the block then has no recipe, and `make` is as it was
  bool extend(BlockId id,
              std::uint32_t lease_serial,
              std::span<BlockId const> operands,
              std::uint64_t cost_ns,
              Recipe::Make&& make) {
    BlockRecord const& block = at(id);
    if (block.recipe == nullptr || !block.recipe->is_suspended ||
        block.recipe->changing_lease != lease_serial) {
      return false;
    }
    Recipe& recipe = *block.recipe;
    std::size_t const first = recipe.operands.size();
    link(id, operands);
    try {
      struct Steps {
        Recipe::Make before;
        Recipe::Make make;
      };
      auto const steps = std::make_shared<Steps>();
      Recipe::Make both =
          [steps, first](void const* stream, std::span<void const* const> addresses, void* result) {
            steps->before(stream, addresses.first(first), result);
            steps->make(stream, addresses.subspan(first), result);
          };
      *steps = {std::move(recipe.make), std::move(make)};
      recipe.make = std::move(both);
    } catch (...) {
      forget(id);
      throw;
    }
    recipe.cost_ns += cost_ns;
    ++recipe.extensions;
    recipe.is_suspended = false;
    return true;
  }

  /// Ends the recipe of a block that does not need it.
  void forget(BlockId id) noexcept {
    BlockRecord& block = at(id);
    if (block.recipe == nullptr) {
      return;
    }
    if (block.recipe->is_orphan && block.needs_recipe()) {
      forget_dependents(id);  // these need its bytes, which can no longer be made
    }
    unlink(id);
  }

  /// Ends the recipes that have a block as an operand, except those that are needed.
  /// @returns whether any is left
  bool forget_dependents(BlockId id) noexcept {
    BlockRecord& block = at(id);
    std::size_t left = block.recipe == nullptr ? 0 : block.recipe->dependents.size();
    while (left != 0) {  // backwards, since a later one takes the place of one that is removed
      BlockId const dependent = block.recipe->dependents[left - 1].block;
      if (is_in_need(dependent)) {
        --left;
      } else {
        forget(dependent);  // removes itself from the list, and may remove others
        left = block.recipe == nullptr ? 0 : std::min(left, block.recipe->dependents.size());
      }
    }
    return block.recipe != nullptr && !block.recipe->dependents.empty();
  }

  /// Returns a block that would be lost if the bytes of block `id` changed now, or that may soon be
  /// such a block.
  [[nodiscard]] std::optional<BlockId> dependent_in_need(BlockId id) noexcept {
    Recipe* const recipe = at(id).recipe.get();
    std::size_t const count = recipe == nullptr ? 0 : recipe->dependents.size();
    for (std::size_t i = 0; i < count; ++i) {
      std::size_t const place = (recipe->needed_by + i) % count;  // most often it is the same again
      BlockId const dependent = recipe->dependents[place].block;
      if (is_in_need(dependent)) {
        recipe->needed_by = static_cast<std::uint32_t>(place);
        return dependent;
      }
    }
    return std::nullopt;
  }

  /// Decides what happens to a block without leases that its owner frees. @returns true if it can
  /// be removed; false if it stays as an orphan until `take_orphan` returns it
  bool may_go(BlockId id) noexcept {
    BlockRecord& block = at(id);
    if (block.recipe != nullptr && block.recipe->is_orphan) {
      return false;
    }
    if (!may_stay_dropped(id) && !forget_dependents(id)) {
      forget(id);
      return true;
    }
    block.is_abandoned = true;
    block.recipe->is_orphan = true;
    block.recipe->passes_need_on = true;  // until now it was in need if it had no bytes
    look_at(id);
    return false;
  }

  /// What happens to an orphan whose bytes no block needs.
  struct Parting {
    BlockId id{};
    bool is_for_good = false;  // false: it is dropped and stays for the blocks made from it
  };
  /// Returns an orphan whose bytes no block needs any more, if there is one. It looks only at the
  /// orphans whose need may have ended since the last call, and at those that were in use then.
  std::optional<Parting> take_orphan() noexcept {
    for (std::size_t i = 0; i < orphans_.size();) {
      BlockId const id = orphans_[i];
      BlockRecord const& block = at(id);
      Recipe& recipe = *block.recipe;
      bool const is_needed = dependent_in_need(id).has_value();
      if (!is_needed && std::exchange(recipe.passes_need_on, false)) {
        look_at_operands(recipe);
      }
      if (!is_needed && (block.is_leased() || block.is_in_transit())) {
        ++i;
        continue;
      }
      orphans_[i] = orphans_.back();
      orphans_.pop_back();
      recipe.is_looked_at = false;
      if (is_needed || (recipe.has_parted && !recipe.dependents.empty())) {
        continue;
      }
      recipe.has_parted = may_stay_dropped(id);
      if (!recipe.has_parted) {
        recipe.is_orphan = false;
        forget_dependents(id);
        forget(id);
        return Parting{id, true};
      }
      return Parting{id, false};
    }
    return std::nullopt;
  }
  /// The number of orphans that the next `take_orphan` may look at.
  [[nodiscard]] std::size_t orphans_to_look_at() const noexcept { return orphans_.size(); }

  /// Notes that a block was recomputed. If it is an orphan, its bytes will soon be needless again.
  void on_recompute(BlockId id) noexcept {
    Recipe& recipe = *at(id).recipe;
    recipe.has_parted = false;
    if (recipe.is_orphan) {
      look_at(id);
    }
    look_at_operands(recipe);
  }
  /// Notes that a block has its bytes although it was about to leave, so that it may no longer need
  /// its recipe.
  void on_need_ended(BlockRecord const& block) noexcept {
    if (block.recipe != nullptr) {
      look_at_operands(*block.recipe);
    }
  }

  /// Whether there are callables of ended recipes that were not taken yet.
  [[nodiscard]] bool has_dead() const noexcept { return !dead_.empty(); }
  /// Hands out the callable of a recipe that has ended. @pre `has_dead()`
  [[nodiscard]] Recipe::Make take_dead() noexcept {
    Recipe::Make make = std::move(dead_.back());
    dead_.pop_back();
    return make;
  }

  /// Counts a recomputation that holds the block by a lease which its owner does not know of.
  void begin_reading(BlockId id) noexcept { ++at(id).recipe->readers; }
  void end_reading(BlockId id) noexcept {
    BlockRecord& block = at(id);
    --block.recipe->readers;
    prune(block);
  }

  /// Notes that an acquire has begun after which the recipe of this block, and those that read it,
  /// will end, and that it has succeeded or failed. Until then none of these blocks is dropped,
  /// even if its recipe is given meanwhile.
  void begin_writing(BlockId id) noexcept { ++at(id).writers; }
  void end_writing(BlockId id) noexcept { --at(id).writers; }

  /// Whether a resident block that is about to leave could be recomputed with at most `room_bytes`
  /// of resident blocks at a time.
  [[nodiscard]] bool may_drop(BlockId id, std::size_t room_bytes) const noexcept {
    std::optional<Chains> const chains = chains_of(id);
    if (!chains || chains->blocks() >= most_chained) {
      return false;
    }
    BlockRecord const& block = at(id);
    std::size_t const top_bytes = chains->above.blocks == 0 ? block.bytes : 0;
    return top_bytes + operand_bytes(block) + chains->below.bytes + chains->above.bytes <=
           room_bytes;
  }

  /// Calls `visit(operand)` for the operands of a dropped block, and recursively for those of its
  /// dropped operands, until it returns false. @returns what `visit` returned last
  template <class Visit>
  bool all_below(BlockId id, Visit const& visit, std::uint32_t depth = 0) const {
    Recipe const& recipe = *at(id).recipe;
    return std::all_of(recipe.operands.begin(), recipe.operands.end(), [&](Recipe::Link operand) {
      return at(operand.block).state() == BlockState::dropped && depth < most_chained
                 ? all_below(operand.block, visit, depth + 1)
                 : visit(operand.block);
    });
  }

  /// Returns the cost of recomputing a block, as stated by the program, including that of the
  /// dropped blocks that it needs.
  [[nodiscard]] std::uint64_t cost_ns(BlockId id) const noexcept {
    std::size_t visits = 0;
    return at(id).recipe->cost_ns + chain(id, id, &Recipe::operands, visits).cost_ns;
  }

 private:
  static constexpr std::size_t most_visits = 256;

  /// What is known about the chains of dropped blocks on one side of a block: the longest of them,
  /// and the largest in bytes.
  struct Chain {
    std::uint32_t blocks = 0;
    std::size_t bytes = 0;  // of operands, and of blocks from which nothing is made
    std::uint64_t cost_ns = 0;
    bool is_whole = true;  // no block of it has lost its bytes or will soon be written
  };
  struct Chains {
    Chain below;
    Chain above;

    [[nodiscard]] std::uint32_t blocks() const noexcept { return below.blocks + above.blocks; }
  };

  [[nodiscard]] BlockRecord& at(BlockId id) noexcept { return *table_.find(id); }
  [[nodiscard]] BlockRecord const& at(BlockId id) const noexcept {
    return *std::as_const(table_).find(id);
  }
  /// @throws std::bad_alloc
  Recipe& node(BlockId id) {
    std::unique_ptr<Recipe>& recipe = at(id).recipe;
    if (recipe == nullptr) {
      if (orphans_.capacity() <= nodes_) {
        orphans_.reserve(2 * nodes_ + 16);
      }
      recipe = std::make_unique<Recipe>();
      ++nodes_;
    }
    return *recipe;
  }

  /// Whether a block's recipe must be kept, since otherwise the block would be lost or, if it is an
  /// orphan, a block that is made from it. The recursion is no deeper than the longest chain. After
  /// too many visits it returns true, which is always safe. Notes in the orphans that are in need
  /// that their operands may be kept because of that.
  [[nodiscard]] bool is_in_need(BlockId id, std::size_t& visits) noexcept {
    BlockRecord const& block = at(id);
    if (!block.needs_recipe() || !block.recipe->is_orphan) {
      return block.needs_recipe();
    }
    std::vector<Recipe::Link> const& made = block.recipe->dependents;
    bool const is_needed =
        ++visits >= most_visits || std::any_of(made.begin(), made.end(), [&](Recipe::Link one) {
          return is_in_need(one.block, visits);
        });
    block.recipe->passes_need_on = block.recipe->passes_need_on || is_needed;
    return is_needed;
  }
  [[nodiscard]] bool is_in_need(BlockId id) noexcept {
    std::size_t visits = 0;
    return is_in_need(id, visits);
  }
  /// Whether a freed block can be dropped and still be recomputed for the blocks made from it.
  [[nodiscard]] bool may_stay_dropped(BlockId id) const noexcept {
    Recipe const* const recipe = at(id).recipe.get();
    if (recipe == nullptr || recipe->dependents.empty()) {
      return false;
    }
    std::optional<Chains> const chains = chains_of(id);
    return chains && chains->blocks() + 1 < most_chained;
  }
  /// Puts an orphan on the list of those that may no longer be needed.
  void look_at(BlockId id) noexcept {
    if (!std::exchange(at(id).recipe->is_looked_at, true)) {
      orphans_.push_back(id);  // `node` has made room for it
    }
  }
  void look_at_operands(Recipe const& recipe) noexcept {
    for (Recipe::Link const& operand : recipe.operands) {
      if (Recipe const* const other = at(operand.block).recipe.get();
          other != nullptr && other->is_orphan) {
        look_at(operand.block);
      }
    }
  }

  /// Adds operands to a block's recipe. @throws std::bad_alloc; it then has none
  void link(BlockId id, std::span<BlockId const> operands) {
    Recipe& recipe = node(id);
    try {
      recipe.operands.reserve(recipe.operands.size() + operands.size());
      for (BlockId const operand : operands) {
        bool const is_linked = std::any_of(recipe.operands.begin(),
                                           recipe.operands.end(),
                                           [&](Recipe::Link one) { return one.block == operand; });
        // `make` gets the addresses in this order. Added first, so that `unlink` finds the operand
        // if the next call throws.
        recipe.operands.push_back({operand});
        if (!is_linked) {
          std::vector<Recipe::Link>& dependents = node(operand).dependents;
          dependents.push_back({id, static_cast<std::uint32_t>(recipe.operands.size() - 1)});
          recipe.operands.back().place = static_cast<std::uint32_t>(dependents.size() - 1);
        }
      }
    } catch (...) {
      unlink(id);
      throw;
    }
  }

  void unlink(BlockId id) noexcept {
    Recipe& recipe = *at(id).recipe;
    look_at_operands(recipe);
    for (Recipe::Link const operand : recipe.operands) {
      if (BlockRecord& block = at(operand.block); block.recipe != nullptr) {
        if (operand.place != Recipe::Link::nowhere) {
          remove_dependent(*block.recipe, operand.place);
        }
        prune(block);
      }
    }
    recipe.operands.clear();
    if (recipe.make) {
      dead_.push_back(std::exchange(recipe.make, nullptr));  // `give` has made room for it
    }
    recipe.is_suspended = false;
    recipe.extensions = 0;
    prune(at(id));
  }
  /// The last dependent takes the place of the one that is removed.
  void remove_dependent(Recipe& recipe, std::uint32_t place) noexcept {
    Recipe::Link const last = recipe.dependents.back();
    recipe.dependents[place] = last;
    at(last.block).recipe->operands[last.place].place = place;
    recipe.dependents.pop_back();
  }
  void prune(BlockRecord& block) noexcept {
    Recipe const& recipe = *block.recipe;
    if (!recipe.make && recipe.dependents.empty() && recipe.readers == 0 && !recipe.is_orphan) {
      block.recipe.reset();
      --nodes_;
    }
  }

  [[nodiscard]] std::size_t operand_bytes(BlockRecord const& block) const noexcept {
    std::size_t bytes = 0;
    for (Recipe::Link const& operand : block.recipe->operands) {
      bytes += at(operand.block).bytes;
    }
    return bytes;
  }

  /// Returns the chains on both sides of a block; nothing if the block could not be recomputed.
  [[nodiscard]] std::optional<Chains> chains_of(BlockId id) const noexcept {
    BlockRecord const& block = at(id);
    if (!block.has_recipe() || !block.has_contents() || block.writers != 0) {
      return std::nullopt;
    }
    std::size_t visits = 0;
    Chains const chains{chain(id, id, &Recipe::operands, visits),
                        chain(id, id, &Recipe::dependents, visits)};
    return visits < most_visits && chains.below.is_whole ? std::optional{chains} : std::nullopt;
  }

  // Recursive, but no deeper than the longest chain. A cycle of recipes looks like a chain that is
  // too long, also if block `first`, which the caller asks about, still has its bytes.
  [[nodiscard]] Chain chain(BlockId first,
                            BlockId id,
                            std::vector<Recipe::Link> Recipe::*links,
                            std::size_t& visits,
                            std::uint32_t depth = 0) const noexcept {
    Chain longest;
    for (Recipe::Link const& link : (*at(id).recipe).*links) {
      BlockRecord const& block = at(link.block);
      longest.is_whole = longest.is_whole && block.has_contents() && block.writers == 0;
      bool const is_cycle = link.block == first;
      if (!is_cycle && (!block.needs_recipe() || !block.has_recipe())) {
        continue;
      }
      if (is_cycle || ++visits >= most_visits || depth == most_chained) {
        longest.blocks = most_chained;
        return longest;
      }
      Chain const rest = chain(first, link.block, links, visits, depth + 1);
      longest.blocks = std::max(longest.blocks, rest.blocks + 1);
      bool const is_top = links == &Recipe::dependents && rest.blocks == 0;
      longest.bytes =
          std::max(longest.bytes, rest.bytes + operand_bytes(block) + (is_top ? block.bytes : 0));
      longest.cost_ns += rest.cost_ns + block.recipe->cost_ns;
      longest.is_whole = longest.is_whole && rest.is_whole;
    }
    return longest;
  }

  BlockTable<BlockRecord>& table_;
  std::vector<BlockId> orphans_;  // orphans that may no longer be needed
  std::vector<Recipe::Make> dead_;
  std::size_t nodes_ = 0;  // number of block records that have a `Recipe`
};

using Recipes = BasicRecipes<>;

SPILLWAY_COMPILED_PART(class BasicRecipes<>);

}  // namespace spillway::detail
