// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/file_io_api.hpp>
#include <spillway/core/error.hpp>
#include <spillway/core/types.hpp>
#include <spillway/host/host_ledger.hpp>
#include <spillway/host/swap_file.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <system_error>
#include <utility>

namespace spillway::detail {

/// The host half of transfers to the slower tiers: copies between staging chunks and slots.
///
/// `HostTransfers` prepares a list of jobs for each chunk and enqueues `write` or `read` on a
/// stream, as a function that runs on the host. It then copies each piece between the chunk and
/// pageable memory or the file. Pieces that are adjacent in the file and in the chunk share one
/// file call.
///
/// A write that the file refuses loses nothing as long as there is memory. The call is first
/// repeated piece by piece. Each piece that fails again is copied to the heap, into the slot's
/// `rescued` list, and the file tier takes no new slots. Reads look there first. The next
/// successful write of the piece, and the end of the slot, free the copy. Only a piece for which
/// there is no memory, and one that cannot be read back, is lost: the ledger notes it, and the next
/// use of the slot throws.
///
/// Jobs are kept for the life of the pool and used again, so that what is enqueued always finds its
/// arguments.
///
/// Threads  `write` and `read` run on threads of the device and make no device call. They lock the
///          pool's mutex for the ledger only. All other functions are called under that mutex.
template <FileIoApi FileIo>
class SlotIo {
 public:
  /// One piece of a transfer, and the place that it has in a staging chunk.
  struct Job {
    SlotIo* owner = nullptr;
    Job* next = nullptr;        // the next job of the same host function
    Job* next_chunk = nullptr;  // in the first job of a chunk: the first job of the next chunk
    HostSlot* slot = nullptr;
    HostPiece piece{};
    std::byte* chunk = nullptr;  // set when the staging chunk is known
    std::size_t chunk_offset = 0;
    // The device's side, which is enqueued beside the host function.
    std::byte* device = nullptr;
    std::size_t reservation = 0;
  };

  /// `mutex` guards `ledger` and this object; `file` is null where there is no file tier.
  SlotIo(std::mutex& mutex, HostLedger& ledger, SwapFile<FileIo>* file)
      : mutex_{&mutex}, ledger_{&ledger}, file_{file} {}
  SlotIo(SlotIo const&) = delete;
  SlotIo& operator=(SlotIo const&) = delete;
  ~SlotIo() = default;

  /// A job that counts as unfinished for the slot until it has run or is given back.
  ///
  /// @throws std::bad_alloc, with nothing changed
  [[nodiscard]] Job& take(HostSlot& slot, SlotAccess access) {
    if (idle_ == nullptr) {
      idle_ = &jobs_.emplace_back();
    }
    Job& job = *std::exchange(idle_, idle_->next);
    job = Job{.owner = this, .slot = &slot};
    ++slot.jobs(access);
    return job;
  }

  void give_back(Job& job, SlotAccess access) noexcept {
    --job.slot->jobs(access);
    ledger_->forget_if_unused(*job.slot);
    job.next = std::exchange(idle_, &job);
  }

  /// Host function: from the chunk to the slots. `argument` is the first job of a list.
  static void write(void* argument) noexcept {
    auto* job = static_cast<Job*>(argument);
    SlotIo& self = *job->owner;
    while (job != nullptr) {
      Job* const end = self.end_of_adjacent(job);
      if (end != job->next && self.write_adjacent(*job, end)) {
        for (Job const* done = job; done != end; done = done->next) {
          self.forget_rescued(*done);
        }
      } else {
        for (Job const* each = job; each != end; each = each->next) {
          self.write_one(*each);
        }
      }
      self.finish(std::exchange(job, end), end, SlotAccess::write);
    }
  }

  /// Host function: from the slots to the chunk. `argument` is the first job of a list.
  static void read(void* argument) noexcept {
    auto* job = static_cast<Job*>(argument);
    SlotIo& self = *job->owner;
    while (job != nullptr) {
      Job* const end = self.end_of_adjacent(job);
      if (end == job->next || !self.read_adjacent(*job, end)) {
        for (Job const* each = job; each != end; each = each->next) {
          self.read_one(*each);
        }
      }
      self.finish(std::exchange(job, end), end, SlotAccess::read);
    }
  }

  /// @throws FileTierError if the slot has lost bytes
  void throw_if_failed(HostSlot& slot) const {
    if (slot.failure) {
      slot.is_failure_told = true;
      throw_lost(*slot.failure);
    }
  }
  [[noreturn]] void throw_lost(FileFailure const& failure) const;

  [[nodiscard]] std::size_t failed_writes() const noexcept { return failed_writes_; }
  [[nodiscard]] std::size_t failed_reads() const noexcept { return failed_reads_; }

 private:
  void write_one(Job const& job) noexcept {
    if (!is_needed(job)) {
      return;
    }
    if (job.piece.memory != nullptr) {
      std::memcpy(job.piece.memory, job.chunk, job.piece.bytes);
    } else if (int const error = file_->write(job.chunk, file_bytes(job), job.piece.file_offset);
               error != 0) {
      rescue(job, error);
    } else {
      forget_rescued(job);
    }
  }

  void read_one(Job const& job) noexcept {
    if (job.piece.memory != nullptr) {
      std::memcpy(job.chunk, job.piece.memory, job.piece.bytes);
    } else if (std::byte const* const rescued = find_rescued(job); rescued != nullptr) {
      std::memcpy(job.chunk, rescued, job.piece.bytes);
    } else if (int const error = file_->read(job.chunk, file_bytes(job), job.piece.file_offset);
               error != 0) {
      note_lost_read(job, error);
    }
  }

  [[nodiscard]] bool write_adjacent(Job const& first, Job const* end) noexcept {
    return file_->write(first.chunk, adjacent_bytes(first, end), first.piece.file_offset) == 0;
  }

  /// Fails, too, where bytes of a slot were rescued: the file does not have all of them then.
  [[nodiscard]] bool read_adjacent(Job const& first, Job const* end) noexcept {
    {
      std::scoped_lock const lock{*mutex_};
      for (Job const* job = &first; job != end; job = job->next) {
        if (!job->slot->rescued.empty()) {
          return false;
        }
      }
    }
    return file_->read(first.chunk, adjacent_bytes(first, end), first.piece.file_offset) == 0;
  }

  /// The first job after `job` whose piece is not adjacent to the one before, in the file and in
  /// the chunk: one call can carry all before it.
  [[nodiscard]] Job* end_of_adjacent(Job const* job) const noexcept {
    Job* end = job->next;
    for (; end != nullptr && job->piece.memory == nullptr; job = end, end = end->next) {
      if (end->piece.file_offset != job->piece.file_offset + job->piece.bytes ||
          end->chunk != job->chunk + job->piece.bytes) {
        break;
      }
    }
    return end;
  }

  [[nodiscard]] std::size_t adjacent_bytes(Job const& first, Job const* end) const noexcept {
    Job const* last = &first;
    while (last->next != end) {
      last = last->next;
    }
    return static_cast<std::size_t>(last->chunk - first.chunk) + file_bytes(*last);
  }

  /// Returns false for a slot that was given back and has no read enqueued: nobody can read its
  /// bytes any more.
  [[nodiscard]] bool is_needed(Job const& job) const noexcept {
    std::scoped_lock const lock{*mutex_};
    return !job.slot->is_given_back || job.slot->read_jobs > 0;
  }

  /// The bytes that a file call has to move for a job. Direct I/O moves whole sectors. The chunk
  /// has room for them, and so has the slot: its granule is a sector.
  [[nodiscard]] std::size_t file_bytes(Job const& job) const noexcept {
    return file_->is_direct() ? round_up(job.piece.bytes, SwapFile<FileIo>::direct_alignment_bytes)
                              : job.piece.bytes;
  }

  /// The rescued bytes of a piece, or null. They stay where they are while this job runs: what
  /// overwrites or frees the slot is ordered after its reads. A slot is always cut into the same
  /// pieces, of which the last may be shorter, so the offset finds the piece.
  [[nodiscard]] std::byte const* find_rescued(Job const& job) const noexcept {
    std::scoped_lock const lock{*mutex_};
    for (RescuedPiece const& rescued : job.slot->rescued) {
      if (rescued.file_offset == job.piece.file_offset) {
        return rescued.data.get();
      }
    }
    return nullptr;
  }

  /// Keeps a piece that the file refused, and stops the file tier from taking new slots.
  void rescue(Job const& job, int error) noexcept {
    RescuedPiece rescued{job.piece.file_offset, job.piece.bytes, nullptr};
    rescued.data.reset(new (std::nothrow) std::byte[job.piece.bytes]);
    if (rescued.data != nullptr) {
      std::memcpy(rescued.data.get(), job.chunk, job.piece.bytes);
    }
    forget_rescued(job);
    std::scoped_lock const lock{*mutex_};
    ledger_->fail(HostTier::file);
    ++failed_writes_;
    try {
      if (rescued.data == nullptr) {
        throw std::bad_alloc{};
      }
      job.slot->rescued.push_back(std::move(rescued));
    } catch (std::bad_alloc const&) {  // the bytes are lost
      ledger_->note_failure(*job.slot,
                            FileFailure{error, job.piece.file_offset, job.piece.bytes, false});
    }
  }

  void forget_rescued(Job const& job) noexcept {
    std::unique_ptr<std::byte[]> outdated;  // freed after the lock
    std::scoped_lock const lock{*mutex_};
    for (RescuedPiece& rescued : job.slot->rescued) {
      if (rescued.file_offset == job.piece.file_offset) {
        outdated = std::move(rescued.data);
        std::swap(rescued, job.slot->rescued.back());
        job.slot->rescued.pop_back();
        return;
      }
    }
  }

  void note_lost_read(Job const& job, int error) noexcept {
    std::scoped_lock const lock{*mutex_};
    ++failed_reads_;
    ledger_->note_failure(*job.slot,
                          FileFailure{error, job.piece.file_offset, job.piece.bytes, true});
  }

  void finish(Job* job, Job const* end, SlotAccess access) noexcept {
    std::scoped_lock const lock{*mutex_};
    while (job != end) {
      give_back(*std::exchange(job, job->next), access);
    }
  }

  std::mutex* mutex_;
  HostLedger* ledger_;
  SwapFile<FileIo>* file_;
  std::deque<Job> jobs_;
  Job* idle_ = nullptr;
  std::size_t failed_writes_ = 0;
  std::size_t failed_reads_ = 0;
};

template <FileIoApi FileIo>
void SlotIo<FileIo>::throw_lost(FileFailure const& failure) const {
  throw FileTierError{Text{"spillway: "} + (failure.is_read ? "reading " : "writing ") +
                      failure.bytes + " bytes at offset " + failure.file_offset +
                      " of the swap file at " + file_->path() +
                      " failed: " + std::generic_category().message(failure.error) +
                      (failure.is_read ? "" : "; there was no memory to keep them in either") +
                      ". These swapped-out bytes are lost; all other slots are intact."};
}

}  // namespace spillway::detail
