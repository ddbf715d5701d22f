// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/config.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>
#include <type_traits>

namespace spillway::detail {

/// An array of plain records that grows at its end and never shrinks.
///
/// Unlike a vector it grows by `realloc`, which remaps the pages of a large array and does not
/// copy, and it does not initialise records. So a table of millions of records grows in
/// microseconds, which matters because tables grow under a lock.
///
/// Threads  thread-compatible.
template <class Record>
  requires std::is_trivially_copyable_v<Record>
class GrowingArray {
 public:
  /// @throws std::bad_alloc
  explicit GrowingArray(std::size_t records) {
    for (std::size_t i = 0; i < records; ++i) {
      push_back(Record{});
    }
  }

  GrowingArray(GrowingArray const&) = delete;
  GrowingArray& operator=(GrowingArray const&) = delete;

  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  [[nodiscard]] Record& operator[](std::size_t i) noexcept {
    SPILLWAY_ASSERT(i < size_);
    return data_.get()[i];
  }
  [[nodiscard]] Record const& operator[](std::size_t i) const noexcept {
    SPILLWAY_ASSERT(i < size_);
    return data_.get()[i];
  }

  /// @throws std::bad_alloc; nothing has changed then
  void push_back(Record const& record) {
    grow();
    data_.get()[size_ - 1] = record;
  }

  /// Adds a record to be written before it is read. @throws std::bad_alloc; nothing has changed
  /// then
  void grow() {
    if (size_ == capacity_) {
      std::size_t const capacity = std::max<std::size_t>(2 * capacity_, 16);
      void* const moved = std::realloc(data_.get(), capacity * sizeof(Record));
      if (moved == nullptr) {
        throw std::bad_alloc{};
      }
      (void)data_.release();  // realloc has freed it
      data_.reset(static_cast<Record*>(moved));
      capacity_ = capacity;
    }
    ++size_;
  }

 private:
  struct Free {
    void operator()(void* p) const noexcept { std::free(p); }
  };

  std::unique_ptr<Record, Free> data_;
  std::size_t size_ = 0;
  std::size_t capacity_ = 0;
};

}  // namespace spillway::detail
