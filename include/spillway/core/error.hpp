// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/config.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <new>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

namespace spillway {

namespace detail {

/// Builds the text of an error from texts and numbers. Concatenating `std::string`s instead would
/// cost compile time at each place that throws.
class Text {
 public:
  explicit Text(std::string_view head) : text_{head} {}

  Text&& operator+(std::string_view text) && {
    text_.append(text);
    return std::move(*this);
  }
  Text&& operator+(std::uint64_t n) && {
    text_.append(std::to_string(n));
    return std::move(*this);
  }
  operator std::string() && { return std::move(text_); }  // NOLINT(google-explicit-constructor)

 private:
  std::string text_;
};

}  // namespace detail

/// The state of an allocator when a call failed to make room. It shows what would have to change
/// for the call to succeed.
struct MemoryReport {
  std::size_t requested_bytes = 0;
  std::size_t capacity_bytes = 0;      ///< the most that may be reserved
  std::size_t reserved_bytes = 0;      ///< taken from the device
  std::size_t free_bytes = 0;          ///< free inside the reservation
  std::size_t largest_free_bytes = 0;  ///< the largest free piece
  std::size_t leased_bytes = 0;        ///< held by leases: can neither move nor leave
  std::size_t reclaimable_bytes = 0;   ///< resident and not leased: could leave
  std::size_t host_free_bytes = 0;     ///< room left in the host pool's tiers
};

/// Thrown when device room cannot be made even after dropping, swapping out and compacting.
///
/// Every block is as it was or validly swapped out: nothing is lost, and the call may be repeated
/// once leases have been released or blocks freed.
class OutOfDeviceMemory : public std::bad_alloc {
 public:
  OutOfDeviceMemory(MemoryReport report, std::string const& advice)
      : report_{report}, what_{describe(report, advice)} {}

  [[nodiscard]] char const* what() const noexcept override { return what_.c_str(); }
  [[nodiscard]] MemoryReport const& report() const noexcept { return report_; }

 private:
  static std::string describe(MemoryReport const& r, std::string const& advice) {
    detail::Text text = detail::Text{"spillway: out of device memory: requested "} +
                        r.requested_bytes + " bytes; capacity " + r.capacity_bytes;
    if (r.reserved_bytes == 0) {  // the other numbers would be 0 as well, and mean nothing
      return std::move(text) + ", of which nothing is reserved. " + advice;
    }
    return std::move(text) + ", reserved " + r.reserved_bytes + ", free " + r.free_bytes +
           ", largest free " + r.largest_free_bytes + ", leased " + r.leased_bytes +
           ", reclaimable " + r.reclaimable_bytes + ", host pool free " + r.host_free_bytes + ". " +
           advice;
  }

  MemoryReport report_;
  std::string what_;
};

/// Thrown when no tier of the host pool can hold the bytes that would have to leave the device, and
/// when there is no pinned memory to copy through.
class OutOfHostMemory : public std::bad_alloc {
 public:
  OutOfHostMemory(std::size_t requested_bytes, std::size_t free_bytes, std::string const& advice)
      : requested_bytes_{requested_bytes},
        free_bytes_{free_bytes},
        what_{detail::Text{"spillway: out of host memory for swapped-out blocks: requested "} +
              requested_bytes + " bytes, free in all tiers " + free_bytes + ". " + advice} {}
  /// For want of pinned memory. `free_bytes()` is 0 then.
  OutOfHostMemory(std::size_t requested_pinned_bytes, std::string const& advice)
      : requested_bytes_{requested_pinned_bytes},
        free_bytes_{0},
        what_{detail::Text{"spillway: out of pinned host memory: requested "} +
              requested_pinned_bytes + " bytes. " + advice} {}

  [[nodiscard]] char const* what() const noexcept override { return what_.c_str(); }
  [[nodiscard]] std::size_t requested_bytes() const noexcept { return requested_bytes_; }
  [[nodiscard]] std::size_t free_bytes() const noexcept { return free_bytes_; }

 private:
  std::size_t requested_bytes_;
  std::size_t free_bytes_;
  std::string what_;
};

/// Thrown when the device or its driver fails a call: a copy, an event, a stream, a mapping.
class DeviceError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Thrown when a block's bytes are lost because the device failed repeatedly while they were moved.
/// Only that block is affected, and it can be used again once it has been overwritten.
class BlockLost : public DeviceError {
 public:
  using DeviceError::DeviceError;
};

/// Thrown when the file tier cannot be opened, sized, written or read, and when what a codec wrote
/// in the host pool cannot be decoded.
class FileTierError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The source location of a call, for the text of an error. It is the last parameter of functions
/// that check their arguments. Leave it out, so that the default argument records the caller; a
/// function that itself has such a parameter passes it on.
class CallSite {
 public:
  CallSite(char const* file = __builtin_FILE(),  // NOLINT(google-explicit-constructor): see above
           int line = __builtin_LINE()) noexcept
      : file_{file}, line_{line} {}

  [[nodiscard]] char const* file() const noexcept { return file_; }
  [[nodiscard]] int line() const noexcept { return line_; }

 private:
  char const* file_;  // lives as long as the program
  int line_;
};

/// Thrown when a caller breaks a documented precondition.
class ContractViolation : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

namespace detail {

/// Returns the beginning of an error's text: the source location and the function of a call,
/// without the template arguments that g++ adds to its name.
inline Text head_of_error(CallSite site, std::string_view function) {
  return Text{site.file()} + ":" + static_cast<unsigned>(site.line()) + ": " +
         function.substr(0, function.find('<')) + ": ";
}

/// Returns whether the text of an error begins with a source location in the library's headers,
/// those of this program or those that the compiled library was built from.
inline bool begins_in_library(std::string_view text) {
  constexpr std::string_view here{__FILE__};
  constexpr std::string_view name{"core/error.hpp"};
  constexpr std::string_view headers =  // their folder, or the single header
      here.ends_with(name) ? here.substr(0, here.size() - name.size()) : here;
  return text.starts_with(headers) ||
         text.substr(0, text.find(": ")).find("include/spillway/") != std::string_view::npos;
}

/// Called by a handler of `error`: throws it again, with `site` in place of a source location in
/// the library's headers, which tells the program's author nothing, and with `call`, if it is
/// given, in place of the function. Other errors, such as those of a program's own recipe, are
/// passed on as they are.
[[noreturn, gnu::cold, gnu::noinline]] inline void
rethrow_at(CallSite site, ContractViolation const& error, char const* call = nullptr) {
  std::string_view const text{error.what()};
  std::size_t const end = text.find(": ");
  if (end == std::string_view::npos || !begins_in_library(text)) {
    throw;
  }
  if (call != nullptr) {
    std::size_t const what = text.find(": ", end + 2) + 2;
    throw ContractViolation{head_of_error(site, call) + text.substr(what)};
  }
  throw ContractViolation{Text{site.file()} + ":" + static_cast<unsigned>(site.line()) +
                          text.substr(end)};
}

/// Returns what `call()` returns. A ContractViolation that it throws names `site`, the line of the
/// program, by `rethrow_at`, and `name` if the program called a function of another name.
template <class Call>
[[gnu::always_inline]] inline decltype(auto)
call_at(CallSite site, Call const& call, char const* name = nullptr) {
  try {
    return call();
  } catch (ContractViolation const& error) {
    rethrow_at(site, error, name);
  }
}

}  // namespace detail

/// An argument together with the source location of the call, for functions whose parameters end in
/// a pack, after which no `CallSite` can follow. Made implicitly from whatever converts to `T`.
template <class T>
class Located {
 public:
  template <std::convertible_to<T> U>
  Located(U const& value, CallSite site = {})  // NOLINT(google-explicit-constructor): see above
      : value_(value), site_{site} {}
  // For a literal 0, which is a stream of CUDA here and a number above.
  Located(T value, CallSite site = {})  // NOLINT(google-explicit-constructor)
      : value_(std::move(value)), site_{site} {}

  [[nodiscard]] T const& value() const noexcept { return value_; }
  [[nodiscard]] CallSite site() const noexcept { return site_; }

 private:
  T value_;
  CallSite site_;
};

/// Checks a precondition of a public function. `function` is the name of the caller; leave it out,
/// too, in public functions. Other functions pass the name of the public function or class whose
/// precondition it is, since the text of the error is for the program's author.
///
/// @throws ContractViolation with the source location and the function, if `ok` is false
inline void expects(bool ok,
                    char const* what,
                    CallSite site = {},
                    char const* function = __builtin_FUNCTION()) {
  if (!ok) {
    throw ContractViolation{detail::head_of_error(site, function) + what};
  }
}

}  // namespace spillway
