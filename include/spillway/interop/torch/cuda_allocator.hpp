// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/types.hpp>
#include <spillway/device/cuda/cuda_context.hpp>
#include <spillway/interop/torch/cuda_history.hpp>
#include <spillway/interop/torch/private_pools.hpp>
#include <spillway/interop/torch/recipe_scratch.hpp>
#include <spillway/interop/torch/storage_leases.hpp>
#include <spillway/interop/torch/tensor_stats.hpp>
#include <spillway/observe/snapshot.hpp>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include <c10/core/Allocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>
#include <torch/csrc/cuda/CUDAPluggableAllocator.h>

// This header of PyTorch needs headers of CUDA libraries, which may not be installed.
#if __has_include(<cublasLt.h>) && __has_include(<cusolverDn.h>) && __has_include(<cusparse.h>)
#  include <ATen/cuda/CUDAContextLight.h>
#  define SPILLWAY_HAS_CUBLAS_WORKSPACES
#endif

namespace spillway::torch {

/// PyTorch's CUDA allocator (`c10::cuda::CUDACachingAllocator::CUDAAllocator`) over a
/// `StorageLeases`, for one device. Calls for other devices are passed to the allocator that
/// PyTorch had before.
///
/// Implements everything that PyTorch asks of its own allocator. Memory of private pools
/// (`torch.cuda.MemPool`, CUDA graphs) is never swapped out. Nor is memory that is shared with
/// other processes by CUDA IPC, which comes from that other allocator (`hand_over`).
///
/// `Site` is as for `StorageLeases`, and has
///
/// | expression               | must                                                            |
/// |--------------------------|-----------------------------------------------------------------|
/// | `Site::tensors()`        | this object; lives until the process ends                       |
/// | `Site::limit()`          | the bytes that tensors may take up                              |
/// | `Site::set_limit(bytes)` | change that                                                     |
/// | `Site::most_bytes()`     | the highest limit that can be set                               |
/// | `Site::total_bytes()`    | the bytes of the device                                         |
///
/// and its allocator's observer is a `TensorObserver`.
///
/// Threads  thread-safe.
/// Streams  as PyTorch's: memory belongs to the stream that was current when it was allocated.
///          Other streams reuse it after the work that was enqueued on that stream, and on those
///          that `recordStream` named, before it was freed.
template <class Site>
class CudaTensorAllocator final
    : public ::torch::cuda::CUDAPluggableAllocator::CUDAPluggableAllocator {
 public:
  using Base = ::torch::cuda::CUDAPluggableAllocator::CUDAPluggableAllocator;
  using Leases = StorageLeases<Site>;
  using Pools = PrivatePools<typename Leases::Allocator>;
  using DeviceIndex = c10::DeviceIndex;

  /// `memory` is the allocator that `Site::leases()` leases from; it is not owned and must outlive
  /// this object.
  explicit CudaTensorAllocator(typename Leases::Allocator& memory)
      : Base{[](std::size_t bytes, int, cudaStream_t stream) {
               return Site::tensors().raw_alloc_with_stream(bytes, stream);
             },
             [](void* p, std::size_t, int, cudaStream_t) { Site::tensors().raw_delete(p); }},
        others_{c10::cuda::CUDACachingAllocator::allocator.load()},
        owner_of_others_{::torch::cuda::CUDAPluggableAllocator::getCurrentAllocator()},
        pools_{memory,
               {[](std::size_t bytes, cudaStream_t stream) {
                  return Site::leases().allocate_fixed(bytes, stream);
                },
                [](void* p) { Site::leases().free_fixed(p); }}} {}

  // Memory

  c10::DataPtr allocate(std::size_t bytes) override {
    DeviceIndex const device = c10::cuda::current_device();
    if (is_other(device)) {
      return fixed(others_->raw_alloc(bytes), device);
    }
    if (Site::frames().recipe != nullptr) {
      return Site::leases().allocate(bytes);
    }
    cudaStream_t const stream = Site::current_stream();
    if (auto const pool = bytes == 0 ? std::nullopt : route(stream)) {
      return fixed(take_from(*pool, bytes, stream), device);
    }
    void* const p = bytes == 0 ? nullptr : take(bytes, stream);
    return {p, p, Leases::deleter(), Site::device()};
  }
  /// The deleter of memory that is never swapped out: of private pools and of other devices. It
  /// frees all other memory of this allocator, too.
  [[nodiscard]] c10::DeleterFnPtr raw_deleter() const override { return &free_any; }
  [[nodiscard]] void* raw_alloc(std::size_t bytes) override {
    return raw_alloc_with_stream(bytes, c10::cuda::getCurrentCUDAStream().stream());
  }
  [[nodiscard]] void* raw_alloc_with_stream(std::size_t bytes, cudaStream_t stream) override {
    if (is_other(c10::cuda::current_device())) {
      return others_->raw_alloc_with_stream(bytes, stream);
    }
    if (bytes == 0) {
      return nullptr;
    }
    if (Site::frames().recipe != nullptr) {
      return allocate_scratch(bytes, stream);
    }
    auto const pool = route(stream);
    return pool ? take_from(*pool, bytes, stream) : take(bytes, stream);
  }
  void raw_delete(void* p) override { Leases::deleter()(p); }
  /// Allocates memory that an operation needs beside its result while a recipe runs it. It counts
  /// against the same limit. Does not wait for other threads, since this thread holds what they may
  /// wait for.
  ///
  /// @throws OutOfDeviceMemory if there is no room; the recipe can then run later
  [[nodiscard]] void* allocate_scratch(std::size_t bytes, cudaStream_t stream) {
    return scratch_.allocate(Site::leases().memory(), bytes, stream);
  }
  /// Frees memory that `StorageLeases` does not know: memory of a private pool, of a recipe, or of
  /// another device. Warns if the address is none of these, for example since it was freed before.
  void free_foreign(void* p) {
    if (pools_.free(p) || scratch_.free(Site::leases().memory(), p)) {
      return;
    }
    try {
      others_->raw_delete(p);
    } catch (c10::Error const& error) {
      TORCH_WARN("spillway: memory at ",
                 p,
                 " was freed that is not allocated: ",
                 error.what_without_backtrace());
    }
  }

  /// @throws c10::NotImplementedError if the stream is of another device than the memory
  void recordStream(c10::DataPtr const& data, c10::cuda::CUDAStream stream) override {
    if (is_other(data.device().index())) {
      record_theirs(data, stream);
      return;
    }
    TORCH_CHECK_NOT_IMPLEMENTED(!is_other(stream.device_index()),
                                "spillway: memory of ",
                                Site::device(),
                                " cannot be recorded on a stream of ",
                                stream.device(),
                                ": let a stream of its own device wait for that one, and record it "
                                "there");
    if (data.get_context() == nullptr ||
        pools_.record_stream(data.get_context(), stream.stream()) ||
        (Site::is_capturing() && Site::is_capturing(stream.stream()))) {
      return;  // what a capture uses is never swapped out
    }
    if (data.get_deleter() == &free_handed_over) {
      record_theirs(data, stream);
    } else {
      Site::leases().record_stream(data, stream.stream());
    }
  }

  /// Releases free memory to the device, except for the free memory of private pools, which is
  /// released with a pool's last user. Releases nothing while allocations belong to a pool: a
  /// capture may be under way then, and the calling thread would wait for the device in the middle
  /// of it.
  void emptyCache(c10::MempoolId_t pool = {0, 0}) override {
    pools_.returns().retry();
    if (is_routing()) {
      return;
    }
    if (has_others_ || shares_) {
      others_->emptyCache(pool);
    }
    if (pool == c10::MempoolId_t{0, 0}) {
      (void)Site::leases().memory().trim_sync();
    }
  }
  /// Releases to the device the free memory that tensors had which were handed over.
  ///
  /// @returns the bytes
  [[nodiscard]] std::size_t empty_shared() {
    if (!shares_ || owner_of_others_ != nullptr || is_routing()) {
      return 0;  // only of PyTorch's own allocator is it known that it keeps free memory
    }
    auto const reserved = [this] {
      return others_->getDeviceStats(Site::device().index()).reserved_bytes[0].current;
    };
    auto const before = reserved();
    others_->emptyCache();
    return static_cast<std::size_t>(std::max<std::int64_t>(before - reserved(), 0));
  }
  /// Reports the largest piece that can be allocated without swapping anything out.
  void cacheInfo(DeviceIndex device, std::size_t* largest) override {
    if (is_other(device)) {
      others_->cacheInfo(device, largest);
      return;
    }
    *largest = std::max(*largest, Site::leases().memory().largest_block_bytes());
  }
  /// Returns the begin of the reservation that contains an address.
  [[nodiscard]] void* getBaseAllocation(void* p, std::size_t* size) override;

  // The device

  void init(int device_count) override {
    others_->init(device_count);
    has_others_ = device_count > 1;
    initialized_ = true;
  }
  [[nodiscard]] bool initialized() override { return initialized_; }
  [[nodiscard]] double getMemoryFraction(DeviceIndex device) override {
    if (is_other(device)) {
      return others_->getMemoryFraction(device);
    }
    return static_cast<double>(Site::limit()) / static_cast<double>(Site::total_bytes());
  }
  /// Sets the limit to a fraction of the device's memory, but to no more than `Site::most_bytes()`.
  void setMemoryFraction(double fraction, DeviceIndex device) override {
    if (is_other(device)) {
      others_->setMemoryFraction(fraction, device);
      return;
    }
    TORCH_CHECK_VALUE(
        fraction > 0 && fraction <= 1,
        "set_per_process_memory_fraction: the fraction has to be above 0 and at most 1, and is ",
        fraction);
    auto const wanted =
        static_cast<std::size_t>(fraction * static_cast<double>(Site::total_bytes()));
    Site::set_limit(std::clamp<std::size_t>(wanted, 1, Site::most_bytes()));
  }
  [[nodiscard]] std::vector<c10::cuda::CUDACachingAllocator::StreamSegmentSize>
  getExpandableSegmentSizes(DeviceIndex device) override {
    if (is_other(device)) {
      return others_->getExpandableSegmentSizes(device);
    }
    return {};  // there are no expandable segments
  }
  [[nodiscard]] std::string name() override { return "spillway"; }

  // Statistics and history

  [[nodiscard]] c10::CachingDeviceAllocator::DeviceStats
  getDeviceStats(DeviceIndex device) override;
  void resetAccumulatedStats(DeviceIndex device) override {
    if (is_other(device)) {
      others_->resetAccumulatedStats(device);
      return;
    }
    watch().reset_accumulated();
  }
  void resetPeakStats(DeviceIndex device) override {
    if (is_other(device)) {
      others_->resetPeakStats(device);
      return;
    }
    watch().reset_peak();
    Site::leases().memory().reset_peak_stats();
  }
  [[nodiscard]] c10::cuda::CUDACachingAllocator::SnapshotInfo
  snapshot(c10::MempoolId_t pool = {0, 0}, bool include_traces = true) override;
  void recordHistory(bool enabled,
                     c10::cuda::CUDACachingAllocator::CreateContextFn gather,
                     std::size_t most_entries,
                     c10::cuda::CUDACachingAllocator::RecordContext when,
                     bool clears,
                     std::vector<std::string> const& skip_actions) override {
    if (has_others_) {
      others_->recordHistory(enabled, gather, most_entries, when, clears, skip_actions);
    }
    history_.record(watch(), enabled, gather, most_entries, when, clears);
  }
  [[nodiscard]] bool isHistoryEnabled() override { return watch().is_recording(); }
  void attachOutOfMemoryObserver(
      c10::cuda::CUDACachingAllocator::OutOfMemoryObserver observer) override {
    if (has_others_) {
      others_->attachOutOfMemoryObserver(observer);
    }
    history_.attach(std::move(observer));
  }
  void attachAllocatorTraceTracker(
      c10::cuda::CUDACachingAllocator::AllocatorTraceTracker tracker) override {
    if (has_others_) {
      others_->attachAllocatorTraceTracker(tracker);
    }
    history_.attach(watch(), std::move(tracker), Site::device().index());
  }
  /// The bytes of the workspaces that PyTorch keeps for cuBLAS, one for each handle and stream of a
  /// thread; 0 if the module was compiled without cuBLAS' headers.
  [[nodiscard]] std::size_t workspace_bytes() const;
  // The following functions are called by the site.

  /// Locks everything that no call of `StorageLeases` locks, for a thread that forks. It must not
  /// wait, since other threads may hold one of these locks while they wait for one that it has.
  ///
  /// @returns false if that is impossible just now
  [[nodiscard]] bool try_lock_for_fork() {
    return std::try_lock(pools_, pools_.returns(), scratch_, history_, watch()) == -1;
  }
  void unlock_after_fork() noexcept {
    watch().unlock();
    history_.unlock();
    scratch_.unlock();
    pools_.returns().unlock();
    pools_.unlock();
  }

  /// Calls `give_back` once `Site::uncaptured_stream()`, from which captures get memory, runs after
  /// the work of all streams. Memory that is freed on it then is reused only after all launches of
  /// graphs.
  void give_back_after_launches(std::function<void()> give_back) {
    pools_.returns().add({Site::uncaptured_stream(), std::nullopt, std::move(give_back)});
  }
  void on_allocated(std::size_t bytes, BlockId block) noexcept {
    watch().on_requested(bytes);
    history_.on_allocated(block);
  }
  void on_freed(std::size_t bytes, BlockId block) noexcept {
    watch().on_request_freed(bytes);
    history_.on_freed(block);
  }
  void on_out_of_memory(std::size_t bytes) {
    watch().on_out_of_memory();
    Stats const now = Site::leases().memory().stats();
    c10::reportOutOfMemoryToProfiler(static_cast<std::int64_t>(bytes),
                                     now.allocated.bytes.current,
                                     now.reserved_bytes,
                                     Site::device());
    history_.on_out_of_memory(Site::device().index(),
                              bytes,
                              Site::total_bytes(),
                              Site::leases().memory().device().memory_info().free_bytes);
  }

  // Private pools

  void createOrIncrefPool(
      DeviceIndex device,
      c10::MempoolId_t pool,
      std::shared_ptr<c10::cuda::CUDACachingAllocator::CUDAAllocator> own = nullptr) override;
  void releasePool(DeviceIndex device, c10::MempoolId_t pool) override {
    if (is_other(device)) {
      others_->releasePool(device, pool);
      return;
    }
    rethrow_as_torch([&] { pools_.release(pool); });
  }
  [[nodiscard]] int getPoolUseCount(DeviceIndex device, c10::MempoolId_t pool) override {
    return is_other(device) ? others_->getPoolUseCount(device, pool) : pools_.use_count(pool);
  }
  /// Called before a capture begins, and when a program wants its allocations in a pool of their
  /// own.
  void beginAllocateToPool(DeviceIndex device,
                           c10::MempoolId_t pool,
                           std::function<bool(cudaStream_t)> filter) override {
    if constexpr (!marks_captures<Base>) {
      Site::leases().keep_for_capture(Site::frames());
    }
    if (is_other(device)) {
      others_->beginAllocateToPool(device, pool, std::move(filter));
      ++other_routes_;
      return;
    }
    // Free memory that a stream of the capture has used is to be reused during the capture.
    Site::leases().memory().prepare_capture();
    pools_.begin(pool, std::move(filter));
  }
  /// @stream waits on the host for memory that was allocated and swapped in during a capture
  void endAllocateToPool(DeviceIndex device, c10::MempoolId_t pool) override {
    if (is_other(device)) {
      --other_routes_;
      others_->endAllocateToPool(device, pool);
      return;
    }
    rethrow_as_torch([&] { pools_.end(pool); });
    Site::leases().memory().device().synchronize(Site::uncaptured_stream());
    pools_.returns().retry();
    if (Site::leases().is_under_pressure()) {  // what could not be given up during the capture
      (void)Site::leases().start_reclaim();
    }
  }
  void setUseOnOOM(DeviceIndex device, c10::MempoolId_t pool, bool lends) override {
    if (is_other(device)) {
      others_->setUseOnOOM(device, pool, lends);
      return;
    }
    pools_.set_lends(pool, lends);
  }
  void setNoSplit(DeviceIndex device, c10::MempoolId_t pool) override {
    if (is_other(device)) {
      others_->setNoSplit(device, pool);
    }
  }
  [[nodiscard]] bool checkPoolLiveAllocations(DeviceIndex device,
                                              c10::MempoolId_t pool,
                                              std::unordered_set<void*> const& expected) override {
    return is_other(device) ? others_->checkPoolLiveAllocations(device, pool, expected)
                            : pools_.has_exactly(pool, expected);
  }
  /// Returns which memory of a pool is allocated. CUDA graph trees
  /// (`torch.compile(mode="reduce-overhead")`) note that after each graph.
  [[nodiscard]] std::shared_ptr<c10::cuda::CUDACachingAllocator::AllocatorState>
  getCheckpointState(DeviceIndex device, c10::MempoolId_t pool) override {
    if (is_other(device)) {
      return others_->getCheckpointState(device, pool);
    }
    auto now = std::make_shared<Checkpoint>();
    now->pool = pools_.checkpoint(pool);
    return now;
  }
  /// Changes what is allocated in a pool to what was allocated when the state was taken. The caller
  /// takes the deleters away from the tensors whose memory is then free, and gives the new ones to
  /// tensors.
  [[nodiscard]] c10::cuda::CUDACachingAllocator::CheckpointDelta setCheckpointPoolState(
      DeviceIndex device,
      std::shared_ptr<c10::cuda::CUDACachingAllocator::AllocatorState> state) override;
  /// Whether allocations may belong to a pool, so that a capture may be under way.
  [[nodiscard]] bool is_routing() const noexcept {
    return pools_.is_routing() || other_routes_.load(std::memory_order_relaxed) != 0;
  }
  /// Override functions that newer versions of PyTorch have and call when a capture begins and
  /// ends.
  void markCaptureBegin(DeviceIndex device) {
    Site::leases().keep_for_capture(Site::frames());
    if (is_other(device)) {
      mark_capture(*others_, device, true);
    }
  }
  void markCaptureEnd(DeviceIndex device) {
    if (is_other(device)) {
      mark_capture(*others_, device, false);
    }
  }

  // Copies between devices

  /// Lets a device access the memory of another one.
  void enablePeerAccess(DeviceIndex from, DeviceIndex to) override {
    others_->enablePeerAccess(from, to);
    if (!is_other(to)) {
      Site::leases().memory().device().allow_access(from);
      peers_ |= bit_of(from);
    }
  }
  cudaError_t memcpyAsync(void* to,
                          int to_device,
                          void const* from,
                          int from_device,
                          std::size_t bytes,
                          cudaStream_t stream,
                          bool has_peer_access) override {
    // Without access of one device to the other, `cudaMemcpyAsync` refuses virtual memory. PyTorch
    // believes in access that `enablePeerAccess` has failed to give.
    bool const has_access = has_peer_access && (is_other(static_cast<DeviceIndex>(to_device)) ||
                                                (peers_ & bit_of(from_device)) != 0);
    return has_access || to_device == from_device
               ? cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream)
               : cudaMemcpyPeerAsync(to, to_device, from, from_device, bytes, stream);
  }

  // Sharing with other processes (CUDA IPC)

  /// Moves a storage to memory of the allocator that PyTorch had before, on the same device. It
  /// stays there and no longer counts toward the limit. Other processes can share it. Does nothing
  /// if its memory is not this allocator's.
  ///
  /// @pre    the calling thread does not hold the interpreter's lock
  /// @throws c10::NotImplementedError if the storage cannot move; as that allocator
  /// @stream waits on the host for other threads and communications that use the storage, and for
  ///         the work of all streams that have used memory of this allocator
  void hand_over(c10::StorageImpl& storage) {
    // Two threads that hand over the same storage would each wait for the other one's pin.
    std::scoped_lock const one_at_a_time{handing_over_};
    if (!Leases::is_ours(storage)) {
      return;
    }
    auto& frames = Site::frames();
    TORCH_CHECK_NOT_IMPLEMENTED(!Site::leases().has_pinned(frames, storage),
                                cannot_move,
                                "this thread is inside of a hold or an operation that uses it. ",
                                share_a_copy);
    typename Site::State::Hook::Frame frame;
    frame.enter_named({{&storage, nullptr, {/*keeps=*/false, /*writes=*/true}}});
    auto const check_is_free = [&] {
      TORCH_CHECK_NOT_IMPLEMENTED(!Site::leases().view(storage).is_kept,
                                  cannot_move,
                                  "its address is known outside of operations (data_ptr, DLPack, a "
                                  "captured graph). ",
                                  share_a_copy);
    };
    check_is_free();
    c10::cuda::CUDAGuard const device{Site::device()};
    // The allocation and the wait below would break a capture of another thread.
    spillway::detail::CudaCaptureBystander const bystander;
    std::size_t const bytes = storage.nbytes();
    shares_ = true;
    c10::DataPtr theirs = fixed(others_->raw_alloc(bytes), Site::device().index());
    void* const to = theirs.get();
    auto moved = std::make_unique<HandedOver>(HandedOver{std::move(theirs), {}});
    HandedOver& both = *moved;
    c10::DataPtr memory{to, moved.release(), &free_handed_over, Site::device()};
    bool const is_moved =
        Site::leases().try_exchange(frames, storage, memory, [&](void const* from) {
          cudaStream_t const stream = Site::current_stream();
          Site::leases().memory().order_after_all(stream);
          C10_CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream));
          c10::cuda::stream_synchronize(stream);
        });
    if (!is_moved) {
      check_is_free();
    }
    TORCH_CHECK_NOT_IMPLEMENTED(is_moved,
                                cannot_move,
                                "another thread or a communication still uses it (a hold, "
                                "all_reduce). Share it when that has ended. ",
                                share_a_copy);
    if (!Site::enrols(bytes)) {
      both.before = std::move(memory);
    }
  }
  [[nodiscard]] c10::cuda::CUDACachingAllocator::ShareableHandle shareIpcHandle(void* p) override {
    TORCH_CHECK_NOT_IMPLEMENTED(
        !base_of(p),
        "spillway: memory at ",
        p,
        " cannot be shared with other processes by CUDA IPC, since it may be swapped out, or is of "
        "a private pool or a graph. Share a copy: tensor.clone()");
    return others_->shareIpcHandle(p);
  }
  [[nodiscard]] std::shared_ptr<void> getIpcDevPtr(std::string handle) override {
    return others_->getIpcDevPtr(std::move(handle));
  }

 private:
  using Other = c10::cuda::CUDACachingAllocator::CUDAAllocator;

  template <class Allocator>
  static constexpr bool marks_captures = requires(Allocator& allocator, DeviceIndex device) {
    allocator.markCaptureBegin(device);
  };
  template <class Allocator>
  static void mark_capture(Allocator& allocator, DeviceIndex device, bool begins) {
    if constexpr (marks_captures<Allocator>) {
      begins ? allocator.markCaptureBegin(device) : allocator.markCaptureEnd(device);
    }
  }

  struct Checkpoint final : c10::cuda::CUDACachingAllocator::AllocatorState {
    typename Pools::Checkpoint pool;
  };

  [[nodiscard]] static std::uint64_t bit_of(int device) noexcept {
    return std::uint64_t{1} << (static_cast<unsigned>(device) % 64);
  }
  [[nodiscard]] static bool is_other(DeviceIndex device) noexcept {
    return device != Site::device().index();
  }
  template <class Act>
  static void rethrow_as_torch(Act act) {
    try {
      act();
    } catch (ContractViolation const& error) {
      TORCH_CHECK(false, "spillway: ", error.what());
    }
  }
  /// Returns the address and the bytes of the reservation that contains an address.
  [[nodiscard]] static std::optional<std::pair<void*, std::size_t>> base_of(void* p) {
    auto const wanted = reinterpret_cast<std::uintptr_t>(p);
    for (auto const& segment : spillway::snapshot(Site::leases().memory()).segments) {
      if (wanted - segment.address < segment.size_bytes) {
        return std::pair{reinterpret_cast<void*>(segment.address), segment.size_bytes};
      }
    }
    return std::nullopt;
  }
  [[nodiscard]] static TensorObserver& watch() { return Site::leases().memory().observer(); }

  static constexpr char const* cannot_move =
      "spillway: a tensor can be shared with other processes by CUDA IPC only if it can move to "
      "other memory. This one cannot, since ";
  static constexpr char const* share_a_copy = "Share a copy: tensor.clone()";

  /// The context of memory that was handed over. An operation that does not pin memory below the
  /// least size may still use the memory that the storage had before.
  struct HandedOver {
    c10::DataPtr now;
    c10::DataPtr before;
  };
  static void free_handed_over(void* context) { delete static_cast<HandedOver*>(context); }

  void record_theirs(c10::DataPtr const& data, c10::cuda::CUDAStream stream) {
    if (data.get_deleter() != &free_any && data.get_deleter() != &free_handed_over) {
      others_->recordStream(data, stream);  // it knows what it has not allocated
      return;
    }
    // That allocator ignores memory that has another deleter than its own. It throws if the memory
    // is not its own, and must not be asked to free it then.
    c10::DataPtr theirs{data.get(), data.get(), others_->raw_deleter(), data.device()};
    try {
      others_->recordStream(theirs, stream);
    } catch (...) {
      (void)theirs.release_context();
      throw;
    }
    (void)theirs.release_context();
  }
  static void free_any(void* p) { Leases::deleter()(p); }
  [[nodiscard]] static c10::DataPtr fixed(void* p, DeviceIndex device) {
    return {p, p, &free_any, {c10::DeviceType::CUDA, device}};
  }
  [[nodiscard]] std::optional<PoolId> route(cudaStream_t stream) const {
    return pools_.is_routing() ? pools_.route(stream) : std::nullopt;
  }
  [[nodiscard]] void* take_from(PoolId pool, std::size_t bytes, cudaStream_t stream) {
    return pools_.allocate(
        pool, bytes, stream, Site::is_capturing(stream) ? Site::uncaptured_stream() : stream);
  }
  [[nodiscard]] void* take(std::size_t bytes, cudaStream_t stream) {
    return Site::leases().allocate_raw(bytes, stream, [this] {
      std::size_t const lent = pools_.lend();
      return lent + empty_shared() != 0;
    });
  }

  Other* others_;
  std::shared_ptr<Other> owner_of_others_;  // null if it is PyTorch's
  bool has_others_ = false;
  std::mutex handing_over_;              // held while a storage is handed over
  std::atomic<bool> shares_{false};      // whether a storage was handed over
  std::atomic<int> other_routes_{0};     // allocations to pools of other devices that have begun
  std::atomic<std::uint64_t> peers_{0};  // a bit for each device that may access this one
  Pools pools_;
  RecipeScratch<typename Leases::Allocator> scratch_;
  CudaHistory history_;
};

template <class Site>
void* CudaTensorAllocator<Site>::getBaseAllocation(void* p, std::size_t* size) {
  auto const base = base_of(p);
  if (!base) {
    return others_->getBaseAllocation(p, size);
  }
  if (size != nullptr) {
    *size = base->second;
  }
  return base->first;
}

template <class Site>
c10::CachingDeviceAllocator::DeviceStats
CudaTensorAllocator<Site>::getDeviceStats(DeviceIndex device) {
  if (is_other(device)) {
    return others_->getDeviceStats(device);
  }
  std::size_t free_ranges = 0;
  Site::leases().memory().for_each_range(
      [&](RangeView const& range) { free_ranges += range.state == RangeState::free ? 1U : 0U; });
  auto stats = as_torch::device_stats(watch().stats(free_ranges));
  for (PoolId const& id : pools_.ids()) {
    as_torch::add_private_pool(stats, id, pools_.reserved_bytes(id));
  }
  return stats;
}

template <class Site>
std::size_t CudaTensorAllocator<Site>::workspace_bytes() const {
  std::size_t bytes = 0;
#if defined(SPILLWAY_HAS_CUBLAS_WORKSPACES)
  auto const sum = [&bytes](auto const& workspaces) {
    for (auto const& entry : workspaces) {  // by handle and stream
      auto const& workspace = entry.second;
      if constexpr (requires { workspace.first.get(); }) {
        bytes += Site::leases().raw_bytes(workspace.first.get());
      } else {
        bytes += Site::leases().raw_bytes(workspace.get());
      }
    }
  };
  auto const add = [&sum](auto& workspaces) {
    if constexpr (requires { workspaces.mutex; }) {
      std::shared_lock const lock{workspaces.mutex};
      sum(workspaces.map);
    } else {
      sum(workspaces);
    }
  };
  add(at::cuda::cublas_handle_stream_to_workspace());
  add(at::cuda::cublaslt_handle_stream_to_workspace());
#endif
  return bytes;
}

template <class Site>
c10::cuda::CUDACachingAllocator::SnapshotInfo
CudaTensorAllocator<Site>::snapshot(c10::MempoolId_t pool, bool include_traces) {
  c10::cuda::CUDACachingAllocator::SnapshotInfo info{};
  DeviceIndex const device = Site::device().index();
  if (has_others_) {
    info = others_->snapshot(pool, include_traces);
  }
  auto const place = static_cast<std::size_t>(device);
  info.device_traces.resize(std::max(info.device_traces.size(), place + 1));
  if (pool != c10::MempoolId_t{0, 0}) {
    for (auto const& piece : pools_.pieces(pool)) {
      info.segments.push_back(as_torch::pool_segment(piece, device, piece.bytes));
    }
    return info;
  }
  auto& memory = Site::leases().memory();
  std::vector<Record> const records = include_traces ? watch().history() : std::vector<Record>{};
  MemorySnapshot const now = spillway::snapshot(memory, records);
  std::unordered_map<std::uintptr_t, typename Pools::Piece> pieces;
  for (PoolId const& id : pools_.ids()) {
    for (auto& piece : pools_.pieces(id)) {
      pieces.emplace(reinterpret_cast<std::uintptr_t>(piece.address), std::move(piece));
    }
  }
  for (MemorySnapshot::Segment const& segment : now.segments) {
    as_torch::add_segments(segment, pieces, device, history_.contexts(), info.segments);
  }
  if (include_traces) {
    info.device_traces[place] =
        as_torch::trace(now, CudaHistory::epoch_ns(now.time_ns), history_.contexts());
  }
  return info;
}

/// @param own  the allocator that the pool's memory comes from, as in
///             `torch.cuda.MemPool(allocator)`; null: the usual one
template <class Site>
void CudaTensorAllocator<Site>::createOrIncrefPool(
    DeviceIndex device,
    c10::MempoolId_t pool,
    std::shared_ptr<c10::cuda::CUDACachingAllocator::CUDAAllocator> own) {
  if (is_other(device)) {
    others_->createOrIncrefPool(device, pool, std::move(own));
    return;
  }
  if (own == nullptr) {
    pools_.retain(pool);
    return;
  }
  auto const take = [own](std::size_t bytes, cudaStream_t stream) {
    void* const p = own->raw_alloc_with_stream(bytes, stream);
    if (p == nullptr && bytes != 0) {
      (void)cudaGetLastError();  // a failed `cudaMalloc` must not look like a later call's error
      TORCH_CHECK_WITH(OutOfMemoryError,
                       false,
                       out_of_memory(Site::device()),
                       "The allocator of a memory pool has no room for ",
                       bytes,
                       " bytes.");
    }
    return p;
  };
  pools_.retain(pool, typename Pools::Source{take, [own](void* p) { own->raw_delete(p); }});
}

template <class Site>
c10::cuda::CUDACachingAllocator::CheckpointDelta CudaTensorAllocator<Site>::setCheckpointPoolState(
    DeviceIndex device, std::shared_ptr<c10::cuda::CUDACachingAllocator::AllocatorState> state) {
  if (is_other(device)) {
    auto delta = others_->setCheckpointPoolState(device, std::move(state));
    for (c10::DataPtr& data : delta.dataptrs_allocd) {
      data = fixed(data.release_context(), device);
    }
    return delta;
  }
  auto const* const checkpoint = dynamic_cast<Checkpoint const*>(state.get());
  TORCH_CHECK_VALUE(checkpoint != nullptr, "spillway: this state is not one of this allocator");
  c10::cuda::CUDACachingAllocator::CheckpointDelta delta;
  rethrow_as_torch(
      [&] { delta.ptrs_freed = pools_.restore(checkpoint->pool, Site::current_stream()); });
  for (auto const& live : checkpoint->pool.live) {
    delta.dataptrs_allocd.push_back(fixed(live.address, device));
  }
  return delta;
}

}  // namespace spillway::torch
