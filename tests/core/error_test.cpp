// SPDX-License-Identifier: Apache-2.0
#include <spillway/core/error.hpp>
#include <spillway/interop/leased_memory.hpp>
#include <spillway/policy/codec/zero_bitmap.hpp>

#include <doctest/doctest.h>

#include <chrono>
#include <cstddef>
#include <string>
#include <type_traits>
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

    std::vector<float> enough(16);
    text = text_of([&] { (void)tensor.acquire_read(stream); });
    CHECK(begins(text, at(__LINE__ - 1) + "acquire: a block is read that"));
    text = text_of([&] { (void)tensor.acquire(Access::read, stream); });
    CHECK(begins(text, at(__LINE__ - 1) + "acquire: a block is read that"));
    text = text_of([&] { tensor.copy_to_host_sync(enough, stream); });
    CHECK(begins(text, at(__LINE__ - 1) + "acquire: a block is read that"));
    SwappableBuffer<support::SmallAllocator> unwritten{memory, 100};
    text = text_of([&] { (void)unwritten.acquire_read(stream); });
    CHECK(begins(text, at(__LINE__ - 1) + "acquire: a block is read that"));
    text = text_of([&] { (void)unwritten.acquire(Access::read, stream); });
    CHECK(begins(text, at(__LINE__ - 1) + "acquire: a block is read that"));
    text = text_of([&] { (void)SwappableBuffer<support::SmallAllocator>{memory, 0}; });
    CHECK(begins(text, at(__LINE__ - 1) + "SwappableBuffer: a block must have"));

    text = text_of([&] { (void)memory.acquire_all(stream, reads(tensor), reads(unwritten)); });
    CHECK(begins(text, at(__LINE__ - 1) + "acquire_all: a block is read that"));
    text = text_of([&] { tensor.set_recipe(std::chrono::nanoseconds{1}, [](auto&&...) {}); });
    CHECK(begins(text, at(__LINE__ - 1) + "set_recipe: a recipe is given once"));
    {
      auto const lease = tensor.acquire_write(stream);
      text = text_of([&] { tensor.swap_out(); });
      CHECK(begins(text, at(__LINE__ - 1) + "swap_out: a leased block"));
      text = text_of([&] { tensor.reset(); });
      CHECK(begins(text, at(__LINE__ - 1) + "reset: a leased block"));
    }

    tensor.reset();
    text = text_of([&] { (void)memory.acquire_all(stream, writes(unwritten), writes(tensor)); });
    CHECK(begins(text, at(__LINE__ - 1) + "acquire_all: an operand is empty"));
    text = text_of([&] { tensor.swap_out(); });
    CHECK(begins(text, at(__LINE__ - 1) + "swap_out: the buffer or tensor is empty"));
    text = text_of([&] { tensor.swap_in(); });
    CHECK(begins(text, at(__LINE__ - 1) + "swap_in: the buffer or tensor is empty"));
    text = text_of([&] { (void)tensor.residency(); });
    CHECK(begins(text, at(__LINE__ - 1) + "residency: the buffer or tensor is empty"));
    text = text_of([&] { tensor.set_codec<ZeroBitmap>(); });
    CHECK(begins(text, at(__LINE__ - 1) + "set_codec: the buffer or tensor is empty"));
    text = text_of([&] { tensor.set_recipe(std::chrono::nanoseconds{1}, [](auto&&...) {}); });
    CHECK(begins(text, at(__LINE__ - 1) + "set_recipe: the buffer or tensor is empty"));
    text = text_of([&] { (void)tensor.acquire_read(stream); });
    CHECK(begins(text, at(__LINE__ - 1) + "acquire: the buffer or tensor is empty"));
    text = text_of([&] { (void)tensor.acquire_write(stream); });
    CHECK(begins(text, at(__LINE__ - 1)));
    text = text_of([&] { (void)tensor.acquire<Access::read_write>(stream); });
    CHECK(begins(text, at(__LINE__ - 1)));
    text = text_of([&] { (void)tensor.acquire(Access::read, stream); });
    CHECK(begins(text, at(__LINE__ - 1)));
    text = text_of([&] { tensor.copy_to_host_sync(few, stream); });
    CHECK(begins(text, at(__LINE__ - 1) + "copy_to_host_sync: the buffer or tensor is empty"));
    SwappableBuffer<support::SmallAllocator> buffer;
    text = text_of([&] { (void)buffer.acquire_read_write(stream); });
    CHECK(begins(text, at(__LINE__ - 1)));
  }

  TEST_CASE("Located: an argument is converted as usual and records the line of the call") {
    struct Owner {
      int* handle = nullptr;
      operator int*() const { return handle; }  // NOLINT(google-explicit-constructor)
    };
    auto const take = [](Located<int*> stream) { return stream; };
    int number = 0;
    Owner const owner{&number};
    CHECK(take(owner).value() == &number);
    CHECK(take(owner).site().line() == __LINE__);
    CHECK(take(&number).value() == &number);
    CHECK(take(0).value() == nullptr);  // the default stream, as many programs name it
    CHECK(take(nullptr).site().line() == __LINE__);
    CHECK(std::string{take(nullptr).site().file()} == __FILE__);
    static_assert(!std::is_convertible_v<float*, Located<int*>>);
  }

  TEST_CASE("acquire: an error of a recipe is passed on as it is") {
    struct OwnViolation : ContractViolation {
      using ContractViolation::ContractViolation;
    };
    support::SmallBench bench{support::small_options(65536)};
    auto const stream = bench.stream;
    auto operand = make_tensor<float>(bench.allocator, {4096});
    auto result = make_tensor<float>(bench.allocator, {4096});
    (void)operand.acquire_write(stream);
    (void)result.acquire_write(stream);
    result.set_recipe(
        std::chrono::nanoseconds{0},
        [](auto const&, auto const&, auto const&) { throw OwnViolation{"recipe.cpp:1: mine"}; },
        operand);
    result.swap_out();
    CHECK_THROWS_WITH_AS(
        (void)result.acquire_read(stream), "recipe.cpp:1: mine", OwnViolation const&);
  }

  TEST_CASE("expects: errors name a public function or class, and no template arguments") {
    support::SmallBench bench{support::small_options(65536)};
    auto& memory = bench.allocator;
    auto const stream = bench.stream;
    auto const says = [](std::string const& text, char const* what) {
      CAPTURE(text);
      CHECK(text.find(std::string{".hpp:"}) != std::string::npos);
      CHECK(text.find(std::string{": "} + what) != std::string::npos);
    };
    auto tensor = make_tensor<float>(memory, {4, 4});
    BlockId const gone = memory.allocate(100);
    memory.deallocate(gone);

    says(text_of([&] { (void)memory.allocate(0); }), "allocate: a block must have");
    says(text_of([&] { (void)memory.declare(0); }), "declare: a block must have");
    says(text_of([&] { (void)memory.acquire(gone, Access::read, stream); }), "acquire: no such");
    says(text_of([&] {
           (void)memory.acquire_all({{gone, Access::read}}, stream);
         }),
         "acquire_all: no such");
    says(text_of([&] { memory.deallocate(gone); }), "deallocate: no such block");
    says(text_of([&] { memory.swap_out(gone); }), "swap_out: no such block");
    says(text_of([&] { memory.swap_in(gone); }), "swap_in: no such block");
    says(text_of([&] { (void)memory.residency(gone); }), "residency: no such block");
    says(text_of([&] { memory.set_codec<ZeroBitmap>(gone); }), "set_codec: no such block");
    says(text_of([&] { (void)memory.acquire(tensor.id(), Access::read, stream); }),
         "acquire: a block is read that");

    says(text_of([&] { memory.close(); }), "close: an allocator ends while 1 of its blocks");
    LeasedMemory leased{memory};
    says(text_of([&] { (void)leased.allocate(8, 3, stream); }), "allocate: alignment must be");
    says(text_of([&] { (void)leased.allocate_sync(8, 3); }), "allocate_sync: alignment must be");
    int foreign = 0;
    says(text_of([&] { leased.deallocate(&foreign, stream); }), "deallocate: 0x");
    says(text_of([&] { leased.deallocate_sync(&foreign); }), "deallocate_sync: 0x");

    auto const refusal = [](support::SmallAllocator::Options const& options) {
      return text_of([&] {
        SimApi device{{.capacity_bytes = 1 << 20}};
        support::SmallAllocator{device, options};
      });
    };
    auto options = support::small_options(100);
    says(refusal(options), "DefragArena: capacity_bytes must be");
    options = support::small_options(65536);
    options.paging.high_watermark = 2;
    says(refusal(options), "DeviceAllocator: watermarks are");
    options = support::small_options(65536);
    options.host.file_bytes = 65536;
    says(refusal(options), "HostSwapPool: a file tier needs a path");
    says(text_of([] { SimApi{{.granularity_bytes = 3}}; }), "SimApi: SimOptions::granularity");
  }
}
