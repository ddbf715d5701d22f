// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/observer.hpp>
#include <spillway/core/record.hpp>
#include <spillway/observe/names.hpp>

#include <atomic>
#include <cstdint>

#include <nvtx3/nvToolsExt.h>

namespace spillway {

/// An observer that shows an allocator's work in NVIDIA's profilers: a mark for each record and a
/// range for each step.
///
/// Marks are in the domain "spillway". Each has the name of what happened, the bytes as its
/// payload, and a category for its kind. Marks are on the row of the host thread, at the time of
/// the call; the profiler shows the copies themselves on the rows of their streams. Without a
/// profiler a record costs a few loads.
///
/// Threads  thread-safe.
class NvtxMarks {
 public:
  static constexpr bool is_enabled = true;

  NvtxMarks() : domain_{nvtxDomainCreateA("spillway")} {
    for (auto kind = RecordKind::allocate; kind <= RecordKind::step; kind = next(kind)) {
      nvtxDomainNameCategoryA(domain_, category_of(kind), name_of(kind));
    }
  }
  NvtxMarks(NvtxMarks const&) = delete;
  NvtxMarks& operator=(NvtxMarks const&) = delete;
  /// Ends the range of the last step.
  ~NvtxMarks() {
    end_step(step_.load());
    nvtxDomainDestroy(domain_);
  }

  void on_record(Record const& record) noexcept {
    nvtxEventAttributes_t attributes{};
    attributes.version = NVTX_VERSION;
    attributes.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
    attributes.category = category_of(record.kind);
    attributes.messageType = NVTX_MESSAGE_TYPE_ASCII;
    attributes.message.ascii = name_of(record.kind);
    if (record.kind == RecordKind::step) {
      end_step(step_.exchange(0));
      end_step(step_.exchange(nvtxDomainRangeStartEx(domain_, &attributes)));
      return;
    }
    attributes.payloadType = NVTX_PAYLOAD_TYPE_UNSIGNED_INT64;
    attributes.payload.ullValue = record.bytes;
    nvtxDomainMarkEx(domain_, &attributes);
  }

 private:
  static constexpr RecordKind next(RecordKind kind) noexcept {
    return static_cast<RecordKind>(static_cast<std::uint8_t>(kind) + 1);
  }

  /// Never 0, since category 0 means none.
  static constexpr std::uint32_t category_of(RecordKind kind) noexcept {
    return static_cast<std::uint32_t>(kind) + 1;
  }

  void end_step(nvtxRangeId_t step) noexcept {
    if (step != 0) {
      nvtxDomainRangeEnd(domain_, step);
    }
  }

  nvtxDomainHandle_t domain_;
  std::atomic<nvtxRangeId_t> step_{0};
};

static_assert(Observer<NvtxMarks>);

}  // namespace spillway
