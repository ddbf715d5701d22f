// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/file_io_api.hpp>
#include <spillway/core/types.hpp>
#include <spillway/host/host_ledger.hpp>
#include <spillway/host/host_slot.hpp>
#include <spillway/host/swap_file.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

namespace spillway::detail {

template <FileIoApi FileIo>
class HostJobs;

/// One piece of a staged transfer, for a host function to carry between a chunk and the slot.
template <FileIoApi FileIo>
struct HostJob {
  HostJobs<FileIo>* owner = nullptr;
  HostJob* next = nullptr;  // to be run after it, or in a list while not enqueued
  HostSlot* slot = nullptr;
  HostPiece piece;
  std::byte* chunk = nullptr;
};

/// The host half of staged transfers: runs on the threads of streams, makes no device call, cannot
/// throw.
///
/// Jobs are kept for the life of the pool and used again, so that what is enqueued always finds its
/// arguments.
///
/// Threads  `run_*` lock the pool's mutex themselves, for bookkeeping only; the rest is called under it.
template <FileIoApi FileIo>
class HostJobs {
 public:
  using job_type = HostJob<FileIo>;

  /// `mutex` guards `ledger` and this object; `file` is null where there is no file tier.
  HostJobs(std::mutex& mutex, HostLedger& ledger, SwapFile<FileIo>* file)
      : mutex_{&mutex}, ledger_{&ledger}, file_{file} {}
  HostJobs(HostJobs const&) = delete;
  HostJobs& operator=(HostJobs const&) = delete;
  ~HostJobs() = default;

  /// A list of `count` jobs. @throws std::bad_alloc, with nothing changed
  [[nodiscard]] job_type* take(std::size_t count);
  void give_back(job_type* job) noexcept {
    job->next = idle_;
    idle_ = job;
    ++idle_count_;
  }

  /// From a chunk to the slot. `argument` is a job, and with it those linked to it.
  static void run_write(void* argument) noexcept;
  /// From the slot to a chunk. `argument` as above.
  static void run_read(void* argument) noexcept;

  [[nodiscard]] std::size_t failed_writes() const noexcept { return failed_writes_; }
  [[nodiscard]] std::size_t failed_reads() const noexcept { return failed_reads_; }

 private:
  void write_one(job_type const& job) noexcept;
  void read_one(job_type const& job) noexcept;
  [[nodiscard]] bool write_run(job_type const& first, job_type const* end) noexcept;
  [[nodiscard]] bool read_run(job_type const& first, job_type const* end) noexcept;
  [[nodiscard]] job_type* run_end(job_type const* job) const noexcept;
  [[nodiscard]] std::size_t run_bytes(job_type const& first, job_type const* end) const noexcept;
  [[nodiscard]] bool are_in_file(job_type const& first, job_type const* end) const noexcept;
  [[nodiscard]] bool is_needed(job_type const& job) const noexcept;
  [[nodiscard]] std::size_t file_bytes(job_type const& job) const noexcept;
  [[nodiscard]] std::byte const* find_rescued(job_type const& job) const noexcept;
  void rescue(job_type const& job, int error) noexcept;
  void forget_rescued(job_type const& job) noexcept;
  void note_lost_read(job_type const& job, int error) noexcept;
  job_type*
  finish_until(job_type* job, job_type* end, std::uint32_t HostSlot::*unfinished) noexcept;

  std::mutex* mutex_;
  HostLedger* ledger_;
  SwapFile<FileIo>* file_;
  std::deque<job_type> jobs_;
  job_type* idle_ = nullptr;
  std::size_t idle_count_ = 0;
  std::size_t failed_writes_ = 0;
  std::size_t failed_reads_ = 0;
};

template <FileIoApi FileIo>
auto HostJobs<FileIo>::take(std::size_t count) -> job_type* {
  while (idle_count_ < count) {
    jobs_.emplace_back().owner = this;
    give_back(&jobs_.back());
  }
  job_type* taken = nullptr;
  for (; count > 0; --count) {
    job_type* const job = std::exchange(idle_, idle_->next);
    --idle_count_;
    job->next = std::exchange(taken, job);
  }
  return taken;
}

template <FileIoApi FileIo>
void HostJobs<FileIo>::run_write(void* argument) noexcept {
  auto* job = static_cast<job_type*>(argument);
  HostJobs& self = *job->owner;
  while (job != nullptr) {
    job_type* const end = self.run_end(job);
    if (end != job->next && self.write_run(*job, end)) {
      for (job_type const* done = job; done != end; done = done->next) {
        self.forget_rescued(*done);
      }
    } else {
      for (job_type* each = job; each != end; each = each->next) {
        self.write_one(*each);
      }
    }
    job = self.finish_until(job, end, &HostSlot::write_jobs);
  }
}

template <FileIoApi FileIo>
void HostJobs<FileIo>::run_read(void* argument) noexcept {
  auto* job = static_cast<job_type*>(argument);
  HostJobs& self = *job->owner;
  while (job != nullptr) {
    job_type* const end = self.run_end(job);
    if (end == job->next || !self.read_run(*job, end)) {
      for (job_type* each = job; each != end; each = each->next) {
        self.read_one(*each);
      }
    }
    job = self.finish_until(job, end, &HostSlot::read_jobs);
  }
}

/// The jobs from `job` to there lie side by side in the file and in the chunk: one call can carry all
/// of them.
template <FileIoApi FileIo>
auto HostJobs<FileIo>::run_end(job_type const* job) const noexcept -> job_type* {
  job_type* end = job->next;
  for (; end != nullptr && job->piece.memory == nullptr; job = end, end = end->next) {
    if (end->piece.file_offset != job->piece.file_offset + job->piece.bytes ||
        end->chunk != job->chunk + job->piece.bytes) {
      break;
    }
  }
  return end;
}

/// None of their bytes are kept in memory, so that the file has all of them.
template <FileIoApi FileIo>
bool HostJobs<FileIo>::are_in_file(job_type const& first, job_type const* end) const noexcept {
  std::scoped_lock const lock{*mutex_};
  for (job_type const* job = &first; job != end; job = job->next) {
    if (!job->slot->rescued.empty()) {
      return false;
    }
  }
  return true;
}

template <FileIoApi FileIo>
std::size_t HostJobs<FileIo>::run_bytes(job_type const& first, job_type const* end) const noexcept {
  job_type const* last = &first;
  while (last->next != end) {
    last = last->next;
  }
  return static_cast<std::size_t>(last->chunk - first.chunk) + file_bytes(*last);
}

template <FileIoApi FileIo>
bool HostJobs<FileIo>::write_run(job_type const& first, job_type const* end) noexcept {
  return file_->write(first.chunk, run_bytes(first, end), first.piece.file_offset) == 0;
}

template <FileIoApi FileIo>
bool HostJobs<FileIo>::read_run(job_type const& first, job_type const* end) noexcept {
  return are_in_file(first, end) &&
         file_->read(first.chunk, run_bytes(first, end), first.piece.file_offset) == 0;
}

template <FileIoApi FileIo>
void HostJobs<FileIo>::write_one(job_type const& job) noexcept {
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

template <FileIoApi FileIo>
void HostJobs<FileIo>::read_one(job_type const& job) noexcept {
  if (job.piece.memory != nullptr) {
    std::memcpy(job.chunk, job.piece.memory, job.piece.bytes);
  } else if (std::byte const* const rescued = find_rescued(job); rescued != nullptr) {
    std::memcpy(job.chunk, rescued, job.piece.bytes);
  } else if (int const error = file_->read(job.chunk, file_bytes(job), job.piece.file_offset);
             error != 0) {
    note_lost_read(job, error);
  }
}

/// Nobody can read a slot any more that was given back and has no read enqueued.
template <FileIoApi FileIo>
bool HostJobs<FileIo>::is_needed(job_type const& job) const noexcept {
  std::scoped_lock const lock{*mutex_};
  return !job.slot->is_given_back || job.slot->read_jobs > 0;
}

/// Direct I/O moves whole sectors. A chunk has room for them, and so has the slot: its granule is one.
template <FileIoApi FileIo>
std::size_t HostJobs<FileIo>::file_bytes(job_type const& job) const noexcept {
  return file_->is_direct() ? round_up(job.piece.bytes, SwapFile<FileIo>::direct_alignment_bytes)
                            : job.piece.bytes;
}

/// Stays where it is while this job runs: who overwrites or frees the slot comes after its reads.
template <FileIoApi FileIo>
std::byte const* HostJobs<FileIo>::find_rescued(job_type const& job) const noexcept {
  std::scoped_lock const lock{*mutex_};
  for (RescuedPiece const& rescued : job.slot->rescued) {
    if (rescued.file_offset == job.piece.file_offset) {
      return rescued.data.get();  // a slot is always cut into the same pieces, the last one shorter
    }
  }
  return nullptr;
}

template <FileIoApi FileIo>
void HostJobs<FileIo>::rescue(job_type const& job, int error) noexcept {
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
  } catch (std::bad_alloc const&) {
    ledger_->note_failure(*job.slot,
                          FileFailure{error, job.piece.file_offset, job.piece.bytes, false});
  }
}

template <FileIoApi FileIo>
void HostJobs<FileIo>::forget_rescued(job_type const& job) noexcept {
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

template <FileIoApi FileIo>
void HostJobs<FileIo>::note_lost_read(job_type const& job, int error) noexcept {
  std::scoped_lock const lock{*mutex_};
  ++failed_reads_;
  ledger_->note_failure(*job.slot,
                        FileFailure{error, job.piece.file_offset, job.piece.bytes, true});
}

/// Returns the job after them.
template <FileIoApi FileIo>
auto HostJobs<FileIo>::finish_until(job_type* job,
                                    job_type* end,
                                    std::uint32_t HostSlot::*unfinished) noexcept -> job_type* {
  std::scoped_lock const lock{*mutex_};
  while (job != end) {
    job_type* const next = job->next;
    HostSlot& slot = *job->slot;
    --(slot.*unfinished);
    give_back(job);
    ledger_->forget_if_unused(slot);
    job = next;
  }
  return end;
}

}  // namespace spillway::detail
