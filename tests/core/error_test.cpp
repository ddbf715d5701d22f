// SPDX-License-Identifier: Apache-2.0
#include <spillway/core/error.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <string>
#include <vector>

#include <support/small_allocator.hpp>

using namespace spillway;

namespace {

/// The message of the exception that `call` throws.
template <class Call>
std::string text_of(Call call) {
  try {
    call();
  } catch (ContractViolation const& error) {
    return error.what();
  }
  return {};
}

/// The beginning of a message that names this line of this file.
std::string at(int line) {
  return std::string{__FILE__} + ":" + std::to_string(line) + ": ";
}

bool begins(std::string const& text, std::string const& with) {
  return text.compare(0, with.size(), with) == 0;
}

void take_positive(int number) {
  expects(number > 0, "the number must be positive");
}

}  // namespace

TEST_SUITE("error") {
  TEST_CASE("expects: a broken precondition names its line and the function that was called") {
    CHECK_NOTHROW(take_positive(1));
    std::string const text = text_of([] { take_positive(0); });
    CHECK(begins(text, std::string{__FILE__} + ":"));
    CHECK(text.find(": take_positive: the number must be positive") != std::string::npos);
  }

  TEST_CASE("expects: errors of buffers and tensors name the calling line of the program") {
    support::SmallBench bench{support::small_options(65536)};
    auto& memory = bench.allocator;
    auto const stream = bench.stream;
    auto tensor = make_tensor<float>(memory, {4, 4});
    std::vector<float> few(3);
    std::string text = text_of([&] { tensor.copy_from_host_sync(few, stream); });
    CHECK(begins(text, at(__LINE__ - 1) + "copy_from_host_sync: the host span"));
    text = text_of([&] { tensor.copy_to_host_sync(few, stream); });
    CHECK(begins(text, at(__LINE__ - 1) + "copy_to_host_sync: the host span"));
    text = text_of([&] { (void)decltype(tensor)::from_host_sync(memory, {4, 4}, few, stream); });
    CHECK(begins(text, at(__LINE__ - 1)));
    text = text_of([&] { (void)make_tensor<float>(memory, {4, 0}); });
    CHECK(begins(text, at(__LINE__ - 1) + "SwappableTensor: a tensor must have"));

    tensor.reset();
    text = text_of([&] { (void)tensor.acquire_read(stream); });
    CHECK(begins(text, at(__LINE__ - 1) + "SwappableBuffer: the buffer is empty"));
    text = text_of([&] { (void)tensor.acquire_write(stream); });
    CHECK(begins(text, at(__LINE__ - 1)));
    text = text_of([&] { (void)tensor.acquire<Access::read_write>(stream); });
    CHECK(begins(text, at(__LINE__ - 1)));
    text = text_of([&] { (void)tensor.acquire(Access::read, stream); });
    CHECK(begins(text, at(__LINE__ - 1)));
    SwappableBuffer<support::SmallAllocator> buffer;
    text = text_of([&] { (void)buffer.acquire_read_write(stream); });
    CHECK(begins(text, at(__LINE__ - 1)));
  }
}
