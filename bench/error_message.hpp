// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <exception>
#include <new>
#include <typeinfo>

/// What the command lines of the tools have in common.
namespace command_line {

/// What to tell the user of an exception. That of `new` has no words of its own; those that are
/// derived from it have. The text lives as long as the exception; nothing is allocated.
inline char const* message_of(std::exception const& error) noexcept {
  return typeid(error) == typeid(std::bad_alloc)
             ? "the memory of the host is not enough: free some, or ask for less, such as fewer "
               "steps or a smaller input"
             : error.what();
}

}  // namespace command_line
