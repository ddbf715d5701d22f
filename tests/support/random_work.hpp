// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/device_api.hpp>
#include <spillway/core/types.hpp>
#include <spillway/testing/device_contracts.hpp>

#include <algorithm>
#include <array>
#include <bitset>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

namespace spillway::test {

/// One thing to enqueue, on small memories shared by all streams.
struct WorkItem {
  enum class Kind : std::uint8_t { copy, fill, record, wait };

  Kind what = Kind::fill;
  CopyKind direction = CopyKind::on_device;
  std::size_t stream = 0;
  std::size_t event = 0;
  std::size_t to = 0;  // offsets into the device's or the host's memory
  std::size_t from = 0;
  std::size_t bytes = 0;
  unsigned char byte = 0;
  bool is_ordered = true;  // after all earlier ordered items that touch the same bytes
};

/// Random work for several streams, and its effect in the given order, which is right if there is
/// no race.
///
/// The order of items is found in a simple, slow way: by the set of all items before each.
class RandomWork {
 public:
  static constexpr std::size_t memory_bytes = 48;
  static constexpr std::size_t streams = 4;
  static constexpr std::size_t events = 3;
  static constexpr std::size_t max_items = 400;

  explicit RandomWork(std::uint64_t seed, std::size_t items = max_items) : random_{seed} {
    for (std::size_t i = 0; i < items; ++i) {
      items_.push_back(draw());
      place(items_.back());
    }
  }

  [[nodiscard]] std::vector<WorkItem> const& items() const noexcept { return items_; }
  /// The contents of both memories at the end, starting with zeros and without the unordered items.
  [[nodiscard]] std::array<unsigned char, memory_bytes> const& device_bytes() const noexcept {
    return bytes_[0];
  }
  [[nodiscard]] std::array<unsigned char, memory_bytes> const& host_bytes() const noexcept {
    return bytes_[1];
  }

 private:
  using Past = std::bitset<max_items>;
  struct Touch {
    std::size_t item = 0;
    std::size_t memory = 0;
    std::size_t begin = 0;
    std::size_t end = 0;
    bool is_write = false;
  };

  std::size_t below(std::size_t n) { return random_() % n; }

  WorkItem draw() {
    WorkItem item;
    item.what = std::array{WorkItem::Kind::copy,
                           WorkItem::Kind::copy,
                           WorkItem::Kind::fill,
                           WorkItem::Kind::record,
                           WorkItem::Kind::wait}[below(5)];
    item.direction =
        std::array{CopyKind::to_host, CopyKind::to_device, CopyKind::on_device}[below(3)];
    item.stream = below(streams);
    item.event = below(events);
    item.byte = static_cast<unsigned char>(random_());
    item.bytes = 1 + below(8);
    item.to = below(memory_bytes - item.bytes + 1);
    do {
      item.from = below(memory_bytes - item.bytes + 1);
    } while (item.from < item.to + item.bytes && item.to < item.from + item.bytes);
    return item;
  }

  void place(WorkItem& item) {
    std::size_t const me = items_.size() - 1;
    Past& mine = past_of_stream_[item.stream];
    if (item.what == WorkItem::Kind::record) {
      past_of_event_[item.event] = mine;
      return;
    }
    if (item.what == WorkItem::Kind::wait) {
      mine |= past_of_event_[item.event];
      return;
    }
    std::vector<Touch> touches;
    bool const is_copy = item.what == WorkItem::Kind::copy;
    std::size_t const target = is_copy && item.direction == CopyKind::to_host ? 1 : 0;
    std::size_t const source = is_copy && item.direction == CopyKind::to_device ? 1 : 0;
    touches.push_back({me, target, item.to, item.to + item.bytes, true});
    if (is_copy) {
      touches.push_back({me, source, item.from, item.from + item.bytes, false});
    }
    for (Touch const& touch : touches) {
      for (Touch const& other : touches_) {
        bool const is_conflict = touch.memory == other.memory && touch.begin < other.end &&
                                 other.begin < touch.end && (touch.is_write || other.is_write);
        item.is_ordered = item.is_ordered && (!is_conflict || mine[other.item]);
      }
    }
    if (item.is_ordered) {
      mine[me] = true;
      touches_.insert(touches_.end(), touches.begin(), touches.end());
      unsigned char* const to = &bytes_[target][item.to];
      if (is_copy) {
        std::memmove(to, &bytes_[source][item.from], item.bytes);
      } else {
        std::memset(to, item.byte, item.bytes);
      }
    }
  }

  std::mt19937_64 random_;
  std::vector<WorkItem> items_;
  std::vector<Touch> touches_;
  std::array<Past, streams> past_of_stream_;
  std::array<Past, events> past_of_event_;
  std::array<std::array<unsigned char, memory_bytes>, 2> bytes_{};
};

/// The streams, events and memories that random work runs on.
template <DeviceApi D>
class WorkBench {
 public:
  explicit WorkBench(D& device) : device_{&device}, rig_{device} {
    for (auto& stream : streams_) {
      stream = rig_.stream();
    }
    for (auto& event : events_) {
      event = rig_.event();
    }
    host_ = rig_.pinned(RandomWork::memory_bytes, 0);
    memory_ = rig_.device_memory(RandomWork::memory_bytes);
    device.fill(memory_, 0, RandomWork::memory_bytes, streams_[0]);
    device.synchronize(streams_[0]);
  }

  void enqueue(WorkItem const& item) {
    auto const stream = streams_[item.stream];
    bool const is_from_host = item.direction == CopyKind::to_device;
    bool const is_to_host = item.direction == CopyKind::to_host;
    switch (item.what) {
    case WorkItem::Kind::copy:
      device_->copy((is_to_host ? host_ : memory_) + item.to,
                    (is_from_host ? host_ : memory_) + item.from,
                    item.bytes,
                    item.direction,
                    stream);
      return;
    case WorkItem::Kind::fill:
      device_->fill(memory_ + item.to, item.byte, item.bytes, stream);
      return;
    case WorkItem::Kind::record:
      device_->record(events_[item.event], stream);
      return;
    case WorkItem::Kind::wait:
      device_->wait(stream, events_[item.event]);
      return;
    }
  }

  void synchronize() {
    for (auto const stream : streams_) {
      device_->synchronize(stream);
    }
  }
  /// Only after `synchronize`.
  [[nodiscard]] bool holds_result_of(RandomWork const& work) const {
    return std::equal(work.device_bytes().begin(), work.device_bytes().end(), memory_) &&
           std::equal(work.host_bytes().begin(), work.host_bytes().end(), host_);
  }

 private:
  D* device_;
  testing::DeviceRig<D> rig_;
  std::array<typename D::stream_type, RandomWork::streams> streams_{};
  std::array<typename D::event_type, RandomWork::events> events_{};
  unsigned char* host_ = nullptr;
  unsigned char* memory_ = nullptr;
};

}  // namespace spillway::test
