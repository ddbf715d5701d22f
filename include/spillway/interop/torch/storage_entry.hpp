// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/types.hpp>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <c10/core/ScalarType.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/intrusive_ptr.h>

namespace spillway::torch {

/// What the first tensor that was seen of a storage looked like, for reports.
struct Likeness {
  std::array<std::int64_t, 5> extents{};
  std::uint8_t rank = 0;
  c10::ScalarType type = c10::ScalarType::Undefined;

  /// In its place, since copying what was just written in pieces stalls the processor.
  void look_at(c10::TensorImpl const& tensor) {
    type = c10::typeMetaToScalarType(tensor.dtype());
    rank = 0;
    if (!tensor.has_symbolic_sizes_strides() && !tensor.is_nested()) {
      auto const sizes = tensor.sizes();
      rank = static_cast<std::uint8_t>(std::min<std::size_t>(sizes.size(), 255));
      std::copy_n(
          sizes.begin(), std::min<std::size_t>(sizes.size(), extents.size()), extents.begin());
    }
  }
  void forget() noexcept { type = c10::ScalarType::Undefined; }

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

/// What keeps one block in its place: a lease on the stream it came to be used on, and one on each other
/// stream that has used it since. They end together, so that whoever takes the block's range comes
/// after all of them.
///
/// Threads  thread-compatible.
template <class Lease, class Stream>
class StreamLeases {
 public:
  StreamLeases() = default;
  StreamLeases(Lease lease, Stream stream) : stream_{stream}, home_{std::move(lease)} {}

  [[nodiscard]] explicit operator bool() const noexcept { return static_cast<bool>(home_); }
  [[nodiscard]] void* data() const noexcept { return home_.data(); }
  [[nodiscard]] bool is_home(Stream stream) const noexcept { return stream_ == stream; }
  [[nodiscard]] bool covers(Stream stream) const noexcept {
    return is_home(stream) || std::any_of(others_.begin(), others_.end(), [&](auto const& one) {
             return one.second == stream;
           });
  }

  void add(Lease lease, Stream stream) { others_.emplace_back(std::move(lease), stream); }
  /// Another lease on the same block and stream in the place of the first. @returns the first
  [[nodiscard]] Lease exchange_home(Lease lease) noexcept {
    return std::exchange(home_, std::move(lease));
  }
  /// Hands all of them over; ends none.
  void move_to(std::vector<Lease>& leases) {
    leases.reserve(leases.size() + 1 + others_.size());
    leases.push_back(std::move(home_));
    for (auto& one : others_) {
      leases.push_back(std::move(one.first));
    }
    others_.clear();
  }
  void release() noexcept {
    home_.release();
    others_.clear();
  }

 private:
  Stream stream_{};
  Lease home_{};
  std::vector<std::pair<Lease, Stream>> others_;
};

/// One allocation that the library looks after. Once an operation has been seen to use it, it is the
/// context of its storage's `DataPtr`, for as long as that lives.
///
/// While `leases` hold, the storage's pointer is their address; otherwise it is null and the
/// bytes may be anywhere. All members are guarded by the desk's lock, but for `pinner`; `storage` does not
/// change while the entry is pinned. What every operation looks at comes first, in one cache line.
template <class Lease, class Stream>
struct alignas(64) StorageEntry {
  /// The list of pins of the thread that pinned last and still does. A thread that finds its own here has
  /// it pinned, without the lock.
  std::atomic<void const*> pinner{nullptr};
  std::uint32_t pins = 0;    // frames in which it is in use; it is not let go before they end
  bool is_kept = false;      // code outside of operations knows the address: never let go
  bool is_frozen = false;    // its owner promised that operations only read it
  bool is_arriving = false;  // one thread is acquiring the lease
  bool is_dead = false;      // the storage is gone; the last pin deletes this
  StreamLeases<Lease, Stream> leases{};
  BlockId block{};
  std::size_t bytes = 0;
  bool is_lent = false;  // to somebody who gives it back by name; never enrolled
  Likeness likeness{};
  StorageEntry* previous = this;
  StorageEntry* next = this;
  c10::weak_intrusive_ptr<c10::StorageImpl> storage{c10::intrusive_ptr<
      c10::StorageImpl>{}};  // never keeps the storage alive; null before it is seen
};

}  // namespace spillway::torch
