// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/types.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <c10/core/ScalarType.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/intrusive_ptr.h>

namespace spillway::pytorch {

/// What the first tensor that was seen of a storage looked like, for reports.
struct Likeness {
  std::array<std::int64_t, 5> extents{};
  std::uint8_t rank = 0;
  c10::ScalarType type = c10::ScalarType::Undefined;

  [[nodiscard]] static Likeness of(c10::TensorImpl const& tensor) {
    Likeness seen{.type = c10::typeMetaToScalarType(tensor.dtype())};
    if (!tensor.has_symbolic_sizes_strides() && !tensor.is_nested()) {
      auto const sizes = tensor.sizes();
      seen.rank = static_cast<std::uint8_t>(std::min<std::size_t>(sizes.size(), 255));
      std::copy_n(sizes.begin(),
                  std::min<std::size_t>(sizes.size(), seen.extents.size()),
                  seen.extents.begin());
    }
    return seen;
  }

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
  StreamLeases(Lease lease, Stream stream) : home_{std::move(lease)}, stream_{stream} {}

  [[nodiscard]] explicit operator bool() const noexcept { return static_cast<bool>(home_); }
  [[nodiscard]] void* data() const noexcept { return home_.data(); }
  [[nodiscard]] bool covers(Stream stream) const noexcept {
    return stream_ == stream || std::any_of(others_.begin(), others_.end(), [&](auto const& one) {
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
  Lease home_{};
  Stream stream_{};
  std::vector<std::pair<Lease, Stream>> others_;
};

/// One storage that the library looks after: the context of its `DataPtr`, for as long as it lives.
///
/// While `leases` hold, the storage's pointer is their address; otherwise it is null and the
/// bytes may be anywhere. All members are guarded by the desk's lock; `storage` does not change while
/// the holding is pinned.
template <class Lease, class Stream>
struct Holding {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;  // never keeps the storage alive
  BlockId block{};
  StreamLeases<Lease, Stream> leases{};
  std::size_t bytes = 0;
  c10::Device device{c10::DeviceType::CPU};
  Likeness likeness{};
  std::uint32_t pins = 0;        // frames in which it is in use; it is not let go before they end
  void const* pinner = nullptr;  // the thread that pinned last and still does
  bool is_arriving = false;      // one thread is acquiring the lease
  bool is_dead = false;          // the storage is gone; the last pin deletes this
  bool is_kept = false;          // code outside of operations knows the address: never let go
  bool is_frozen = false;        // its owner promised that operations only read it
  Holding* previous = this;
  Holding* next = this;

  explicit Holding(c10::weak_intrusive_ptr<c10::StorageImpl> the_storage)
      : storage{std::move(the_storage)} {}
};

}  // namespace spillway::pytorch
