// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/config.hpp>
#include <spillway/core/error.hpp>
#include <spillway/core/types.hpp>
#include <spillway/device/sim/sim_backing.hpp>
#include <spillway/device/sim/sim_handles.hpp>
#include <spillway/device/sim/sim_options.hpp>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <optional>
#include <utility>
#include <vector>

namespace spillway::detail {

/// A map of disjoint address ranges, each with the physical memory that is mapped there, if any.
///
/// Threads  thread-unsafe: a lookup changes the cache of the last hit.
/// Cost     O(log n); O(1) for `covers` inside its last hit.
template <class Lazy = Lazily>
class BasicSimRanges {
 public:
  struct Range {
    std::size_t bytes = 0;
    SimPhysical physical{};
  };
  using map_type = std::map<std::uintptr_t, Range>;
  using iterator = typename map_type::iterator;

  void insert(void const* p, std::size_t bytes, SimPhysical physical = {}) {
    ranges_.emplace(address_of(p), Range{bytes, physical});
  }

  /// The range that starts at `p`, or `end()`.
  [[nodiscard]] iterator find(void const* p) noexcept { return ranges_.find(address_of(p)); }
  [[nodiscard]] iterator end() noexcept { return ranges_.end(); }
  [[nodiscard]] iterator begin() noexcept { return ranges_.begin(); }
  [[nodiscard]] iterator lower_bound(void const* p) noexcept {
    return ranges_.lower_bound(address_of(p));
  }

  /// The range that holds address `p`, or `end()`.
  [[nodiscard]] iterator holder(void const* p) noexcept {
    auto const after = ranges_.upper_bound(address_of(p));
    if (after == ranges_.begin()) {
      return ranges_.end();
    }
    auto const it = std::prev(after);
    return address_of(p) - it->first < it->second.bytes ? it : ranges_.end();
  }

  iterator erase(iterator it) noexcept {
    hit_begin_ = hit_end_ = 0;
    return ranges_.erase(it);
  }

  /// True if every byte of `[p, p + bytes)` lies in some range; ranges may touch.
  [[nodiscard]] bool covers(void const* p, std::size_t bytes) noexcept {
    std::uintptr_t const begin = address_of(p);
    std::uintptr_t const end = begin + bytes;
    if (end < begin) {
      return false;
    }
    if (begin >= hit_begin_ && end <= hit_end_) {
      return true;
    }
    auto it = holder(p);
    if (it == ranges_.end()) {
      return false;
    }
    std::uintptr_t const first = it->first;
    std::uintptr_t last = it->first + it->second.bytes;
    for (++it; last < end && it != ranges_.end() && it->first == last; ++it) {
      last += it->second.bytes;
    }
    if (last < end) {
      return false;
    }
    hit_begin_ = first;
    hit_end_ = last;
    return true;
  }

  /// True if `[p, p + bytes)` touches no range.
  [[nodiscard]] bool is_clear(void const* p, std::size_t bytes) noexcept {
    if (holder(p) != ranges_.end()) {
      return false;
    }
    auto const next = ranges_.lower_bound(address_of(p));
    return next == ranges_.end() || next->first - address_of(p) >= bytes;
  }

  [[nodiscard]] std::size_t size() const noexcept { return ranges_.size(); }

 private:
  map_type ranges_;
  std::uintptr_t hit_begin_ = 0;
  std::uintptr_t hit_end_ = 0;
};

using SimRanges = BasicSimRanges<>;

/// The memory of a simulated device. Keeps track of what is reserved, pinned and mapped, and
/// enforces the limits.
///
/// Memory may be given back while enqueued work still uses it. Later operations on it are refused.
/// It stays mapped until `Barrier::is_passed` says that the work has run.
///
/// Threads  thread-compatible; the device uses it under its own lock.
template <class Backing, class Barrier>
class SimMemory {
 public:
  explicit SimMemory(SimOptions const& options) : options_{&options}, backing_{options} {
    expects(std::has_single_bit(options.granularity_bytes),
            "SimOptions::granularity_bytes must be a power of two",
            {},
            "SimApi");
  }
  SimMemory(SimMemory const&) = delete;
  SimMemory& operator=(SimMemory const&) = delete;
  ~SimMemory();

  [[nodiscard]] void* try_reserve(std::size_t bytes);
  void release(void* p, std::size_t bytes, Barrier barrier);
  [[nodiscard]] void* try_allocate_pinned(std::size_t bytes);
  void free_pinned(void* p, std::size_t bytes, Barrier barrier);

  /// @throws DeviceError unless both ranges are live, of the right kind, and do not overlap
  void check_copy(void const* to, void const* from, std::size_t bytes, CopyKind kind);
  /// @throws DeviceError unless all of the range is device memory; an empty range always passes
  void check_device(void const* p, std::size_t bytes, char const* role);
  /// @throws DeviceError unless all of the range is pinned memory
  void check_pinned(void const* p, std::size_t bytes, char const* role);

  [[nodiscard]] MemoryInfo memory_info() const noexcept {
    return {options_->capacity_bytes - used_bytes_, options_->capacity_bytes};
  }
  [[nodiscard]] std::size_t pinned_bytes() const noexcept { return pinned_bytes_; }

  [[nodiscard]] void* reserve_address(std::size_t bytes);
  void free_address(void* p, std::size_t bytes) noexcept;
  [[nodiscard]] std::optional<SimPhysical> try_create_physical(std::size_t bytes);
  void release_physical(SimPhysical physical) noexcept;
  void map(void* p, std::size_t bytes, SimPhysical physical);
  /// @returns how many pieces were mapped there
  std::size_t unmap(void* p, std::size_t bytes) noexcept;

 private:
  struct Physical {
    std::uint64_t offset = 0;
    std::size_t bytes = 0;
    std::size_t mappings = 0;
  };
  struct Departed {
    void* p = nullptr;
    std::size_t bytes = 0;
    Barrier barrier;
  };

  static void check_granularity(std::size_t n, std::size_t granularity, char const* what);
  void keep(SimRanges& ranges, void* p, std::size_t bytes);
  void depart(void* p, std::size_t bytes, Barrier barrier);
  void collect() noexcept;

  SimOptions const* options_;
  Backing backing_;
  std::size_t used_bytes_ = 0;
  std::size_t pinned_bytes_ = 0;
  SimRanges device_;  // mappings of physical memory, and reservations, which have none
  SimRanges pinned_;
  SimRanges addresses_;
  SimTable<SimPhysicalTag, Physical> physical_;
  std::vector<Departed> departed_;
};

template <class Backing, class Barrier>
SimMemory<Backing, Barrier>::~SimMemory() {
  for (Departed const& range : departed_) {
    backing_.unmap_memory(range.p, range.bytes);
  }
  auto const pointer = [](std::uintptr_t address) {
    return reinterpret_cast<void*>(address);  // NOLINT(performance-no-int-to-ptr)
  };
  for (auto const& [address, range] : device_) {
    if (range.physical == SimPhysical{}) {
      backing_.unmap_memory(pointer(address), range.bytes);
    }
  }
  for (auto const& [address, range] : pinned_) {
    backing_.unmap_memory(pointer(address), range.bytes);
  }
  for (auto const& [address, range] : addresses_) {
    backing_.free_address(pointer(address), range.bytes);
  }
}

template <class Backing, class Barrier>
void* SimMemory<Backing, Barrier>::try_reserve(std::size_t bytes) {
  if (bytes == 0) {
    throw DeviceError{"SimApi: try_reserve was asked for 0 bytes"};
  }
  collect();
  if (bytes > options_->capacity_bytes - used_bytes_) {
    return nullptr;
  }
  void* const p = backing_.try_map_memory(bytes, true);
  if (p != nullptr) {
    keep(device_, p, bytes);
    used_bytes_ += bytes;
  }
  return p;
}

template <class Backing, class Barrier>
void SimMemory<Backing, Barrier>::release(void* p, std::size_t bytes, Barrier barrier) {
  auto const it = device_.find(p);
  if (it == device_.end() || it->second.bytes != bytes || it->second.physical != SimPhysical{}) {
    sim_misuse(Text{"release of "} + describe_range(p, bytes) + ", which is no live reservation");
  }
  device_.erase(it);
  used_bytes_ -= bytes;
  depart(p, bytes, std::move(barrier));
}

template <class Backing, class Barrier>
void* SimMemory<Backing, Barrier>::try_allocate_pinned(std::size_t bytes) {
  if (bytes == 0) {
    throw DeviceError{"SimApi: try_allocate_pinned was asked for 0 bytes"};
  }
  collect();
  if (bytes > options_->pinned_capacity_bytes - pinned_bytes_) {
    return nullptr;
  }
  void* const p = backing_.try_map_memory(bytes, true);
  if (p != nullptr) {
    keep(pinned_, p, bytes);
    pinned_bytes_ += bytes;
  }
  return p;
}

template <class Backing, class Barrier>
void SimMemory<Backing, Barrier>::free_pinned(void* p, std::size_t bytes, Barrier barrier) {
  auto const it = pinned_.find(p);
  if (it == pinned_.end() || it->second.bytes != bytes) {
    sim_misuse(Text{"free_pinned of "} + describe_range(p, bytes) +
               ", which is no live allocation");
  }
  pinned_.erase(it);
  pinned_bytes_ -= bytes;
  depart(p, bytes, std::move(barrier));
}

template <class Backing, class Barrier>
void SimMemory<Backing, Barrier>::check_copy(void const* to,
                                             void const* from,
                                             std::size_t bytes,
                                             CopyKind kind) {
  if (kind == CopyKind::to_device) {
    check_pinned(from, bytes, "source of a copy to the device");
  } else {
    check_device(from, bytes, "source of a copy");
  }
  if (kind == CopyKind::to_host) {
    check_pinned(to, bytes, "destination of a copy to the host");
  } else {
    check_device(to, bytes, "destination of a copy");
  }
  if (address_of(from) < address_of(to) + bytes && address_of(to) < address_of(from) + bytes) {
    throw DeviceError{Text{"SimApi: a copy from "} + describe_range(from, bytes) + " to " +
                      describe_range(to, bytes) + " overlaps itself"};
  }
}

template <class Backing, class Barrier>
void SimMemory<Backing, Barrier>::check_device(void const* p, std::size_t bytes, char const* role) {
  if (bytes != 0 && !device_.covers(p, bytes)) {
    throw DeviceError{Text{"SimApi: the "} + role + " " + describe_range(p, bytes) +
                      " is not inside live device memory"};
  }
}

template <class Backing, class Barrier>
void SimMemory<Backing, Barrier>::check_pinned(void const* p, std::size_t bytes, char const* role) {
  if (bytes != 0 && !pinned_.covers(p, bytes)) {
    throw DeviceError{Text{"SimApi: the "} + role + " " + describe_range(p, bytes) +
                      " is not inside live pinned memory, which try_allocate_pinned gives"};
  }
}

template <class Backing, class Barrier>
void SimMemory<Backing, Barrier>::check_granularity(std::size_t n,
                                                    std::size_t granularity,
                                                    char const* what) {
  if (n == 0 || n % granularity != 0) {
    throw DeviceError{Text{"SimApi: "} + what + " " + n +
                      " is not a positive multiple of the granularity " + granularity};
  }
}

template <class Backing, class Barrier>
void* SimMemory<Backing, Barrier>::reserve_address(std::size_t bytes) {
  check_granularity(bytes, options_->granularity_bytes, "the size of an address range");
  void* const p = backing_.reserve_address(bytes);
  keep(addresses_, p, bytes);
  return p;
}

template <class Backing, class Barrier>
void SimMemory<Backing, Barrier>::free_address(void* p, std::size_t bytes) noexcept {
  auto const it = addresses_.find(p);
  if (it == addresses_.end() || it->second.bytes != bytes) {
    sim_misuse(Text{"free_address of "} + describe_range(p, bytes) + ", which is no address range");
  }
  if (!device_.is_clear(p, bytes)) {
    sim_misuse(Text{"free_address of "} + describe_range(p, bytes) +
               " while memory is mapped there");
  }
  addresses_.erase(it);
  backing_.free_address(p, bytes);
}

template <class Backing, class Barrier>
std::optional<SimPhysical> SimMemory<Backing, Barrier>::try_create_physical(std::size_t bytes) {
  check_granularity(bytes, options_->granularity_bytes, "the size of physical memory");
  if (bytes > options_->capacity_bytes - used_bytes_) {
    return std::nullopt;
  }
  std::uint64_t const offset = backing_.create_physical(bytes);
  try {
    SimPhysical const physical = physical_.insert({offset, bytes, 0});
    used_bytes_ += bytes;
    return physical;
  } catch (...) {
    backing_.release_physical(offset, bytes);
    throw;
  }
}

template <class Backing, class Barrier>
void SimMemory<Backing, Barrier>::release_physical(SimPhysical physical) noexcept {
  Physical const& memory = physical_.expect(physical, "release_physical");
  if (memory.mappings != 0) {
    sim_misuse(Text{"release_physical of "} + memory.bytes + " bytes that are mapped " +
               memory.mappings + " times");
  }
  backing_.release_physical(memory.offset, memory.bytes);
  used_bytes_ -= memory.bytes;
  physical_.erase(physical);
}

template <class Backing, class Barrier>
void SimMemory<Backing, Barrier>::map(void* p, std::size_t bytes, SimPhysical physical) {
  Physical& memory = physical_.at(physical, "map");
  check_granularity(address_of(p), options_->granularity_bytes, "the address");
  if (bytes != memory.bytes) {
    throw DeviceError{Text{"SimApi: map of "} + describe_range(p, bytes) +
                      " with physical memory of " + memory.bytes + " bytes"};
  }
  if (!addresses_.covers(p, bytes)) {
    throw DeviceError{Text{"SimApi: map of "} + describe_range(p, bytes) +
                      ", which is not inside a reserved address range"};
  }
  if (!device_.is_clear(p, bytes)) {
    throw DeviceError{Text{"SimApi: map of "} + describe_range(p, bytes) +
                      ", where memory is mapped already"};
  }
  device_.insert(p, bytes, physical);
  try {
    backing_.map(p, memory.offset, bytes);
  } catch (...) {
    device_.erase(device_.find(p));
    throw;
  }
  ++memory.mappings;
}

template <class Backing, class Barrier>
std::size_t SimMemory<Backing, Barrier>::unmap(void* p, std::size_t bytes) noexcept {
  std::size_t pieces = 0;
  std::uintptr_t const end = address_of(p) + bytes;
  auto it = device_.find(p);
  std::uintptr_t at = address_of(p);
  while (at != end) {
    if (it == device_.end() || it->first != at || it->second.bytes > end - at ||
        it->second.physical == SimPhysical{}) {
      sim_misuse(Text{"unmap of "} + describe_range(p, bytes) +
                 ", which is not made of whole mappings");
    }
    at += it->second.bytes;
    --physical_.expect(it->second.physical, "unmap").mappings;
    it = device_.erase(it);
    ++pieces;
  }
  backing_.unmap(p, bytes);
  return pieces;
}

/// Records a range that the backing has just mapped. @throws std::bad_alloc; it is unmapped then
template <class Backing, class Barrier>
void SimMemory<Backing, Barrier>::keep(SimRanges& ranges, void* p, std::size_t bytes) {
  try {
    ranges.insert(p, bytes);
  } catch (...) {
    backing_.unmap_memory(p, bytes);
    throw;
  }
}

template <class Backing, class Barrier>
void SimMemory<Backing, Barrier>::depart(void* p, std::size_t bytes, Barrier barrier) {
  collect();
  if (barrier.is_passed()) {
    backing_.unmap_memory(p, bytes);
  } else {
    departed_.push_back({p, bytes, std::move(barrier)});
  }
}

template <class Backing, class Barrier>
void SimMemory<Backing, Barrier>::collect() noexcept {
  std::erase_if(departed_, [this](Departed const& range) {
    bool const is_passed = range.barrier.is_passed();
    if (is_passed) {
      backing_.unmap_memory(range.p, range.bytes);
    }
    return is_passed;
  });
}

SPILLWAY_COMPILED_PART(class BasicSimRanges<>);

}  // namespace spillway::detail
