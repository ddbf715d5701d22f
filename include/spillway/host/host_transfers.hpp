// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/codec.hpp>
#include <spillway/concepts/device_api.hpp>
#include <spillway/concepts/device_capabilities.hpp>
#include <spillway/concepts/file_io_api.hpp>
#include <spillway/core/error.hpp>
#include <spillway/core/fence.hpp>
#include <spillway/core/types.hpp>
#include <spillway/host/coded_parts.hpp>
#include <spillway/host/device_scratch.hpp>
#include <spillway/host/host_ledger.hpp>
#include <spillway/host/host_tier.hpp>
#include <spillway/host/slot_codecs.hpp>
#include <spillway/host/slot_io.hpp>
#include <spillway/host/staging.hpp>
#include <spillway/host/swap_file.hpp>
#include <spillway/stream/copy_batch.hpp>
#include <spillway/stream/stream_order.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace spillway::detail {

/// Copies bytes between the device and the slots of a host pool. Every read and write of
/// `HostSwapPool` goes through `enqueue`; a single transfer is a batch of one.
///
/// Many transfers become few copies: `enqueue` cuts the list of requests into batches. A batch is
/// as many requests from the front as are in one tier, have at most `max_batch_bytes` together and,
/// if the tier is staged, fit into one staging chunk; a larger transfer is a batch of its own.
///
///   Pinned tier: each piece of each slot is one copy between the device and a slab. A copy that
///   continues the one before on both sides is joined to it, and the device gets the rest in one
///   call. Example: four blocks of 1 KiB that are neighbours on the device get neighbouring slots,
///   because the pool cuts them from one slab. They leave as one copy of 4 KiB.
///
///   Staged tiers: pieces are cut at the size of a chunk and packed into chunks. For each chunk of
///   a write, one batch of copies (device to chunk) goes to the caller's stream, and one host
///   function (chunk to slot, `SlotIo::run`) to the stream of the write lane. A read does the
///   same in reverse order. The two streams wait for each other by the chunk's fence, so that the
///   next chunk leaves the device while the last one is written to the file. Where the file's queue
///   has room for several chunks, a second stream of the lane begins the file calls of a chunk as
///   soon as they may begin (`SlotIo::begin`), while those of the chunk before are being finished.
///
/// A slot with a codec is a batch of its own. One host function encodes it from device memory or
/// decodes it (`SlotCodecs::run`): on the caller's stream if the slot is in memory, on the lane's
/// stream if it is in the file. In the latter case the codec works on one part of a staging chunk
/// while other parts are being written to the file or read from it (`SlotIo::Cursor`). A
/// `StreamCodec` runs on the device, on the caller's stream, with scratch memory that is kept for
/// it (`DeviceScratch`), and a host function behind it only notes the result. If the host cannot
/// address device memory, other codecs work only in the staged tiers: each chunk holds a part of
/// the block, and a host function encodes or decodes it (`CodedParts`).
///
/// If the file's queue can access the device (`DeviceFileQueueApi`), blocks of `least_direct_bytes`
/// or more are transferred directly on the lane's stream, without chunks and copies, as long as no
/// write has failed. A slot that was staged once is always staged: its bytes may have been rescued
/// and are then not in the file.
///
/// Everything that may have been enqueued is added to a fence at once: to that of the chunk, to
/// `done` of the request, and from there to that of the slot. So a call that fails half-way has
/// accounted for all of its work.
///
/// Threads  thread-safe.
/// Streams  the device's copies run on the caller's stream, memory copies and file calls of the
///          slower tiers on the host in the order of a stream of this object, one for each
///          direction (`StagingLane::launch`).
/// Cost     two locks of the pool for each batch; allocates only while its lists grow.
template <DeviceApi Device, FileIoApi FileIo>
class HostTransfers {
  using Lane = StagingLane<Device>;
  using Io = SlotIo<FileIo>;
  using Job = typename Io::Job;

 public:
  using stream_type = typename Device::stream_type;

  /// The arguments are not owned and must outlive this object. `mutex` guards `ledger` and `io`.
  /// Without slower tiers no staging memory is reserved.
  ///
  /// @throws OutOfHostMemory where there is no pinned memory to stage through; DeviceError
  HostTransfers(Device& device,
                StreamOrder<Device>& order,
                std::mutex& mutex,
                HostLedger& ledger,
                Io& io,
                SlotCodecs& codecs,
                HostPoolOptions const& options,
                int numa_node);

  /// Enqueues the transfers in order. @throws as `HostSwapPool::write_all` and `read_all`
  void enqueue(SlotAccess access, std::span<TransferRequest> requests, stream_type stream);

  /// Reserves the device memory that a codec's transfers need. @throws OutOfDeviceMemory,
  /// DeviceError
  template <StreamCodec<Device> C>
  void reserve_scratch() {
    std::size_t const bytes = C::scratch_bytes(*device_);
    write_scratch_.reserve(bytes);
    read_scratch_.reserve(bytes);
  }

  /// Waits on the host until no host function runs and no chunk is in use in that direction.
  ///
  /// @throws DeviceError
  void drain_sync(SlotAccess access) {
    if (std::optional<Lane>& used = lane(access)) {
      used->drain_sync();
    }
  }

  /// How often a thread waited for a chunk that another one held.
  [[nodiscard]] std::uint64_t staging_waits() const {
    return (write_lane_ ? write_lane_->waits() : 0) + (read_lane_ ? read_lane_->waits() : 0);
  }

 private:
  struct Entry {
    HostSlot* slot = nullptr;
    Fence before;  // must pass before the slot is accessed
  };
  /// The lists of a batch; later batches reuse their memory.
  struct Lists {
    std::vector<Entry> entries;
    CopyBatch copies;
  };

  /// Transfers that are enqueued together. Their slots are in use from `begin` until the
  /// destructor.
  class Batch {
   public:
    Batch(HostTransfers& owner, SlotAccess access) : owner_{&owner}, access_{access} {}
    Batch(Batch const&) = delete;
    Batch& operator=(Batch const&) = delete;
    /// Ends the transfers: notes in each slot what is in the `done` of its request.
    ~Batch() {
      std::scoped_lock const lock{*owner_->mutex_};
      while (first_chunk_ != nullptr) {
        Job* job = std::exchange(first_chunk_, first_chunk_->next_chunk);
        while (job != nullptr) {
          owner_->io_->give_back(*std::exchange(job, job->next));
        }
      }
      if (coded_ != nullptr) {
        owner_->codecs_->give_back(*coded_);
      }
      for (std::size_t i = 0; i < entries().size(); ++i) {
        TransferRequest const& request = requests_[i];
        bool const is_enqueued = request.state == TransferState::enqueued;
        Fence const& done = request.done.host_done;
        bool const is_torn =
            request.state == TransferState::torn && (may_have_begun_ || !done.is_empty());
        entries()[i].slot->end_transfer(
            access_, done, is_enqueued || is_torn, is_enqueued ? request.bytes : 0);
        owner_->ledger_->trim(*entries()[i].slot);
      }
      lists_.entries.clear();
      lists_.copies.clear();
      if (owner_->idle_lists_.size() < max_idle_lists) {
        owner_->idle_lists_.push_back(std::move(lists_));
      }
    }

    /// Begins as many transfers from the front as can be enqueued together, at least one.
    ///
    /// @throws ContractViolation, FileTierError, std::bad_alloc; the destructor undoes the rest
    void begin(std::span<TransferRequest> candidates) {
      std::scoped_lock const lock{*owner_->mutex_};
      if (!owner_->idle_lists_.empty()) {
        lists_ = std::move(owner_->idle_lists_.back());
        owner_->idle_lists_.pop_back();
      }
      lists_.entries.reserve(candidates.size());
      requests_ = candidates;
      HostSlot& first = owner_->ledger_->at(candidates.front().slot, "HostSwapPool");
      owner_->io_->throw_if_failed(first);
      char const* const refusal = first.refusal(candidates.front().bytes, access_);
      expects(refusal == nullptr, refusal, {}, "HostSwapPool");
      add(first, candidates.front());
      for (TransferRequest const& request : candidates.subspan(1)) {
        HostSlot* const slot = owner_->ledger_->find(request.slot);
        if (!can_join(slot, request)) {
          break;  // if it must be refused, the batch that begins with it throws
        }
        add(*slot, request);
      }
    }

    [[nodiscard]] HostTier tier() const noexcept { return entries().front().slot->tier; }
    [[nodiscard]] std::span<TransferRequest> requests() const noexcept {
      return requests_.first(entries().size());
    }
    [[nodiscard]] std::vector<Entry> const& entries() const noexcept { return lists_.entries; }
    /// The copies of the whole batch in the pinned tier, those of the current chunk in a staged
    /// tier.
    [[nodiscard]] CopyBatch& copies() noexcept { return lists_.copies; }
    [[nodiscard]] CopyKind kind() const noexcept {
      return is_write() ? CopyKind::to_host : CopyKind::to_device;
    }
    [[nodiscard]] SlotAccess access() const noexcept { return access_; }
    [[nodiscard]] bool is_write() const noexcept { return access_ == SlotAccess::write; }

    /// Adds a copy between a piece's place on the host and the device.
    void add_copy(std::byte* host, std::byte* device, std::size_t bytes, bool may_join) {
      is_write() ? copies().add(host, device, bytes, may_join)
                 : copies().add(device, host, bytes, may_join);
    }
    /// Whether the batch is a single transfer through a codec.
    [[nodiscard]] bool is_coded() const noexcept { return entries().front().slot->has_codec(); }
    [[nodiscard]] SlotCodecs::Job* coded() const noexcept { return coded_; }
    /// The transfer belongs to an enqueued host function, which gives it back.
    void forget_coded() noexcept { coded_ = nullptr; }
    /// The jobs of the next chunk to be enqueued, or null; none in the pinned tier.
    [[nodiscard]] Job* first_chunk() const noexcept { return first_chunk_; }
    /// The jobs of the first chunk belong to an enqueued host function, which gives them back.
    void set_first_chunk(Job* next) noexcept { first_chunk_ = next; }

    /// Notes that part of a transfer that failed may have been enqueued.
    void note_begun() noexcept { may_have_begun_ = true; }

    void answer(TransferState state, Transfer const& done) noexcept {
      for (TransferRequest& request : requests()) {
        request.state = state;
        request.done = done;
      }
    }

   private:
    [[nodiscard]] bool can_join(HostSlot const* slot,
                                TransferRequest const& request) const noexcept {
      return slot != nullptr && !slot->failure && !slot->has_codec() && !is_coded() &&
             slot->refusal(request.bytes, access_) == nullptr && slot->tier == tier() &&
             owner_->is_direct(*slot) == owner_->is_direct(*entries().front().slot) &&
             (slot->tier == HostTier::pinned ||
              staged_bytes_ + slot->bytes <= owner_->chunk_bytes_);
    }

    /// @pre the lock is held, and there is room for an entry
    void add(HostSlot& slot, TransferRequest const& request) {
      std::byte* device = request.device;
      if (slot.has_codec()) {
        coded_ = &owner_->codecs_->take(slot, request, access_);
        device = nullptr;
      }
      std::size_t const plain_bytes = slot.has_codec() ? 0 : request.bytes;
      owner_->ledger_->for_each_piece(slot, plain_bytes, [&](HostPiece const& piece) {
        if (slot.tier == HostTier::pinned) {
          bool const may_join = request.reservation != 0 &&
                                request.reservation == last_reservation_ &&
                                piece.slab == last_slab_;
          add_copy(piece.memory, device, piece.bytes, may_join);
          last_reservation_ = request.reservation;
          last_slab_ = piece.slab;
        } else {
          add_jobs(slot, piece, device, request.reservation);
        }
        device += piece.bytes;
      });
      lists_.entries.push_back({&slot, slot.fence_before(access_)});
      slot.begin_transfer(access_);
    }

    /// Packs a piece into staging chunks. It is always cut at the same places, whatever else is in
    /// the batch, since `SlotIo` finds rescued bytes by the offset of their part of the piece.
    void add_jobs(HostSlot& slot, HostPiece piece, std::byte* device, std::size_t reservation) {
      std::size_t const granule = owner_->ledger_->granule(slot.tier);
      for (std::size_t left = piece.bytes; left > 0; left -= piece.bytes) {
        piece.bytes = std::min(left, owner_->chunk_bytes_);
        std::size_t const room = round_up(piece.bytes, granule);
        Job& job = owner_->io_->take(slot, access_);
        if (first_chunk_ == nullptr) {
          first_chunk_ = last_chunk_ = &job;
        } else if (filled_bytes_ + room > owner_->chunk_bytes_) {
          last_chunk_ = last_chunk_->next_chunk = &job;
          filled_bytes_ = 0;
        } else {
          last_job_->next = &job;
        }
        last_job_ = &job;
        job.piece = piece;
        job.chunk_offset = filled_bytes_;
        job.device = device;
        job.reservation = reservation;
        filled_bytes_ += room;
        staged_bytes_ += room;
        piece.memory = piece.memory == nullptr ? nullptr : piece.memory + piece.bytes;
        piece.file_offset += piece.bytes;
        device += piece.bytes;
      }
    }

    HostTransfers* owner_;
    SlotAccess access_;
    std::span<TransferRequest> requests_;
    Lists lists_;
    std::size_t last_reservation_ = 0;  // of the last copy in the pinned tier
    std::uint32_t last_slab_ = 0;
    std::size_t staged_bytes_ = 0;  // what all chunks of the batch hold
    std::size_t filled_bytes_ = 0;  // what the last of them holds
    Job* first_chunk_ = nullptr;    // the first job of each chunk, linked by `next_chunk`
    Job* last_chunk_ = nullptr;
    Job* last_job_ = nullptr;
    SlotCodecs::Job* coded_ = nullptr;
    bool may_have_begun_ = false;
  };

  // All transfers of a batch are done at one point. With 8 MiB the first waits at most 0.16 ms for
  // the last on a fast link. The fixed cost of a copy, 2 to 4 us on an H200, is small beside that.
  static constexpr std::size_t max_batch_bytes = 8_MiB;
  static constexpr std::size_t max_batch_requests = 512;
  // In a batch larger than this, no transfer waits for the fence of another one.
  static constexpr std::size_t max_waiting_bytes = 256_KiB;
  static constexpr std::size_t max_idle_lists = 8;
  // Smaller blocks are staged, since many of them share a chunk, and neighbours share a file call.
  static constexpr std::size_t least_direct_bytes = 256_KiB;

  /// How many of the transfers may be enqueued together, whatever tier they are in.
  [[nodiscard]] std::size_t batch_limit(std::span<TransferRequest const> requests,
                                        StreamIndex at) const {
    std::size_t bytes = 0;
    std::size_t count = 0;
    for (TransferRequest const& next :
         requests.first(std::min(requests.size(), max_batch_requests))) {
      bytes += next.bytes;
      if (bytes > max_batch_bytes ||
          (bytes > max_waiting_bytes && !order_->is_ordered(next.after, at))) {
        break;
      }
      ++count;
    }
    return std::max<std::size_t>(count, 1);
  }

  [[nodiscard]] std::optional<Lane>& lane(SlotAccess access) noexcept {
    return access == SlotAccess::write ? write_lane_ : read_lane_;
  }
  void enqueue_staged(Batch& batch, Transfer& done, stream_type stream, StreamIndex at);
  void enqueue_direct(Batch& batch, Transfer& done, stream_type stream, StreamIndex at);
  void finish_on_lane(Batch const& batch, Transfer& done, StreamIndex at);
  void enqueue_coded(Batch& batch, Transfer& done, stream_type stream, StreamIndex at);
  void enqueue_in_memory(SlotCodecs::Job& job, stream_type stream, StreamIndex at);
  void enqueue_by_parts(Batch& batch, Transfer& done, stream_type stream, StreamIndex at);

  /// Whether a batch goes through staging chunks, or at least through a lane's stream.
  [[nodiscard]] static bool is_staged(Batch const& batch) noexcept {
    bool const reads_device = AddressableApi<Device> && batch.is_coded();
    return batch.tier() == HostTier::file || (batch.tier() == HostTier::pageable && !reads_device);
  }

  /// Whether the bytes of a slot are transferred directly between the device and the file.
  [[nodiscard]] bool is_direct(HostSlot const& slot) const noexcept {
    return io_->is_direct_possible() && slot.tier == HostTier::file && !slot.has_codec() &&
           slot.bytes >= least_direct_bytes;
  }

  /// Host function for a slot with a codec in the file. `argument` is a job of `SlotCodecs`.
  static void run_in_file(void* argument) noexcept {
    auto& job = *static_cast<SlotCodecs::Job*>(argument);
    typename Io::Cursor slot{
        *static_cast<Io*>(job.io), *job.slot, job.slot_version, job.pieces, job.access, job.chunk};
    SlotCodecs::run(job, slot);
  }

  Device* device_;
  StreamOrder<Device>* order_;
  std::mutex* mutex_;
  HostLedger* ledger_;
  Io* io_;
  SlotCodecs* codecs_;
  CodedParts<FileIo> parts_;
  DeviceScratch<Device> write_scratch_;
  DeviceScratch<Device> read_scratch_;
  std::size_t chunk_bytes_;
  std::optional<Lane> write_lane_;
  std::optional<Lane> read_lane_;
  std::vector<Lists> idle_lists_;  // guarded by the mutex
};

/// Makes both lanes, with up to `staging_chunks` chunks, or as many as there is pinned memory for.
template <DeviceApi Device, FileIoApi FileIo>
HostTransfers<Device, FileIo>::HostTransfers(Device& device,
                                             StreamOrder<Device>& order,
                                             std::mutex& mutex,
                                             HostLedger& ledger,
                                             Io& io,
                                             SlotCodecs& codecs,
                                             HostPoolOptions const& options,
                                             int numa_node)
    : device_{&device},
      order_{&order},
      mutex_{&mutex},
      ledger_{&ledger},
      io_{&io},
      codecs_{&codecs},
      parts_{mutex, codecs, io},
      write_scratch_{device, order},
      read_scratch_{device, order},
      chunk_bytes_{Lane::chunk_bytes_for(options.staging_bytes)} {
  idle_lists_.reserve(max_idle_lists);
  bool const is_staged = options.pageable_bytes > 0 || options.file_bytes > 0;
  for (std::size_t chunks = options.staging_chunks; is_staged && !read_lane_; --chunks) {
    try {
      write_lane_.emplace(device, order, chunks, chunk_bytes_, numa_node);
      read_lane_.emplace(device, order, chunks, chunk_bytes_, numa_node);
    } catch (OutOfHostMemory const&) {
      write_lane_.reset();
      if (chunks == 1) {
        throw;
      }
    }
  }
  for (SlotAccess const access : {SlotAccess::write, SlotAccess::read}) {
    if (options.file_bytes > 0 && io.open_queue(access, lane(access)->memory())) {
      lane(access)->open_begin_stream();
    }
  }
  io.template open_direct<Device>();
}

template <DeviceApi Device, FileIoApi FileIo>
void HostTransfers<Device, FileIo>::enqueue(SlotAccess access,
                                            std::span<TransferRequest> requests,
                                            stream_type stream) {
  StreamIndex const at = order_->index_of(stream);
  for (TransferRequest& request : requests) {
    request.forget_answer();
  }
  while (!requests.empty()) {
    Batch batch{*this, access};
    batch.begin(requests.first(batch_limit(requests, at)));
    bool const has_chunks = is_staged(batch);
    StreamIndex const slot_stream = has_chunks ? lane(access)->index() : at;
    for (TransferRequest const& request : batch.requests()) {
      order_->wait(at, request.after);
    }
    for (Entry const& entry : batch.entries()) {
      order_->wait(slot_stream, entry.before);
      if (batch.tier() == HostTier::file && lane(access)->has_begin_stream()) {
        order_->wait(lane(access)->begin_index(), entry.before);
      }
    }
    Transfer done;
    try {
      if (batch.is_coded()) {
        enqueue_coded(batch, done, stream, at);
      } else if (is_direct(*batch.entries().front().slot)) {
        enqueue_direct(batch, done, stream, at);
      } else if (has_chunks) {
        enqueue_staged(batch, done, stream, at);
      } else {
        batch.copies().enqueue(*device_, batch.kind(), stream);
        done.device_done = done.host_done = order_->mark(at);
      }
    } catch (...) {
      done.device_done.add(order_->mark(at));
      if (!has_chunks && batch.copies().size() > 1) {  // some of them may have been enqueued
        done.host_done = done.device_done;
        batch.note_begun();
      }
      batch.answer(TransferState::torn, done);
      throw;
    }
    batch.answer(TransferState::enqueued, done);
    requests = requests.subspan(batch.requests().size());
  }
}

template <DeviceApi Device, FileIoApi FileIo>
void HostTransfers<Device, FileIo>::enqueue_coded(Batch& batch,
                                                  Transfer& done,
                                                  stream_type stream,
                                                  StreamIndex at) {
  if constexpr (!AddressableApi<Device>) {
    if (is_staged(batch)) {
      enqueue_by_parts(batch, done, stream, at);
      return;
    }
  }
  if (batch.tier() != HostTier::file) {
    try {
      enqueue_in_memory(*batch.coded(), stream, at);
    } catch (...) {
      if (SlotCodecs::calls_on_stream<Device>(*batch.coded()) != nullptr) {
        done.host_done = order_->mark(at);  // some of its work may have been enqueued
      }
      throw;
    }
    batch.forget_coded();
    done.device_done = done.host_done = order_->mark(at);
    return;
  }
  Lane& lane = *this->lane(batch.access());
  typename Lane::Chunk chunk{lane};
  batch.coded()->io = io_;
  batch.coded()->chunk = {chunk.data(), chunk_bytes_};
  order_->wait(lane.index(), order_->mark(at));
  order_->wait(lane.index(), chunk.fence());
  lane.launch(&HostTransfers::run_in_file, batch.coded());
  batch.forget_coded();
  chunk.fence() = order_->mark(lane.index());
  finish_on_lane(batch, done, at);
}

/// Ends a batch whose work on the lane's stream accesses device memory, so that the caller's stream
/// has to be ordered with it.
template <DeviceApi Device, FileIoApi FileIo>
void HostTransfers<Device, FileIo>::finish_on_lane(Batch const& batch,
                                                   Transfer& done,
                                                   StreamIndex at) {
  StreamIndex const on = lane(batch.access())->index();
  done.device_done = done.host_done = order_->mark(on);
  order_->record(on);
  if (!batch.is_write()) {  // later work on the caller's stream must find the bytes
    order_->wait(at, done.device_done);
    done.device_done = order_->mark(at);
  }
}

template <DeviceApi Device, FileIoApi FileIo>
void HostTransfers<Device, FileIo>::enqueue_direct([[maybe_unused]] Batch& batch,
                                                   [[maybe_unused]] Transfer& done,
                                                   [[maybe_unused]] stream_type stream,
                                                   [[maybe_unused]] StreamIndex at) {
  if constexpr (SwapFile<FileIo>::template may_reach<Device>) {
    Lane& lane = *this->lane(batch.access());
    order_->wait(lane.index(), order_->mark(at));
    while (Job* const first = batch.first_chunk()) {
      Job* const next = first->next_chunk;  // the host function may run at once and reuse the job
      done.host_done = order_->mark(lane.index());  // an attempt that fails may have written some
      if (!io_->try_enqueue_direct(*device_, *first, lane.stream())) {
        enqueue_staged(batch, done, stream, at);  // the direct attempt has left nothing in flight
        return;
      }
      batch.set_first_chunk(next);
      done.device_done = done.host_done = order_->mark(lane.index());
    }
    finish_on_lane(batch, done, at);
  }
}

template <DeviceApi Device, FileIoApi FileIo>
void HostTransfers<Device, FileIo>::enqueue_in_memory(SlotCodecs::Job& job,
                                                      stream_type stream,
                                                      StreamIndex at) {
  auto const* const on_stream = SlotCodecs::calls_on_stream<Device>(job);
  if (on_stream == nullptr) {
    device_->launch_host(stream, &SlotCodecs::run_in_memory, &job);
    return;
  }
  if (job.access == SlotAccess::write) {
    typename DeviceScratch<Device>::Use const scratch{write_scratch_, at};
    on_stream->encode(*device_, stream, {job.device, job.bytes}, job.memory, scratch.memory());
  } else {
    typename DeviceScratch<Device>::Use const scratch{read_scratch_, at};
    on_stream->decode(*device_, stream, job.memory, {job.device, job.bytes}, scratch.memory());
  }
  device_->launch_host(stream, &SlotCodecs::note_on_stream, &job);
}

template <DeviceApi Device, FileIoApi FileIo>
void HostTransfers<Device, FileIo>::enqueue_by_parts(Batch& batch,
                                                     Transfer& done,
                                                     stream_type stream,
                                                     StreamIndex at) {
  Lane& lane = *this->lane(batch.access());
  SlotCodecs::Job& job = *batch.coded();
  auto& transfer = parts_.take(job);  // owns the job from now on
  batch.forget_coded();
  try {
    for (std::size_t begin = 0; begin < job.bytes; begin += codecs_->part_bytes()) {
      typename Lane::Chunk chunk{lane};
      std::size_t const length = std::min(codecs_->part_bytes(), job.bytes - begin);
      auto& part = parts_.add(transfer, chunk.data(), length);
      try {
        if (batch.is_write()) {
          order_->wait(at, chunk.fence());
          device_->copy(chunk.data(), job.device + begin, length, batch.kind(), stream);
          done.device_done = chunk.fence() = order_->mark(at);
        }
        order_->wait(lane.index(), chunk.fence());
        lane.launch(&CodedParts<FileIo>::run, &part);
      } catch (...) {
        chunk.fence().add(order_->mark(at));  // the copy may have been enqueued
        parts_.cancel(part);
        throw;
      }
      done.host_done = chunk.fence() = order_->mark(lane.index());
      order_->record(lane.index());
      if (!batch.is_write()) {
        try {
          order_->wait(at, chunk.fence());
          device_->copy(job.device + begin, chunk.data(), length, batch.kind(), stream);
        } catch (...) {
          chunk.fence().add(order_->mark(at));
          throw;
        }
        done.device_done = chunk.fence() = order_->mark(at);
        order_->record(at);
      }
    }
  } catch (...) {
    parts_.close(transfer);
    throw;
  }
  parts_.close(transfer);
}

/// Enqueues a batch through staging chunks. An event is recorded for each chunk at once. If it were
/// recorded only when the chunk is needed again, it would cover all chunks enqueued since, and the
/// ring would stall.
template <DeviceApi Device, FileIoApi FileIo>
void HostTransfers<Device, FileIo>::enqueue_staged(Batch& batch,
                                                   Transfer& done,
                                                   stream_type stream,
                                                   StreamIndex at) {
  Lane& lane = *this->lane(batch.access());
  bool const begins = batch.tier() == HostTier::file && lane.has_begin_stream();
  while (Job* const first = batch.first_chunk()) {
    typename Lane::Chunk chunk{lane};
    batch.copies().clear();
    std::size_t reservation = 0;
    for (Job* job = first; job != nullptr; job = job->next) {
      job->chunk = chunk.data() + job->chunk_offset;
      bool const may_join = job->reservation != 0 && job->reservation == reservation;
      batch.add_copy(job->chunk, job->device, job->piece.bytes, may_join);
      reservation = job->reservation;
    }
    auto const copy = [&] {
      order_->wait(at, chunk.fence());
      batch.copies().enqueue(*device_, batch.kind(), stream);
      done.device_done = chunk.fence() = order_->mark(at);
    };
    auto const launch = [&] {
      order_->wait(lane.index(), chunk.fence());
      Job* const next = first->next_chunk;  // the host function may run at once and reuse the job
      if (begins) {
        order_->wait(lane.begin_index(), chunk.fence());
        io_->expect_begin(*first);
      }
      lane.launch(&Io::run, first);
      batch.set_first_chunk(next);
      done.host_done = chunk.fence() = order_->mark(lane.index());
      if (begins) {
        try {
          lane.launch_begin(&Io::begin, first);
        } catch (...) {
          io_->end_call(*first);
          throw;
        }
      }
    };
    try {
      if (batch.is_write()) {
        copy();
        launch();
        order_->record(lane.index());
      } else {
        launch();
        copy();
        order_->record(at);
      }
    } catch (...) {
      chunk.fence().add(order_->mark(at));  // some of the copies may have been enqueued
      throw;
    }
  }
}

}  // namespace spillway::detail
