// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/error.hpp>
#include <spillway/core/stats.hpp>
#include <spillway/device_share.hpp>
#include <spillway/host/host_tier.hpp>
#include <spillway/interop/framework/codec_choice.hpp>
#include <spillway/interop/framework/fork_handlers.hpp>
#include <spillway/interop/torch/held_storages.hpp>
#include <spillway/interop/torch/operands.hpp>
#include <spillway/interop/torch/sending_converter.hpp>
#include <spillway/interop/torch/site_state.hpp>

#include <cstddef>
#include <filesystem>
#include <new>
#include <system_error>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <torch/csrc/jit/passes/tensorexpr_fuser.h>

namespace spillway::torch {

/// Large-model support for the tensors of one PyTorch device, in a program in C++ (LibTorch) as in
/// Python: tensors that no operation uses may be swapped out to the host, and are swapped in before
/// the next operation that uses them.
///
/// `Site` is a `HostSite` or a `CudaSite`. Call `install` once, before the program makes its first
/// large tensor. All functions are static, since PyTorch has one allocator for each kind of device.
///
/// Errors are PyTorch's: `c10::OutOfMemoryError` if there is no room on the device or the host,
/// `c10::Error` for everything else. After an error all tensors are as they were.
///
/// The state is that of a template, so all parts of a program have to see the same one. A shared
/// library that is built with hidden visibility would have a state of its own, and be refused by
/// `install`: export the symbols of `spillway::torch` there.
///
/// Threads  thread-safe, except for `install`. A thread whose operations use tensors that may be
///          swapped out needs the *hook*. The thread that calls `install` has it, and so have the
///          threads in which PyTorch runs backward passes for it. In each other thread of the
///          program make a `Hook` first, after `install`.
/// Streams  operations may use any of PyTorch's streams.
template <class Site>
class LargeModelSupport {
 public:
  using State = typename Site::State;
  using FrameHook = typename State::Hook;
  using Leases = typename Site::Leases;

  /// The default for `InstallOptions::least_bytes`. There are many smaller tensors, and swapping
  /// them gains nothing. Among them are the states of random number generators, whose bytes PyTorch
  /// reads outside of operations.
  static constexpr std::size_t default_least_bytes = 8192;

  /// Replaces PyTorch's allocator, puts the hook in front of all operations, and switches it on for
  /// the calling thread. Tensors that exist already are not affected, and never leave.
  ///
  /// A limit of 0 stands for nine tenths of what is free, and `file_bytes` of 0 for half of what is
  /// free in the folder of the file tier.
  ///
  /// @throws c10::Error if it is called twice, if there is no such device, if PyTorch has begun to
  ///         use CUDA already, or if another module needs the same dispatch key
  static void install(InstallOptions options = {}) {
    TORCH_CHECK(!is_installed(), "spillway is installed already");
    if (options.least_bytes == 0) {
      options.least_bytes = default_least_bytes;
    }
    with_errors_of_torch([&] {
      if (!options.file_tier.empty() && options.file_bytes == 0) {
        options.file_bytes = std::filesystem::space(options.file_tier).available / 2;
      }
      [[maybe_unused]] static bool const are_registered = [] {
        framework::ForkHandlers<LargeModelSupport>::install();
        return true;
      }();
      Site::install(options);
      install_sending_converter<Site>();
    });
    // Kernels of this fuser of TorchScript ask for addresses outside of operations.
    ::torch::jit::setTensorExprFuserEnabled(false);
    set_hook(true);
  }
  [[nodiscard]] static bool is_installed() noexcept { return Site::state() != nullptr; }

  /// Switches support off or on, for the whole process; it is on after `install`. While it is off,
  /// nothing is swapped out any more, and what is swapped out still comes back when it is used.
  static void enable(bool is_on) { installed().leases.enable(is_on); }
  [[nodiscard]] static bool is_enabled() {
    return is_installed() && installed().leases.is_enabled();
  }

  // Threads

  /// Switches the hook on for the calling thread, for as long as the object lives.
  class Hook {
   public:
    Hook() = default;

   private:
    c10::impl::IncludeDispatchKeyGuard included_{hook_key};
  };
  /// Switches the hook on or off for the calling thread.
  static void set_hook(bool is_on) { c10::impl::tls_set_dispatch_key_included(hook_key, is_on); }
  [[nodiscard]] static bool has_hook() { return c10::impl::tls_is_dispatch_key_included(hook_key); }

  // Limits and what leaves

  /// The most bytes that tensors may take up on the device.
  [[nodiscard]] static std::size_t limit() { return installed().limit(); }
  /// Lowers the limit, or raises it up to that of `install`, which 0 stands for. Tensors that are
  /// not in use are moved or swapped out if they stand in the way.
  static void set_limit(std::size_t bytes) {
    with_errors_of_torch([&] { installed().set_limit(bytes); });
  }
  /// The least size of a tensor that may be swapped out.
  [[nodiscard]] static std::size_t least_bytes() { return installed().least_bytes.load(); }
  static void set_least_bytes(std::size_t bytes) { installed().least_bytes = bytes; }
  /// The most bytes that one call of a `_foreach_` operation may use at once, which optimizers
  /// make; it is cut into several otherwise.
  static void set_foreach_bytes(std::size_t bytes) { installed().foreach_bytes = bytes; }

  /// Marks the beginning of a step of training. The allocator learns the order in which a step uses
  /// tensors, and plans the next steps with it.
  static void begin_step() {
    with_errors_of_torch([] { installed().leases.begin_step(); });
  }

  /// Swaps out all tensors that are not in use, as far as the host has room. Small tensors that
  /// other threads have used last stay (`StorageLeases::keep_recent`).
  ///
  /// @returns the bytes that were swapped out
  static std::size_t reclaim() {
    return with_errors_of_torch([] { return with_nothing_recent().leases.reclaim(); });
  }
  /// Gives device memory that is free now back to the system. Waits on the host for work that still
  /// uses it.
  ///
  /// @returns the bytes given back
  static std::size_t trim_sync() {
    return with_errors_of_torch([] { return installed().memory.trim_sync() + trim_shared(); });
  }
  /// Does both of these, so that other programs can use the device. A tensor that is used comes
  /// back by itself. While support is off nothing is swapped out.
  ///
  /// @param level  `HostTier::file` also releases host memory, as far as the file has room
  /// @returns the bytes of device memory that were given back
  static std::size_t park(HostTier level = HostTier::pinned) {
    return with_errors_of_torch(
        [&] { return with_nothing_recent().leases.park(level) + trim_shared(); });
  }
  /// Swaps all tensors in at once, as far as the limit allows.
  ///
  /// @returns the bytes that were swapped in
  static std::size_t wake() {
    return with_errors_of_torch([] { return installed().leases.wake(); });
  }

  /// Lets tensors leave without a copy, and makes them again with the operations that made them,
  /// where that takes less time. Off after `install`.
  static void set_recompute(bool is_on) { installed().leases.set_recompute(is_on); }
  [[nodiscard]] static bool recomputes() {
    return is_installed() && installed().leases.recomputes();
  }

  /// Sets the codec of all tensors that are made from now on, which makes them take fewer bytes of
  /// host memory while they are swapped out. Not `CodecChoice::bfloat16`, which loses bits.
  static void set_codec(framework::CodecChoice choice) {
    TORCH_CHECK_VALUE(choice != framework::CodecChoice::bfloat16,
                      "spillway: bfloat16 loses bits, so it has to be asked for by tensor");
    check_has_codecs(choice);
    with_errors_of_torch([&] { installed().leases.set_default_codec(choice); });
  }
  /// Sets the codec of these tensors' memory. `CodecChoice::bfloat16` is for float32 only.
  static void set_codec(framework::CodecChoice choice, at::ArrayRef<at::Tensor> tensors) {
    check_has_codecs(choice);
    auto& leases = installed().leases;
    std::vector<c10::StorageImpl*> storages;
    for (at::Tensor const& tensor : tensors) {
      for_each_part(tensor, [&](at::Tensor const& part, bool) {
        c10::StorageImpl* const storage = storage_of(part);
        bool const has_memory = is_ours(storage);
        if (choice == framework::CodecChoice::bfloat16) {
          check_is_float32(part.scalar_type());
          auto const first =
              has_memory ? leases.view(*storage).description.type : c10::ScalarType::Undefined;
          check_is_float32(first == c10::ScalarType::Undefined ? at::kFloat : first);
        }
        if (has_memory) {
          storages.push_back(storage);
        }
      });
    }
    with_errors_of_torch([&] {
      for (c10::StorageImpl* const storage : storages) {
        leases.set_codec(*storage, choice);
      }
    });
  }

  // Code that works on addresses

  /// Swaps a tensor in and keeps it at its address for good.
  static void keep(at::Tensor const& tensor) { bring_in(tensor, /*keeps=*/true); }
  /// Keeps tensors at their addresses while the object lives, and so what the thread's operations
  /// use or make meanwhile. Not needed for operations, which do this themselves, but for code that
  /// asks for addresses or reads memory by itself: `data_ptr()`, `accessor()`, `torch::save`.
  ///
  /// The tensors have to fit under the limit together, or the constructor throws
  /// `c10::OutOfMemoryError`. A hold belongs to the thread that makes it. If another thread
  /// destroys it, it ends before the next operation of its own thread, or with that thread.
  class Hold {
   public:
    explicit Hold(at::ArrayRef<at::Tensor> tensors) {
      with_errors_of_torch([&] {
        for (at::Tensor const& tensor : tensors) {
          held_.add(tensor);
        }
        held_.enter();
      });
    }
    Hold(Hold const&) = delete;
    Hold& operator=(Hold const&) = delete;
    ~Hold() = default;

   private:
    HeldStorages<Site> held_{/*may_write=*/true};
  };
  /// Swaps a tensor in, and keeps it at its address for good if `keeps`.
  static void bring_in(at::Tensor const& tensor, bool keeps) {
    with_errors_of_torch([&] {
      for_each_part(tensor, [&](at::Tensor const& part, bool) {
        if (c10::StorageImpl* const storage = storage_of(part); is_ours(storage)) {
          FrameHook::bring_in(*storage, part.unsafeGetTensorImpl(), keeps);
        }
      });
    });
  }
  /// Whether the calling thread is inside of an operation or a `Hold`.
  [[nodiscard]] static bool is_inside() { return is_installed() && FrameHook::is_inside(); }
  /// Whether the memory of a tensor is the allocator's, so that it may be swapped out.
  [[nodiscard]] static bool is_ours(at::Tensor const& tensor) {
    return is_ours(storage_of(tensor));
  }
  [[nodiscard]] static bool is_ours(c10::StorageImpl* storage) {
    return storage != nullptr && is_installed() && Leases::is_ours(*storage);
  }

  // Other programs on the same device

  /// Divides the device with the other programs that name the same file; see `DeviceShare`. From
  /// then on the share sets the limit, and `set_limit` is an error. Waits on the host for the other
  /// programs, for at most `ShareOptions::patience`.
  static void share(ShareOptions options) {
    with_errors_of_torch([&] { installed().leases.share(std::move(options)); });
  }
  [[nodiscard]] static bool is_shared() { return is_installed() && installed().leases.is_shared(); }
  [[nodiscard]] static std::vector<ShareMember> share_members() {
    return with_errors_of_torch([] { return installed().leases.share_members(); });
  }
  /// To be called before a program that shares the device ends.
  static void leave_share() {
    with_errors_of_torch([] { installed().leases.leave_share(); });
  }

  // Statistics

  [[nodiscard]] static Stats stats() { return installed().memory.stats(); }
  [[nodiscard]] static HostPoolStats host_stats() { return installed().memory.host_stats(); }
  [[nodiscard]] static framework::OperationCounts counts() { return installed().leases.counts(); }
  /// What is on the device and cannot be swapped out now.
  [[nodiscard]] static Tally unreclaimable() { return installed().leases.unreclaimable(); }
  /// Whether a tensor is on the device. If the program asks for its address, it may still get an
  /// error: see `Hold`.
  [[nodiscard]] static bool is_resident(at::Tensor const& tensor) {
    c10::StorageImpl* const storage = storage_of(tensor);
    return !is_ours(storage) || is_resident(installed().leases.view(*storage));
  }
  [[nodiscard]] static bool is_resident(StorageView const& seen) {
    if (seen.is_leased || seen.block == BlockId{}) {
      return true;  // memory of a private pool has no block
    }
    try {
      Residency const residency = installed().memory.residency(seen.block);
      return residency == Residency::device || residency == Residency::moving_in;
    } catch (ContractViolation const&) {
      return false;  // another thread has freed it meanwhile
    }
  }
  static void reset_peak_stats() { installed().memory.reset_peak_stats(); }

  /// The objects behind these functions.
  ///
  /// @throws c10::Error before `install`
  [[nodiscard]] static State& installed() {
    TORCH_CHECK(Site::state() != nullptr, "spillway: install() has not been called");
    return *Site::state();
  }
  [[nodiscard]] static c10::StorageImpl* storage_of(at::Tensor const& tensor) {
    return tensor.defined() && tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl()
                                                    : nullptr;
  }

  // The following two are for `ForkHandlers`.
  static Leases* leases_if_any() { return is_installed() ? &installed().leases : nullptr; }
  static auto const* frame_of_thread() { return &Site::frames(); }

 private:
  /// Ends what keeps small tensors resident that this thread has used last, so that they can leave,
  /// too.
  [[nodiscard]] static State& with_nothing_recent() {
    State& state = installed();
    state.leases.end_recent(Site::frames());
    return state;
  }
  /// Gives back what is free of the memory of tensors that were sent to other processes.
  [[nodiscard]] static std::size_t trim_shared() {
    if constexpr (requires { Site::tensors().empty_shared(); }) {
      return Site::tensors().empty_shared();
    } else {
      return 0;
    }
  }
  template <class Act>
  static auto with_errors_of_torch(Act act) {
    try {
      return FrameHook::rethrow_as_torch(act);
    } catch (ContractViolation const& error) {
      TORCH_CHECK(false, "spillway: ", error.what());
    } catch (std::system_error const& error) {
      TORCH_CHECK(false, "spillway: ", error.what());
    } catch (std::bad_alloc const& error) {
      TORCH_CHECK_WITH(OutOfMemoryError, false, "spillway: ", error.what());
    }
  }
  static void check_has_codecs(framework::CodecChoice choice) {
    if (choice != framework::CodecChoice::none) {
      char const* const refusal = Site::codec_refusal();
      TORCH_CHECK_NOT_IMPLEMENTED(refusal == nullptr, "spillway: set_codec: ", refusal);
    }
  }
  static void check_is_float32(c10::ScalarType type) {
    TORCH_CHECK_VALUE(
        type == at::kFloat,
        "spillway: set_codec: only memory of float32 can travel as bfloat16, not that of a "
        "tensor of ",
        type);
  }
};

}  // namespace spillway::torch
