// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace spillway {

/// A position that stands for "nothing predicts the next use".
inline constexpr std::uint64_t use_unknown = ~std::uint64_t{0};
/// A position that stands for "the record shows no further use of this block before it is freed".
/// Later than every real position, so that it compares as the farthest use there is.
inline constexpr std::uint64_t use_never = use_unknown - 1;

/// `Use::entry` of a use that is missing from the record.
inline constexpr std::uint32_t unknown_entry = ~std::uint32_t{0};
/// `Use::entry` of a block that the record shows no further use of.
inline constexpr std::uint32_t never_entry = unknown_entry - 1;

/// One use of a block and what is known of the one after it.
///
/// Units   positions count acquisitions since the schedule was constructed; the first has position
///         0.
struct Use {
  std::uint64_t now = 0;             ///< position of this use
  std::uint64_t next = use_unknown;  ///< predicted position of the next one, or one of the above
  /// The recorded entry of that next use, plus the length of the step if it lies in the step after
  /// this one. Unlike `next` it stays right when the program skips a few uses.
  std::uint32_t entry = unknown_entry;
  bool is_ahead = false;  ///< no use has happened: the block is resident, or comes in, ahead of one
};

}  // namespace spillway
