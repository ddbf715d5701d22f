// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/error.hpp>

#include <utility>

namespace spillway {

/// Owns a stream of an allocator's device: creates it, and in the destructor retires it
/// (`DeviceAllocator::retire_stream`) and destroys it. Made by `DeviceAllocator::create_stream`.
///
/// Converts to the device's `stream_type`, so it can be passed wherever a stream is wanted; an
/// empty one is refused there. Leases that were acquired on it must end before it is destroyed, and
/// it must be destroyed before its allocator. Work that has been enqueued on it still runs. If the
/// allocator cannot retire it (see `retire_stream`), the stream is not destroyed.
///
/// Threads  thread-compatible; the device's stream may be used by several threads, as in CUDA.
template <class Allocator>
class Stream {
 public:
  using stream_type = typename Allocator::stream_type;

  /// Makes an empty object, which owns no stream.
  Stream() noexcept = default;
  /// @param allocator  not owned; must outlive the stream
  /// @throws DeviceError
  explicit Stream(Allocator& allocator)
      : allocator_{&allocator}, handle_{allocator.device().create_stream()} {
    count(1);
  }
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
      count(-1);
    }
  }

  /// Returns the device's handle of the stream. That of an empty object is `stream_type{}`, which
  /// may name a stream, too: on CUDA the default stream.
  [[nodiscard]] stream_type get() const noexcept { return handle_; }
  /// The handle, for calls that take a stream. @throws ContractViolation if there is no stream
  // NOLINTNEXTLINE(google-explicit-constructor): a stream is passed as what the device calls one
  operator stream_type() const {
    expects(!empty(), what_is_empty, {}, "Stream");
    return handle_;
  }

  /// Waits on the host for all work that has been enqueued here.
  ///
  /// @throws ContractViolation if there is no stream; DeviceError
  void synchronize(CallSite site = {}) const {
    expects(!empty(), what_is_empty, site);
    allocator_->device().synchronize(handle_);
  }

  /// Returns whether there is no stream: default-constructed or moved from.
  [[nodiscard]] bool empty() const noexcept { return allocator_ == nullptr; }
  [[nodiscard]] explicit operator bool() const noexcept { return !empty(); }

 private:
  /// Lets the allocator know how many streams would outlive it, if it ended now.
  void count(int change) noexcept {
    if constexpr (requires { allocator_->count_streams(change); }) {
      allocator_->count_streams(change);
    }
  }

  static constexpr char const* what_is_empty =
      "the stream is empty: it was moved from, or never made; create_stream() makes one";

  Allocator* allocator_ = nullptr;  // not owned
  stream_type handle_{};
};

}  // namespace spillway
