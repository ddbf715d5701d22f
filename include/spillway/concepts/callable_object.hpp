// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace spillway::detail {

/// The concepts use this type for the callables that a model gets. It behaves as a temporary lambda
/// expression with captures does: it can be copied but not assigned. So a model that accepts only
/// function pointers or non-const references does not satisfy the concept.
template <class Signature>
struct CallableObject;

template <class Result, class... Arguments, bool is_noexcept>
struct CallableObject<Result(Arguments...) noexcept(is_noexcept)> {
  CallableObject(CallableObject const&) noexcept;
  CallableObject& operator=(CallableObject const&) = delete;
  ~CallableObject() = default;
  Result operator()(Arguments...) const noexcept(is_noexcept);
};

}  // namespace spillway::detail
