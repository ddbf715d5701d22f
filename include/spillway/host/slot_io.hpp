// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/file_io_api.hpp>
#include <spillway/core/config.hpp>
#include <spillway/core/error.hpp>
#include <spillway/core/types.hpp>
#include <spillway/host/host_ledger.hpp>
#include <spillway/host/swap_file.hpp>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include <sys/types.h>

namespace spillway::detail {

/// The host half of transfers to the slower tiers: copies between staging chunks and slots.
///
/// `HostTransfers` prepares a list of jobs for each chunk and enqueues the host function `run`,
/// which copies each piece between the chunk and pageable memory or the file. Pieces that are
/// adjacent in the file and in the chunk share one file call. All file calls of a chunk are begun
/// before the first of them is waited for. If the file's queue can begin calls, the host function
/// `begin` is enqueued on a second stream, so that the calls of a chunk can begin while `run` is
/// still busy with an earlier chunk. Whichever of the two runs first begins the calls; the jobs are
/// reused when both have returned.
///
/// A write that the file refuses loses nothing as long as there is memory. The call is first
/// repeated piece by piece. Each piece that fails again is copied to the heap, into the slot's
/// `rescued` list, and the file tier takes no new slots. Reads look there first. The next
/// successful write of the piece, and the end of the slot, free the copy. Only a piece for which
/// there is no memory, and one that cannot be read back, is lost: the ledger notes it, and the next
/// use of the slot throws.
///
/// The file may take writes again, for example when the disk is no longer full. `try_again` tries
/// that: it writes the rescued pieces, of all slots that nobody is writing. If all succeed the tier
/// takes new slots again. So no more bytes are ever rescued than those of writes that were on their
/// way when one failed. After each attempt in vain the next one comes after twice as many requests
/// for room, up to `most_requests`, so that a file that never recovers costs next to nothing.
///
/// If the file's queue can access the device (`DeviceFileQueueApi`), `try_enqueue_direct` enqueues
/// a list of jobs as direct transfers, without a chunk. The bytes of a direct write that fails are
/// lost, since host functions cannot copy them from the device. So after a write has failed nothing
/// is transferred directly any more (`is_direct_possible`).
///
/// `Cursor` is for a host function that reads or writes a slot in the file by itself.
///
/// Jobs are reused and live as long as the pool, so that enqueued functions always find their
/// arguments.
///
/// Threads  `run` and `begin` run on threads of the device and make no device call. They lock the
///          pool's mutex for the ledger only. `try_enqueue_direct` needs no lock. All other
///          functions are called under that mutex.
template <FileIoApi FileIo>
class SlotIo {
 public:
  /// One piece of a transfer, and its place in a staging chunk.
  struct Job {
    SlotIo* owner = nullptr;
    Job* next = nullptr;        // the next job of the same host function
    Job* next_chunk = nullptr;  // in the first job of a chunk: the first job of the next chunk
    HostSlot* slot = nullptr;
    std::uint32_t slot_version = 0;  // when the job was made
    HostPiece piece{};
    std::byte* chunk = nullptr;  // its place in the chunk; `device` in a direct transfer
    std::size_t chunk_offset = 0;
    FileTransfer transfer{};  // for this job, or, in the first of adjacent jobs, for all of them
    SlotAccess access{};
    bool is_direct = false;
    bool is_begun = false;   // in the first job of a chunk: the file calls
    std::uint8_t calls = 1;  // in the first job of a chunk: host functions that have not returned
    // The device's side, which is enqueued beside the host function.
    std::byte* device = nullptr;
    std::size_t reservation = 0;
  };

  class Cursor;

  /// `mutex` guards `ledger` and this object; `file` is null where there is no file tier.
  SlotIo(std::mutex& mutex, HostLedger& ledger, SwapFile<FileIo>* file)
      : mutex_{&mutex}, ledger_{&ledger}, file_{file} {}
  SlotIo(SlotIo const&) = delete;
  SlotIo& operator=(SlotIo const&) = delete;
  ~SlotIo() = default;

  /// Makes a job, which counts as unfinished for the slot until it has run or is given back.
  ///
  /// @throws std::bad_alloc, with nothing changed
  [[nodiscard]] Job& take(HostSlot& slot, SlotAccess access) {
    if (idle_ == nullptr) {
      idle_ = &jobs_.emplace_back();
    }
    Job& job = *std::exchange(idle_, idle_->next);
    job = Job{.owner = this, .slot = &slot, .slot_version = slot.version, .access = access};
    ++slot.jobs(access);
    return job;
  }

  /// Ends a job that no host function was enqueued for.
  void give_back(Job& job) noexcept {
    end_use(job);
    job.next = std::exchange(idle_, &job);
  }

  /// Opens the file's queue for one direction. `memory` is that of the chunks.
  ///
  /// @returns whether the queue can begin calls, so that `begin` is useful
  /// @throws  std::bad_alloc
  bool open_queue(SlotAccess access, std::span<std::byte> memory) {
    return queue(access).emplace(file_->make_queue(memory)).can_begin();
  }

  /// Announces that `begin` will be enqueued for a chunk beside `run`. Call it before both.
  void expect_begin(Job& first) noexcept { first.calls = 2; }

  /// Host function: begins the file calls of a chunk. `argument` is the first job of a list.
  static void begin(void* argument) noexcept {
    auto& first = *static_cast<Job*>(argument);
    first.owner->begin_calls(first);
    first.owner->end_call(first);
  }

  /// Host function: moves the bytes of a chunk to the slots, or from them. `argument` is the first
  /// job of a list.
  static void run(void* argument) noexcept {
    auto& first = *static_cast<Job*>(argument);
    first.owner->finish(first);
  }

  /// Finds out whether the file's queues can transfer directly from and to the device.
  template <class Device>
  void open_direct() noexcept {
    is_direct_possible_ = std::all_of(queues_.begin(), queues_.end(), [](auto const& queue) {
      return queue && queue->template reaches<Device>();
    });
  }
  /// Whether `try_enqueue_direct` may be used: not any more after it has returned false, or after a
  /// write has failed. Needs no lock.
  [[nodiscard]] bool is_direct_possible() const noexcept { return is_direct_possible_; }

  /// Enqueues direct transfers for a list of jobs, between their slots and their device memory, and
  /// a host function that notes the results.
  ///
  /// @returns false if direct transfers of this file are not possible; nothing is in flight then
  /// @throws  DeviceError; nothing is in flight then unless the device has failed altogether
  template <class Device>
    requires(SwapFile<FileIo>::template may_reach<Device>)
  [[nodiscard]] bool
  try_enqueue_direct(Device& device, Job& first, typename Device::stream_type stream) {
    for (Job* job = &first; job != nullptr; job = job->next) {
      job->chunk = job->device;
      job->is_direct = true;
    }
    try {
      Job* job = &first;
      while (job != nullptr && try_enqueue_adjacent(device, *job, stream)) {
        job = end_of_adjacent(job);
      }
      if (job == nullptr) {
        device.launch_host(stream, &note_direct, &first);
        return true;
      }
    } catch (...) {
      device.synchronize(stream);  // what was enqueued uses the jobs
      throw;
    }
    is_direct_possible_ = false;
    device.synchronize(stream);
    for (Job* job = &first; job != nullptr; job = job->next) {
      job->is_direct = false;
      job->transfer = {};
    }
    return false;
  }

  /// Counts a host function of a chunk as returned. After the last its jobs can be used again.
  void end_call(Job& first) noexcept {
    std::scoped_lock const lock{*mutex_};
    if (--first.calls > 0) {
      return;
    }
    for (Job* job = &first; job != nullptr;) {
      Job* const done = std::exchange(job, job->next);
      done->next = std::exchange(idle_, done);
    }
  }

  /// @throws FileTierError if the slot has lost bytes
  void throw_if_failed(HostSlot const& slot) const {
    if (slot.failure) {
      throw error_of(*slot.failure);
    }
  }
  /// Returns the error that says which bytes are lost. @throws std::bad_alloc
  [[nodiscard]] FileTierError error_of(FileFailure const& failure) const;

  /// The name of the calls that carry bytes to the file and back, empty where there is none. If the
  /// calls of only one direction can be begun ahead, it is that of the other one. Needs no lock.
  [[nodiscard]] std::string_view file_calls() const noexcept {
    for (std::optional<Queue> const& queue : queues_) {
      if (queue && !queue->can_begin()) {
        return queue->name();
      }
    }
    return queues_[0] ? queues_[0]->name() : std::string_view{};
  }
  [[nodiscard]] std::size_t failed_writes() const noexcept { return failed_writes_; }
  /// The error number of the last write that failed.
  [[nodiscard]] int write_error() const noexcept { return write_error_; }

  /// Counts a request for room that no tier has. @returns whether the file tier has failed and is
  /// to be tried again for this request
  [[nodiscard]] bool is_attempt_due() noexcept {
    if (!ledger_->has_failed(HostTier::file)) {
      return false;
    }
    bool const is_due = requests_left_ == 0;
    requests_left_ -= is_due ? 0 : 1;
    return is_due;
  }
  /// Writes again what the file refused or, if nothing of that is left, one unit elsewhere, up to
  /// the first failure. Lets the tier take new slots if all succeed and no other write has failed
  /// meanwhile. Makes file calls. Called without the lock, by one thread at a time.
  ///
  /// @returns whether the tier takes new slots now
  [[nodiscard]] bool try_again() noexcept;
  [[nodiscard]] std::size_t failed_reads() const noexcept { return failed_reads_; }

 private:
  using Queue = typename SwapFile<FileIo>::Queue;

  static constexpr std::size_t most_requests = 63;

  [[nodiscard]] std::optional<Queue>& queue(SlotAccess access) noexcept {
    return queues_[static_cast<std::size_t>(access)];
  }

  /// Waits for a job's file call. Only one thread at a time may wait for a queue: usually that of
  /// the lane, but a codec's transfer that was abandoned may end on another thread.
  [[nodiscard]] int finish_call(Job& job) noexcept {
    std::scoped_lock const lock{finish_mutex_[static_cast<std::size_t>(job.access)]};
    return queue(job.access)->finish(job.transfer);
  }

  void begin_calls(Job& first) noexcept {
    std::scoped_lock const lock{begin_mutex_[static_cast<std::size_t>(first.access)]};
    if (std::exchange(first.is_begun, true)) {
      return;
    }
    FileTransfer* first_call = nullptr;
    FileTransfer* last_call = nullptr;
    for (Job* job = &first; job != nullptr;) {
      Job* const end = end_of_adjacent(job);
      if (job->piece.memory == nullptr && can_share(*job, end)) {
        job->transfer = transfer_of(*job, adjacent_bytes(*job, end));
        (first_call == nullptr ? first_call : last_call->next) = &job->transfer;
        last_call = &job->transfer;
      }
      job = end;
    }
    if (first_call != nullptr) {
      queue(first.access)->begin(*first_call);
    }
  }

  void finish(Job& first) noexcept {
    begin_calls(first);
    for (Job* job = &first; job != nullptr;) {
      Job* const end = end_of_adjacent(job);
      finish_adjacent(*job, end);
      std::scoped_lock const lock{*mutex_};
      for (; job != end; job = job->next) {
        end_use(*job);
      }
    }
    end_call(first);
  }

  template <class Device>
  [[nodiscard]] bool
  try_enqueue_adjacent(Device& device, Job& first, typename Device::stream_type stream) {
    first.transfer = transfer_of(first, adjacent_bytes(first, end_of_adjacent(&first)));
    return queue(first.access)->try_enqueue(device, first.transfer, stream);
  }

  /// Host function: notes the results of direct transfers. `argument` is the first job of a list.
  static void note_direct(void* argument) noexcept {
    auto& first = *static_cast<Job*>(argument);
    SlotIo& io = *first.owner;
    for (Job* job = &first; job != nullptr;) {
      Job* const end = io.end_of_adjacent(job);
      ssize_t const moved = job->transfer.result;
      bool const is_whole = moved >= 0 && static_cast<std::size_t>(moved) == job->transfer.bytes;
      // Some libraries return negative numbers that are not error numbers, such as -1.
      bool const is_number = moved < -1 && moved > -4096;
      int const error = is_whole ? 0 : is_number ? static_cast<int>(-moved) : EIO;
      for (; job != end; job = job->next) {
        io.note_result(*job, error);
        std::scoped_lock const lock{*io.mutex_};
        io.end_use(*job);
      }
    }
    io.end_call(first);
  }

  /// Whether one file call is to serve all of these jobs. Not if it is a single write whose bytes
  /// nobody can read any more, or if bytes of a slot that is read were rescued, since the file then
  /// does not have all of them.
  [[nodiscard]] bool can_share(Job const& first, Job const* end) const noexcept {
    std::scoped_lock const lock{*mutex_};
    if (first.access == SlotAccess::write) {
      return first.next != end || is_needed(first);
    }
    for (Job const* job = &first; job != end; job = job->next) {
      if (!job->slot->rescued.empty()) {
        return false;
      }
    }
    return true;
  }

  [[nodiscard]] static FileTransfer transfer_of(Job const& job, std::size_t bytes) noexcept {
    return {.memory = job.chunk,
            .bytes = bytes,
            .offset = job.piece.file_offset,
            .is_write = job.access == SlotAccess::write};
  }

  void finish_adjacent(Job& first, Job* end) noexcept {
    if (first.piece.memory != nullptr) {
      copy(first);
      return;
    }
    if (first.transfer.bytes > 0) {
      int const error = finish_call(first);
      if (error == 0 || first.next == end) {
        for (Job const* job = &first; job != end; job = job->next) {
          note_result(*job, error);
        }
        return;
      }
    }
    for (Job* job = &first; job != end; job = job->next) {
      finish_one(*job);
    }
  }

  void finish_one(Job& job) noexcept {
    if (job.access == SlotAccess::read) {
      if (read_rescued(job)) {
        return;
      }
    } else if (std::scoped_lock const lock{*mutex_}; !is_needed(job)) {
      return;
    }
    job.transfer = transfer_of(job, file_bytes(job));
    note_result(job, finish_call(job));
  }

  /// Reads a piece from its rescued bytes. @returns false if it was not rescued
  [[nodiscard]] bool read_rescued(Job const& job) const noexcept {
    auto const rescued = find_rescued(job);
    if (rescued != nullptr) {
      std::memcpy(job.chunk, rescued.get(), job.piece.bytes);
    }
    return rescued != nullptr;
  }

  /// Copies a piece between a chunk and pageable memory.
  void copy(Job const& job) const noexcept {
    if (job.access == SlotAccess::read) {
      std::memcpy(job.chunk, job.piece.memory, job.piece.bytes);
      return;
    }
    {
      std::scoped_lock const lock{*mutex_};
      if (!is_needed(job)) {
        return;
      }
    }
    std::memcpy(job.piece.memory, job.chunk, job.piece.bytes);
  }

  void note_result(Job const& job, int error) noexcept {
    if (job.access == SlotAccess::read) {
      error != 0 ? note_lost_read(job, error) : note_read_of_lost_write(job);
    } else if (error != 0) {
      rescue(job, error);
    } else {
      forget_rescued(job);
    }
  }

  /// Returns the first job after `job` whose piece is not adjacent to the one before it in the file
  /// and in the chunk. One call can serve all jobs before it.
  [[nodiscard]] Job* end_of_adjacent(Job const* job) const noexcept {
    Job* end = job->next;
    for (; end != nullptr && job->piece.memory == nullptr; job = end, end = end->next) {
      bool const is_other_memory = end->is_direct && end->slot != job->slot &&
                                   (end->reservation == 0 || end->reservation != job->reservation);
      if (end->piece.file_offset != job->piece.file_offset + job->piece.bytes ||
          end->chunk != job->chunk + job->piece.bytes || is_other_memory) {
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

  /// Whether anybody can still read what a job is to write. The lock is held.
  [[nodiscard]] bool is_needed(Job const& job) const noexcept { return !job.slot->is_unneeded(); }

  /// Returns how many bytes a file call transfers for a job. Direct I/O and checksums need whole
  /// sectors, for which chunk and slot have room, since the granule of the file tier is a sector.
  /// Direct transfers from device memory have any size.
  [[nodiscard]] std::size_t file_bytes(Job const& job) const noexcept {
    return file_->moves_units() && !job.is_direct
               ? round_up(job.piece.bytes, SwapFile<FileIo>::unit_bytes)
               : job.piece.bytes;
  }

  /// Returns the rescued bytes of a piece, or null. A slot is always cut into the same pieces, of
  /// which the last may be shorter, so the offset identifies the piece.
  [[nodiscard]] std::shared_ptr<std::byte[]> find_rescued(Job const& job) const noexcept {
    std::scoped_lock const lock{*mutex_};
    for (RescuedPiece const& rescued : job.slot->rescued) {
      if (rescued.file_offset == job.piece.file_offset) {
        return rescued.data;
      }
    }
    return nullptr;
  }

  /// Copies what a job's file call transfers. @returns null if there is no memory, and for a direct
  /// transfer
  [[nodiscard]] std::shared_ptr<std::byte[]> copy_of(Job const& job) const noexcept {
    if (job.is_direct) {
      return nullptr;
    }
    try {
      std::size_t const bytes = file_bytes(job);
      std::shared_ptr<std::byte[]> copy = make_file_memory(bytes);
      std::memcpy(copy.get(), job.chunk, bytes);
      return copy;
    } catch (std::bad_alloc const&) {
      return nullptr;
    }
  }

  /// Keeps a piece that the file refused, and stops the file tier from taking new slots.
  void rescue(Job const& job, int error) noexcept {
    RescuedPiece rescued{job.piece.file_offset, job.piece.bytes, copy_of(job)};
    forget_rescued(job);
    std::scoped_lock const lock{*mutex_};
    ledger_->fail(HostTier::file);
    ++failed_writes_;
    write_error_ = error;
    is_direct_possible_ = false;
    if (!is_needed(job)) {
      return;
    }
    try {
      if (rescued.data == nullptr) {
        throw std::bad_alloc{};
      }
      job.slot->rescued.push_back(std::move(rescued));
    } catch (std::bad_alloc const&) {  // the bytes are lost
      ledger_->note_failure(*job.slot,
                            job.slot_version,
                            FileFailure{.error = error,
                                        .file_offset = job.piece.file_offset,
                                        .bytes = job.piece.bytes,
                                        .is_direct = job.is_direct});
    }
  }

  void forget_rescued(Job const& job) noexcept {
    std::shared_ptr<std::byte[]> outdated;  // freed after the lock
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

  /// Writes the rescued pieces of a slot, until one is refused again. @returns 0 or that error
  /// number
  [[nodiscard]] int write_rescued(Job& job) noexcept {
    for (;;) {
      // While these are held no other write begins, also not one of a slot that takes this place.
      std::scoped_lock const turn{begin_mutex_[static_cast<std::size_t>(SlotAccess::write)],
                                  finish_mutex_[static_cast<std::size_t>(SlotAccess::write)]};
      std::shared_ptr<std::byte[]> data;
      {
        std::scoped_lock const lock{*mutex_};
        HostSlot const& slot = *job.slot;
        if (slot.rescued.empty() || slot.is_emptied || slot.write_jobs != 1) {
          return 0;  // none is left, or another job is going to write the slot
        }
        data = slot.rescued.back().data;
        job.piece.file_offset = slot.rescued.back().file_offset;
        job.piece.bytes = slot.rescued.back().bytes;
      }
      int const error =
          queue(SlotAccess::write)->write(data.get(), file_bytes(job), job.piece.file_offset);
      if (error != 0) {
        return error;
      }
      forget_rescued(job);
    }
  }

  void note_lost_read(Job const& job, int error) noexcept {
    std::scoped_lock const lock{*mutex_};
    ++failed_reads_;
    ledger_->note_failure(*job.slot,
                          job.slot_version,
                          FileFailure{.error = error,
                                      .file_offset = job.piece.file_offset,
                                      .bytes = job.piece.bytes,
                                      .is_read = true});
  }

  /// If an earlier write of the slot has lost its bytes, this read has got others.
  void note_read_of_lost_write(Job const& job) noexcept {
    std::scoped_lock const lock{*mutex_};
    if (job.slot->failure && !job.slot->failure->has_reached_owner()) {
      FileFailure failure = *job.slot->failure;
      failure.was_read = true;
      ledger_->note_failure(*job.slot, job.slot_version, failure);
    }
  }

  /// Ends this job's use of its slot, which may be forgotten then. The lock is held.
  void end_use(Job& job) noexcept {
    --job.slot->jobs(job.access);
    ledger_->forget_if_unused(*job.slot);
  }

  std::mutex* mutex_;
  HostLedger* ledger_;
  SwapFile<FileIo>* file_;
  std::array<std::optional<Queue>, 2> queues_;  // by `SlotAccess`, where there is a file
  std::atomic<bool> is_direct_possible_{false};
  std::array<std::mutex, 2> begin_mutex_;   // held while calls are begun
  std::array<std::mutex, 2> finish_mutex_;  // and while one of them is waited for
  std::deque<Job> jobs_;
  Job* idle_ = nullptr;
  std::size_t failed_writes_ = 0;
  int write_error_ = 0;
  std::size_t requests_ = 0;  // that the next attempt lets pass, and how many of them are left
  std::size_t requests_left_ = 0;
  std::size_t failed_reads_ = 0;
};

/// Reads or writes the bytes of a slot in the file from its front to its end, through the parts of
/// a staging chunk: while one part is filled or emptied, others are being written or read.
///
/// A slot is always cut into the same parts, of which the last may be shorter. So a part that the
/// file refuses is rescued, and found again, like a piece of a slot without a codec.
template <FileIoApi FileIo>
class SlotIo<FileIo>::Cursor {
 public:
  Cursor(SlotIo& io,
         HostSlot& slot,
         std::uint32_t slot_version,
         std::vector<HostPiece> const& pieces,
         SlotAccess access,
         std::span<std::byte> chunk)
      : io_{&io}, pieces_{&pieces} {
    constexpr std::size_t unit = SwapFile<FileIo>::unit_bytes;
    count_ = std::clamp(chunk.size() / unit, std::size_t{1}, parts_.size());
    part_bytes_ = std::max(chunk.size() / count_ / unit, std::size_t{1}) * unit;
    SPILLWAY_ASSERT(count_ * part_bytes_ <= chunk.size());
    for (std::size_t i = 0; i < count_; ++i) {
      parts_[i].slot = &slot;
      parts_[i].slot_version = slot_version;
      parts_[i].access = access;
      parts_[i].chunk = chunk.data() + i * part_bytes_;
    }
    for (HostPiece const& piece : pieces) {
      left_ += piece.bytes;
    }
    if (is_read()) {
      std::scoped_lock const lock{*io.mutex_};
      left_ = std::min(left_, slot.stored_bytes);
    }
    ahead_ = left_;
    for (std::size_t i = 0; is_read() && i < count_; ++i) {
      begin_read(parts_[i]);
    }
  }
  Cursor(Cursor const&) = delete;
  Cursor& operator=(Cursor const&) = delete;
  ~Cursor() {
    for (Job& part : parts_) {  // waits for parts that were read ahead and not used
      if (part.is_begun) {
        static_cast<void>(io_->finish_call(part));
      }
    }
  }

  [[nodiscard]] std::size_t left_bytes() const noexcept { return has_all_ ? left_ : 0; }
  [[nodiscard]] std::byte* in_one_piece(std::size_t bytes) noexcept {
    return bytes <= left_bytes() && open() && at_ + bytes <= part().piece.bytes ? part().chunk + at_
                                                                                : nullptr;
  }
  void write(std::byte const* from, std::size_t bytes) noexcept {
    for_each_part(bytes, [&](std::byte* memory, std::size_t part) {
      std::memcpy(memory, std::exchange(from, from + part), part);
    });
  }
  void read(std::byte* to, std::size_t bytes) noexcept {
    for_each_part(bytes, [&](std::byte const* memory, std::size_t part) {
      std::memcpy(std::exchange(to, to + part), memory, part);
    });
  }
  void skip(std::size_t bytes) noexcept {
    for_each_part(bytes, [](std::byte*, std::size_t) {});
  }
  [[nodiscard]] bool finish() noexcept {
    if (!is_read() && at_ > 0) {
      part().piece.bytes = at_;
      begin_write();
    }
    for (std::size_t i = 0; !is_read() && i < count_; ++i) {
      end_write(parts_[i]);
    }
    return has_all_;
  }

 private:
  [[nodiscard]] Job& part() noexcept { return parts_[current_]; }
  [[nodiscard]] bool is_read() const noexcept { return parts_[0].access == SlotAccess::read; }

  template <class Use>
  void for_each_part(std::size_t bytes, Use use) noexcept {
    while (bytes > 0 && left_bytes() > 0 && open()) {
      std::size_t const length = std::min(bytes, part().piece.bytes - at_);
      use(part().chunk + at_, length);
      at_ += length;
      left_ -= length;
      bytes -= length;
      if (!is_read() && at_ == part().piece.bytes) {
        begin_write();
      }
    }
  }

  /// Makes the current part ready: with room to write, or with bytes that were read. @returns false
  /// if these are lost
  [[nodiscard]] bool open() noexcept {
    if (!is_read()) {
      if (at_ == 0) {
        end_write(part());
        place(part());
      }
      return true;
    }
    if (is_open_ && at_ < part().piece.bytes) {
      return true;
    }
    if (is_open_) {
      begin_read(part());
      current_ = (current_ + 1) % count_;
    }
    is_open_ = true;
    at_ = 0;
    has_all_ = end_read(part());
    return has_all_;
  }

  /// Assigns to a part the next place of the slot.
  void place(Job& part) noexcept {
    while (piece_at_ == (*pieces_)[piece_].bytes) {
      ++piece_;
      piece_at_ = 0;
    }
    HostPiece const& piece = (*pieces_)[piece_];
    part.piece = {nullptr,
                  piece.file_offset + piece_at_,
                  std::min({part_bytes_, piece.bytes - piece_at_, ahead_}),
                  piece.slab};
    piece_at_ += part.piece.bytes;
    ahead_ -= part.piece.bytes;
  }

  void begin(Job& part) noexcept {
    part.transfer = transfer_of(part, io_->file_bytes(part));
    part.is_begun = true;
    std::scoped_lock const lock{io_->begin_mutex_[static_cast<std::size_t>(part.access)]};
    io_->queue(part.access)->begin(part.transfer);
  }
  void begin_write() noexcept {
    begin(part());
    current_ = (current_ + 1) % count_;
    at_ = 0;
  }
  void end_write(Job& part) noexcept {
    if (std::exchange(part.is_begun, false)) {
      io_->note_result(part, io_->finish_call(part));
    }
  }
  void begin_read(Job& part) noexcept {
    if (ahead_ > 0) {
      place(part);
      if (!io_->read_rescued(part)) {
        begin(part);
      }
    }
  }
  [[nodiscard]] bool end_read(Job& part) noexcept {
    int const error = std::exchange(part.is_begun, false) ? io_->finish_call(part) : 0;
    io_->note_result(part, error);
    return error == 0;
  }

  SlotIo* io_;
  std::vector<HostPiece> const* pieces_;
  std::array<Job, 4> parts_;
  std::size_t count_ = 0;  // number of parts in use
  std::size_t part_bytes_ = 0;
  std::size_t current_ = 0;   // the part that is filled or emptied
  std::size_t at_ = 0;        // position in the current part
  bool is_open_ = false;      // a part was read
  std::size_t left_ = 0;      // bytes of the slot behind the cursor
  std::size_t ahead_ = 0;     // those that are not assigned to a part yet
  std::size_t piece_ = 0;     // the piece in which these begin
  std::size_t piece_at_ = 0;  // and the offset in that piece
  bool has_all_ = true;
};

template <FileIoApi FileIo>
bool SlotIo<FileIo>::try_again() noexcept {
  Job* first = nullptr;
  std::size_t failed_before = 0;
  {
    std::scoped_lock const lock{*mutex_};
    failed_before = failed_writes_;
    try {
      ledger_->for_each_slot([&](HostSlot& slot) {
        if (!slot.rescued.empty() && !slot.is_emptied && !slot.is_enqueueing_write &&
            slot.write_jobs == 0) {
          Job& job = take(slot, SlotAccess::write);
          job.next = std::exchange(first, &job);
        }
      });
    } catch (std::bad_alloc const&) {  // NOLINT(bugprone-empty-catch): some slots will do
    }
  }
  int error = 0;
  if (first == nullptr) {
    std::scoped_lock const turn{finish_mutex_[static_cast<std::size_t>(SlotAccess::write)]};
    error = file_->try_out(*queue(SlotAccess::write));
  }
  for (Job* job = first; job != nullptr && error == 0; job = job->next) {
    error = write_rescued(*job);
  }
  std::scoped_lock const lock{*mutex_};
  while (first != nullptr) {
    give_back(*std::exchange(first, first->next));
  }
  if (error == 0 && failed_writes_ == failed_before) {
    ledger_->recover(HostTier::file);
    requests_ = requests_left_ = 0;
    return true;
  }
  write_error_ = error != 0 ? error : write_error_;
  requests_ = requests_left_ = std::min(2 * requests_ + 1, most_requests);
  return false;
}

template <FileIoApi FileIo>
FileTierError SlotIo<FileIo>::error_of(FileFailure const& failure) const {
  if (failure.is_encoding) {
    return FileTierError{
        Text{"spillway: "} + failure.bytes +
        (failure.is_read ? " bytes of a host slot cannot be decoded: what is there is not what a "
                           "codec wrote"
                         : " bytes of a host slot were not written: their codec has failed") +
        ". These swapped-out bytes are lost; all other slots are intact."};
  }
  return FileTierError{Text{"spillway: "} + (failure.is_read ? "reading " : "writing ") +
                       failure.bytes + " bytes at offset " + failure.file_offset +
                       " of the swap file at " + file_->path() +
                       " failed: " + SwapFile<FileIo>::reason(failure.error) +
                       (failure.is_read     ? ""
                        : failure.is_direct ? "; they were on the device only"
                                            : "; there was no memory to keep them in either") +
                       ". These swapped-out bytes are lost; all other slots are intact."};
}

}  // namespace spillway::detail
