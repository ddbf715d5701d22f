// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/policy_set.hpp>
#include <spillway/concepts/recompute_policy.hpp>
#include <spillway/core/range_table.hpp>
#include <spillway/core/record.hpp>
#include <spillway/core/types.hpp>
#include <spillway/defrag_arena.hpp>
#include <spillway/device/sim/sim_api.hpp>
#include <spillway/policy/compaction/sliding_compaction.hpp>
#include <spillway/policy/fit/segregated_fit.hpp>
#include <spillway/schedule/access_schedule.hpp>
#include <spillway/schedule/use.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include <support/archetypes/file_io_archetype.hpp>

/// Policies and a device that have only what their concepts require: a template that compiles with
/// them uses nothing else. They work, so it can be run, too.
namespace spillway::test {

/// Operations that no concept requires unless it says so.
struct NotCopyable {
  NotCopyable() = default;
  NotCopyable(NotCopyable const&) = delete;
  NotCopyable& operator=(NotCopyable const&) = delete;
};
struct MovableOnly {
  MovableOnly() = default;
  MovableOnly(MovableOnly&&) = default;
  MovableOnly& operator=(MovableOnly&&) = default;
};

/// Evicts in the order in which blocks came.
class EvictionArchetype : MovableOnly {
 public:
  void on_insert(BlockId id, std::size_t /*bytes*/, Use /*use*/) { ids_.push_back(id); }
  void on_access(BlockId /*id*/, Use /*use*/) noexcept {}
  void on_erase(BlockId id) noexcept { std::erase(ids_, id); }
  template <class Inspect>
  std::optional<BlockId> victim(std::size_t /*short_bytes*/, Inspect inspect) noexcept {
    for (BlockId const id : ids_) {
      std::optional<EvictionCandidate> const block = inspect(id);
      if (block) {
        return id;
      }
    }
    return std::nullopt;
  }
  void on_misprediction() noexcept {}
  void on_step(AccessSchedule const& /*schedule*/, std::size_t /*capacity_bytes*/) noexcept {}

 protected:
  std::vector<BlockId> ids_;
};

/// The same with what `SpeculativeEvictionPolicy` requires in addition.
class SpeculativeEvictionArchetype : public EvictionArchetype {
 public:
  template <class Inspect>
  std::optional<BlockId> early_victim(Inspect inspect) noexcept {
    return victim(0, [&](BlockId id) noexcept {
      std::optional<EvictionCandidate> const block = inspect(id);
      return block && !block->is_clean ? block : std::nullopt;
    });
  }
  template <class Inspect>
  std::optional<BlockId> leaving_victim(Inspect inspect) noexcept {
    return victim(0, inspect);
  }
  bool may_return(AccessSchedule const& /*schedule*/, BlockId /*id*/) const noexcept {
    return true;
  }
};

/// Names the blocks in the order in which they were made.
class PrefetchArchetype : MovableOnly {
 public:
  void on_create(BlockId id) { ids_.push_back(id); }
  void on_access(BlockId /*id*/, Use /*use*/) noexcept {}
  void on_destroy(BlockId id) noexcept { std::erase(ids_, id); }
  void on_step() noexcept {}
  template <class Visit>
  void candidates(AccessSchedule const& schedule, Visit visit) const {
    for (BlockId const id : ids_) {
      if (!visit(id, schedule.position())) {
        return;
      }
    }
  }
  std::size_t max_inflight_bytes() const noexcept { return std::size_t{1} << 20U; }

 private:
  std::vector<BlockId> ids_;
};

/// Makes a block again if that takes less than a copy.
class RecomputeArchetype : MovableOnly {
 public:
  void on_step(double /*step_ns*/, std::size_t /*bytes*/) noexcept {}
  bool prefers_recompute(RecomputeCosts costs) const noexcept {
    return costs.recompute_ns < costs.copy_ns;
  }
  double plan_share(RecomputeCosts /*costs*/) const noexcept { return 1; }
  bool wants_recipes() const noexcept { return true; }
};

struct ObserverArchetype : NotCopyable {
  static constexpr bool is_enabled = true;
  void on_record(Record const& /*record*/) noexcept {}
};

class LockArchetype : NotCopyable {
 public:
  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }
  bool try_lock() { return mutex_.try_lock(); }

 private:
  std::mutex mutex_;
};

class CodecArchetype : NotCopyable {
 public:
  static constexpr bool is_lossless = true;
  static std::string_view name() noexcept { return "archetype"; }
  static std::size_t worst_bytes(std::size_t bytes) noexcept { return bytes; }
  std::size_t encode(std::span<std::byte const> from, std::span<std::byte> to) noexcept {
    std::copy(from.begin(), from.end(), to.begin());
    return from.size();
  }
  bool decode(std::span<std::byte const> from, std::span<std::byte> to) noexcept {
    return from.size() == to.size() && encode(from, to) == to.size();
  }
};

class FitArchetype : MovableOnly {
 public:
  void insert(RangeTable& table, std::uint32_t node) noexcept { fit_.insert(table, node); }
  void erase(RangeTable& table, std::uint32_t node) noexcept { fit_.erase(table, node); }
  void
  resize(RangeTable& table, std::uint32_t node, std::uint32_t first, std::uint32_t count) noexcept {
    fit_.resize(table, node, first, count);
  }
  Fit find(RangeTable const& table, std::uint32_t count) const noexcept {
    return fit_.find(table, count);
  }
  std::uint32_t largest(RangeTable const& table) const noexcept { return fit_.largest(table); }
  template <class Visit>
  void visit_large(RangeTable const& table, Visit visit) const {
    fit_.visit_large(table, visit);
  }

 private:
  SegregatedFit fit_;
};

class CompactionArchetype : MovableOnly {
 public:
  static constexpr bool moves_blocks = true;
  std::optional<LayoutPlan> plan(Layout const& layout, std::uint32_t count, std::uint64_t budget) {
    return compaction_.plan(layout, count, budget);
  }

 private:
  SlidingCompaction compaction_;
};

/// A device that forwards to a simulated one, with none of the abilities beyond `DeviceApi`. It
/// cannot be made by default, and its streams and events are types of their own.
class DeviceArchetype : NotCopyable {
 public:
  struct stream_type {
    SimApi::stream_type handle{};
    friend bool operator==(stream_type const&, stream_type const&) = default;
  };
  struct event_type {
    SimApi::event_type handle{};
    friend bool operator==(event_type const&, event_type const&) = default;
  };

  explicit DeviceArchetype(SimApi& device) : device_{device} {}

  void* try_reserve(std::size_t bytes) { return device_.try_reserve(bytes); }
  void release(void* base, std::size_t bytes) noexcept { device_.release(base, bytes); }
  void* try_allocate_pinned(std::size_t bytes, int node) {
    return device_.try_allocate_pinned(bytes, node);
  }
  void free_pinned(void* base, std::size_t bytes) noexcept { device_.free_pinned(base, bytes); }
  void copy(void* to, void const* from, std::size_t bytes, CopyKind kind, stream_type stream) {
    device_.copy(to, from, bytes, kind, stream.handle);
  }
  void fill(void* to, unsigned char byte, std::size_t bytes, stream_type stream) {
    device_.fill(to, byte, bytes, stream.handle);
  }
  void launch_host(stream_type stream, HostFunction function, void* argument) {
    device_.launch_host(stream.handle, function, argument);
  }
  stream_type create_stream() { return {device_.create_stream()}; }
  void destroy_stream(stream_type stream) noexcept { device_.destroy_stream(stream.handle); }
  event_type create_event() { return {device_.create_event()}; }
  void destroy_event(event_type event) noexcept { device_.destroy_event(event.handle); }
  void record(event_type event, stream_type stream) { device_.record(event.handle, stream.handle); }
  void wait(stream_type stream, event_type event) { device_.wait(stream.handle, event.handle); }
  bool is_complete(event_type event) { return device_.is_complete(event.handle); }
  void synchronize(event_type event) { device_.synchronize(event.handle); }
  void synchronize(stream_type stream) { device_.synchronize(stream.handle); }
  MemoryInfo memory_info() const { return device_.memory_info(); }
  int numa_node() const noexcept { return device_.numa_node(); }
  std::uint64_t clock_ns() const noexcept { return device_.clock_ns(); }

 private:
  SimApi& device_;
};

}  // namespace spillway::test

template <>
struct std::hash<spillway::test::DeviceArchetype::stream_type> {
  std::size_t operator()(spillway::test::DeviceArchetype::stream_type stream) const noexcept {
    return std::hash<spillway::SimApi::stream_type>{}(stream.handle);
  }
};

namespace spillway::test {

/// A bundle of archetypes alone.
struct PoliciesArchetype {
  using device = DeviceArchetype;
  using fit = FitArchetype;
  using arena = MovableBlocks;
  using compaction = CompactionArchetype;
  using eviction = EvictionArchetype;
  using prefetch = PrefetchArchetype;
  using recompute = RecomputeArchetype;
  using file_io = FileIoArchetype;
  using lock = LockArchetype;
  using observer = ObserverArchetype;
};

}  // namespace spillway::test
