// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/error.hpp>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace spillway::torch {

/// PyTorch's name of a private pool.
using PoolId = std::pair<unsigned long long, unsigned long long>;

/// Where a pool's memory comes from.
template <class Stream>
struct PoolSource {
  std::function<void*(std::size_t bytes, Stream stream)> allocate;  ///< throws if there is no room
  std::function<void(void* p)> free;                                ///< ordered after all uses
};

/// The private pools of `torch.cuda.MemPool` and of CUDA graphs: memory that stays with its pool
/// when it is freed, at addresses that do not change, until the pool has no users left.
///
/// A piece is never split. A piece that is freed becomes idle and serves the next allocation of
/// nearly its size on the same stream, where the order of work is the order of calls. A piece that
/// other streams have used is returned to its source instead. During a capture nothing can be
/// ordered after those streams, and the piece is retired until the pool ends.
///
/// Units    bytes.
/// Threads  thread-safe. Sources are called without the lock.
template <class Stream>
class PrivatePools {
 public:
  using Source = PoolSource<Stream>;
  using Admits = std::function<bool(Stream)>;

  static constexpr bool is_thread_safe = true;

  /// `usual` serves pools that bring no source of their own.
  explicit PrivatePools(Source usual) : usual_{std::move(usual)} {}
  PrivatePools(PrivatePools const&) = delete;
  PrivatePools& operator=(PrivatePools const&) = delete;

  /// Adds a user; the first one makes the pool, with a source of its own if `own` is given.
  void retain(PoolId id, std::optional<Source> own = std::nullopt) {
    std::scoped_lock const lock{mutex_};
    auto const [at, is_new] = pools_.try_emplace(id);
    if (is_new) {
      at->second.source = std::move(own);
    }
    ++at->second.uses;
  }
  /// Removes a user. After the last one idle pieces are returned to the source, and live ones when
  /// they are freed.
  ///
  /// @throws ContractViolation if the pool has no users
  void release(PoolId id);
  [[nodiscard]] int use_count(PoolId id) const {
    std::scoped_lock const lock{mutex_};
    auto const found = pools_.find(id);
    return found == pools_.end() ? 0 : found->second.uses;
  }
  /// Sets whether idle pieces of this pool may be returned when there is no other room.
  void set_lends(PoolId id, bool lends) {
    std::scoped_lock const lock{mutex_};
    pools_[id].lends = lends;
  }

  /// Makes allocations on streams for which `admits` is true belong to the pool, and adds a user.
  void begin(PoolId id, Admits admits) {
    retain(id);
    std::scoped_lock const lock{mutex_};
    routes_.emplace_back(id, std::move(admits));
    route_count_.store(routes_.size(), std::memory_order_relaxed);
  }
  /// Ends `begin`; its user stays. @throws ContractViolation if nothing was begun
  void end(PoolId id);
  /// Whether `route` may name a pool; without the lock.
  [[nodiscard]] bool is_routing() const noexcept {
    return route_count_.load(std::memory_order_relaxed) != 0;
  }
  /// Returns the pool that an allocation on `stream` belongs to: of several the one begun last.
  [[nodiscard]] std::optional<PoolId> route(Stream stream) const;

  /// @param stream  where the memory is used
  /// @param from    the stream that the source allocates it on
  [[nodiscard]] void* allocate(PoolId id, std::size_t bytes, Stream stream, Stream from);
  /// @returns false if the address is not of a pool
  [[nodiscard]] bool free(void* p, bool is_captured);
  /// Another stream uses the memory. @returns false if the address is not of a pool
  [[nodiscard]] bool record_stream(void* p, Stream stream);

  /// Returns idle pieces to their sources: of one pool, or of all. @returns the bytes
  std::size_t trim(std::optional<PoolId> only = std::nullopt) {
    return return_idle([&](PoolId id, Pool const&) { return !only || *only == id; });
  }
  /// Does the same for the pools that `set_lends` allows it for.
  std::size_t lend() {
    return return_idle([](PoolId, Pool const& pool) { return pool.lends; });
  }

  [[nodiscard]] bool has_exactly(PoolId id, std::unordered_set<void*> const& expected) const;
  /// The bytes of idle and live pieces; 0 for an unknown pool.
  [[nodiscard]] std::size_t reserved_bytes(PoolId id) const;

  struct Piece {
    PoolId pool{};
    void* address = nullptr;
    std::size_t bytes = 0;
    std::size_t requested_bytes = 0;  // 0 while idle
    Stream stream{};
    bool is_shared = false;  // other streams have used it
  };
  /// Live pieces and idle ones, in order of address.
  [[nodiscard]] std::vector<Piece> pieces(PoolId id) const;
  [[nodiscard]] std::vector<PoolId> ids() const {
    std::scoped_lock const lock{mutex_};
    std::vector<PoolId> all;
    for (auto const& [id, pool] : pools_) {
      all.push_back(id);
    }
    return all;
  }

 private:
  struct Pool {
    int uses = 0;
    bool lends = false;
    std::optional<Source> source;
    std::multimap<std::size_t, Piece> idle;  // by bytes
    std::vector<Piece> retired;
    std::size_t live = 0;
  };
  using Lock = std::unique_lock<std::mutex>;

  /// A piece is reused if not more than a quarter of it is wasted.
  [[nodiscard]] static bool fits(Piece const& piece, std::size_t bytes) noexcept {
    return piece.bytes >= bytes && piece.bytes - bytes <= piece.bytes / 4;
  }
  [[nodiscard]] Source source_of(Pool const& pool) const {
    return pool.source ? *pool.source : usual_;
  }
  template <class Chooses>
  std::size_t return_idle(Chooses chooses);
  void erase_if_unused(typename std::map<PoolId, Pool>::iterator at) {
    if (at->second.uses == 0 && at->second.live == 0) {
      pools_.erase(at);
    }
  }

  Source usual_;
  mutable std::mutex mutex_;  // guards what follows
  std::map<PoolId, Pool> pools_;
  std::unordered_map<void*, Piece> live_;
  std::vector<std::pair<PoolId, Admits>> routes_;
  std::atomic<std::size_t> route_count_{0};
};

template <class Stream>
void PrivatePools<Stream>::release(PoolId id) {
  std::vector<Piece> gone;
  Source source;
  {
    Lock const lock{mutex_};
    auto const found = pools_.find(id);
    expects(found != pools_.end() && found->second.uses != 0,
            "a memory pool is released that nobody uses");
    Pool& pool = found->second;
    if (--pool.uses != 0) {
      return;
    }
    source = source_of(pool);
    for (auto& [bytes, piece] : pool.idle) {
      gone.push_back(piece);
    }
    gone.insert(gone.end(), pool.retired.begin(), pool.retired.end());
    pool.idle.clear();
    pool.retired.clear();
    erase_if_unused(found);
  }
  for (Piece const& piece : gone) {
    source.free(piece.address);
  }
}

template <class Stream>
void PrivatePools<Stream>::end(PoolId id) {
  Lock const lock{mutex_};
  auto const found = std::find_if(
      routes_.rbegin(), routes_.rend(), [&](auto const& route) { return route.first == id; });
  expects(found != routes_.rend(), "the end of allocations to a memory pool that were not begun");
  routes_.erase(std::next(found).base());
  route_count_.store(routes_.size(), std::memory_order_relaxed);
}

template <class Stream>
std::optional<PoolId> PrivatePools<Stream>::route(Stream stream) const {
  std::vector<std::pair<PoolId, Admits>> routes;
  {
    Lock const lock{mutex_};
    routes = routes_;
  }
  auto const found = std::find_if(
      routes.rbegin(), routes.rend(), [&](auto const& one) { return one.second(stream); });
  return found == routes.rend() ? std::nullopt : std::optional{found->first};
}

template <class Stream>
void* PrivatePools<Stream>::allocate(PoolId id, std::size_t bytes, Stream stream, Stream from) {
  Lock lock{mutex_};
  Pool& pool = pools_[id];
  for (auto at = pool.idle.lower_bound(bytes); at != pool.idle.end() && fits(at->second, bytes);
       ++at) {
    if (at->second.stream == stream) {
      Piece piece = at->second;
      pool.idle.erase(at);
      piece.requested_bytes = bytes;
      ++pool.live;
      live_[piece.address] = piece;
      return piece.address;
    }
  }
  ++pool.live;  // keeps the pool while the lock is released
  Source const source = source_of(pool);
  lock.unlock();
  void* p = nullptr;
  try {
    p = source.allocate(bytes, from);
  } catch (...) {
    lock.lock();
    --pools_[id].live;
    throw;
  }
  lock.lock();
  live_[p] = {id, p, bytes, bytes, stream, false};
  return p;
}

template <class Stream>
bool PrivatePools<Stream>::free(void* p, bool is_captured) {
  Source source;
  {
    Lock const lock{mutex_};
    auto const found = live_.find(p);
    if (found == live_.end()) {
      return false;
    }
    Piece piece = found->second;
    live_.erase(found);
    auto const at = pools_.find(piece.pool);
    Pool& pool = at->second;
    --pool.live;
    piece.requested_bytes = 0;
    if (pool.uses != 0 && !piece.is_shared) {
      pool.idle.emplace(piece.bytes, piece);
      return true;
    }
    if (pool.uses != 0 && is_captured) {
      pool.retired.push_back(piece);
      return true;
    }
    source = source_of(pool);
    erase_if_unused(at);
  }
  source.free(p);
  return true;
}

template <class Stream>
bool PrivatePools<Stream>::record_stream(void* p, Stream stream) {
  Lock const lock{mutex_};
  auto const found = live_.find(p);
  if (found == live_.end()) {
    return false;
  }
  found->second.is_shared = found->second.is_shared || found->second.stream != stream;
  return true;
}

template <class Stream>
template <class Chooses>
std::size_t PrivatePools<Stream>::return_idle(Chooses chooses) {
  std::vector<std::pair<Piece, Source>> gone;
  std::size_t bytes = 0;
  {
    Lock const lock{mutex_};
    for (auto& [id, pool] : pools_) {
      if (chooses(id, std::as_const(pool))) {
        for (auto& [size, piece] : pool.idle) {
          gone.emplace_back(piece, source_of(pool));
        }
        pool.idle.clear();
      }
    }
  }
  for (auto const& [piece, source] : gone) {
    source.free(piece.address);
    bytes += piece.bytes;
  }
  return bytes;
}

template <class Stream>
bool PrivatePools<Stream>::has_exactly(PoolId id, std::unordered_set<void*> const& expected) const {
  Lock const lock{mutex_};
  std::size_t found = 0;
  for (auto const& [p, piece] : live_) {
    if (piece.pool == id) {
      ++found;
      if (expected.count(p) == 0) {
        return false;
      }
    }
  }
  return found == expected.size();
}

template <class Stream>
std::size_t PrivatePools<Stream>::reserved_bytes(PoolId id) const {
  std::size_t bytes = 0;
  for (Piece const& piece : pieces(id)) {
    bytes += piece.bytes;
  }
  return bytes;
}

template <class Stream>
auto PrivatePools<Stream>::pieces(PoolId id) const -> std::vector<Piece> {
  std::vector<Piece> all;
  {
    Lock const lock{mutex_};
    for (auto const& [p, piece] : live_) {
      if (piece.pool == id) {
        all.push_back(piece);
      }
    }
    if (auto const found = pools_.find(id); found != pools_.end()) {
      for (auto const& [bytes, piece] : found->second.idle) {
        all.push_back(piece);
      }
      all.insert(all.end(), found->second.retired.begin(), found->second.retired.end());
    }
  }
  std::sort(all.begin(), all.end(), [](Piece const& a, Piece const& b) {
    return std::less<>{}(a.address, b.address);
  });
  return all;
}

}  // namespace spillway::torch
