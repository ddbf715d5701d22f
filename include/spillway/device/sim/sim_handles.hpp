// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/bits.hpp>
#include <spillway/core/block_table.hpp>
#include <spillway/core/error.hpp>
#include <spillway/core/types.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <utility>

namespace spillway {

/// Names a stream, an event or a piece of memory of a simulated device. The index into the device's
/// table is reused; the generation is not, so stale handles are recognised.
///
/// A default-constructed handle names nothing. Comparing and hashing need no device.
template <class Tag>
struct SimHandle {
  std::uint32_t index = 0;
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

/// Ends the program because a function that must not throw was given an invalid argument.
///
/// A caller that releases memory which is not its own has lost track of its memory, so continuing
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
class SimTable {
 public:
  using handle_type = SimHandle<Tag>;

  SimTable() = default;
  SimTable(SimTable const&) = delete;
  SimTable& operator=(SimTable const&) = delete;

  [[nodiscard]] handle_type insert(T value) {
    BlockId const id = table_.emplace(std::move(value));
    return {index_of_block(id), generation_of(id)};
  }
  void erase(handle_type handle) noexcept { table_.erase(id_of(handle)); }

  /// Returns the object that a handle names. @throws DeviceError if it names none
  [[nodiscard]] T& at(handle_type handle, char const* caller) {
    T* const found = table_.find(id_of(handle));
    if (found == nullptr) {
      throw DeviceError{describe(handle, caller)};
    }
    return *found;
  }

  /// As `at`, for calls that must not throw: a handle that names nothing ends the program.
  [[nodiscard]] T& expect(handle_type handle, char const* caller) noexcept {
    T* const found = table_.find(id_of(handle));
    if (found == nullptr) {
      sim_misuse(describe(handle, caller));
    }
    return *found;
  }

  [[nodiscard]] std::size_t size() const noexcept { return table_.size(); }

  /// Calls `use(object)` for each object.
  template <class Use>
  void for_each(Use use) {
    table_.for_each([&](BlockId, T& object) { use(object); });
  }

 private:
  // The first generation differs between devices, so that a handle of another device is unlikely to
  // be valid here.
  [[nodiscard]] std::uint32_t first_generation() const noexcept {
    return 1 + static_cast<std::uint32_t>(mix_bits(address_of(this)) >> 44U);
  }
  [[nodiscard]] static BlockId id_of(handle_type handle) noexcept {
    return make_block_id(handle.index, handle.generation);
  }

  [[nodiscard]] static std::string describe(handle_type handle, char const* caller) {
    return Text{"SimApi: "} + caller + " was given a " + Tag::name +
           (handle.generation == 0 ? " handle that names nothing"
                                   : " that was destroyed or belongs to another device") +
           " (index " + handle.index + ", generation " + handle.generation + ")";
  }

  BlockTable<T> table_{first_generation()};
};

}  // namespace detail

}  // namespace spillway

template <class Tag>
struct std::hash<spillway::SimHandle<Tag>> {
  std::size_t operator()(spillway::SimHandle<Tag> handle) const noexcept {
    return std::hash<std::uint64_t>{}((std::uint64_t{handle.generation} << 32U) | handle.index);
  }
};
