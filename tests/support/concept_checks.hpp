// SPDX-License-Identifier: Apache-2.0
#pragma once

// Checks of what a concept refuses, one line for each requirement that a type may lack.

/// A type derived from a model, in which a deleted member hides the model's member of that name.
#define CHECK_NEEDS(Concept, Model, member)                                                        \
  do {                                                                                             \
    struct Lacking : Model {                                                                       \
      void member() = delete;                                                                      \
    };                                                                                             \
    static_assert(!Concept<Lacking>, #Concept " does not ask for " #member);                       \
  } while (false)

/// The same for a member with a declaration that does not meet the concept.
#define CHECK_REFUSES(Concept, Model, ...)                                                         \
  do {                                                                                             \
    struct Lacking : Model {                                                                       \
      __VA_ARGS__;                                                                                 \
    };                                                                                             \
    static_assert(!Concept<Lacking>, #Concept " is content with " #__VA_ARGS__);                   \
  } while (false)

namespace spillway::test {

/// A model of a concept, except that it cannot be moved.
template <class Model>
struct NotMovable : Model {
  NotMovable() = default;
  NotMovable(NotMovable const&) = delete;
};

}  // namespace spillway::test
