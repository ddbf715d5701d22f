// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/owned_thread.hpp>
#include <spillway/core/types.hpp>
#include <spillway/device/cuda/cuda_context.hpp>

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <system_error>

namespace spillway::detail {

/// Calls functions that may take long, such as file calls, in the order of a stream but on a thread
/// of its own. CUDA may run the host functions of all streams on one thread, so a file call in a
/// host function would block other streams.
///
/// `launch` enqueues two things: a host function that only wakes the worker's thread, and a wait of
/// the stream for a word of pinned memory, which the thread writes when the function has returned.
/// If the driver has no such waits, or all words are in use, the function runs as a host function
/// instead.
///
/// CUDA does not know what such a wait depends on, so it must not depend on work that CUDA may
/// queue behind it. This one depends only on the worker's thread, which needs no device, and which
/// the same stream has woken before.
///
/// Threads  thread-safe.
/// Streams  belongs to the stream that it is made for.
class CudaHostWorker {
 public:
  /// `context` is not owned and must outlive this object, and so must `stream`.
  /// @throws CudaError
  CudaHostWorker(CudaContext const& context, cudaStream_t stream)
      : context_{&context}, stream_{stream} {
    constexpr unsigned cuda_11_7 = 11070;
    wait_ = try_cuda_entry_point<PFN_cuStreamWaitValue32_v11070>("cuStreamWaitValue32", cuda_11_7);
    has_waits_ = wait_ != nullptr && try_make_words();
    if (has_waits_) {
      try {
        thread_.start([this] { serve(); });
      } catch (std::system_error const&) {
        has_waits_ = false;
      }
    }
  }
  CudaHostWorker(CudaHostWorker const&) = delete;
  CudaHostWorker& operator=(CudaHostWorker const&) = delete;
  /// Everything launched must have run before, or never run because the device has failed.
  ~CudaHostWorker() {
    thread_.end(mutex_);
    if (words_ != nullptr) {
      CudaScope const scope{*context_, std::nothrow};
      CudaCaptureBystander const bystander;
      cuda_forgive(cudaFreeHost(words_));
    }
  }

  /// Enqueues a call of `function(argument)`, for which later work on the stream waits. It is not
  /// called if the device has failed by then.
  ///
  /// @throws CudaError; the function is not called then
  void launch(HostFunction function, void* argument) {
    CudaScope const scope{*context_};
    Job* const job =
        has_waits_.load(std::memory_order_relaxed) ? take(function, argument) : nullptr;
    if (job != nullptr) {
      if (cudaError_t const status = cudaLaunchHostFunc(stream_, &wake, job);
          status != cudaSuccess) {
        give_back(*job);
        cuda_check(status);
      }
      auto const word = static_cast<CUdeviceptr>(reinterpret_cast<std::uintptr_t>(job->word));
      CUresult const result = wait_(stream_, word, job->number, CU_STREAM_WAIT_VALUE_GEQ);
      decide(*job, result == CUDA_SUCCESS);
      if (result != CUDA_ERROR_NOT_SUPPORTED) {
        cuda_driver_check(result);
        return;
      }
      has_waits_.store(false, std::memory_order_relaxed);
    }
    cuda_check(cudaLaunchHostFunc(stream_, function, argument));
  }

 private:
  /// Whether a job may run is known only after `launch` has enqueued the stream's wait for it. The
  /// stream may have reached the job by then or not.
  enum class State : std::uint8_t { undecided, due, cancelled };
  struct Job {
    CudaHostWorker* owner = nullptr;
    HostFunction function = nullptr;
    void* argument = nullptr;
    std::uint32_t* word = nullptr;
    std::uint32_t number = 0;  // value to which the word is set; grows with each use of the job
    State state = State::undecided;
    bool is_reached = false;  // whether the stream has reached it
    Job* next = nullptr;      // in the list of idle jobs, or of jobs that are ready to run
  };

  static constexpr std::size_t max_jobs = 256;

  [[nodiscard]] bool try_make_words() {
    CudaScope const scope{*context_};
    CudaCaptureBystander const bystander;
    void* memory = nullptr;
    // Allocated and not registered, since registered memory may have another address on the device.
    cudaError_t const status =
        cudaHostAlloc(&memory, max_jobs * sizeof(std::uint32_t), cudaHostAllocPortable);
    cuda_forgive(status);
    if (status != cudaSuccess) {
      return false;
    }
    words_ = static_cast<std::uint32_t*>(memory);
    for (std::size_t i = 0; i < max_jobs; ++i) {
      words_[i] = 0;
      jobs_[i].owner = this;
      jobs_[i].word = words_ + i;
      jobs_[i].next = i + 1 < max_jobs ? &jobs_[i + 1] : nullptr;
    }
    idle_ = jobs_.data();
    return true;
  }

  /// Returns null if all jobs are in use.
  [[nodiscard]] Job* take(HostFunction function, void* argument) {
    std::scoped_lock const lock{mutex_};
    Job* const job = idle_;
    if (job != nullptr) {
      idle_ = job->next;
      job->function = function;
      job->argument = argument;
      ++job->number;
      job->state = State::undecided;
      job->is_reached = false;
    }
    return job;
  }
  void give_back(Job& job) noexcept {
    std::scoped_lock const lock{mutex_};
    make_idle(job);
  }
  void make_idle(Job& job) noexcept {
    job.next = idle_;
    idle_ = &job;
  }

  void decide(Job& job, bool is_due) noexcept {
    std::scoped_lock const lock{mutex_};
    job.state = is_due ? State::due : State::cancelled;
    if (job.is_reached) {
      begin(job);
    }
  }
  /// The host function that a stream calls.
  static void wake(void* argument) noexcept {
    auto& job = *static_cast<Job*>(argument);
    std::scoped_lock const lock{job.owner->mutex_};
    job.is_reached = true;
    if (job.state != State::undecided) {
      job.owner->begin(job);
    }
  }
  /// @pre the lock is held, the stream has reached the job, and the state is not `undecided`
  void begin(Job& job) noexcept {
    if (job.state == State::cancelled) {
      make_idle(job);
      return;
    }
    job.next = nullptr;
    (last_ready_ == nullptr ? first_ready_ : last_ready_->next) = &job;
    last_ready_ = &job;
    thread_.changed().notify_one();
  }

  void serve() noexcept {
    std::unique_lock lock{mutex_};
    for (;;) {
      thread_.changed().wait(lock,
                             [this] { return first_ready_ != nullptr || thread_.is_ending(); });
      if (first_ready_ == nullptr) {
        return;
      }
      Job& job = *first_ready_;
      first_ready_ = job.next;
      last_ready_ = first_ready_ == nullptr ? nullptr : last_ready_;
      lock.unlock();
      job.function(job.argument);
      // From here on the stream may continue. If it looks at the word only after a later use has
      // set a higher number, the comparison (>=) is still true.
      std::atomic_ref<std::uint32_t>{*job.word}.store(job.number);
      lock.lock();
      make_idle(job);
    }
  }

  CudaContext const* context_;
  cudaStream_t stream_;
  PFN_cuStreamWaitValue32_v11070 wait_ = nullptr;
  std::atomic<bool> has_waits_{false};
  std::uint32_t* words_ = nullptr;  // pinned, one for each job
  std::mutex mutex_;  // guards what follows; never held across a call of CUDA or of a function
  std::array<Job, max_jobs> jobs_{};
  Job* idle_ = nullptr;
  Job* first_ready_ = nullptr;  // in the order in which the stream has reached them
  Job* last_ready_ = nullptr;
  OwnedThread thread_;
};

}  // namespace spillway::detail
