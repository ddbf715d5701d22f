// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/types.hpp>

#include <concepts>
#include <cstddef>
#include <span>
#include <vector>

namespace spillway {

/// One operand of an operation: which block, and what will be done with its bytes.
struct LeaseRequest {
  BlockId id{};
  Access access = Access::read;
  /// Whether the holder will describe its change by `DeviceAllocator::extend_recipe`. The block's
  /// recipe is then suspended and does not end.
  bool extends_recipe = false;
};

/// A move-only lease on one block, which a pager gives out: while it is held, the block is resident
/// and does not move.
///
/// Given `l` of type `L` (`cl` if const):
///
/// | expression        | must                                                             |
/// |-------------------|------------------------------------------------------------------|
/// | `L()`             | hold nothing                                                     |
/// | `l.release()`     | end the lease as the destructor does; do nothing the second time |
/// | `cl.data()`       | the block's address on the device while it is held, else null    |
/// | `cl.size_bytes()` | the size that was asked for while the block is held, else 0      |
/// | `cl.block()`      | the block that was acquired                                      |
/// | `cl.access()`     | the access that it was acquired for                              |
/// | `cl.empty()`      | whether nothing is held                                          |
// clang-format off
template <class L>
concept BlockLease =
    std::default_initializable<L> && std::movable<L> && !std::copyable<L> &&
    requires(L l, L const cl) {
      { l.release()     } noexcept -> std::same_as<void>;
      { cl.data()       } noexcept -> std::same_as<void*>;
      { cl.size_bytes() } noexcept -> std::same_as<std::size_t>;
      { cl.block()      } noexcept -> std::same_as<BlockId>;
      { cl.access()     } noexcept -> std::same_as<Access>;
      { cl.empty()      } noexcept -> std::same_as<bool>;
    };
// clang-format on

/// Owns blocks and moves them between the device and host swap: all that `SwappableBuffer` and
/// `SwappableTensor` ask of an allocator, except that their functions `set_codec` and `set_recipe`
/// call those of the allocator, which it need not have.
///
/// Given `p` of type `P`, `n` bytes, stream `s`, block `id`, access `a`, requests `r`, host memory
/// `h` and the address `d` of a leased block:
///
/// | expression                          | must                                                   |
/// |-------------------------------------|--------------------------------------------------------|
/// | `P::lease_type`                     | be a `BlockLease`                                      |
/// | `p.allocate(n)`                     | make a resident block without contents, or throw       |
/// |                                     | `OutOfDeviceMemory`                                    |
/// | `p.deallocate(id)`                  | free it; `ContractViolation` if it is unknown or       |
/// |                                     | leased                                                 |
/// | `p.abandon(id)`                     | free it as soon as its last lease is gone              |
/// | `p.acquire(id, a, s)`               | a lease: the block is resident and work on `s` may use |
/// |                                     | it                                                     |
/// | `p.acquire_all(r, s)`               | leases for all operands of one operation; none is      |
/// |                                     | evicted for another                                    |
/// | `p.swap_out(id)`                    | copy the bytes to the host pool and free the range     |
/// | `p.swap_in(id)`                     | copy the bytes back, ahead of the lease that needs     |
/// |                                     | them                                                   |
/// | `cp.residency(id)`                  | where the bytes are                                    |
/// | `p.copy_from_host_sync(d, h, n, s)` | copy `n` bytes to the device on `s`, and wait until    |
/// |                                     | `h` is no longer needed                                |
/// | `p.copy_to_host_sync(h, d, n, s)`   | copy `n` bytes from the device on `s`, and wait for    |
/// |                                     | them                                                   |
///
/// A pager remembers the last uses of each block on all streams, and orders calls that take no
/// stream after them. Streams are passed by value.
// clang-format off
template <class P>
concept Pager =
    std::copyable<typename P::stream_type> && BlockLease<typename P::lease_type> &&
    requires(P p, P const cp, BlockId id, std::size_t n, Access a, typename P::stream_type s,
             std::span<LeaseRequest const> r, void* to, void const* from) {
      { p.allocate(n)                        }          -> std::same_as<BlockId>;
      { p.deallocate(id)                     }          -> std::same_as<void>;
      { p.abandon(id)                        } noexcept -> std::same_as<void>;
      { p.acquire(id, a, s)                  }          -> std::same_as<typename P::lease_type>;
      { p.acquire_all(r, s)                  }
                                             -> std::same_as<std::vector<typename P::lease_type>>;
      { p.swap_out(id)                       }          -> std::same_as<void>;
      { p.swap_in(id)                        }          -> std::same_as<void>;
      { cp.residency(id)                     }          -> std::same_as<Residency>;
      { p.copy_from_host_sync(to, from, n, s) }         -> std::same_as<void>;
      { p.copy_to_host_sync(to, from, n, s)   }         -> std::same_as<void>;
    };
// clang-format on

}  // namespace spillway
