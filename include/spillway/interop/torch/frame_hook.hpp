// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/error.hpp>
#include <spillway/interop/torch/native_nodes.hpp>
#include <spillway/interop/torch/operands.hpp>
#include <spillway/interop/torch/operations.hpp>
#include <spillway/interop/torch/random_draw.hpp>
#include <spillway/interop/torch/recompute.hpp>
#include <spillway/interop/torch/site.hpp>
#include <spillway/interop/torch/storage_leases.hpp>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <unordered_set>
#include <utility>
#include <vector>

#include <ATen/ThreadLocalPythonObjects.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/library.h>

#if __has_include(<torch/csrc/distributed/c10d/Work.hpp>)
#  include <torch/csrc/distributed/c10d/Work.hpp>
#endif

namespace spillway::torch {

#if __has_include(<torch/csrc/distributed/c10d/Work.hpp>)
using Communication = c10::intrusive_ptr<c10d::Work>;

/// Returns the communication that an operation has begun, if it is among its results; else null.
[[nodiscard]] inline Communication find_communication(std::span<c10::IValue const> results) {
  for (c10::IValue const& result : results) {
    if (result.isCustomClass()) {
      return result.toCustomClass<c10d::Work>();
    }
  }
  return {};
}
/// Returns the future that completes with a communication; null if the backend has none, as for
/// send and receive.
[[nodiscard]] inline c10::intrusive_ptr<c10::ivalue::Future>
find_future(Communication const& communication) {
  try {
    return communication->getFuture();
  } catch (c10::Error const&) {
    return {};
  }
}

/// Keeps the leases of one thread's communications whose end no future reports. A lease is released
/// when the thread waits for the results (`_c10d_functional::wait_tensor`). It is also released
/// when the thread begins another communication, if this one has completed by then or its object is
/// gone.
///
/// Threads  thread-compatible.
class PendingCommunications {
 public:
  PendingCommunications() = default;
  PendingCommunications(PendingCommunications const&) = delete;
  PendingCommunications& operator=(PendingCommunications const&) = delete;
  /// Memory of communications that have not completed when the thread ends stays leased for good.
  ~PendingCommunications() {
    release_completed();
    for (Pending& one : pending_) {
      (void)new std::shared_ptr<void>{std::move(one.lease)};
    }
  }

  void add(Communication const& communication, std::shared_ptr<void> lease) {
    pending_.push_back({c10::weak_intrusive_ptr<c10d::Work>{communication}, {}, std::move(lease)});
  }
  /// @param results  the program will wait for one of these storages
  void add(std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> results,
           std::shared_ptr<void> lease) {
    pending_.push_back({std::nullopt, std::move(results), std::move(lease)});
  }
  void release_completed() {
    std::erase_if(pending_, [](Pending const& one) {
      if (!one.communication) {
        return false;
      }
      Communication const communication = one.communication->lock();
      return !communication || communication->isCompleted();
    });
  }
  void release_waited(c10::StorageImpl const* result) {
    std::erase_if(pending_, [result](Pending const& one) {
      return std::any_of(one.results.begin(), one.results.end(), [result](auto const& storage) {
        return storage._unsafe_get_target() == result;
      });
    });
  }

 private:
  struct Pending {
    std::optional<c10::weak_intrusive_ptr<c10d::Work>> communication;
    std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> results;
    std::shared_ptr<void> lease;
  };
  std::vector<Pending> pending_;
};
#endif

/// Extends the leases of an operation's operands until this object is destroyed: for a
/// communication that continues after the operation, or for an object outside of PyTorch that
/// shares their memory.
///
/// Threads  may be destroyed on any thread. If it ends with a communication, threads that find no
///          room wait for that, for at most `patience`: the communication itself may wait for
///          another process.
/// Streams  later uses of the memory are ordered after the stream that is current when this object
///          is destroyed, which runs after the communication. PyTorch runs each communication on
///          another one of a few dozen streams. At a `JoiningSite` one stream is made to run after
///          all of these and is recorded in their place, since a `Fence` holds four tickets and
///          replaces more of them by one that waits for all streams.
template <class Site>
class ExtendedLease {
 public:
  using Leases = StorageLeases<Site>;

  /// Precondition: the calling thread has pinned the operands.
  explicit ExtendedLease(Operands const& operands) { Site::leases().lend(pins_, operands); }
  ExtendedLease(ExtendedLease const&) = delete;
  ExtendedLease& operator=(ExtendedLease const&) = delete;
  ~ExtendedLease() {
    try {
      Site::leases().record_stream(pins_, stream_after());
    } catch (...) {
      keep();  // without the lease nothing says when the memory may be reused
    }
    Site::leases().end_loan(frames_, pins_);
    if (ends_by_itself_) {
      Site::leases().end_waiting_for_loan();
    }
  }

  /// Keeps the operands resident for good, for a communication whose end cannot be observed.
  void keep() noexcept { Site::leases().keep(pins_); }

  /// Keeps `use` alive until the communication has ended.
  static void end_with(c10::ivalue::Future& future, std::shared_ptr<ExtendedLease> use) {
    use->ends_by_itself_ = true;
    Site::leases().begin_waiting_for_loan();
    future.addCallback([use = std::move(use)](c10::ivalue::Future const&) mutable { use.reset(); });
  }

 private:
  [[nodiscard]] static auto stream_after() {
    auto const stream = Site::current_stream();
    if constexpr (JoiningSite<Site>) {
      auto& memory = Site::leases().memory();
      memory.order_after(Site::joining_stream(), memory.mark(stream));
      return Site::joining_stream();
    } else {
      return stream;
    }
  }

  typename Leases::Frames frames_;
  typename Leases::Pins pins_;
  bool ends_by_itself_ = false;
};

/// While this object lives, the Python objects are taken out of the thread's local state.
///
/// A communication copies that state, in which a backward pass may have left a Python object. A
/// thread of the backend destroys the copy, for which it takes the interpreter's lock. If the
/// interpreter has ended meanwhile, Python ends that thread, and the C++ runtime ends the process
/// with `std::terminate`. That can happen in PyTorch alone, too; leases that end with a
/// communication make it more likely.
class WithoutPythonObjects {
 public:
  WithoutPythonObjects() { State::set_state({}); }
  WithoutPythonObjects(WithoutPythonObjects const&) = delete;
  WithoutPythonObjects& operator=(WithoutPythonObjects const&) = delete;
  ~WithoutPythonObjects() { State::set_state(std::move(objects_)); }

 private:
  using State = at::impl::ThreadLocalPythonObjects;
  State objects_ = State::get_state();
};

/// The hook's state for one thread, beside its frames. `Random` is the state of a random number
/// generator of the site's device.
template <class Random>
struct HookState {
  OperationKinds kinds;
  PrivateGenerators<Random> generators;
#if __has_include(<torch/csrc/distributed/c10d/Work.hpp>)
  PendingCommunications communications;
#endif
};

/// The boxed kernel that PyTorch's dispatcher calls before every operation; it leases the operands
/// while the operation runs.
///
/// The outermost operation of a thread opens a *frame*: its operands are enrolled, pinned and
/// swapped in together. Operands of nested operations are pinned, too, and stay pinned until the
/// outermost operation ends, since a kernel may have read an address before it calls another
/// operation. Memory that is allocated inside of a frame is enrolled only if it is a result. Memory
/// that is returned without contents is enrolled when an operation first uses it, since until then
/// the caller may be filling it through its address.
///
/// `Site` is as for `StorageLeases`. It also has `Site::hook()`, which returns the calling thread's
/// `HookState`, and `Site::foreach_bytes()`, the most bytes that one call of a `_foreach_` kernel
/// may pin.
///
/// Threads  thread-safe; runs in each thread that has `Key` in its local set.
template <class Site, c10::DispatchKey Key>
class FrameHook {
 public:
  using site_type = Site;
  using Leases = StorageLeases<Site>;
  using Stack = ::torch::jit::Stack;

  /// Gives recipes to the results of an operation, if the operation can be run again.
  template <bool is_recomputable>
  using Recipes = std::conditional_t<is_recomputable, RecipeWriter<Site>, NoRecipes>;

  static constexpr c10::DispatchKey key = Key;

  /// The hook's registrations with PyTorch; destroying them removes the hook.
  struct Registration {
    ::torch::Library fallback;
    ::torch::Library operations;
    ::torch::Library nested;
  };

  /// Installs the hook for all operations. It stays installed as long as the returned object lives.
  /// A dispatch key can have only one fallback.
  ///
  /// Three kinds of operations bypass the hook, except for nested tensors: views, operations that
  /// make tensors without contents, and composites that are known to leave all reading and writing
  /// to the operations that they call. The operations that models call most have unboxed kernels
  /// (operations.hpp). All others share the boxed kernel.
  ///
  /// @throws c10::Error if another fallback is registered for the key
  [[nodiscard]] static std::unique_ptr<Registration> install() {
    auto const here = static_cast<std::uint32_t>(__LINE__);
    auto library = std::make_unique<Registration>(
        Registration{{::torch::Library::IMPL, "_", Key, __FILE__, here},
                     {::torch::Library::IMPL, "aten", Key, __FILE__, here},
                     {::torch::Library::IMPL, "aten", std::nullopt, __FILE__, here}});
    library->fallback.fallback(::torch::CppFunction::makeFromBoxedFunction<&run>());
    std::unordered_set<std::string> typed;
    auto& dispatcher = c10::Dispatcher::singleton();
#define SPILLWAY_TORCH_INSTALL_KERNEL(op, name)                                                    \
  library->operations.impl(name, TORCH_FN((&TypedKernel<FrameHook, at::_ops::op>::run)));          \
  typed.insert("aten::" name);
#define SPILLWAY_TORCH_INSTALL_COMPOSITE(op, full_name)                                            \
  if (auto const handle =                                                                          \
          dispatcher.findSchemaOrThrow(at::_ops::op::name, at::_ops::op::overload_name);           \
      detail::is_composite_for_all(handle)) {                                                      \
    bypass(*library, handle);                                                                      \
  } else {                                                                                         \
    library->operations.impl(full_name,                                                            \
                             TORCH_FN((&TypedKernel<FrameHook, at::_ops::op>::run_composite)));    \
  }                                                                                                \
  typed.insert("aten::" full_name);
    SPILLWAY_TORCH_KERNELS(SPILLWAY_TORCH_INSTALL_KERNEL)
    SPILLWAY_TORCH_COMPARING_KERNELS(SPILLWAY_TORCH_INSTALL_KERNEL)
    SPILLWAY_TORCH_COMPOSITES(SPILLWAY_TORCH_INSTALL_COMPOSITE)
#undef SPILLWAY_TORCH_INSTALL_KERNEL
#undef SPILLWAY_TORCH_INSTALL_COMPOSITE
    for (c10::OperatorName const& name : dispatcher.getAllOpNames()) {
      auto const op = dispatcher.findSchema(name);
      if (!op || typed.count(toString(name)) != 0) {
        continue;
      }
      OperationKind const kind = kind_of(*op);
      if (kind == OperationKind::view || kind == OperationKind::factory) {
        bypass(*library, *op);
      }
    }
    return library;
  }

  /// Whether the calling thread's operations are hooked.
  [[nodiscard]] static bool is_on() {
    return c10::impl::tls_is_dispatch_key_included(Key) &&
           !c10::impl::tls_is_dispatch_key_excluded(Key);
  }

  /// Calls the kernel for nested tensors of an operation that otherwise bypasses the hook.
  template <class Call>
  static void run_nested(c10::OperatorHandle const& op, Stack* stack, Call const& call) {
    // The caller may be filling a tensor without contents, but the tensors of its sizes are
    // complete.
    NativeNodes<FrameHook>::hold_nested();
    run_framed(
        op,
        {},
        stack,
        [&call](Operands const&) { call(); },
        Site::hook().kinds.of(op) == OperationKind::factory);
  }

  /// Returns the dispatch keys behind the hook.
  [[nodiscard]] static c10::DispatchKeySet after(c10::DispatchKeySet keys) noexcept {
    return keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, Key);
  }

  static void run(c10::OperatorHandle const& op, c10::DispatchKeySet keys, Stack* stack) {
    auto const next = after(keys);
    switch (Site::hook().kinds.of(op)) {
    case OperationKind::view:
    case OperationKind::factory:
      op.redispatchBoxed(next, stack);
      return;
    case OperationKind::composite:
      run_composite(op, next, stack);
      return;
    case OperationKind::per_tensor:
      run_per_tensor(op, next, stack);
      return;
    case OperationKind::lazy_clone: {
      // The original would put a context of its own around the entry. A copy looks the same to the
      // program.
      at::Tensor const copy = ::torch::jit::pop(*stack).toTensor().clone();
      ::torch::jit::push(*stack, copy);
      return;
    }
    case OperationKind::exposing:
      run_exposing(op, next, stack);
      return;
    case OperationKind::packing:
      run_packing(op, next, stack);
      return;
    case OperationKind::permutation:
      run_kernel(op, next, stack);
      if constexpr (ReadingSite<Site>) {
        at::Tensor const& result = stack->back().toTensor();
        if (result.is_cpu() && result.has_storage()) {
          bring_in(*result.storage().unsafeGetStorageImpl(), nullptr, /*keeps=*/true);
        }
      }
      return;
    default:
      run_kernel(op, next, stack);
      return;
    }
  }

  using DrawWatch = torch::DrawWatch<typename Site::random_type>;
  /// Watches the generator that an operation draws from which is given none.
  [[nodiscard]] C10_NOINLINE static DrawWatch watch_draws() {
    at::Generator const* const own = Site::frames().generator;
    return DrawWatch{own != nullptr ? *own : at::globalContext().defaultGenerator(Site::device())};
  }

  /// A frame of the calling thread: keeps storages leased until it ends.
  class Frame {
   public:
    Frame() : frames_{Site::frames()} {
      if (C10_UNLIKELY(frames_.held != 0)) {
        Site::leases().end_holds(frames_);
      }
      ++frames_.depth;
      is_outermost_ = frames_.depth == 1 || Site::leases().ends_frames_early();
    }
    Frame(Frame const&) = delete;
    Frame& operator=(Frame const&) = delete;
    ~Frame() {
      if (!has_ended_) {
        end({});
      }
    }

    [[nodiscard]] bool is_outermost() const noexcept { return is_outermost_; }
    [[nodiscard]] typename Leases::Frames const& frames() const noexcept { return frames_; }
    /// While an object of this class lives, the frame's operation counts as one that will be begun
    /// again if it finds no room, so it can give way to other programs. It counts so only if it is
    /// outermost, has operands, and the thread has no holds.
    class Repeatable {
     public:
      Repeatable(Frame& frame, Operands const& operands, bool can_repeat = true)
          : flag_{frame.frames_.can_repeat}, before_{flag_} {
        flag_ = can_repeat && frame.may_regroup(operands);
      }
      Repeatable(Repeatable const&) = delete;
      Repeatable& operator=(Repeatable const&) = delete;
      ~Repeatable() { flag_ = before_; }

     private:
      bool& flag_;
      bool before_;
    };

    void enter(Operands const& operands) { enter(operands, is_outermost_); }
    /// As `enter`, for operands that the program names or whose addresses are used later. They are
    /// enrolled within another operation, too, since the entry has to record that they stay.
    void enter_named(Operands const& operands) { enter(operands, /*enrols=*/true); }
    /// Enrols results of a nested operation. They stay pinned until the outermost operation ends.
    void enrol(Operands const& results) {
      Site::leases().enter(frames_, frames_.pins, results, /*enrols=*/true);
    }
    /// To be called when the kernel of `op` has run out of memory. If there is enough room, but in
    /// pieces, and if the kernel can run again, acquires the operands again, side by side.
    ///
    /// @returns whether the kernel should run again
    [[nodiscard]] C10_NOINLINE bool try_regroup(c10::OperatorHandle const& op,
                                                Operands const& operands) {
      if (!has_split_room(operands) || !Site::hook().kinds.is_repeatable(op)) {
        return false;
      }
      rethrow_as_torch([&] { Site::leases().regroup(frames_, operands); });
      return true;
    }
    /// To be called once, with the results if this is the outermost frame.
    void end(std::span<Operand const> results) noexcept {
      has_ended_ = true;
      --frames_.depth;
      // Ends the frame's pins unless a hold that began inside continues. A hold around this frame
      // may have ended already.
      if (frames_.depth == 0 || (is_outermost_ && frames_.held == 0)) {
        if constexpr (ReadingSite<Site>) {
          Site::leases().keep_recent(frames_, results);
        }
        Site::leases().exit(frames_, frames_.pins, results);
        if (frames_.split_bytes != 0) {
          Site::leases().report_split(frames_);
        }
        frames_.claim_hold.reset();
      }
    }

   private:
    void enter(Operands const& operands, bool enrols) {
      if (operands.empty()) {
        return;
      }
      rethrow_as_torch([&] {
        try {
          Repeatable const gives_way{*this, operands};
          Site::leases().enter(frames_, frames_.pins, operands, enrols);
        } catch (c10::OutOfMemoryError const&) {
          if (!has_split_room(operands)) {
            throw;
          }
          Site::leases().regroup(frames_, operands);
        }
      });
    }
    [[nodiscard]] bool may_regroup(Operands const& operands) const noexcept {
      return is_outermost_ && frames_.held == 0 && !operands.empty();
    }
    [[nodiscard]] bool has_split_room(Operands const& operands) const noexcept {
      return frames_.split_bytes != 0 && may_regroup(operands);
    }

    typename Leases::Frames& frames_;
    bool is_outermost_ = false;
    bool has_ended_ = false;
  };

  /// A part of a program that counts as one operation of the thread in which it begins: what that
  /// thread uses or allocates in it stays resident until it ends.
  ///
  /// Several holds of one thread may end in any order, also inside of operations.
  ///
  /// Threads  may be destroyed on any thread. If that is not the thread in which it began, the hold
  ///          ends before that thread's next operation, or with that thread.
  class Hold {
   public:
    /// @param is_kernel  whether the hold is for a call of a kernel, during which the program
    ///                   learns no addresses
    explicit Hold(bool is_kernel) : is_kernel_{is_kernel} {
      auto& frames = Site::frames();
      if (frames.ended_elsewhere == nullptr) {
        frames.ended_elsewhere = std::make_shared<std::atomic<int>>(0);
      }
      ended_elsewhere_ = frames.ended_elsewhere;
      frames.held_by_kernels += is_kernel ? 1 : 0;
      Site::leases().begin_hold(frames);
    }
    Hold(Hold const&) = delete;
    Hold& operator=(Hold const&) = delete;
    ~Hold() {
      auto& frames = Site::frames();
      if (frames.ended_elsewhere == ended_elsewhere_) {
        frames.held_by_kernels -= is_kernel_ ? 1 : 0;
        Site::leases().end_holds(frames, 1);
      } else {
        ended_elsewhere_->fetch_add(1);
      }
    }

   private:
    bool is_kernel_;
    std::shared_ptr<std::atomic<int>> ended_elsewhere_;  // also identifies the thread
  };
  /// Whether the calling thread is inside of an operation or a hold.
  [[nodiscard]] static bool is_inside() noexcept {
    auto& frames = Site::frames();
    Site::leases().end_holds(frames);
    return frames.depth > 0;
  }

#if __has_include(<torch/csrc/distributed/c10d/Work.hpp>)
  /// If the calling thread has the hook, switches it on in the thread that completes the future.
  /// Callbacks that are added later run in that thread, and their operations use what was leased
  /// until then.
  static void end_in_hooked_thread(c10::ivalue::Future& future) {
    if (c10::impl::tls_is_dispatch_key_included(Key)) {
      future.addCallback(
          [](c10::ivalue::Future const&) { c10::impl::tls_set_dispatch_key_included(Key, true); });
    }
  }
  /// Keeps the operands of a communication leased until the communication has ended.
  static void lease_until_end(Communication const& communication,
                              std::shared_ptr<ExtendedLease<Site>> use) {
    if (auto const end = find_future(communication)) {
      end_in_hooked_thread(*end);
      ExtendedLease<Site>::end_with(*end, std::move(use));
    } else {
      PendingCommunications& pending = Site::hook().communications;
      pending.release_completed();
      pending.add(communication, std::move(use));
    }
  }
#endif

  /// Swaps a storage in as if an operation had used it, and keeps it resident for good if `keeps`.
  /// If the program asks, the storage counts as written, since the program may write to the
  /// address; for a kernel, the operation declares what it writes. Does nothing if the storage has
  /// memory of another allocator.
  ///
  /// @param tensor  a tensor that uses the storage; null if none is known
  static void bring_in(c10::StorageImpl& storage, c10::TensorImpl const* tensor, bool keeps) {
    if (Leases::is_ours(storage)) {
      auto const& frames = Site::frames();
      bool const is_program = frames.depth == frames.held && frames.held_by_kernels == 0;
      Frame frame;
      frame.enter_named({Operand{&storage, tensor, {keeps, /*writes=*/is_program}}});
    }
  }

  /// Leases some operands of a composite, while the operations that it calls open frames of their
  /// own.
  class CompositeFrame {
   public:
    CompositeFrame() {
      frames_.further_pins.push_back(&pins_);
      ++frames_.composites;
    }
    CompositeFrame(CompositeFrame const&) = delete;
    CompositeFrame& operator=(CompositeFrame const&) = delete;
    ~CompositeFrame() {
      --frames_.composites;
      Site::leases().exit(frames_, pins_, {});
      frames_.further_pins.pop_back();
    }

    void enter(Operands const& operands) {
      rethrow_as_torch([&] { Site::leases().enter(frames_, pins_, operands, frames_.depth == 0); });
    }

   private:
    typename Leases::Frames& frames_ = Site::frames();
    typename Leases::Pins pins_;
  };

  /// While an object of this class lives, an operation runs that may keep the addresses of copies
  /// that it makes.
  class ForeignOperation {
   public:
    ForeignOperation() { ++frames_.foreign; }
    ForeignOperation(ForeignOperation const&) = delete;
    ForeignOperation& operator=(ForeignOperation const&) = delete;
    ~ForeignOperation() { --frames_.foreign; }

   private:
    typename Leases::Frames& frames_ = Site::frames();
  };

  /// Turns the library's errors into PyTorch's.
  template <class Act>
  static auto rethrow_as_torch(Act act) {
    try {
      return act();
    } catch (OutOfDeviceMemory const& error) {
      TORCH_CHECK_WITH(OutOfMemoryError, false, out_of_memory(Site::device()), error.what());
    } catch (OutOfHostMemory const& error) {
      TORCH_CHECK_WITH(OutOfMemoryError, false, out_of_memory(Site::device()), error.what());
    } catch (DeviceError const& error) {
      TORCH_CHECK(false, error.what());
    } catch (FileTierError const& error) {
      TORCH_CHECK(false, error.what());
    }
  }

 private:
  [[nodiscard]] static std::span<c10::IValue const> last(Stack const& stack, std::size_t count) {
    return std::span{stack}.last(count);
  }

  static void bypass(Registration& library, c10::OperatorHandle const& op) {
    library.operations.impl(toString(op.operator_name()).c_str(),
                            ::torch::CppFunction::makeFallthrough());
    NestedKernel<FrameHook>::install(library.nested, op);
  }

  [[nodiscard]] static Operands operands_of(c10::OperatorHandle const& op, Stack const& stack) {
    Operands operands;
    auto const& schema = op.schema();
    auto const& arguments = schema.arguments();
    auto const values = last(stack, arguments.size());
    bool const tells_reads = Site::leases().gives_recipes();
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      bool const only_reads = tells_reads && !detail::may_write(schema, values, i);
      collect<Leases>(values.subspan(i, 1),
                      operands,
                      {/*keeps=*/false, detail::writes(arguments[i]), only_reads});
    }
    return operands;
  }

  static void run_kernel(c10::OperatorHandle const& op, c10::DispatchKeySet next, Stack* stack) {
    if (op.schema().name().rfind("aten::", 0) == 0) {
      run_framed(
          op, next, stack, [&](Operands const&) { op.redispatchBoxed(next, stack); }, false);
      return;
    }
    ForeignOperation const foreign;
    typename NativeNodes<FrameHook>::Call const call;
    run_framed(
        op,
        next,
        stack,
        [&](Operands const& operands) {
          auto const objects_stay = weak_references(operands);
          op.redispatchBoxed(next, stack);
          auto const results = last(*stack, op.schema().returns().size());
          keep_shared(operands, results);
          call.end(operands, tensors_of(results));
        },
        false);
  }

  /// Keeps the objects of storages in memory that are still asked when a kernel has run. The kernel
  /// may have let its arguments go, and then nothing else keeps a storage that is not enrolled.
  [[nodiscard]] static std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>>
  weak_references(Operands const& operands) {
    std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> storages;
    storages.reserve(operands.size());
    for (Operand const& operand : operands) {
      storages.push_back(StorageTraits<Site>::weak_reference(*operand.storage));
    }
    return storages;
  }

  /// Keeps operands resident for good if a result shares their memory through a storage of its own
  /// (`at::from_blob`). An operand that is gone shares nothing: the pointer of its storage is null.
  static void keep_shared(Operands const& operands, std::span<c10::IValue const> results) {
    auto const address_of = [](c10::StorageImpl& storage) {
      return reinterpret_cast<std::uintptr_t>(storage._mutable_data_ptr_no_checks().get());
    };
    auto const visit = [&](at::Tensor const& tensor, bool) {
      c10::StorageImpl* const own = tensor.storage().unsafeGetStorageImpl();
      bool const is_foreign = own != nullptr && !Leases::is_ours(*own);
      std::uintptr_t const address = is_foreign ? address_of(*own) : 0;
      for (Operand const& operand : operands) {
        if (address != 0 && address - address_of(*operand.storage) < operand.storage->nbytes()) {
          bring_in(*operand.storage, /*tensor=*/nullptr, /*keeps=*/true);
        }
      }
    };
    for (c10::IValue const& result : results) {
      for_each_tensor(result, visit);
    }
  }

  /// Runs `call(operands)` in a frame with the operands and results of the operation, which are on
  /// the stack.
  ///
  /// @param next       the dispatch keys behind the hook
  /// @param kept_only  enrol only the results whose addresses PyTorch uses outside of operations
  template <class Call>
  static void run_framed(c10::OperatorHandle const& op,
                         c10::DispatchKeySet next,
                         Stack* stack,
                         Call const& call,
                         bool kept_only) {
    Operands operands = operands_of(op, *stack);
    Frame frame;
    Recipes<true> recipes;
    if (C10_UNLIKELY(recipes.are_wanted())) {
      begin_recipe(recipes, op, next, *stack);
    }
    frame.enter(operands);
    Stack arguments;
    if (C10_UNLIKELY(recipes.are_wanted())) {
      start_recipe(recipes, op, *stack, arguments);
    }
    if (C10_UNLIKELY(frame.frames().generator != nullptr)) {
      draw_from(*frame.frames().generator, op, *stack);
    }
    call_repeatably(op, stack, frame, operands, call);
    if (!recipes.try_end_draw()) {
      stack->resize(stack->size() - op.schema().returns().size());
      stack->insert(stack->end(), arguments.begin(), arguments.end());
      call(operands);
    }
    if (frame.is_outermost()) {
      if (C10_UNLIKELY(recipes.are_wanted())) {
        // A copy: the interpreter may have moved its operands onto the stack, and `arguments` alone
        // keeps the storages alive until the results have their recipes.
        recipes.prepare([&] { return arguments; });
      }
      operands.clear();
      auto const results = last(*stack, op.schema().returns().size());
      collect<Leases>(results, operands, {}, kept_only);
      frame.end(operands);
      if (C10_UNLIKELY(recipes.are_wanted())) {
        give_recipes(recipes, results);
      }
    }
  }
  template <class Writer>
  C10_NOINLINE static void begin_recipe(Writer& recipes,
                                        c10::OperatorHandle const& op,
                                        c10::DispatchKeySet next,
                                        Stack const& stack) {
    RecomputeTraits const& traits = Site::hook().kinds.recompute(op);
    recipes.begin(traits, op, next, Key);
    if (traits.is_in_place) {
      recipes.begin_change(last(stack, op.schema().arguments().size()).front().toTensor());
    }
  }
  /// @param arguments  receives a copy of the operation's arguments before it runs
  template <class Writer>
  C10_NOINLINE static void
  start_recipe(Writer& recipes, c10::OperatorHandle const& op, Stack& stack, Stack& arguments) {
    if (!recipes.try_lease()) {
      return;
    }
    std::span<c10::IValue> const values = std::span{stack}.last(op.schema().arguments().size());
    arguments.assign(values.begin(), values.end());
    std::size_t const generator = Site::hook().kinds.recompute(op).generator_position;
    recipes.start(generator < values.size() ? &values[generator] : nullptr);
  }
  /// Passes the generator to an operation that runs as a part of the one that draws from it.
  C10_NOINLINE static void
  draw_from(at::Generator const& generator, c10::OperatorHandle const& op, Stack& stack) {
    std::span<c10::IValue> const values = std::span{stack}.last(op.schema().arguments().size());
    std::size_t const position = Site::hook().kinds.recompute(op).generator_position;
    if (position < values.size() && values[position].isNone() && values.front().isTensor() &&
        values.front().toTensor().device() == Site::device()) {
      values[position] = generator;  // other devices have other generators
    }
  }
  /// Watches the generator that an operation, whose arguments are on the stack, draws from.
  [[nodiscard]] C10_NOINLINE static DrawWatch watch_draws(c10::OperatorHandle const& op,
                                                          Stack const& stack) {
    RecomputeTraits const& traits = Site::hook().kinds.recompute(op);
    if (!traits.draws) {
      return {};
    }
    auto const values = std::span{stack}.last(op.schema().arguments().size());
    std::size_t const position = traits.generator_position;
    return position < values.size() && values[position].isGenerator()
               ? DrawWatch{values[position].toGenerator()}
               : watch_draws();
  }
  /// Returns one tensor for each value; an undefined one for a value that is not a tensor.
  [[nodiscard]] static std::vector<at::Tensor> tensors_of(std::span<c10::IValue const> values) {
    std::vector<at::Tensor> tensors;
    for (c10::IValue const& value : values) {
      tensors.push_back(value.isTensor() ? value.toTensor() : at::Tensor{});
    }
    return tensors;
  }
  template <class Writer>
  C10_NOINLINE static void give_recipes(Writer& recipes, std::span<c10::IValue const> results) {
    recipes.give(tensors_of(results));
  }

  /// Runs `call`. If it fails for lack of memory before it has drawn random numbers, and the frame
  /// can make room for it, runs it once more. Only where room is scarce are the arguments copied
  /// for that.
  template <class Call>
  static void call_repeatably(c10::OperatorHandle const& op,
                              Stack* stack,
                              Frame& frame,
                              Operands const& operands,
                              Call const& call) {
    if (!Site::leases().is_room_scarce() || !frame.is_outermost() ||
        !Site::hook().kinds.is_repeatable(op)) {
      call(operands);
      return;
    }
    DrawWatch watch = watch_draws(op, *stack);
    bool const has_run = try_call<c10::OutOfMemoryError>(
        op,
        stack,
        [&] {
          typename Frame::Repeatable const gives_way{frame, operands};
          call(operands);
        },
        [&](auto const&) { return !watch.has_drawn() && frame.try_regroup(op, operands); });
    if (!has_run) {
      call(operands);
    }
  }

  /// Runs `call` and returns true. If it throws an `Error` for which `may_repeat(error)` is true,
  /// restores the arguments on the stack and returns false.
  template <class Error, class Call, class MayRepeat>
  [[nodiscard]] static bool try_call(c10::OperatorHandle const& op,
                                     Stack* stack,
                                     Call const& call,
                                     MayRepeat const& may_repeat) {
    auto const arguments = last(*stack, op.schema().arguments().size());
    Stack const copy(arguments.begin(), arguments.end());
    std::size_t const base = stack->size() - copy.size();
    try {
      call();
      return true;
    } catch (Error const& error) {
      if (!may_repeat(error)) {
        throw;
      }
    }
    stack->resize(base);
    stack->insert(stack->end(), copy.begin(), copy.end());
    return false;
  }

  /// Whether a thread of the communication runs operations on the operands, as it does for sparse
  /// tensors and for a list that it joins into one tensor.
  template <class Values>
  [[nodiscard]] static bool takes_sparse_or_several(Values const& values) {
    auto const is_sparse = [](c10::IValue const& value) {
      return value.isTensor() && value.toTensor().defined() &&
             value.toTensor().layout() != at::kStrided;
    };
    return std::any_of(values.begin(), values.end(), [&](c10::IValue const& value) {
      return is_sparse(value) ||
             (value.isTensorList() &&
              (value.toListRef().size() > 1 ||
               std::any_of(value.toListRef().begin(), value.toListRef().end(), is_sparse)));
    });
  }

  /// Runs an operation whose communication continues after the operation has returned. The operands
  /// are leased until the communication has ended, or for good if its end cannot be observed.
  static void run_exposing(c10::OperatorHandle const& op, c10::DispatchKeySet next, Stack* stack) {
    ForeignOperation const foreign;
    Operands operands = operands_of(op, *stack);
    Frame frame;
    frame.enter_named(operands);
    bool const is_wait = op.schema().name() == "_c10d_functional::wait_tensor";
    auto use = is_wait ? nullptr : std::make_shared<ExtendedLease<Site>>(operands);
    auto const objects_stay = weak_references(operands);
    {
      WithoutPythonObjects const begins_clean;
      // In these cases a thread of the communication uses the addresses of tensors that its
      // operations make. Without the hook these are not enrolled, so they stay resident.
      std::optional<c10::impl::ExcludeDispatchKeyGuard> without_hook;
      if (takes_sparse_or_several(last(*stack, op.schema().arguments().size()))) {
        without_hook.emplace(Key);
      }
      op.redispatchBoxed(next, stack);
    }
#if __has_include(<torch/csrc/distributed/c10d/Work.hpp>)
    auto const results = last(*stack, op.schema().returns().size());
    PendingCommunications& pending = Site::hook().communications;
    pending.release_completed();
    auto const awaited = awaited_storages(results, operands);
    if (is_wait) {
      for (c10::StorageImpl const* const storage : awaited) {
        pending.release_waited(storage);
      }
    } else if (auto const communication = find_communication(results)) {
      lease_until_end(communication, std::move(use));
    } else if (!awaited.empty()) {
      std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> storages;
      for (c10::StorageImpl* const storage : awaited) {
        storages.push_back(StorageTraits<Site>::weak_reference(*storage));
      }
      pending.add(std::move(storages), std::move(use));
    }
#endif
    if (use != nullptr) {
      use->keep();
    }
  }

#if __has_include(<torch/csrc/distributed/c10d/Work.hpp>)
  /// Returns the storages for one of which a program waits before it uses the results of a
  /// communication: the storages of the results. A result that wraps an operand, such as an
  /// `AsyncCollectiveTensor`, has no storage; the program then waits for the operand.
  [[nodiscard]] static std::vector<c10::StorageImpl*>
  awaited_storages(std::span<c10::IValue const> results, Operands const& operands) {
    std::vector<c10::StorageImpl*> storages;
    bool has_wrapper = false;
    for (c10::IValue const& result : results) {
      has_wrapper = has_wrapper || (result.isTensor() && is_wrapper(result.toTensor()));
      for_each_tensor(result, [&](at::Tensor const& tensor, bool) {
        if (!is_wrapper(tensor)) {
          storages.push_back(tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
        }
      });
    }
    if (has_wrapper) {
      for (Operand const& operand : operands) {
        storages.push_back(operand.storage);
      }
    }
    return storages;
  }
  [[nodiscard]] static bool is_wrapper(at::Tensor const& tensor) noexcept {
    return tensor.unsafeGetTensorImpl()->is_python_dispatch();
  }
#endif

  /// Runs an operation that puts its operands into an object, or takes tensors out of one. The
  /// object uses their addresses from then on, so they are kept resident for good.
  static void run_packing(c10::OperatorHandle const& op, c10::DispatchKeySet next, Stack* stack) {
    constexpr bool keeps = true;
    ForeignOperation const foreign;
    Operands operands;
    collect<Leases>(last(*stack, op.schema().arguments().size()), operands, {keeps, false});
    Frame frame;
    frame.enter_named(operands);
    op.redispatchBoxed(next, stack);
    operands.clear();
    collect<Leases>(last(*stack, op.schema().returns().size()), operands, {keeps, false});
    frame.end(operands);
  }

  /// Runs a composite, whose inner operations lease their own operands. Since a few composites
  /// themselves read indices, lengths or masks, and may write operands that their schema declares
  /// as written, those operands are leased here. For tensors that are not dense the operation runs
  /// as a kernel, since other kernels exist for them.
  static void run_composite(c10::OperatorHandle const& op, c10::DispatchKeySet next, Stack* stack) {
    auto const arguments = last(*stack, op.schema().arguments().size());
    Operands operands;
    bool is_dense = true;
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      bool const is_written = detail::writes(op.schema().arguments()[i]);
      for_each_dense(arguments[i], is_dense, [&](at::Tensor const& tensor) {
        if (is_written || c10::isIntegralType(tensor.scalar_type(), /*includeBool=*/true)) {
          c10::StorageImpl* const storage = tensor.storage().unsafeGetStorageImpl();
          if (storage != nullptr && Leases::is_ours(*storage)) {
            bool const may_write = detail::may_write(op.schema(), op.schema().arguments()[i]);
            operands.push_back({storage,
                                tensor.unsafeGetTensorImpl(),
                                OperandUse{/*keeps=*/false, is_written, !may_write}});
          }
        }
      });
    }
    if (!is_dense) {
      run_kernel(op, next, stack);
    } else if (operands.empty()) {
      call_composite(op, next, stack);
    } else {
      CompositeFrame frame;
      frame.enter(operands);
      call_composite(op, next, stack);
    }
  }

  /// Calls a composite. If the composite itself asks for an address and is refused, it runs once
  /// more, as a kernel, unless it draws or writes, so that the program could tell. For example,
  /// PyTorch may print a tensor into an error message; the program must get that message.
  static void
  call_composite(c10::OperatorHandle const& op, c10::DispatchKeySet next, Stack* stack) {
    if (Site::frames().depth > 0 || !Site::hook().kinds.is_repeatable(op) ||
        Site::hook().kinds.recompute(op).draws) {
      op.redispatchBoxed(next, stack);
      return;
    }
    bool const has_run = try_call<c10::Error>(
        op, stack, [&] { op.redispatchBoxed(next, stack); }, &is_refused_address);
    if (!has_run) {
      run_kernel(op, next, stack);
    }
  }

  template <class Visit>
  static void for_each_dense(c10::IValue const& value, bool& is_dense, Visit const& visit) {
    auto const one = [&](at::Tensor const& tensor) {
      if (!tensor.defined()) {
        return;
      }
      c10::TensorImpl const* const impl = tensor.unsafeGetTensorImpl();
      if (impl->layout() != c10::kStrided || impl->is_nested()) {
        is_dense = false;
      } else if (impl->has_storage()) {
        visit(tensor);
      }
    };
    if (value.isTensor()) {
      one(value.toTensor());
    } else if (value.isList()) {
      for (c10::IValue const& element : value.toListRef()) {
        if (element.isTensor()) {
          one(element.toTensor());
        } else if (!element.isNone()) {
          return;
        }
      }
    }
  }

  /// Runs a kernel on parts of its lists, one part after the other, since a long list could pin a
  /// whole model at once. The results are bitwise the same.
  static void
  run_per_tensor(c10::OperatorHandle const& op, c10::DispatchKeySet next, Stack* stack) {
    c10::FunctionSchema const& schema = op.schema();
    std::size_t const arguments = schema.arguments().size();
    std::size_t const results = schema.returns().size();
    std::size_t const base = stack->size() - arguments;
    std::span<c10::IValue const> const given = last(*stack, arguments);
    std::vector<std::size_t> const cuts =
        Site::frames().depth == 0 ? pieces(given) : std::vector<std::size_t>{};
    bool const is_list_of_tensors =
        results == 0 ||
        (results == 1 && schema.returns()[0].type()->kind() == c10::TypeKind::ListType);
    if (cuts.size() <= 2 || !is_list_of_tensors || has_out(schema) ||
        !takes_one_element_each(schema, given, cuts.back()) ||
        !is_the_same_to_autograd(schema, given, cuts.back())) {
      run_kernel(op, next, stack);
      return;
    }
    c10::List<at::Tensor> all;
    for (std::size_t c = 0; c + 1 < cuts.size(); ++c) {
      Stack piece;
      for (std::size_t i = 0; i < arguments; ++i) {
        piece.push_back(
            slice(schema.arguments()[i], (*stack)[base + i], cuts.back(), cuts[c], cuts[c + 1]));
      }
      run_kernel(op, next, &piece);
      if (results == 1) {
        for (c10::IValue const& tensor : piece.back().toListRef()) {
          all.push_back(tensor.toTensor());
        }
      }
    }
    stack->erase(stack->begin() + static_cast<std::ptrdiff_t>(base), stack->end());
    if (results == 1) {
      stack->emplace_back(std::move(all));
    }
  }

  /// Returns whether this is an overload with `out=`. PyTorch computes all results of one before it
  /// writes the first, so in parts an error would leave the results of earlier parts.
  [[nodiscard]] static bool has_out(c10::FunctionSchema const& schema) {
    return std::any_of(schema.arguments().begin(),
                       schema.arguments().end(),
                       [](c10::Argument const& argument) { return argument.is_out(); });
  }

  /// Returns whether an argument is a tensor that has one number for each element of the lists
  /// (`_foreach_addcdiv.Tensor`).
  [[nodiscard]] static bool is_packed(c10::Argument const& argument, c10::IValue const& value) {
    return value.isTensor() && argument.name() == "scalars";
  }

  /// Returns whether each list has one value for each of `length` elements. PyTorch's kernel has to
  /// see lists of other lengths whole: parts of them may fit each other, which would hide its error
  /// and combine the wrong elements. Only fused optimizers have lists that may be left out.
  [[nodiscard]] static bool takes_one_element_each(c10::FunctionSchema const& schema,
                                                   std::span<c10::IValue const> arguments,
                                                   std::size_t length) {
    bool const may_omit = schema.name().rfind("aten::_fused_", 0) == 0;
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      c10::IValue const& value = arguments[i];
      if (value.isList()) {
        std::size_t const size = value.toListRef().size();
        if (size != length && !(may_omit && size == 0)) {
          return false;
        }
      } else if (is_packed(schema.arguments()[i], value)) {
        // A part of a tensor that PyTorch refuses could have a form that it accepts.
        at::Tensor const& scalars = value.toTensor();
        if (!scalars.defined() || scalars.dim() != 1 || !scalars.device().is_cpu() ||
            !scalars.is_contiguous() || static_cast<std::size_t>(scalars.numel()) != length) {
          return false;
        }
      }
    }
    return true;
  }

  /// Returns whether autograd does the same for parts of the lists as for whole lists. It does not
  /// if only some elements require a gradient, since that makes all results require one, or if the
  /// operation writes a parameter or a view of one, which is refused before anything is written.
  [[nodiscard]] static bool is_the_same_to_autograd(c10::FunctionSchema const& schema,
                                                    std::span<c10::IValue const> arguments,
                                                    std::size_t length) {
    if (!c10::GradMode::is_enabled()) {
      return true;
    }
    std::vector<bool> requires_grad(length, false);
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      if (!arguments[i].isTensorList()) {
        continue;
      }
      bool const is_written = detail::writes(schema.arguments()[i]);
      auto const elements = arguments[i].toListRef();
      for (std::size_t e = 0; e < elements.size(); ++e) {
        at::Tensor const& tensor = elements[e].toTensor();
        if (tensor.defined() && tensor.requires_grad()) {
          requires_grad[e] = true;
          if (is_written && (tensor.is_leaf() || tensor.is_view())) {
            return false;
          }
        }
      }
    }
    return std::adjacent_find(requires_grad.begin(), requires_grad.end(), std::not_equal_to<>{}) ==
           requires_grad.end();
  }

  /// Returns the bytes that an operation pins for a tensor. A tensor that a compiler traces has no
  /// memory, and perhaps no known size.
  [[nodiscard]] static std::size_t pinned_bytes(at::Tensor const& tensor) {
    bool const may_be_ours = tensor.defined() && tensor.has_storage();
    return may_be_ours && Site::Leases::is_ours(*tensor.storage().unsafeGetStorageImpl())
               ? tensor.storage().nbytes()
               : 0;
  }

  /// Returns where to cut lists of the same length, so that no part pins more than `foreach_bytes`.
  [[nodiscard]] static std::vector<std::size_t> pieces(std::span<c10::IValue const> arguments) {
    std::size_t length = 0;
    for (c10::IValue const& value : arguments) {
      if (value.isTensorList()) {
        length = std::max(length, value.toListRef().size());
      }
    }
    std::vector<std::size_t> cuts{0};
    std::size_t bytes = 0;
    for (std::size_t i = 0; i < length; ++i) {
      std::size_t row = 0;
      for (c10::IValue const& value : arguments) {
        if (value.isTensorList() && value.toListRef().size() == length) {
          row += pinned_bytes(value.toListRef()[i].toTensor());
        }
      }
      if (bytes != 0 && bytes + row > Site::foreach_bytes()) {
        cuts.push_back(i);
        bytes = 0;
      }
      bytes += row;
    }
    cuts.push_back(length);
    return cuts;
  }

  /// Returns elements [begin, end) of an argument that has `length` of them; any other argument as
  /// it is.
  [[nodiscard]] static c10::IValue slice(c10::Argument const& argument,
                                         c10::IValue const& value,
                                         std::size_t length,
                                         std::size_t begin,
                                         std::size_t end) {
    if (is_packed(argument, value)) {
      return value.toTensor().slice(
          0, static_cast<std::int64_t>(begin), static_cast<std::int64_t>(end));
    }
    if (!value.isList() || value.toListRef().size() != length) {
      return value;
    }
    auto const elements = value.toListRef();
    c10::impl::GenericList part{value.toList().elementType()};
    for (std::size_t i = begin; i < end; ++i) {
      part.push_back(elements[i]);
    }
    return part;
  }
};

}  // namespace spillway::torch
