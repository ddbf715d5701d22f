// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace spillway::detail {

/// Stands in the concepts for the callables that a model is given: temporary lambda expressions
/// that capture something, which can be copied and not assigned. A model that takes only plain
/// functions, or references to what is not constant, could not be called with them.
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
