// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/block/host_ledger.hpp>
#include <spillway/block/host_slot.hpp>
#include <spillway/block/swap_file.hpp>
#include <spillway/concepts/file_io_api.hpp>
#include <spillway/core/types.hpp>

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

namespace spillway {

template <FileIoApi FileIo>
class HostJobs;

/// One piece of a staged transfer, for a host function to carry between a chunk and the slot.
template <FileIoApi FileIo>
struct HostJob {
  HostJobs<FileIo>* owner = nullptr;
  HostJob* next = nullptr;  // in a list, while not enqueued
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

  /// From a chunk to the slot. `argument` is a job.
  static void run_write(void* argument) noexcept;
  /// From the slot to a chunk. `argument` is a job.
  static void run_read(void* argument) noexcept;

  [[nodiscard]] std::size_t failed_writes() const noexcept { return failed_writes_; }
  [[nodiscard]] std::size_t failed_reads() const noexcept { return failed_reads_; }

 private:
  [[nodiscard]] bool is_needed(job_type const& job) const noexcept;
  [[nodiscard]] std::size_t file_bytes(job_type const& job) const noexcept;
  [[nodiscard]] std::byte const* find_rescued(job_type const& job) const noexcept;
  void rescue(job_type const& job, int error) noexcept;
  void forget_rescued(job_type const& job) noexcept;
  void note_lost_read(job_type const& job, int error) noexcept;
  void finish(job_type& job, std::uint32_t HostSlot::*unfinished) noexcept;

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
  auto& job = *static_cast<job_type*>(argument);
  HostJobs& self = *job.owner;
  if (self.is_needed(job)) {
    if (job.piece.memory != nullptr) {
      std::memcpy(job.piece.memory, job.chunk, job.piece.bytes);
    } else if (int const error =
                   self.file_->write(job.chunk, self.file_bytes(job), job.piece.file_offset);
               error != 0) {
      self.rescue(job, error);
    } else {
      self.forget_rescued(job);
    }
  }
  self.finish(job, &HostSlot::write_jobs);
}

template <FileIoApi FileIo>
void HostJobs<FileIo>::run_read(void* argument) noexcept {
  auto& job = *static_cast<job_type*>(argument);
  HostJobs& self = *job.owner;
  if (job.piece.memory != nullptr) {
    std::memcpy(job.chunk, job.piece.memory, job.piece.bytes);
  } else if (std::byte const* const rescued = self.find_rescued(job); rescued != nullptr) {
    std::memcpy(job.chunk, rescued, job.piece.bytes);
  } else if (int const error =
                 self.file_->read(job.chunk, self.file_bytes(job), job.piece.file_offset);
             error != 0) {
    self.note_lost_read(job, error);
  }
  self.finish(job, &HostSlot::read_jobs);
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

template <FileIoApi FileIo>
void HostJobs<FileIo>::finish(job_type& job, std::uint32_t HostSlot::*unfinished) noexcept {
  std::scoped_lock const lock{*mutex_};
  HostSlot& slot = *job.slot;
  --(slot.*unfinished);
  give_back(&job);
  ledger_->forget_if_unused(slot);
}

}  // namespace spillway
