// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/types.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

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

/// One storage that the library looks after: the context of its `DataPtr`, for as long as it lives.
///
/// While `lease` holds, the storage's pointer is the lease's address; otherwise it is null and the
/// bytes may be anywhere. All members but `storage`, which never changes, are guarded by the desk's
/// lock.
template <class Lease>
struct Holding {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;  // never keeps the storage alive
  BlockId block{};
  Lease lease{};
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
