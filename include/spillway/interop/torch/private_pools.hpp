// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/error.hpp>
#include <spillway/core/fence.hpp>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <exception>
#include <functional>
#include <iterator>
#include <list>
#include <map>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace spillway::torch {

/// PyTorch's identifier of a private pool (`c10::MempoolId_t`).
using PoolId = std::pair<unsigned long long, unsigned long long>;

/// Where a pool's memory comes from.
template <class Stream>
struct PoolSource {
  std::function<void*(std::size_t bytes, Stream stream)> allocate;  ///< throws if there is no room
  std::function<void(void* p)>
      free;  ///< the memory may be reused after the work on the stream of `allocate`
};

/// Frees memory once a stream runs after all work that uses the memory, by means of events.
///
/// This is impossible while a stream that has used the memory is being captured into a graph. The
/// memory then waits in a list until the next call of `add` or `retry`.
///
/// `Memory` is a `DeviceAllocator`, or has its members `stream_type`, `order_after` and
/// `order_after_all`.
///
/// Threads  thread-safe. `Memory` and `give_back` are called without the lock.
template <class Memory>
class OrderedReturns {
 public:
  using stream_type = typename Memory::stream_type;

  struct Return {
    stream_type stream{};  ///< stream on which the memory is free after `give_back`
    /// Work that the stream must run after; if empty, the work of all streams
    std::optional<Fence> after;
    std::function<void()> give_back;
  };

  /// `memory` is not owned and must outlive this object.
  explicit OrderedReturns(Memory& memory) : memory_{&memory} {}
  OrderedReturns(OrderedReturns const&) = delete;
  OrderedReturns& operator=(OrderedReturns const&) = delete;

  void add(Return one) {
    std::list<Return> all;
    all.push_back(std::move(one));
    add(std::move(all));
  }
  /// Needs no host memory of its own, so that no return is lost.
  void add(std::list<Return> all) {
    {
      std::scoped_lock const lock{mutex_};
      all.splice(all.end(), waiting_);
    }
    while (!all.empty()) {
      Return const& one = all.front();
      try {
        if (one.after) {
          memory_->order_after(one.stream, *one.after);
        } else {
          memory_->order_after_all(one.stream);
        }
        one.give_back();
        all.pop_front();
      } catch (std::exception const&) {
        std::scoped_lock const lock{mutex_};
        waiting_.splice(waiting_.end(), all, all.begin());
      }
    }
  }
  /// Tries again to give back what had to wait.
  void retry() { add(std::list<Return>{}); }
  [[nodiscard]] std::size_t waiting_count() const {
    std::scoped_lock const lock{mutex_};
    return waiting_.size();
  }

  // For a thread that forks: while it holds the lock, no other thread is inside of a call.

  void lock() { mutex_.lock(); }
  [[nodiscard]] bool try_lock() noexcept { return mutex_.try_lock(); }
  void unlock() noexcept { mutex_.unlock(); }

 private:
  Memory* memory_;
  mutable std::mutex mutex_;  // guards what follows
  std::list<Return> waiting_;
};

/// The private pools of `torch.cuda.MemPool` and of CUDA graphs. Memory that is freed stays with
/// its pool, at the same address, until the pool has no users left.
///
/// A piece is never split. A piece that is freed becomes *idle*. It serves the next allocation of
/// nearly its size on the same stream, which is first made to run after the other streams that have
/// used the piece. That is impossible while the stream is being captured, so an allocation during a
/// capture gets no piece that other streams have used.
///
/// Idle pieces of a pool that has users are never given to anybody else, since a captured graph
/// writes its intermediate results to them whenever it is launched. When the last user is gone, the
/// pieces are returned to their source. A piece that a capture has used is returned after the work
/// of all streams, since nothing tells on which streams the graph was launched; any other piece
/// after the work of the streams that have used it.
///
/// `Memory` is a `DeviceAllocator`, or has its members `stream_type`, `mark`, `order_after` and
/// `order_after_all`.
///
/// A call that throws, also for lack of host memory, leaves all pieces as they were.
///
/// Units    bytes.
/// Threads  thread-safe. Sources are called without the lock. `Memory` is called with it, so that
///          `restore` sees each piece either live or idle.
/// Streams  nothing waits on the host.
template <class Memory>
class PrivatePools {
 public:
  using stream_type = typename Memory::stream_type;
  using Source = PoolSource<stream_type>;
  using Admits = std::function<bool(stream_type)>;

  static constexpr bool is_thread_safe = true;

  /// `memory` is not owned and must outlive this object. `usual` is the source of pools that have
  /// none of their own.
  PrivatePools(Memory& memory, Source usual)
      : memory_{&memory}, returns_{memory}, usual_{std::move(usual)} {}
  PrivatePools(PrivatePools const&) = delete;
  PrivatePools& operator=(PrivatePools const&) = delete;

  /// Adds a user. The first user creates the pool, with `own` as its source if that is given.
  void retain(PoolId id, std::optional<Source> own = std::nullopt) {
    std::scoped_lock const lock{mutex_};
    auto const [at, is_new] = pools_.try_emplace(id);
    if (is_new) {
      at->second.source = std::move(own);
    }
    ++at->second.uses;
  }
  /// Removes a user. After the last one, idle pieces are returned to the source at once, and live
  /// pieces when they are freed.
  ///
  /// @throws ContractViolation if the pool has no users
  void release(PoolId id);
  [[nodiscard]] int use_count(PoolId id) const {
    std::scoped_lock const lock{mutex_};
    auto const found = pools_.find(id);
    return found == pools_.end() ? 0 : found->second.uses;
  }
  /// Sets whether `lend` may return idle pieces of this pool. If a capture has used the pool, it
  /// does not.
  void set_lends(PoolId id, bool lends) {
    std::scoped_lock const lock{mutex_};
    pools_[id].lends = lends;
  }

  /// Begins to serve allocations from the pool if `admits` is true for their stream, and adds a
  /// user.
  void begin(PoolId id, Admits admits) {
    std::scoped_lock const lock{mutex_};
    routes_.reserve(routes_.size() + 1);
    ++pools_[id].uses;
    routes_.emplace_back(id, std::move(admits));
    route_count_.store(routes_.size(), std::memory_order_relaxed);
  }
  /// Ends `begin`. The user that it has added stays. @throws ContractViolation if nothing was begun
  void end(PoolId id);
  /// Whether `route` may return a pool. Takes no lock.
  [[nodiscard]] bool is_routing() const noexcept {
    return route_count_.load(std::memory_order_relaxed) != 0;
  }
  /// Returns the pool that serves allocations on `stream`; if there are several, the one that was
  /// begun last.
  [[nodiscard]] std::optional<PoolId> route(stream_type stream) const;

  /// @param stream  where the memory is used
  /// @param from    stream that the source allocates on; it differs from `stream` if that is being
  ///                captured
  [[nodiscard]] void* allocate(PoolId id, std::size_t bytes, stream_type stream, stream_type from);
  /// @returns false if the address is not in a pool
  /// @throws  as `Memory::mark`; the piece is then live
  [[nodiscard]] bool free(void* p);
  /// Records that another stream uses the memory: it is reused after the work that is enqueued
  /// there when it is freed. @returns false if the address is not in a pool
  /// @throws as `Memory::mark`; nothing has changed then
  [[nodiscard]] bool record_stream(void* p, stream_type stream);

  /// Returns idle pieces to their source, for the pools that `set_lends` allows it for. @returns
  /// their bytes
  std::size_t lend();
  /// For other memory that captured graphs use: it is given back here, after their launches.
  [[nodiscard]] OrderedReturns<Memory>& returns() noexcept { return returns_; }

  /// Which pieces of a pool are live at some time.
  struct Checkpoint {
    struct Live {
      void* address = nullptr;
      std::size_t requested_bytes = 0;
    };
    PoolId pool{};
    std::vector<Live> live{};
  };
  [[nodiscard]] Checkpoint checkpoint(PoolId id) const;
  /// Makes exactly those pieces of a pool live that were when the checkpoint was made. All other
  /// live pieces become idle, so the caller must let no tensor free them again. Pieces that the
  /// pool has got since stay with it.
  ///
  /// @param stream  runs after the work that has used the pieces which become live again
  /// @returns the pieces that were live until now
  /// @throws ContractViolation if nobody uses the pool, or if it no longer has one of the pieces,
  ///                           since nobody used it in between; as `Memory::order_after`. Nothing
  ///                           has changed then
  std::vector<void*> restore(Checkpoint const& checkpoint, stream_type stream);

  [[nodiscard]] bool has_exactly(PoolId id, std::unordered_set<void*> const& expected) const;
  /// The bytes of idle and live pieces; 0 for an unknown pool.
  [[nodiscard]] std::size_t reserved_bytes(PoolId id) const;

  struct Piece {
    PoolId pool{};
    void* address = nullptr;
    std::size_t bytes = 0;
    std::size_t requested_bytes = 0;  // 0 while idle
    stream_type stream{};
    stream_type from{};                   // the stream it was allocated on
    bool is_captured = false;             // a graph accesses it whenever the graph is launched
    std::vector<stream_type> visitors{};  // other streams that use it until it is freed
    Fence after{};  // the work of these streams, once the piece has been freed
  };
  /// Returns live and idle pieces, in order of address.
  [[nodiscard]] std::vector<Piece> pieces(PoolId id) const;
  [[nodiscard]] std::vector<PoolId> ids() const {
    std::scoped_lock const lock{mutex_};
    std::vector<PoolId> all;
    for (auto const& [id, pool] : pools_) {
      all.push_back(id);
    }
    return all;
  }

  // For a thread that forks: while it holds the lock, no other thread is inside of a call.

  void lock() { mutex_.lock(); }
  [[nodiscard]] bool try_lock() noexcept { return mutex_.try_lock(); }
  void unlock() noexcept { mutex_.unlock(); }

 private:
  using Idle = std::multimap<std::size_t, Piece>;  // by bytes
  using Live = std::map<void*, Piece>;             // by address
  struct Pool {
    int uses = 0;
    bool lends = false;
    bool is_captured = false;
    std::optional<Source> source;
    Idle idle;
    std::size_t live = 0;
  };
  using PoolPlace = typename std::map<PoolId, Pool>::iterator;
  using Lock = std::unique_lock<std::mutex>;
  using Return = typename OrderedReturns<Memory>::Return;

  /// Whether an allocation may reuse a piece: no more than a quarter of the piece may be wasted.
  [[nodiscard]] static bool fits(Piece const& piece, std::size_t bytes) noexcept {
    return piece.bytes >= bytes && piece.bytes - bytes <= piece.bytes / 4;
  }
  [[nodiscard]] Source source_of(Pool const& pool) const {
    return pool.source ? *pool.source : usual_;
  }
  [[nodiscard]] Return return_of(Pool const& pool, Piece const& piece) const {
    return {piece.from,
            piece.is_captured ? std::nullopt : std::optional{piece.after},
            [free = source_of(pool).free, p = piece.address] { free(p); }};
  }
  [[nodiscard]] static bool may_lend(Pool const& pool) noexcept {
    return pool.lends && !pool.is_captured;
  }
  /// Adds the returns of a pool's idle pieces to a list. The caller then removes the pieces.
  void add_returns(Pool const& pool, std::list<Return>& to) const {
    for (auto const& [bytes, piece] : pool.idle) {
      to.push_back(return_of(pool, piece));
    }
  }
  /// As `pieces`, in any order. The caller holds the lock.
  [[nodiscard]] std::vector<Piece> pieces_of(PoolId id) const;
  /// Adds the work of a live piece's visitors to what its next use comes after.
  void mark_visitors(Piece& piece) const {
    for (stream_type const visitor : piece.visitors) {
      piece.after.add(memory_->mark(visitor));
    }
  }
  /// Changes a live piece into one that is not, after `mark_visitors`.
  static void retire(Piece& piece) noexcept {
    piece.visitors.clear();
    piece.requested_bytes = 0;
  }
  /// Ends an allocation that has failed.
  void give_up(PoolPlace at) noexcept {
    --at->second.live;
    erase_if_unused(at);
  }
  void erase_if_unused(PoolPlace at) noexcept {
    if (at->second.uses == 0 && at->second.live == 0) {
      pools_.erase(at);
    }
  }

  Memory* memory_;
  OrderedReturns<Memory> returns_;
  Source usual_;
  mutable std::mutex mutex_;  // guards what follows
  std::map<PoolId, Pool> pools_;
  Live live_;
  std::vector<std::pair<PoolId, Admits>> routes_;
  std::atomic<std::size_t> route_count_{0};
};

template <class Memory>
void PrivatePools<Memory>::release(PoolId id) {
  std::list<Return> gone;
  {
    Lock const lock{mutex_};
    auto const found = pools_.find(id);
    expects(found != pools_.end() && found->second.uses != 0,
            "a memory pool is released that nobody uses");
    Pool& pool = found->second;
    if (pool.uses > 1) {
      --pool.uses;
      return;
    }
    add_returns(pool, gone);
    pool.idle.clear();
    pool.uses = 0;
    erase_if_unused(found);
  }
  returns_.add(std::move(gone));
}

template <class Memory>
void PrivatePools<Memory>::end(PoolId id) {
  Lock const lock{mutex_};
  auto const found = std::find_if(
      routes_.rbegin(), routes_.rend(), [&](auto const& route) { return route.first == id; });
  expects(found != routes_.rend(),
          "allocations to a memory pool were ended that had not been begun");
  routes_.erase(std::next(found).base());
  route_count_.store(routes_.size(), std::memory_order_relaxed);
}

template <class Memory>
std::optional<PoolId> PrivatePools<Memory>::route(stream_type stream) const {
  std::vector<std::pair<PoolId, Admits>> routes;
  {
    Lock const lock{mutex_};
    routes = routes_;
  }
  auto const found = std::find_if(
      routes.rbegin(), routes.rend(), [&](auto const& one) { return one.second(stream); });
  return found == routes.rend() ? std::nullopt : std::optional{found->first};
}

template <class Memory>
void* PrivatePools<Memory>::allocate(PoolId id,
                                     std::size_t bytes,
                                     stream_type stream,
                                     stream_type from) {
  bool const is_captured = from != stream;
  Lock lock{mutex_};
  PoolPlace const place = pools_.try_emplace(id).first;
  Pool& pool = place->second;
  pool.is_captured = pool.is_captured || is_captured;
  ++pool.live;  // keeps the pool while the lock is released
  for (auto at = pool.idle.lower_bound(bytes); at != pool.idle.end() && fits(at->second, bytes);
       ++at) {
    if (at->second.stream != stream || (is_captured && !at->second.after.is_empty())) {
      continue;
    }
    void* const p = at->second.address;
    try {
      live_.try_emplace(p);
      memory_->order_after(stream, at->second.after);
    } catch (...) {
      live_.erase(p);
      give_up(place);
      throw;
    }
    Piece& piece = live_.at(p);
    piece = std::move(at->second);
    pool.idle.erase(at);
    piece.after.clear();
    piece.requested_bytes = bytes;
    piece.is_captured = piece.is_captured || is_captured;
    return p;
  }
  Live made;  // before the memory is allocated, since there may be no host memory for it
  void* p = nullptr;
  try {
    made.try_emplace(nullptr);
    Source const source = source_of(pool);
    lock.unlock();
    p = source.allocate(bytes, from);
    lock.lock();
  } catch (...) {
    if (!lock.owns_lock()) {
      lock.lock();
    }
    give_up(place);
    throw;
  }
  auto node = made.extract(made.begin());
  node.key() = p;
  node.mapped() = {id, p, bytes, bytes, stream, from, is_captured};
  live_.insert(std::move(node));
  return p;
}

template <class Memory>
bool PrivatePools<Memory>::free(void* p) {
  std::list<Return> gone;
  {
    Lock const lock{mutex_};
    auto const found = live_.find(p);
    if (found == live_.end()) {
      return false;
    }
    Piece& piece = found->second;
    auto const at = pools_.find(piece.pool);
    Pool& pool = at->second;
    mark_visitors(piece);
    Idle idle;
    if (pool.uses != 0) {
      idle.emplace(piece.bytes, Piece{});
    } else {
      gone.push_back(return_of(pool, piece));
    }
    // Nothing fails from here on.
    retire(piece);
    if (!idle.empty()) {
      idle.begin()->second = std::move(piece);
      pool.idle.merge(idle);
    }
    live_.erase(found);
    --pool.live;
    erase_if_unused(at);
  }
  if (!gone.empty()) {
    returns_.add(std::move(gone));
  }
  return true;
}

template <class Memory>
bool PrivatePools<Memory>::record_stream(void* p, stream_type stream) {
  Lock const lock{mutex_};
  auto const found = live_.find(p);
  if (found == live_.end()) {
    return false;
  }
  std::vector<stream_type>& visitors = found->second.visitors;
  if (found->second.stream != stream &&
      std::find(visitors.begin(), visitors.end(), stream) == visitors.end()) {
    // Throws now, rather than when the piece is freed, if there are too many streams. The piece
    // then has no such visitor.
    (void)memory_->mark(stream);
    visitors.push_back(stream);
  }
  return true;
}

template <class Memory>
std::size_t PrivatePools<Memory>::lend() {
  std::list<Return> gone;
  std::size_t bytes = 0;
  {
    Lock const lock{mutex_};
    for (auto const& [id, pool] : pools_) {
      if (may_lend(pool)) {
        add_returns(pool, gone);
      }
    }
    for (auto& [id, pool] : pools_) {
      if (may_lend(pool)) {
        for (auto const& [size, piece] : pool.idle) {
          bytes += size;
        }
        pool.idle.clear();
      }
    }
  }
  returns_.add(std::move(gone));
  return bytes;
}

template <class Memory>
auto PrivatePools<Memory>::checkpoint(PoolId id) const -> Checkpoint {
  Checkpoint now{id};
  for (Piece const& piece : pieces(id)) {
    if (piece.requested_bytes != 0) {
      now.live.push_back({piece.address, piece.requested_bytes});
    }
  }
  return now;
}

template <class Memory>
std::vector<void*> PrivatePools<Memory>::restore(Checkpoint const& checkpoint, stream_type stream) {
  std::unordered_map<void*, std::size_t> wanted;
  for (typename Checkpoint::Live const& live : checkpoint.live) {
    wanted.emplace(live.address, live.requested_bytes);
  }
  Lock const lock{mutex_};
  auto const at = pools_.find(checkpoint.pool);
  expects(at != pools_.end() && at->second.uses != 0,
          "a checkpoint is restored of a memory pool that nobody uses");
  std::vector<Piece> all = pieces_of(checkpoint.pool);
  Fence after;
  std::size_t found = 0;
  for (Piece const& piece : all) {
    if (wanted.count(piece.address) != 0) {
      after.add(piece.after);
      ++found;
    }
  }
  expects(found == wanted.size(),
          "a checkpoint of a memory pool is restored after the pool has given back memory of it");
  memory_->order_after(stream, after);

  std::vector<void*> were_live;
  for (Piece& piece : all) {
    auto const to = wanted.find(piece.address);
    if (piece.requested_bytes != 0) {
      were_live.push_back(piece.address);
      if (to == wanted.end()) {
        mark_visitors(piece);
        retire(piece);
      }
    } else if (to != wanted.end()) {
      piece.requested_bytes = to->second;
      piece.after.clear();
    }
  }
  Idle idle;
  Live live;
  for (Piece& piece : all) {
    void* const p = piece.address;
    if (piece.requested_bytes == 0) {
      idle.emplace(piece.bytes, std::move(piece));
    } else {
      live.emplace(p, std::move(piece));
    }
  }
  // Nothing fails from here on.
  for (void* const p : were_live) {
    live_.erase(p);
  }
  live_.merge(live);
  Pool& pool = at->second;
  pool.idle.swap(idle);
  pool.live = pool.live - were_live.size() + wanted.size();
  return were_live;
}

template <class Memory>
bool PrivatePools<Memory>::has_exactly(PoolId id, std::unordered_set<void*> const& expected) const {
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

template <class Memory>
std::size_t PrivatePools<Memory>::reserved_bytes(PoolId id) const {
  std::size_t bytes = 0;
  for (Piece const& piece : pieces(id)) {
    bytes += piece.bytes;
  }
  return bytes;
}

template <class Memory>
auto PrivatePools<Memory>::pieces(PoolId id) const -> std::vector<Piece> {
  std::vector<Piece> all;
  {
    Lock const lock{mutex_};
    all = pieces_of(id);
  }
  std::sort(all.begin(), all.end(), [](Piece const& a, Piece const& b) {
    return std::less<>{}(a.address, b.address);
  });
  return all;
}

template <class Memory>
auto PrivatePools<Memory>::pieces_of(PoolId id) const -> std::vector<Piece> {
  std::vector<Piece> all;
  for (auto const& [p, piece] : live_) {
    if (piece.pool == id) {
      all.push_back(piece);
    }
  }
  if (auto const found = pools_.find(id); found != pools_.end()) {
    for (auto const& [bytes, piece] : found->second.idle) {
      all.push_back(piece);
    }
  }
  return all;
}

}  // namespace spillway::torch
