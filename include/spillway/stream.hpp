// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/error.hpp>

#include <utility>

namespace spillway {

/// A stream of an allocator's device: created with this object, and at its end retired at the
/// allocator and destroyed. Made by `DeviceAllocator::create_stream`.
///
/// Converts to the device's `stream_type`, so it is passed wherever a stream is asked for. Leases
/// that were acquired on it end before it does, and it ends before its allocator. Work that is
/// enqueued on it by then still runs.
///
/// Threads  thread-compatible; the device's stream may be used by several threads, as in CUDA.
template <class Allocator>
class Stream {
 public:
  using stream_type = typename Allocator::stream_type;

  /// No stream.
  Stream() noexcept = default;
  /// @param allocator  not owned; must outlive the stream
  /// @throws DeviceError
  explicit Stream(Allocator& allocator)
      : allocator_{&allocator}, handle_{allocator.device().create_stream()} {}
  Stream(Stream&& other) noexcept
      : allocator_{std::exchange(other.allocator_, nullptr)},
        handle_{std::exchange(other.handle_, {})} {}
  Stream& operator=(Stream&& other) noexcept {
    Stream moved{std::move(other)};
    std::swap(allocator_, moved.allocator_);
    std::swap(handle_, moved.handle_);
    return *this;
  }
  ~Stream() {
    if (allocator_ != nullptr) {
      try {
        allocator_->retire_stream(handle_);
        allocator_->device().destroy_stream(handle_);
      } catch (
          ...) {  // NOLINT(bugprone-empty-catch): the allocator still names the stream; it stays
      }
    }
  }

  /// The device's name for the stream.
  [[nodiscard]] stream_type get() const noexcept { return handle_; }
  // NOLINTNEXTLINE(google-explicit-constructor): a stream is passed as what the device calls one
  operator stream_type() const noexcept { return handle_; }

  /// Waits on the host for all work that has been enqueued here.
  ///
  /// @throws ContractViolation if there is no stream; DeviceError
  void synchronize(CallSite site = {}) const {
    expects(!empty(), "the stream is empty: it was moved from, or never made", site);
    allocator_->device().synchronize(handle_);
  }

  /// True after a move: there is no stream.
  [[nodiscard]] bool empty() const noexcept { return allocator_ == nullptr; }
  [[nodiscard]] explicit operator bool() const noexcept { return !empty(); }

 private:
  Allocator* allocator_ = nullptr;  // not owned
  stream_type handle_{};
};

}  // namespace spillway
