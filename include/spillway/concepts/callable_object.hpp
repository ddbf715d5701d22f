// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace spillway::detail {

/// Stands in the concepts for the callables that a model is given: function objects with a state. A
/// model that takes only plain functions could not be called with them. Most are temporaries, so
/// the concepts hand them over with `std::move`: a model that takes references to variables alone
/// could not be called with those.
template <class Signature>
struct CallableObject;

template <class Result, class... Arguments, bool is_noexcept>
struct CallableObject<Result(Arguments...) noexcept(is_noexcept)> {
  Result operator()(Arguments...) const noexcept(is_noexcept);
};

}  // namespace spillway::detail
