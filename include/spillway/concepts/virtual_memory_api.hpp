// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/device_api.hpp>

#include <concepts>
#include <cstddef>
#include <optional>

namespace spillway {

/// A device whose addresses and memory are two things: addresses are reserved, memory is mapped.
///
/// Given `d` of type `D`, address `p`, physical memory `m` of `n` bytes; every size and address is a
/// multiple of `granularity_bytes()`:
///
/// | expression                  | must                                                        |
/// |-----------------------------|-------------------------------------------------------------|
/// | `d.granularity_bytes()`     | the smallest piece that can be mapped, a power of two        |
/// | `d.reserve_address(n)`      | address space with nothing behind it                        |
/// | `d.free_address(p, n)`      | give it back; nothing is mapped there                       |
/// | `d.try_create_physical(n)`  | device memory without an address, nothing when the device is full |
/// | `d.release_physical(m)`     | give it back; it is mapped nowhere                          |
/// | `d.map(p, n, m)`            | put all of `m` at `p`, readable and writable by the device  |
/// | `d.unmap(p, n)`             | take it away; all work that touches it has finished         |
///
/// Mapping changes take effect at the call, not in stream order: whoever unmaps has seen the last
/// use finish. Thread-safe; calls without `noexcept` throw `DeviceError` and then had no effect.
// clang-format off
template <class D>
concept VirtualMemoryApi =
    DeviceApi<D> && std::regular<typename D::physical_type> &&
    requires(D d, D const cd, std::size_t n, void* p, typename D::physical_type m) {
      { cd.granularity_bytes()   } noexcept -> std::same_as<std::size_t>;
      { d.reserve_address(n)     }          -> std::same_as<void*>;
      { d.free_address(p, n)     } noexcept -> std::same_as<void>;
      { d.try_create_physical(n) }          -> std::same_as<std::optional<typename D::physical_type>>;
      { d.release_physical(m)    } noexcept -> std::same_as<void>;
      { d.map(p, n, m)           }          -> std::same_as<void>;
      { d.unmap(p, n)            } noexcept -> std::same_as<void>;
    };

/// A virtual memory device where any memory is as good as any other: `D::maps_runs` is true, one `map` may
/// cover many pieces, and its `m` is not looked at. Neighbouring pages are then mapped with one call.
template <class D>
concept RunMappingApi = VirtualMemoryApi<D> && requires { requires D::maps_runs; };

/// A virtual memory device that can take memory away in stream order, with
/// `d.vacate(p, n, s)`: when the work enqueued on `s` before is done, `d.unmap(p, n)`.
///
/// What is swapped out is then unmapped as soon as it has been copied, and whoever uses its address all
/// the same faults at once. Without it memory stays mapped until it is needed elsewhere.
template <class D>
concept VacatingApi =
    VirtualMemoryApi<D> && requires(D d, std::size_t n, void* p, typename D::stream_type s) {
      { d.vacate(p, n, s) } -> std::same_as<void>;
    };
// clang-format on

}  // namespace spillway
