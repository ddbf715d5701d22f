// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/types.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

namespace spillway {

/// The interface to a device: its memory, pinned host memory, copies, streams and events. The
/// library makes no device call but through it.
///
/// Given `d` of type `D`, device pointer `p`, `n` bytes, stream `s`, event `e`:
///
/// | expression                       | must                                                      |
/// |----------------------------------|-----------------------------------------------------------|
/// | `d.try_reserve(n)`               | device memory aligned to 256 B, or null if the device is  |
/// |                                  | full                                                      |
/// | `d.release(p, n)`                | give back a whole reservation; its work is done or        |
/// |                                  | ordered                                                   |
/// | `d.try_allocate_pinned(n, node)` | page-locked host memory near NUMA `node` (-1: any), or    |
/// |                                  | null                                                      |
/// | `d.free_pinned(h, n)`            | give it back                                              |
/// | `d.copy(to, from, n, kind, s)`   | enqueue; on_device ranges do not overlap                  |
/// | `d.fill(p, byte, n, s)`          | enqueue a memset of device memory                         |
/// | `d.launch_host(s, f, arg)`       | enqueue a call on the host, which makes no device call;   |
/// |                                  | later work waits for it                                   |
/// | `d.create_stream()`              | a stream that does not wait for any other                 |
/// | `d.destroy_stream(s)`            | wait for nothing; enqueued work still runs                |
/// | `d.create_event()`               | an event; it is complete until it is recorded             |
/// | `d.destroy_event(e)`             | give it back                                              |
/// | `d.record(e, s)`                 | `e` now stands for all work enqueued on `s` so far        |
/// | `d.wait(s, e)`                   | later work on `s` waits for what `e` stands for *now*     |
/// | `d.is_complete(e)`               | ask without waiting                                       |
/// | `d.synchronize(e)`, `(s)`        | wait on the host                                          |
/// | `d.memory_info()`                | free and total bytes of the device                        |
/// | `d.numa_node()`                  | the device's NUMA node, -1 where unknown                  |
/// | `d.clock_ns()`                   | a monotonic clock, virtual if the device only models time |
///
/// All calls are thread-safe. Calls without `noexcept` throw `DeviceError` and then have had no
/// effect. Streams and events are cheap handles (a pointer or an index): copying one copies a name.
/// They have different types, since `synchronize` takes either.
// clang-format off
template <class D>
concept DeviceApi =
    std::regular<typename D::stream_type> && std::regular<typename D::event_type> &&
    !std::same_as<typename D::stream_type, typename D::event_type> &&
    requires(D d, D const cd, std::size_t n, void* p, void const* q, int node, unsigned char byte,
             CopyKind kind, HostFunction f, typename D::stream_type s, typename D::event_type e) {
      { std::hash<typename D::stream_type>{}(s) } -> std::convertible_to<std::size_t>;
      { d.try_reserve(n)               }          -> std::same_as<void*>;
      { d.release(p, n)                } noexcept -> std::same_as<void>;
      { d.try_allocate_pinned(n, node) }          -> std::same_as<void*>;
      { d.free_pinned(p, n)            } noexcept -> std::same_as<void>;
      { d.copy(p, q, n, kind, s)       }          -> std::same_as<void>;
      { d.fill(p, byte, n, s)          }          -> std::same_as<void>;
      { d.launch_host(s, f, p)         }          -> std::same_as<void>;
      { d.create_stream()              }          -> std::same_as<typename D::stream_type>;
      { d.destroy_stream(s)            } noexcept -> std::same_as<void>;
      { d.create_event()               }          -> std::same_as<typename D::event_type>;
      { d.destroy_event(e)             } noexcept -> std::same_as<void>;
      { d.record(e, s)                 }          -> std::same_as<void>;
      { d.wait(s, e)                   }          -> std::same_as<void>;
      { d.is_complete(e)               }          -> std::same_as<bool>;
      { d.synchronize(e)               }          -> std::same_as<void>;
      { d.synchronize(s)               }          -> std::same_as<void>;
      { cd.memory_info()               }          -> std::same_as<MemoryInfo>;
      { cd.numa_node()                 } noexcept -> std::same_as<int>;
      { cd.clock_ns()                  } noexcept -> std::same_as<std::uint64_t>;
    };
// clang-format on

namespace detail {

/// Enqueues a call of `work()` by `launch_host`, which takes only plain functions. `work` is moved
/// to the heap and freed after the call. @throws as `launch_host`; std::bad_alloc
template <DeviceApi D, std::invocable Work>
void launch_callable(D& device, typename D::stream_type stream, Work work) {
  auto owned = std::make_unique<Work>(std::move(work));
  device.launch_host(
      stream,
      [](void* argument) noexcept {
        std::unique_ptr<Work> const mine{static_cast<Work*>(argument)};
        (*mine)();
      },
      owned.get());
  static_cast<void>(owned.release());  // the call frees it
}

}  // namespace detail

}  // namespace spillway
