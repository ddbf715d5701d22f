// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/interop/torch/storage_desk.hpp>

#include <memory>
#include <span>

#include <ATen/core/ivalue.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>

#if __has_include(<torch/csrc/distributed/c10d/Work.hpp>)
#  include <torch/csrc/distributed/c10d/Work.hpp>
#endif

namespace spillway::pytorch {

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

/// Holds the operands of an operation that goes on with them after it has returned.
///
/// Threads  what `until` is called for may end on any thread. Nobody waits for it to let go: it may wait
///          itself, for another process.
/// Streams  what is behind the end comes after what is on the stream that is current then, which runs
///          after the communication.
template <class Site>
class LastingUse {
 public:
  using Desk = StorageDesk<Site>;

  /// Holds what the calling thread has pinned now until the future is complete. If that never comes, it stays.
  static void until(c10::ivalue::Future& end, Operands const& operands) {
    auto const use = std::make_shared<LastingUse>();
    Site::desk().pin_also(use->pins_, operands);
    end.addCallback([use](c10::ivalue::Future const&) { use->finish(); });
  }

 private:
  void finish() {
    Site::desk().note_stream(pins_, Site::current_stream());
    Site::desk().leave(frames_, pins_, {});
  }

  typename Desk::Frames frames_;
  typename Desk::Pins pins_;
};

}  // namespace spillway::pytorch
