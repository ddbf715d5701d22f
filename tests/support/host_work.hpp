// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/device_api.hpp>
#include <spillway/testing/device_contracts.hpp>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>

namespace spillway::test {

/// The work of `allocator_load` as host functions, for devices whose memory the host can touch.
template <DeviceApi D>
class HostWork {
 public:
  explicit HostWork(D& device) : device_{&device} {}

  void write(void* p, std::size_t n, std::uint32_t tag, typename D::stream_type stream) {
    launch(
        stream,
        [](Task const& task) {
          for (std::size_t i = 0; i < std::min(task.bytes, period); ++i) {
            task.p[i] = byte_of(task.tag, i);
          }
          for (std::size_t i = period; i < task.bytes; i += period) {
            std::memcpy(task.p + i, task.p, std::min(period, task.bytes - i));
          }
        },
        p,
        n,
        tag);
  }
  void check(void const* p, std::size_t n, std::uint32_t tag, typename D::stream_type stream) {
    launch(
        stream,
        [](Task const& task) {
          std::uint64_t wrong = 0;
          for (std::size_t i = 0; i < std::min(task.bytes, period); ++i) {
            wrong += task.p[i] != byte_of(task.tag, i) ? 1U : 0U;
          }
          for (std::size_t i = period; i < task.bytes;
               i += period) {  // at least one in such a piece
            bool const is_same =
                std::memcmp(task.p + i, task.p, std::min(period, task.bytes - i)) == 0;
            wrong += is_same ? 0U : 1U;
          }
          *task.wrong += wrong;
        },
        const_cast<void*>(p),
        n,
        tag);
  }
  /// How many bytes were wrong; of several close together only one is counted.
  [[nodiscard]] std::uint64_t wrong() const { return wrong_; }

 private:
  struct Task {
    void (*run)(Task const&);
    unsigned char* p;
    std::size_t bytes;
    std::uint32_t tag;
    std::atomic<std::uint64_t>* wrong;
  };

  /// The pattern repeats after so many bytes, so that it can be copied and compared fast even
  /// without optimisation.
  static constexpr std::size_t period = 1U << 15U;
  static unsigned char byte_of(std::uint32_t tag, std::size_t i) {
    return static_cast<unsigned char>((tag * 2654435761U + static_cast<std::uint32_t>(i)) >> 7U);
  }

  void launch(typename D::stream_type stream,
              void (*run)(Task const&),
              void* p,
              std::size_t n,
              std::uint32_t tag) {
    auto task = std::make_unique<Task>(Task{run, static_cast<unsigned char*>(p), n, tag, &wrong_});
    device_->launch_host(
        stream,
        [](void* argument) noexcept {
          std::unique_ptr<Task> const mine{static_cast<Task*>(argument)};
          mine->run(*mine);
        },
        task.get());
    (void)task.release();
  }

  D* device_;
  std::atomic<std::uint64_t> wrong_{0};
};

/// A `Gate` in the form that `allocator_load` wants.
class HostGate {
 public:
  template <class E>
  void close(E& e, typename E::stream_type stream) {
    gate_->close(e.device, stream);
  }
  void open() { gate_->open(); }

 private:
  std::unique_ptr<testing::Gate> gate_ = std::make_unique<testing::Gate>();
};

}  // namespace spillway::test
