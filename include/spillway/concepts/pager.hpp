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
};

/// Owns blocks and moves them between the device and host swap.
///
/// Given `p` of type `P`, `n` bytes, stream `s`, block `id`, access `a`, requests `r`:
///
/// | expression            | must                                                                 |
/// |-----------------------|----------------------------------------------------------------------|
/// | `p.allocate(n)`       | make a resident block without contents, or throw `OutOfDeviceMemory` |
/// | `p.deallocate(id)`    | free it; `ContractViolation` if it is unknown or leased              |
/// | `p.abandon(id)`       | free it as soon as its last lease is gone                            |
/// | `p.acquire(id, a, s)` | a lease; the block is resident and work on `s` may use it            |
/// | `p.acquire_all(r, s)` | leases for all operands of one operation, none evicted for another   |
/// | `p.swap_out(id)`      | bytes to the host pool, range free for others                        |
/// | `p.swap_in(id)`       | bytes back, ahead of the lease that will need them                   |
/// | `cp.residency(id)`    | where the bytes are                                                  |
///
/// Only `acquire` takes a stream: a block remembers its last uses, so everything else is ordered
/// after them wherever they were enqueued.
// clang-format off
template <class P>
concept Pager =
    requires(P p, P const cp, BlockId id, std::size_t n, Access a, typename P::stream_type s,
             std::span<LeaseRequest const> r) {
      typename P::lease_type;
      { p.allocate(n)       }          -> std::same_as<BlockId>;
      { p.deallocate(id)    }          -> std::same_as<void>;
      { p.abandon(id)       } noexcept -> std::same_as<void>;
      { p.acquire(id, a, s) }          -> std::same_as<typename P::lease_type>;
      { p.acquire_all(r, s) }          -> std::same_as<std::vector<typename P::lease_type>>;
      { p.swap_out(id)      }          -> std::same_as<void>;
      { p.swap_in(id)       }          -> std::same_as<void>;
      { cp.residency(id)    }          -> std::same_as<Residency>;
    };
// clang-format on

}  // namespace spillway
