// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/bits.hpp>
#include <spillway/core/error.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

namespace spillway {

/// Names a stream, an event or a piece of memory of a simulated device. `slot` is an index into a
/// table and is reused; the generation is not, so stale handles are recognised.
///
/// A default-constructed handle names nothing. Comparing and hashing need no device.
template <class Tag>
struct SimHandle {
  std::uint32_t slot = 0;
  std::uint32_t generation = 0;

  friend constexpr bool operator==(SimHandle, SimHandle) noexcept = default;
};

struct SimStreamTag {
  static constexpr char const* name = "stream";
};
struct SimEventTag {
  static constexpr char const* name = "event";
};
struct SimPhysicalTag {
  static constexpr char const* name = "physical memory";
};

using SimStream = SimHandle<SimStreamTag>;
using SimEvent = SimHandle<SimEventTag>;
using SimPhysical = SimHandle<SimPhysicalTag>;

namespace detail {

[[nodiscard]] inline std::uintptr_t address_of(void const* p) noexcept {
  return reinterpret_cast<std::uintptr_t>(p);
}

/// Writes a range as text for error messages.
[[nodiscard]] inline std::string describe_range(std::uintptr_t begin, std::size_t bytes) {
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), "[0x%jx, +%zu bytes)", std::uintmax_t{begin}, bytes);
  return text.data();
}
[[nodiscard]] inline std::string describe_range(void const* p, std::size_t bytes) {
  return describe_range(address_of(p), bytes);
}

/// Ends the program because a call that must not throw was given an argument that makes no sense.
///
/// A caller that releases memory which is not its own has lost track of memory already, so going on
/// would hide the mistake.
[[noreturn]] inline void sim_misuse(std::string const& what) noexcept {
  std::fprintf(stderr, "spillway SimApi misused: %s\n", what.c_str());
  std::abort();
}

/// A table of the objects that handles name: the streams, events or memory of a simulated device.
///
/// Threads  thread-compatible.
/// Cost     O(1), amortised for `insert`.
template <class Tag, class T>
class SimSlots {
 public:
  using handle_type = SimHandle<Tag>;

  SimSlots() = default;
  SimSlots(SimSlots const&) = delete;
  SimSlots& operator=(SimSlots const&) = delete;
  ~SimSlots() = default;

  [[nodiscard]] handle_type insert(T value) {
    if (idle_.empty()) {
      // Every entry may become idle: with room for all of them, `erase` need not allocate.
      idle_.reserve(slots_.size() + 1);
      slots_.push_back(Slot{T{}, first_generation()});
      idle_.push_back(static_cast<std::uint32_t>(slots_.size() - 1));
    }
    std::uint32_t const at = idle_.back();
    idle_.pop_back();
    Slot& slot = slots_[at];
    slot.value = std::move(value);
    ++slot.generation;  // odd while in use
    ++live_;
    return {at, slot.generation};
  }

  void erase(handle_type handle) noexcept {
    slots_[handle.slot].value = T{};
    ++slots_[handle.slot].generation;
    --live_;
    if (slots_[handle.slot].generation < std::numeric_limits<std::uint32_t>::max() - 1) {
      idle_.push_back(handle.slot);
    }
  }

  [[nodiscard]] bool contains(handle_type handle) const noexcept {
    return handle.generation % 2 == 1 && handle.slot < slots_.size() &&
           slots_[handle.slot].generation == handle.generation;
  }

  /// The object that a handle names. @throws DeviceError if it names none
  [[nodiscard]] T& at(handle_type handle, char const* caller) {
    if (!contains(handle)) {
      throw DeviceError{describe(handle, caller)};
    }
    return slots_[handle.slot].value;
  }

  /// The same for calls that must not throw: a handle that names nothing ends the program.
  [[nodiscard]] T& expect(handle_type handle, char const* caller) noexcept {
    if (!contains(handle)) {
      sim_misuse(describe(handle, caller));
    }
    return slots_[handle.slot].value;
  }

  [[nodiscard]] std::size_t size() const noexcept { return live_; }

  template <class Use>
  void for_each(Use use) {
    for (std::uint32_t i = 0; i < slots_.size(); ++i) {
      if (slots_[i].generation % 2 == 1) {
        use(handle_type{i, slots_[i].generation}, slots_[i].value);
      }
    }
  }

 private:
  struct Slot {
    T value{};
    std::uint32_t generation = 0;
  };

  // It differs between devices, so that a handle of another device is unlikely to be valid here.
  [[nodiscard]] std::uint32_t first_generation() const noexcept {
    auto const mixed = mix_bits(reinterpret_cast<std::uintptr_t>(this));
    return static_cast<std::uint32_t>(mixed >> 44U) << 1U;
  }

  [[nodiscard]] static std::string describe(handle_type handle, char const* caller) {
    return std::string{"SimApi: "} + caller + " was given a " + Tag::name +
           (handle.generation == 0 ? " handle that names nothing"
                                   : " that was destroyed or belongs to another device") +
           " (slot " + std::to_string(handle.slot) + ", generation " +
           std::to_string(handle.generation) + ")";
  }

  std::vector<Slot> slots_;
  std::vector<std::uint32_t> idle_;
  std::size_t live_ = 0;
};

}  // namespace detail

}  // namespace spillway

template <class Tag>
struct std::hash<spillway::SimHandle<Tag>> {
  std::size_t operator()(spillway::SimHandle<Tag> handle) const noexcept {
    return std::hash<std::uint64_t>{}((std::uint64_t{handle.generation} << 32U) | handle.slot);
  }
};
