// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/callable_object.hpp>
#include <spillway/concepts/device_api.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

/// The concepts in this file are abilities that a device may have beyond `DeviceApi`. The library
/// tests for them only by these concepts, so a device offers an ability by having its members:
///
/// | concept              | asks for                      | then the library                      |
/// |----------------------|-------------------------------|---------------------------------------|
/// | `BatchCopyApi`       | `copy_batch`                  | copies many blocks at once            |
/// | `VirtualMemoryApi`   | `reserve_address`, `try_map`  | can remap instead of move             |
/// | `CheapPiecesApi`     | `has_cheap_pieces` is true    | maps single pages, and makes no       |
/// |                      |                               | larger pieces                         |
/// | `RemappingApi`       | `move_mapped`                 | takes memory from where it is mapped  |
/// |                      |                               | to where it is needed in one call     |
/// | `VacatingApi`        | `vacate`                      | unmaps swapped-out blocks in stream   |
/// |                      |                               | order                                 |
/// | `HostWorkApi`        | `make_host_worker`            | runs copies in memory and file calls  |
/// |                      |                               | where they hold nothing else up       |
/// | `SlowPinningApi`     | `pins_slowly` is true         | pins host memory ahead of need, on a  |
/// |                      |                               | thread of its own                     |
/// | `SharedMemoryApi`    | `shares_host_memory`          | swaps to files only, where that is so |
/// | `ByteHoldingApi`     | `holds_bytes` is not false    | may read and write through addresses  |
/// | `AddressableApi`     | `is_addressable` is true      | lets codecs read blocks in place      |
/// | `ReadCheckingApi`    | `checks_reads`                | refuses reads of what was never       |
/// |                      |                               | written                               |
/// | `HostCallCheckingApi`| `is_host_function_caller`     | refuses acquires of host functions    |
/// | `CapturingApi`       | `is_capturing`                | refuses what a capture does not allow |
/// | `PerThreadStreamApi` | `is_one_stream`               | refuses handles that it cannot order  |
/// | `CallerStreamApi`    | `is_caller`                   | keeps no order after what has         |
/// |                      |                               | happened already                      |
/// | `NumberedApi`        | `ordinal`                     | names the device in snapshots and     |
/// |                      |                               | tensors                               |
/// | `LaunchingApi`       | `launch`                      | times kernels that are callables      |
/// | `TimingApi`          | `create_timed_event`, ...     | can price operations of a framework   |
/// | `KernelTimeApi`      | `compute`                     | lets replays model the time of        |
/// |                      |                               | kernels                               |
/// | `VirtualClockApi`    | `finish_time_ns`              | lets replays read the end of the work |
/// | `SteppedApi`         | `run_all`                     | runs nothing until it is told to      |
/// | `ForkingApi`         | `before_fork`, ...            | can go on in a child after `fork`     |

namespace spillway {

/// A device that takes many copies in one call, for less than they cost one by one.
///
/// Given `d` of type `D`, `to`, `from` and `sizes` of the same length, and a stream `s`:
///
/// | expression                               | must                                           |
/// |------------------------------------------|------------------------------------------------|
/// | `d.copy_batch(to, from, sizes, kind, s)` | enqueue copies of one kind, in any order among |
/// |                                          | themselves; later work on `s` waits for all of |
/// |                                          | them                                           |
///
/// No range that a batch writes overlaps another range of the batch. Sizes may be 0. Thread-safe.
/// Unlike other calls, one that throws `DeviceError` may have had an effect: any or none of the
/// copies may have been enqueued.
// clang-format off
template <class D>
concept BatchCopyApi =
    DeviceApi<D> &&
    requires(D d, std::span<void* const> to, std::span<void const* const> from,
             std::span<std::size_t const> sizes, CopyKind kind, typename D::stream_type s) {
      { d.copy_batch(to, from, sizes, kind, s) } -> std::same_as<void>;
    };

/// A device that reserves addresses apart from memory, and maps memory to them.
///
/// Given `d` of type `D`, address `p`, physical memory `m` of `n` bytes, a span `ms` of such; every
/// size and address is a multiple of `granularity_bytes()`:
///
/// | expression                 | must                                                            |
/// |----------------------------|-----------------------------------------------------------------|
/// | `d.granularity_bytes()`    | the smallest piece that can be mapped, a power of two           |
/// | `d.reserve_address(n)`     | address space without memory                                    |
/// | `d.free_address(p, n)`     | give it back; nothing is mapped there                           |
/// | `d.try_create_physical(n)` | device memory without an address, nothing if the device is full |
/// | `d.release_physical(m)`    | give it back; it is mapped nowhere                              |
/// | `d.try_map(p, n, ms)`      | map all of `ms`, each of `n` bytes, side by side from `p` on,   |
/// |                            | readable and writable by the device; false, with no effect, if  |
/// |                            | the device has no memory for the mapping itself                 |
/// | `d.unmap(p, n)`            | unmap whole mappings, one or several that lie side by side; all |
/// |                            | work that touches them has finished                             |
///
/// Mapping changes take effect at the call, not in stream order: before `unmap` the caller has
/// waited for the last use. Thread-safe. Calls without `noexcept` throw `DeviceError` and then have
/// had no effect.
template <class D>
concept VirtualMemoryApi =
    DeviceApi<D> && std::regular<typename D::physical_type> &&
    requires(D d, D const cd, std::size_t n, void* p, typename D::physical_type m,
             std::span<typename D::physical_type const> ms) {
      { cd.granularity_bytes()   } noexcept -> std::same_as<std::size_t>;
      { d.reserve_address(n)     }          -> std::same_as<void*>;
      { d.free_address(p, n)     } noexcept -> std::same_as<void>;
      { d.try_create_physical(n) }
                                        -> std::same_as<std::optional<typename D::physical_type>>;
      { d.release_physical(m)    } noexcept -> std::same_as<void>;
      { d.try_map(p, n, ms)      }          -> std::same_as<bool>;
      { d.unmap(p, n)            } noexcept -> std::same_as<void>;
    };

/// A virtual memory device for which it makes no difference in how many pieces memory is created,
/// mapped and unmapped: `D::has_cheap_pieces` is true.
template <class D>
concept CheapPiecesApi = VirtualMemoryApi<D> && requires { requires D::has_cheap_pieces; };

/// A device with cheap pieces that can move mapped memory to other addresses faster than by
/// unmapping and mapping it. `d.move_mapped(to, from, n)` has the effect of `d.unmap(from, n)` and
/// `d.map` of the same memory at `to`. The contents of the memory are undefined then.
///
/// The two ranges do not overlap, all of `from` is mapped, and nothing is mapped at `to`. If it
/// throws `DeviceError`, nothing is mapped at either.
template <class D>
concept RemappingApi = CheapPiecesApi<D> && requires(D d, std::size_t n, void* p) {
  { d.move_mapped(p, p, n) } -> std::same_as<void>;
};

/// A virtual memory device that can unmap in stream order: `d.vacate(p, n, s)` does `d.unmap(p, n)`
/// once the work that was enqueued on `s` before is done.
///
/// A block that is swapped out is then unmapped as soon as it has been copied, so that a program
/// that still uses its address faults at once. Without this ability the memory stays mapped until
/// it is needed elsewhere.
template <class D>
concept VacatingApi =
    VirtualMemoryApi<D> && requires(D d, std::size_t n, void* p, typename D::stream_type s) {
      { d.vacate(p, n, s) } -> std::same_as<void>;
    };

/// A device whose host functions delay those of other streams, so that long ones need a thread of
/// their own: `d.make_host_worker(s)` returns a pointer to an object that owns the thread. Its
/// `launch(f, arg)` is thread-safe and has the effect of `d.launch_host(s, f, arg)`. The object is
/// destroyed before `s`, after all functions that it has launched have returned.
template <class D>
concept HostWorkApi =
    DeviceApi<D> && requires(D d, typename D::stream_type s, HostFunction f, void* p) {
      { d.make_host_worker(s)->launch(f, p) } -> std::same_as<void>;
    };

/// A device for which pinning host memory takes about as long as copying into it, or longer:
/// `D::pins_slowly` is true.
template <class D>
concept SlowPinningApi = DeviceApi<D> && requires { requires D::pins_slowly; };

/// A device whose memory may be the host's memory, as that of integrated GPUs: then
/// `cd.shares_host_memory()` is true. Swapping out to host memory would not make room there, so
/// only a file is useful.
///
/// It is false if device and host have separate memories and only the addresses are shared.
template <class D>
concept SharedMemoryApi = DeviceApi<D> && requires(D const cd) {
  { cd.shares_host_memory() } noexcept -> std::same_as<bool>;
};

/// A device whose memory holds bytes. If `D::holds_bytes` exists and is false, the device only
/// models memory: its addresses are mere names and must not be dereferenced.
template <class D>
concept ByteHoldingApi = DeviceApi<D> && !requires { requires !D::holds_bytes; };

/// A device whose memory host functions on a stream can read and write directly:
/// `D::is_addressable` is true.
template <class D>
concept AddressableApi = ByteHoldingApi<D> && requires { requires D::is_addressable; };

/// A device that looks for mistakes of programs, as simulated ones do: if `cd.checks_reads()` is
/// true, the allocator refuses a lease for reading a block that was never written.
template <class D>
concept ReadCheckingApi = DeviceApi<D> && requires(D const cd) {
  { cd.checks_reads() } noexcept -> std::same_as<bool>;
};

/// A device that knows its host functions, which may neither call it nor wait for work: if
/// `cd.is_host_function_caller()` is true, the caller is one, and the allocator refuses to acquire
/// a block for it.
template <class D>
concept HostCallCheckingApi = DeviceApi<D> && requires(D const cd) {
  { cd.is_host_function_caller() } -> std::same_as<bool>;
};

/// A device that can record the work of a stream into a graph instead of running it:
/// `cd.is_capturing(s)` says whether it records what is enqueued on `s` now.
template <class D>
concept CapturingApi = DeviceApi<D> && requires(D const cd, typename D::stream_type s) {
  { cd.is_capturing(s) } -> std::same_as<bool>;
};

/// A device with handles that stand for a different stream in each thread (as CUDA's per-thread
/// default stream). Their work cannot be ordered: `D::is_one_stream(s)` is false for them.
template <class D>
concept PerThreadStreamApi = DeviceApi<D> && requires(typename D::stream_type s) {
  { D::is_one_stream(s) } noexcept -> std::same_as<bool>;
};

/// A device with streams whose work runs on the calling thread: it has finished when the call that
/// enqueues it returns, so nothing has to wait for it. `D::is_caller(s)` is true for such streams.
template <class D>
concept CallerStreamApi = DeviceApi<D> && requires(typename D::stream_type s) {
  { D::is_caller(s) } noexcept -> std::same_as<bool>;
};

/// One of several devices of its kind: `cd.ordinal()` is its number, from 0.
template <class D>
concept NumberedApi = DeviceApi<D> && requires(D const cd) {
  { cd.ordinal() } noexcept -> std::same_as<int>;
};

/// A device whose kernels are callables: `d.launch(s, work)` enqueues a call of `work()` on `s`.
template <class D>
concept LaunchingApi =
    DeviceApi<D> &&
    requires(D d, typename D::stream_type s, detail::CallableObject<void()> work) {
  { d.launch(s, work) } -> std::same_as<void>;
};

/// A device that knows when streams have passed events: `d.create_timed_event()` makes an event
/// with a time stamp, and `d.elapsed_ns(from, to)` is how much later `to` was passed than `from`,
/// in nanoseconds, where both are complete and were recorded on one stream in this order.
template <class D>
concept TimingApi = DeviceApi<D> && requires(D d, typename D::event_type e) {
  { d.create_timed_event() } -> std::same_as<typename D::event_type>;
  { d.elapsed_ns(e, e)     } -> std::same_as<std::uint64_t>;
};

/// A device that models the time of kernels: `d.compute(s, ns)` keeps stream `s` busy for `ns`
/// nanoseconds.
template <class D>
concept KernelTimeApi =
    DeviceApi<D> && requires(D d, typename D::stream_type s, std::uint64_t ns) {
      { d.compute(s, ns) } -> std::same_as<void>;
    };

/// A device on a virtual clock: `cd.finish_time_ns()` is when all work enqueued so far will have
/// finished.
template <class D>
concept VirtualClockApi = DeviceApi<D> && requires(D const cd) {
  { cd.finish_time_ns() } -> std::same_as<std::uint64_t>;
};

/// A device that runs nothing until it is told to: `d.run_all()` runs all work that can run and
/// returns how much that was.
template <class D>
concept SteppedApi = DeviceApi<D> && requires(D d) {
  { d.run_all() } -> std::same_as<std::size_t>;
};

/// A device that a child process can use after `fork`. The thread that forks calls
/// `d.before_fork()`, from which on no other thread is inside of a call, and then
/// `d.after_fork_in_parent()` in the parent and `d.after_fork_in_child()` in the child. Where the
/// device has several allocators, each of these is called once for each allocator. In between,
/// `d.let_others_in()`, if there is one, lets other threads in for a moment: an allocator waits
/// there for calls that they are inside of.
template <class D>
concept ForkingApi = DeviceApi<D> && requires(D d) {
  { d.before_fork()          }          -> std::same_as<void>;
  { d.after_fork_in_parent() } noexcept -> std::same_as<void>;
  { d.after_fork_in_child()  } noexcept -> std::same_as<void>;
};
// clang-format on

}  // namespace spillway
