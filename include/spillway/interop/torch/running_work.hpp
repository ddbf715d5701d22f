// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/interop/torch/storage_leases.hpp>

#include <memory>
#include <span>
#include <utility>

#include <ATen/core/ivalue.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>

#if __has_include(<torch/csrc/distributed/c10d/Work.hpp>)
#  include <torch/csrc/distributed/c10d/Work.hpp>
#endif

namespace spillway::torch {

/// What tells when communication ends that an operation has begun, if that is among its results.
/// @returns null if there is nothing that tells: none is going on, or its backend does not say
[[nodiscard]] inline c10::intrusive_ptr<c10::ivalue::Future>
running_work([[maybe_unused]] std::span<c10::IValue const> results) {
#if __has_include(<torch/csrc/distributed/c10d/Work.hpp>)
  for (c10::IValue const& result : results) {
    if (result.isCustomClass()) {
      try {
        return result.toCustomClass<c10d::Work>()->getFuture();
      } catch (c10::Error const&) {
        return {};  // not a backend's business: those of send and receive, for example
      }
    }
  }
#endif
  return {};
}

/// Holds operands of an operation that may go on with them after it has returned, for as long as it lives.
///
/// Threads  may be destroyed on any thread. Nobody waits for it to let go: it may wait itself, for another
///          process.
/// Streams  what uses the memory afterwards comes after what is on the stream that is current when this is
///          destroyed, which runs after the communication.
template <class Site>
class LastingUse {
 public:
  using Leases = StorageLeases<Site>;

  /// The calling thread has the operands pinned.
  explicit LastingUse(Operands const& operands) { Site::leases().pin_also(pins_, operands); }
  LastingUse(LastingUse const&) = delete;
  LastingUse& operator=(LastingUse const&) = delete;
  ~LastingUse() {
    try {
      Site::leases().note_stream(pins_, Site::current_stream());
    } catch (...) {
      keep();  // nobody would know when the memory may be used again
    }
    Site::leases().leave(frames_, pins_, {});
  }

  /// For good, since nothing tells when it ends.
  void keep() noexcept { Site::leases().keep(pins_); }

  static void end_with(c10::ivalue::Future& future, std::shared_ptr<LastingUse> use) {
    future.addCallback([use = std::move(use)](c10::ivalue::Future const&) mutable { use.reset(); });
  }

 private:
  typename Leases::Frames frames_;
  typename Leases::Pins pins_;
};

}  // namespace spillway::torch
