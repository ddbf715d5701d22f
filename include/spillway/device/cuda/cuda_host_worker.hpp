// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/types.hpp>
#include <spillway/device/cuda/cuda_context.hpp>

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>

namespace spillway::detail {

/// Calls functions that may take long, such as file calls, in the order of a stream but on a thread
/// of its own. The host functions of CUDA may share one thread, which a file call would keep from
/// all other streams.
///
/// `launch` enqueues two things: a host function that only wakes the thread, and a wait of the
/// stream for a word of pinned memory, which the thread writes when the function has returned.
/// Where the driver has no such waits, and where all words are in use, the function runs as a host
/// function instead.
///
/// CUDA does not know what such a wait is for, so work that ends it must not be queued behind it.
/// What ends this one is a thread that needs no device, and that was woken by the same stream
/// before.
///
/// Threads  thread-safe.
/// Streams  the one that it is made for.
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
        thread_ = std::thread{[this] { serve(); }};
      } catch (std::system_error const&) {
        has_waits_ = false;
      }
    }
  }
  CudaHostWorker(CudaHostWorker const&) = delete;
  CudaHostWorker& operator=(CudaHostWorker const&) = delete;
  /// All that was launched has run, or will never run since the device has failed.
  ~CudaHostWorker() {
    if (thread_.joinable()) {
      {
        std::scoped_lock const lock{mutex_};
        is_ending_ = true;
      }
      woken_.notify_one();
      thread_.join();
    }
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
        cuda_check(cuda_status(result));
        return;
      }
      has_waits_.store(false, std::memory_order_relaxed);
    }
    cuda_check(cudaLaunchHostFunc(stream_, function, argument));
  }

 private:
  /// Whether a job is to run is known only after `launch` has enqueued the wait for it. By then the
  /// stream may have come to it or not.
  enum class State : std::uint8_t { undecided, due, cancelled };
  struct Job {
    CudaHostWorker* owner = nullptr;
    HostFunction function = nullptr;
    void* argument = nullptr;
    std::uint32_t* word = nullptr;
    std::uint32_t number = 0;  // what the word is set to; grows with each use of the job
    State state = State::undecided;
    bool is_reached = false;  // by the stream
    Job* next = nullptr;      // of those that are idle, or to run
  };

  static constexpr std::size_t max_jobs = 256;

  [[nodiscard]] bool try_make_words() {
    CudaScope const scope{*context_};
    CudaCaptureBystander const bystander;
    void* memory = nullptr;
    // Not registered memory, whose address on the device may be another one.
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
  /// Host function.
  static void wake(void* argument) noexcept {
    auto& job = *static_cast<Job*>(argument);
    std::scoped_lock const lock{job.owner->mutex_};
    job.is_reached = true;
    if (job.state != State::undecided) {
      job.owner->begin(job);
    }
  }
  /// @pre the lock is held, the stream has reached the job, and it is decided
  void begin(Job& job) noexcept {
    if (job.state == State::cancelled) {
      make_idle(job);
      return;
    }
    job.next = nullptr;
    (last_ready_ == nullptr ? first_ready_ : last_ready_->next) = &job;
    last_ready_ = &job;
    woken_.notify_one();
  }

  void serve() noexcept {
    std::unique_lock lock{mutex_};
    for (;;) {
      woken_.wait(lock, [this] { return first_ready_ != nullptr || is_ending_; });
      if (first_ready_ == nullptr) {
        return;
      }
      Job& job = *first_ready_;
      first_ready_ = job.next;
      last_ready_ = first_ready_ == nullptr ? nullptr : last_ready_;
      lock.unlock();
      job.function(job.argument);
      // From here on the stream continues. A later use of the word has a higher number, which the
      // stream's comparison takes for this one, too.
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
  std::condition_variable woken_;
  std::array<Job, max_jobs> jobs_{};
  Job* idle_ = nullptr;
  Job* first_ready_ = nullptr;  // in the order in which the stream came to them
  Job* last_ready_ = nullptr;
  bool is_ending_ = false;
  std::thread thread_;  // last: it starts when all other members exist
};

}  // namespace spillway::detail
