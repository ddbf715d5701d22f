// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <vector>

namespace replay {

/// A trace file that cannot be used. Says file, line and what is wrong there. Line 0 is the whole
/// file.
class TraceError : public std::invalid_argument {
 public:
  TraceError(std::filesystem::path const& file, std::size_t line, std::string const& what)
      : std::invalid_argument{file.string() +
                              (line == 0 ? "" : std::string{":"} + std::to_string(line)) + ": " +
                              what} {}
};

/// One tensor of a trace.
struct Tensor {
  std::uint64_t id = 0;  // as the file names it
  std::size_t bytes = 0;
  bool is_weight = false;  // lives across the whole trace
};

/// What one operation does to one tensor.
struct Operand {
  std::uint32_t tensor = 0;  // index into Trace::tensors
  bool is_first = false;     // comes to be here
  bool is_last = false;      // is not needed after this
};

/// One operation: its operands must be on the device together.
struct Operation {
  std::size_t first_operand = 0;
  std::size_t operand_count = 0;
  std::uint64_t kernel_ns = 0;
};

/// A program's use of memory, as a sequence of operations.
///
/// Both forms of file come to this: in the lifetime form a tensor's allocation is an operation that
/// writes it and its end is one that reads it for the last time.
struct Trace {
  enum class Form { lifetimes, accesses };

  Form form = Form::lifetimes;
  std::vector<Tensor> tensors;
  std::vector<Operation> operations;
  std::vector<Operand> operands;
  std::size_t peak_live_bytes = 0;    // sizes rounded up to the arena's granule
  std::size_t working_set_bytes = 0;  // the largest single operation
  std::uint64_t compute_ns = 0;       // sum of all kernels
};

/// Reads a trace, multiplying every size by `scale`.
///
/// @throws TraceError naming file and line for anything that is not one of the two forms
[[nodiscard]] Trace read_trace(std::filesystem::path const& file, double scale);

}  // namespace replay
