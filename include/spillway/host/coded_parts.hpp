// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/file_io_api.hpp>
#include <spillway/core/types.hpp>
#include <spillway/host/host_ledger.hpp>
#include <spillway/host/host_tier.hpp>
#include <spillway/host/slot_codecs.hpp>
#include <spillway/host/slot_io.hpp>
#include <spillway/host/swap_file.hpp>

#include <cstddef>
#include <deque>
#include <mutex>
#include <optional>
#include <span>
#include <utility>

namespace spillway::detail {

/// Runs codecs on the host for devices whose memory the host cannot address: a block goes through
/// staging chunks part by part, and a host function encodes each part into the slot or decodes it
/// from there.
///
/// `HostTransfers` takes a `Transfer`, adds a part for each chunk, enqueues `run` for it on the
/// lane's stream, and closes the transfer. The host functions of one transfer run one after the
/// other in the order of the parts; between them the cursor keeps the position in the slot. The
/// transfer ends, and gives its job back, when it is closed and all enqueued functions have run,
/// even if it was closed before its last part. A transfer for a slot in the file has 256 KiB of
/// memory, which is kept for later transfers.
///
/// Threads  `run` runs on threads of the device, makes no device call, and locks the pool's mutex
///          for short times only. All other functions lock it, too.
template <FileIoApi FileIo>
class CodedParts {
  using Io = SlotIo<FileIo>;
  using Job = SlotCodecs::Job;

 public:
  struct Transfer;

  struct Part {
    Transfer* transfer = nullptr;
    std::byte* chunk = nullptr;
    std::size_t begin = 0;  // in the block
    std::size_t bytes = 0;
  };

  /// `mutex` is the one that guards `codecs` and `io`.
  CodedParts(std::mutex& mutex, SlotCodecs& codecs, Io& io)
      : mutex_{&mutex}, codecs_{&codecs}, io_{&io} {}
  CodedParts(CodedParts const&) = delete;
  CodedParts& operator=(CodedParts const&) = delete;
  ~CodedParts() = default;

  /// Begins a transfer without parts. It owns the job from now on.
  ///
  /// @throws std::bad_alloc, with nothing changed
  [[nodiscard]] Transfer& take(Job& job);

  /// Adds the next part of the block. `run` must be enqueued for it, or `cancel` be called.
  ///
  /// @throws std::bad_alloc, with nothing changed
  [[nodiscard]] Part& add(Transfer& transfer, std::byte* chunk, std::size_t bytes);
  void cancel(Part& part) noexcept {
    std::scoped_lock const lock{*mutex_};
    --part.transfer->unfinished;
  }
  /// Closes a transfer: no more parts will be added.
  void close(Transfer& transfer) noexcept {
    bool is_finished = false;
    {
      std::scoped_lock const lock{*mutex_};
      transfer.is_closed = true;
      is_finished = transfer.unfinished == 0;
    }
    if (is_finished) {
      end(transfer);
    }
  }

  /// Host function for a part. `argument` is the part.
  static void run(void* argument) noexcept {
    auto& part = *static_cast<Part*>(argument);
    part.transfer->owner->carry(part);
  }

 private:
  static constexpr std::size_t file_bytes = 256_KiB;  // buffer for a slot in the file

  void carry(Part& part) noexcept {
    Transfer& all = *part.transfer;
    if (all.job->slot->tier == HostTier::file) {
      if (part.begin == 0) {
        all.in_file.emplace(*io_,
                            *all.job->slot,
                            all.job->slot_version,
                            all.job->pieces,
                            all.job->access,
                            std::span{all.memory.get(), file_bytes});
      }
      carry(part, *all.in_file);
    } else {
      if (part.begin == 0) {
        all.in_memory.emplace(all.job->pieces);
      }
      carry(part, *all.in_memory);
    }
    bool is_finished = false;
    {
      std::scoped_lock const lock{*mutex_};
      is_finished = --all.unfinished == 0 && all.is_closed;
    }
    if (is_finished) {
      end(all);
    }
  }

  template <class Cursor>
  void carry(Part& part, Cursor& slot) noexcept {
    Transfer& all = *part.transfer;
    Job& job = *all.job;
    bool const is_write = job.access == SlotAccess::write;
    if (part.begin == 0) {
      all.room = slot.left_bytes();
      all.is_needed = !is_write || codecs_->is_needed(job);
    }
    std::span const bytes{part.chunk, part.bytes};
    if (!is_write) {
      all.are_sound = all.are_sound && SlotCodecs::decode_part(job, slot, part.begin, bytes);
    } else if (all.is_needed) {
      SlotCodecs::encode_part(job, slot, part.begin, bytes);
    }
    if (part.begin + part.bytes == job.bytes) {
      all.stored = is_write && all.is_needed ? all.room - slot.left_bytes() : 0;
      all.are_sound = !slot.finish() || all.are_sound;  // a loss by the file is noted already
    }
  }

  void end(Transfer& transfer) noexcept {
    transfer.in_memory.reset();
    transfer.in_file.reset();
    codecs_->finish(*transfer.job, transfer.stored, transfer.are_sound);
    std::scoped_lock const lock{*mutex_};
    transfer.next = std::exchange(idle_, &transfer);
  }

  std::mutex* mutex_;  // guards what follows
  SlotCodecs* codecs_;
  Io* io_;
  std::deque<Transfer> transfers_;
  Transfer* idle_ = nullptr;
};

template <FileIoApi FileIo>
struct CodedParts<FileIo>::Transfer {
  CodedParts* owner = nullptr;
  Transfer* next = nullptr;  // next idle transfer
  Job* job = nullptr;
  std::deque<Part> parts;  // a deque, since enqueued functions have pointers to their parts
  std::size_t added_bytes = 0;
  std::size_t unfinished = 0;  // number of parts; guarded by the mutex, as is the next member
  bool is_closed = false;
  // Only the host functions use what follows; they run one after the other.
  FileMemory memory;  // for slots in the file
  std::optional<PieceCursor> in_memory;
  std::optional<typename Io::Cursor> in_file;
  std::size_t room = 0;
  std::size_t stored = 0;
  bool is_needed = true;
  bool are_sound = true;
};

template <FileIoApi FileIo>
auto CodedParts<FileIo>::take(Job& job) -> Transfer& {
  std::scoped_lock const lock{*mutex_};
  if (idle_ == nullptr) {
    idle_ = &transfers_.emplace_back();
  }
  Transfer& transfer = *idle_;
  if (job.slot->tier == HostTier::file && transfer.memory == nullptr) {
    transfer.memory = make_file_memory(file_bytes);
  }
  idle_ = std::exchange(transfer.next, nullptr);
  transfer.owner = this;
  transfer.job = &job;
  transfer.parts.clear();
  transfer.added_bytes = 0;
  transfer.is_closed = false;
  transfer.stored = 0;
  transfer.are_sound = true;
  return transfer;
}

template <FileIoApi FileIo>
auto CodedParts<FileIo>::add(Transfer& transfer, std::byte* chunk, std::size_t bytes) -> Part& {
  Part& part = transfer.parts.emplace_back(Part{&transfer, chunk, transfer.added_bytes, bytes});
  transfer.added_bytes += bytes;
  std::scoped_lock const lock{*mutex_};
  ++transfer.unfinished;
  return part;
}

}  // namespace spillway::detail
