// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/device_allocator.hpp>
#include <spillway/lease.hpp>
#include <spillway/stream.hpp>
#include <spillway/swappable_tensor.hpp>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <optional>
#include <span>
#include <tuple>
#include <typeindex>
#include <typeinfo>
#include <unordered_map>
#include <vector>

#include "pinned.hpp"
#include "view.hpp"

namespace beyond {

/// What a kernel sees of a leased tensor. The elements are const under a lease for reading.
template <class Lease>
[[nodiscard]] auto matrix(Lease const& lease) {
  return Matrix<typename Lease::element_type>{
      lease.data(), static_cast<Index>(lease.extents()[0]), static_cast<Index>(lease.extents()[1])};
}

/// What a kernel sees of a tensor that is recomputed.
template <class T>
[[nodiscard]] auto matrix(spillway::TensorView<T, 2> const& view) {
  return Matrix<T>{
      view.data_handle(), static_cast<Index>(view.extent(0)), static_cast<Index>(view.extent(1))};
}

/// One allocator and one stream: where tensors live, and in which order operations run.
///
/// `Execution` says how Thrust runs on this kind of device; see sim_execution.hpp and
/// cuda_execution.cuh.
template <class Policies, class Execution>
class Session {
 public:
  using allocator_type = spillway::DeviceAllocator<Policies>;
  using device_type = typename Policies::device;
  using stream_type = typename device_type::stream_type;
  using tiling = typename Execution::tiling;
  template <class T>
  using tensor_type = spillway::SwappableTensor<T, 2, allocator_type>;

  /// `device` and `allocator` are not owned and must outlive the session.
  /// @param recomputes      whether results of `make` get recipes, so that they can be recomputed
  /// @param recompute_time  time that recomputing takes; if empty, measured for each kind of work
  Session(device_type& device,
          allocator_type& allocator,
          bool recomputes = false,
          std::optional<std::chrono::nanoseconds> recompute_time = {})
      : device_{&device},
        allocator_{&allocator},
        stream_{allocator},
        staging_{device},
        recomputes_{recomputes},
        recompute_time_{recompute_time} {}

  /// Waits for the stream, so that no memory of the session is in use any more.
  ~Session() {
    try {
      synchronize();
    } catch (...) {  // NOLINT(bugprone-empty-catch): a device that has failed uses no memory
    }
  }
  Session(Session const&) = delete;
  Session& operator=(Session const&) = delete;

  /// A tensor without contents.
  template <class T>
  [[nodiscard]] tensor_type<T> tensor(std::size_t rows, std::size_t cols) {
    return {*allocator_, {rows, cols}};
  }

  // [run]
  /// Enqueues one operation: leases all its operands, then calls `work(thrust_policy, matrix...)`.
  ///
  /// The leases end when this returns, long before the work has run: the allocator knows the
  /// stream, and moves or swaps nothing before the stream has passed this point.
  template <class Work, spillway::Access... access, class... Tensors>
  void run(Work work, spillway::Operand<access, Tensors> const&... operands) {
    auto const leases = allocator_->acquire_all(stream_, operands...);
    auto const matrices =
        std::apply([](auto const&... lease) { return std::tuple{matrix(lease)...}; }, leases);
    Execution::launch(*device_, stream_, [work, matrices](auto const& policy) {
      std::apply([&](auto const&... m) { work(policy, m...); }, matrices);
    });
  }
  // [run end]

  // [make]
  /// Enqueues an operation that makes `result` from `operands` alone, in the order
  /// `work(thrust_policy, operands..., result)`. While none of the operands changes, `result` may
  /// leave the device without a copy: the same work makes it again.
  template <class Work, class Tensor, class... Operands>
  void make(Work work, Tensor& result, Operands const&... operands) {
    auto const enqueue = [&] { run(work, reads(operands)..., writes(result)); };
    if (!recomputes_) {
      enqueue();
      return;
    }
    result.set_recipe(
        timed<Work>(enqueue),
        [device = device_, work](stream_type stream, auto to, auto... from) {
          Execution::launch(*device, stream, [work, to, from...](auto const& policy) {
            work(policy, matrix(from)..., matrix(to));
          });
        },
        operands...);
  }
  // [make end]

  /// Fills `tensor` from the host: `fill(span)` writes its elements, row by row.
  ///
  /// Waits only when the staging memory of a much earlier upload is still being copied.
  template <class Tensor, class Fill>
  void upload(Tensor& tensor, Fill fill) {
    using T = typename Tensor::element_type;
    auto& slot = staging_.next(tensor.size_bytes());
    fill(std::span{static_cast<T*>(slot.data()), tensor.size()});
    auto const lease = tensor.acquire_write(stream_);
    device_->copy(
        lease.data(), slot.data(), tensor.size_bytes(), spillway::CopyKind::to_device, stream_);
    slot.record(stream_);
  }

  /// Enqueues a copy of `tensor` to pinned memory; it is there after `synchronize()`.
  template <class Tensor>
  void download(Tensor const& tensor, typename Tensor::element_type* to) {
    auto const lease = tensor.acquire_read(stream_);
    device_->copy(to, lease.data(), tensor.size_bytes(), spillway::CopyKind::to_host, stream_);
  }

  /// The elements of `tensor`. Waits for them.
  template <class Tensor>
  [[nodiscard]] auto values_sync(Tensor const& tensor) {
    std::vector<typename Tensor::element_type> values(tensor.size());
    tensor.copy_to_host_sync(values, stream_);
    return values;
  }

  /// Waits until all that was enqueued has run.
  void synchronize() { stream_.synchronize(); }

  [[nodiscard]] device_type& device() const { return *device_; }
  [[nodiscard]] allocator_type& allocator() const { return *allocator_; }

 private:
  /// Runs `enqueue` and returns the time that the device takes for `Work`: the given time, or a
  /// measured one. To measure it, the first call runs the work three more times with all operands
  /// resident, waits for each, and takes the least time.
  template <class Work, class Enqueue>
  std::chrono::nanoseconds timed(Enqueue enqueue) {
    enqueue();
    if (recompute_time_) {
      return *recompute_time_;
    }
    auto const [cost, is_new] =
        costs_.try_emplace(std::type_index{typeid(Work)}, std::chrono::nanoseconds::max());
    for (int i = 0; is_new && i < 3; ++i) {
      synchronize();
      auto const start = std::chrono::steady_clock::now();
      enqueue();
      synchronize();
      cost->second = std::min<std::chrono::nanoseconds>(cost->second,
                                                        std::chrono::steady_clock::now() - start);
    }
    return cost->second;
  }

  device_type* device_;
  allocator_type* allocator_;
  spillway::Stream<allocator_type> stream_;
  Staging<device_type> staging_;
  bool recomputes_;
  std::optional<std::chrono::nanoseconds> recompute_time_;
  std::unordered_map<std::type_index, std::chrono::nanoseconds> costs_;  // by the kind of work
};

/// The tensors of a session.
template <class Session, class T>
using TensorOf = typename Session::template tensor_type<T>;

}  // namespace beyond
