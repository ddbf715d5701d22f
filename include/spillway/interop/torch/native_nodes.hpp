// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/interop/torch/operands.hpp>
#include <spillway/interop/torch/storage_leases.hpp>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <span>
#include <string_view>
#include <type_traits>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include <ATen/SequenceNumber.h>
#include <ATen/core/TensorBase.h>
#include <ATen/record_function.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>
#include <pthread.h>
#include <torch/csrc/autograd/function.h>

namespace spillway::torch {

namespace detail {

using NodePointer = std::remove_cvref_t<decltype(std::declval<at::TensorBase const&>().grad_fn())>;

template <class Node>
c10::weak_intrusive_ptr<Node> weak_of(c10::intrusive_ptr<Node> const& node) {
  return c10::weak_intrusive_ptr<Node>{node};
}
template <class Node>
std::weak_ptr<Node> weak_of(std::shared_ptr<Node> const& node) {  // Up to PyTorch 2.12.
  return node;
}

}  // namespace detail

/// Leases what autograd nodes of extensions in C++ (`torch::autograd::Function`) use. Such a node
/// runs outside of operations, and asks for the addresses of the tensors that it has saved, of the
/// gradients that it is given, and of the tensors that it makes. So each of its calls is a hold. It
/// leases the gradients, and everything still alive that was in use in the call that made the node,
/// since nothing tells which of these tensors the node has saved.
///
/// Some of PyTorch's own nodes for nested tensors fill tensors of sizes themselves, and print such
/// tensors in their errors. A call of one of these nodes is a hold of the gradients.
///
/// Threads  thread-safe.
template <class Hook>
class NativeNodes {
 public:
  using Site = typename Hook::site_type;
  using Tensors = std::span<at::Tensor const>;

  /// A call of an operation or a function of an extension, which may make such nodes.
  class Call {
   public:
    /// Make it before the call has pinned anything.
    Call() = default;
    Call(Call const&) = delete;
    Call& operator=(Call const&) = delete;

    /// To be called while everything that the call has used is pinned.
    ///
    /// @param given  the arguments of the call, which may have been pinned before it
    void end(Operands const& given, Tensors results) const {
      std::vector<detail::NodePointer> const nodes = made_since(first_sequence_, results);
      if (nodes.empty()) {
        return;
      }
      Storages used = Site::leases().pinned_since(Site::frames().pins, first_pin_);
      auto const add = [&used](c10::StorageImpl& storage) {
        used.push_back(StorageTraits<Site>::weak_reference(storage));
      };
      for (Operand const& operand : given) {
        add(*operand.storage);
      }
      for (at::Tensor const& result : results) {
        for_each_part(result, [&add](at::Tensor const& part, bool) {
          add(*part.storage().unsafeGetStorageImpl());
        });
      }
      all().add(nodes, std::move(used));
    }

   private:
    std::uint64_t first_sequence_ = at::sequence_number::peek();
    std::size_t first_pin_ = Site::frames().pins.size();
  };

  /// To be called when the first nested tensor is used. From then on calls of their nodes are
  /// holds.
  static void hold_nested() {
    NativeNodes& nodes = all();
    if (!nodes.is_called_.load(std::memory_order_relaxed)) {
      nodes.observe();
    }
  }

 private:
  using Storages = std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>>;
  using Node = ::torch::autograd::Node;
  struct Used {
    decltype(detail::weak_of(detail::NodePointer{})) node;
    std::shared_ptr<Storages const> storages;
  };
  /// What PyTorch keeps until the node has run.
  struct Running final : at::ObserverContext {
    std::vector<c10::intrusive_ptr<c10::StorageImpl>> storages;
    std::optional<typename Hook::Hold> hold;
  };

  /// No other thread may have locked the mutex when the process forks, since the child could not
  /// unlock it.
  NativeNodes() {
    if (::pthread_atfork([] { all().mutex_.lock(); },
                         [] { all().mutex_.unlock(); },
                         [] { all().mutex_.unlock(); }) != 0) {
      throw std::bad_alloc{};
    }
  }
  [[nodiscard]] static NativeNodes& all() {
    static auto* const nodes = new NativeNodes;  // PyTorch may call it until the process ends
    return *nodes;
  }
  [[nodiscard]] static bool is_native(std::string_view name) noexcept {
    return name.starts_with("torch::autograd::CppNode<");
  }
  [[nodiscard]] static bool is_nested(std::string_view name) noexcept {
    return name.find("AutogradNestedTensor") != std::string_view::npos;
  }
  /// Returns the native nodes that the results depend on and that this thread has made since
  /// sequence number `first`.
  [[nodiscard]] static std::vector<detail::NodePointer> made_since(std::uint64_t first,
                                                                   Tensors results) {
    std::vector<detail::NodePointer> found;
    std::vector<detail::NodePointer> left;
    std::unordered_set<Node const*> seen;
    auto const visit = [&](detail::NodePointer const& node) {
      if (node != nullptr && node->sequence_nr() >= first && seen.insert(node.get()).second) {
        left.push_back(node);
      }
    };
    for (at::Tensor const& result : results) {
      try {
        visit(result.defined() ? result.grad_fn() : nullptr);
      } catch (c10::Error const&) {  // NOLINT(bugprone-empty-catch)
        // PyTorch refuses to tell the node of a view that was made without gradients and has been
        // changed since. No node of this call leads to it.
      }
    }
    while (!left.empty()) {
      detail::NodePointer const node = std::move(left.back());
      left.pop_back();
      if (is_native(node->name())) {
        found.push_back(node);
      }
      for (::torch::autograd::Edge const& edge : node->next_edges()) {
        visit(edge.function);
      }
    }
    return found;
  }

  void add(std::vector<detail::NodePointer> const& nodes, Storages used) {
    auto const storages = std::make_shared<Storages const>(std::move(used));
    observe();
    std::lock_guard const guard{mutex_};
    if (used_.size() >= most_) {
      std::erase_if(used_, [](auto const& one) { return one.second.node.expired(); });
      most_ = std::max(most_, 2 * used_.size());
    }
    for (detail::NodePointer const& node : nodes) {
      used_.insert_or_assign(node.get(), Used{detail::weak_of(node), storages});
    }
  }
  void observe() {
    if (!is_called_.exchange(true)) {
      at::addGlobalCallback(at::RecordFunctionCallback{&begin}.needsInputs(true).scopes(
          {at::RecordScope::BACKWARD_FUNCTION}));
    }
  }
  [[nodiscard]] std::shared_ptr<Storages const> used_by(Node const* node) {
    std::lock_guard const guard{mutex_};
    auto const found = used_.find(node);
    return found == used_.end() ? nullptr : found->second.storages;
  }

  /// PyTorch calls this before a node runs, and destroys the result after that. If this throws,
  /// PyTorch prints a warning, and the node gets errors when it asks for addresses of what is
  /// swapped out.
  static std::unique_ptr<at::ObserverContext> begin(at::RecordFunction const& call) {
    if (!is_native(call.name()) && !is_nested(call.name())) {
      return nullptr;
    }
    auto running = std::make_unique<Running>();
    Operands operands;
    collect<typename Hook::Leases>({call.inputs().data(), call.inputs().size()}, operands, {});
    if (auto const used = all().used_by(::torch::autograd::get_current_node().get())) {
      for (auto const& storage : *used) {
        if (auto strong = storage.lock()) {
          if (Hook::Leases::is_ours(*strong)) {
            operands.push_back({strong.get()});
          }
          running->storages.push_back(std::move(strong));
        }
      }
    }
    typename Hook::Frame frame;
    frame.enter_named(operands);
    running->hold.emplace(/*is_kernel=*/true);
    return running;
  }

  std::mutex mutex_;
  std::unordered_map<Node const*, Used> used_;
  std::size_t most_ = 64;  // number of entries above which those of nodes that are gone are removed
  std::atomic<bool> is_called_{false};
};

}  // namespace spillway::torch
