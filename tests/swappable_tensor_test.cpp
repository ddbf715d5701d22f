// SPDX-License-Identifier: Apache-2.0
#include <spillway/swappable_tensor.hpp>

#include <doctest/doctest.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <support/small_allocator.hpp>

using namespace spillway;
using namespace spillway::literals;
using support::SmallAllocator;
using support::SmallBench;

namespace {

template <class T, std::size_t Rank>
using SmallTensor = spillway::Tensor<T, Rank, support::SmallPolicies>;
template <class Range>
concept CanRead = requires(Range& range) {
  reads(range);
};
template <class Range>
concept CanChange = requires(Range& range) {
  writes(range);
}
|| requires(Range& range) {
  updates(range);
};

static_assert(std::is_same_v<SmallTensor<int, 3>, SwappableTensor<int, 3, SmallAllocator>>);
static_assert(std::is_same_v<spillway::Tensor<int, 3>, SwappableTensor<int, 3, DeviceAllocator<>>>);

static_assert(std::is_nothrow_move_constructible_v<SmallTensor<float, 2>> &&
              std::is_nothrow_move_assignable_v<SmallTensor<float, 2>>);
static_assert(!std::is_copy_constructible_v<SmallTensor<float, 2>>);

template <class T>
constexpr bool can_be_element = requires {
  typename SmallTensor<T, 1>;
};
static_assert(can_be_element<std::array<float, 3>>);
static_assert(!can_be_element<std::string>, "elements are copied byte by byte");
struct alignas(granule_bytes) Aligned {
  char byte;
};
struct alignas(2 * granule_bytes) OverAligned {
  char byte;
};
static_assert(can_be_element<Aligned>);
static_assert(!can_be_element<OverAligned>, "a block may begin at any multiple of 256");

// Uses that a lease for reading does not allow do not compile.
template <class Lease>
concept AllowsWriting = requires(Lease& lease) {
  *lease.data() = 1;
};
template <class Lease>
concept AllowsWritingThroughView = requires(Lease& lease) {
  lease.view()(0, 0) = 1;
};
template <class T, Access access>
concept IsAcquirable = requires(T& tensor, SimStream stream) {
  tensor.template acquire<access>(stream);
};
using Matrix = SmallTensor<int, 2>;
template <Access access>
using MatrixLease = Matrix::lease_for<access>;

static_assert(!AllowsWriting<MatrixLease<Access::read>>);
static_assert(!AllowsWritingThroughView<MatrixLease<Access::read>>);
static_assert(AllowsWriting<MatrixLease<Access::write>>);
static_assert(AllowsWritingThroughView<MatrixLease<Access::write>>);
static_assert(AllowsWriting<MatrixLease<Access::read_write>>);
static_assert(AllowsWritingThroughView<MatrixLease<Access::read_write>>);
static_assert(IsAcquirable<Matrix const, Access::read>);
static_assert(!IsAcquirable<Matrix const, Access::write>, "a const tensor is only read");
static_assert(!IsAcquirable<Matrix const, Access::read_write>);
template <class T>
concept IsWritten = requires(T& tensor) {
  writes(tensor);
};
template <class T>
concept IsUpdated = requires(T& tensor) {
  updates(tensor);
};
static_assert(IsWritten<Matrix> && !IsWritten<Matrix const>);
static_assert(IsUpdated<Matrix> && !IsUpdated<Matrix const>);

std::vector<int> counted(std::size_t n, int first) {
  std::vector<int> values(n);
  std::iota(values.begin(), values.end(), first);
  return values;
}

template <std::size_t Rank>
std::vector<int> read(SmallTensor<int, Rank>& tensor, SmallBench& bench) {
  std::vector<int> values(tensor.size());
  tensor.copy_to_host_sync(values, bench.stream);
  return values;
}

constexpr std::size_t most = std::numeric_limits<std::size_t>::max();

}  // namespace

TEST_SUITE("swappable_tensor") {
  TEST_CASE("SwappableTensor: strides are those of row-major order") {
    SmallBench bench;
    auto const tensor = make_tensor<float>(bench.allocator, {2, 3, 5});

    CHECK(tensor.extents() == Extents<3>{2, 3, 5});
    CHECK(tensor.strides() == Extents<3>{15, 5, 1});
    CHECK(tensor.size() == 30);
    CHECK(tensor.size_bytes() == 120);
    CHECK(bench.allocator.stats().requested_bytes.current == 120);
  }

  TEST_CASE("make_tensor: takes extents in braces or as an object") {
    SmallBench bench;
    auto const tensor = make_tensor<float>(bench.allocator, Extents<2>{3, 5});
    auto const alike = make_tensor<int>(bench.allocator, tensor.extents());
    auto const ranked = make_tensor<int, 2>(bench.allocator, {3, 5});
    auto const scalar = make_tensor<int>(bench.allocator, Extents<0>{});

    static_assert(std::is_same_v<decltype(tensor), SmallTensor<float, 2> const>);
    CHECK(tensor.extents() == Extents<2>{3, 5});
    CHECK(alike.extents() == tensor.extents());
    CHECK(ranked.extents() == tensor.extents());
    CHECK(scalar.size() == 1);
    CHECK_THROWS_AS((void)make_tensor<float>(bench.allocator, Extents<2>{3, 0}), ContractViolation);
  }

  TEST_CASE("SwappableTensor: without dimensions it has one element") {
    SmallBench bench;
    auto tensor =
        SmallTensor<int, 0>::from_host_sync(bench.allocator, {}, counted(1, 42), bench.stream);

    CHECK(tensor.size() == 1);
    CHECK(read(tensor, bench) == std::vector{42});
  }

  TEST_CASE(
      "SwappableTensor: an extent of 0 or a size beyond 64 bits is refused and allocates nothing") {
    SmallBench bench;
    auto& allocator = bench.allocator;

    CHECK_THROWS_AS((SmallTensor<float, 2>{allocator, {0, 5}}), ContractViolation);
    CHECK_THROWS_AS((SmallTensor<float, 2>{allocator, {5, 0}}), ContractViolation);
    CHECK_THROWS_AS((SmallTensor<float, 1>{allocator, {most}}), ContractViolation);
    CHECK_THROWS_AS((SmallTensor<float, 1>{allocator, {most / 4 + 1}}), ContractViolation);
    CHECK_THROWS_AS((SmallTensor<char, 2>{allocator, {most / 2 + 1, 2}}), ContractViolation);
    CHECK_THROWS_AS((SmallTensor<char, 3>{allocator, {1ULL << 32U, 1ULL << 31U, 2}}),
                    ContractViolation);
    // The last one that fits into 64 bits fits into no device.
    CHECK_THROWS_AS((SmallTensor<char, 1>{allocator, {most}}), OutOfDeviceMemory);
    CHECK_THROWS_AS((SmallTensor<char, 2>{allocator, {1ULL << 32U, (1ULL << 32U) - 1}}),
                    OutOfDeviceMemory);
    CHECK(allocator.stats().allocated.blocks.total == 0);
  }

  TEST_CASE("SwappableTensor: a recipe gets views of its operands, each with its own shape") {
    SmallBench bench;
    auto row = SmallTensor<int, 1>::from_host_sync(
        bench.allocator, {3}, std::vector{1, 2, 3}, bench.stream);
    auto column = SmallTensor<int, 2>::from_host_sync(
        bench.allocator, {2, 1}, std::vector{10, 20}, bench.stream);
    std::vector<int> const sums{11, 12, 13, 21, 22, 23};
    auto sum = SmallTensor<int, 2>::from_host_sync(bench.allocator, {2, 3}, sums, bench.stream);
    sum.set_recipe(
        std::chrono::nanoseconds{0},
        [&](auto stream, auto to, auto from_row, auto from_column) {
          static_assert(std::is_same_v<decltype(to), TensorView<int, 2>>);
          static_assert(std::is_same_v<decltype(from_row), TensorView<int const, 1>>);
          static_assert(std::is_same_v<decltype(from_column), TensorView<int const, 2>>);
          bench.device.launch(stream, [=] {
            for (std::size_t i = 0; i < to.extent(0); ++i) {
              for (std::size_t j = 0; j < to.extent(1); ++j) {
                to(i, j) = from_column(i, 0) + from_row(j);
              }
            }
          });
        },
        row,
        column);
    sum.swap_out();
    CHECK(sum.residency() == Residency::none);
    CHECK(read(sum, bench) == sums);
    CHECK(bench.allocator.stats().recomputations.count == 1);
  }

  TEST_CASE("SwappableTensor: elements are read back as they were written") {
    SmallBench bench;
    auto const values = counted(5000, 7);
    auto tensor =
        SmallTensor<int, 2>::from_host_sync(bench.allocator, {50, 100}, values, bench.stream);

    CHECK(read(tensor, bench) == values);
    auto const others = counted(5000, -3);
    tensor.copy_from_host_sync(others, bench.stream);
    CHECK(read(tensor, bench) == others);
  }

  TEST_CASE("SwappableTensor: elements survive swap-outs, moves and other tensors") {
    SmallBench bench;
    std::vector<SmallTensor<int, 1>> tensors;
    for (int i = 0; i < 12; ++i) {  // 2.9 MB on 1 MiB
      tensors.push_back(SmallTensor<int, 1>::from_host_sync(
          bench.allocator, {60'000}, counted(60'000, i), bench.stream));
    }
    tensors.erase(tensors.begin() + 10);
    bench.allocator.compact();

    for (std::size_t i = 0; i < tensors.size(); ++i) {
      CHECK(read(tensors[i], bench) == counted(60'000, static_cast<int>(i < 10 ? i : i + 1)));
    }
    CHECK(bench.allocator.stats().swap_ins.count >= 8);
    tensors[0].swap_out();
    tensors[0].swap_in();
    CHECK(read(tensors[0], bench) == counted(60'000, 0));
  }

  TEST_CASE("SwappableTensor: a tensor larger than the staging memory is copied in pieces") {
    SmallBench bench{support::small_options(16_MiB)};
    auto const values = counted(9_MiB / sizeof(int) + 3, 11);
    auto tensor =
        SmallTensor<int, 1>::from_host_sync(bench.allocator, {values.size()}, values, bench.stream);

    CHECK(read(tensor, bench) == values);
  }

  TEST_CASE("SwappableTensor: a wrong number of elements is refused, and no element changes") {
    SmallBench bench;
    auto const values = counted(6, 1);
    auto tensor =
        SmallTensor<int, 2>::from_host_sync(bench.allocator, {2, 3}, values, bench.stream);
    std::vector<int> five(5);
    std::vector<int> seven(7);

    CHECK_THROWS_AS(tensor.copy_from_host_sync(five, bench.stream), ContractViolation);
    CHECK_THROWS_AS(tensor.copy_from_host_sync(seven, bench.stream), ContractViolation);
    CHECK_THROWS_AS(tensor.copy_to_host_sync(five, bench.stream), ContractViolation);
    CHECK_THROWS_AS(tensor.copy_to_host_sync(seven, bench.stream), ContractViolation);
    std::string what;
    try {
      (void)SmallTensor<int, 2>::from_host_sync(bench.allocator, {2, 2}, values, bench.stream);
    } catch (ContractViolation const& error) {
      what = error.what();
    }
    CHECK(what.ends_with("from_host_sync: the host span has 6 elements, the tensor has 4"));
    CHECK(bench.allocator.stats().allocated.blocks.current == 1);
    CHECK(read(tensor, bench) == values);
  }

  TEST_CASE("SwappableTensor: a lease gives access to the elements") {
    SmallBench bench;
    auto tensor =
        SmallTensor<int, 2>::from_host_sync(bench.allocator, {4, 3}, counted(12, 0), bench.stream);
    auto lease = tensor.acquire(Access::read_write, bench.stream);
    bench.device.synchronize(bench.stream);  // the simulated device is host memory

    CHECK(lease.extents() == tensor.extents());
    CHECK(lease.strides() == tensor.strides());
    CHECK(lease.size() == 12);
    CHECK(lease.access() == Access::read_write);
    auto const view = lease.view();
    CHECK(view.data_handle() == lease.data());
    CHECK(view(2, 1) == 7);
    view(2, 1) = 70;
    lease.release();
    CHECK_FALSE(lease);
    CHECK(lease.data() == nullptr);
    CHECK(read(tensor, bench)[7] == 70);
  }

  TEST_CASE(
      "SwappableTensor: a lease has the access and the element type with which it was acquired") {
    SmallBench bench;
    auto const tensor =
        Matrix::from_host_sync(bench.allocator, {4, 3}, counted(12, 0), bench.stream);
    Matrix other = make_tensor<int>(bench.allocator, {4, 3});
    {
      auto const from = tensor.acquire<Access::read>(bench.stream);
      auto const to = other.acquire<Access::write>(bench.stream);
      bench.device.synchronize(bench.stream);

      CHECK(from.access() == Access::read);
      CHECK(to.access() == Access::write);
      CHECK(from.block() == tensor.id());
      CHECK(from.size_bytes() == 48);
      TensorView<int const, 2> const in = from.view();
      TensorView<int, 2> const out = to.view();
      for (std::size_t i = 0; i < 4; ++i) {
        for (std::size_t j = 0; j < 3; ++j) {
          out(i, j) = 10 * in(i, j);
        }
      }
    }
    CHECK(read(other, bench)[7] == 70);
    CHECK(tensor.acquire_read(bench.stream).access() == Access::read);
    CHECK(other.acquire_write(bench.stream).access() == Access::write);
    CHECK(other.acquire_read_write(bench.stream).access() == Access::read_write);
  }

  TEST_CASE("SwappableTensor: a lease for reading keeps it clean, one for writing does not") {
    SmallBench bench;
    auto tensor = Matrix::from_host_sync(bench.allocator, {2, 2}, counted(4, 5), bench.stream);
    tensor.swap_out();
    tensor.acquire_read(bench.stream).release();
    tensor.swap_out();
    CHECK(bench.allocator.stats().swap_outs.count == 1);
    tensor.acquire_read_write(bench.stream).release();
    tensor.swap_out();
    CHECK(bench.allocator.stats().swap_outs.count == 2);
    auto const swap_ins = bench.allocator.stats().swap_ins.count;
    tensor.acquire_write(bench.stream).release();
    CHECK(bench.allocator.stats().swap_ins.count == swap_ins);
  }

  TEST_CASE("SwappableTensor: leases on the operands of one operation have their types, and all or "
            "none are acquired") {
    SmallBench bench;
    auto const x = Matrix::from_host_sync(bench.allocator, {2, 2}, counted(4, 1), bench.stream);
    auto y = SmallTensor<double, 1>{bench.allocator, {3}};
    SwappableBuffer<SmallAllocator> z{bench.allocator, 16};
    {
      auto const [a, b, c] =
          bench.allocator.acquire_all(bench.stream, reads(x), writes(y), updates(z));
      static_assert(std::is_same_v<decltype(a.data()), int const*>);
      static_assert(std::is_same_v<decltype(b.data()), double*>);
      static_assert(std::is_same_v<decltype(c.data()), void*>);

      CHECK(a.block() == x.id());
      CHECK(a.access() == Access::read);
      CHECK(a.extents() == x.extents());
      CHECK(b.block() == y.id());
      CHECK(b.access() == Access::write);
      CHECK(c.block() == z.id());
      CHECK(c.access() == Access::read_write);
      CHECK(bench.allocator.stats().leased.blocks.current == 3);
    }
    CHECK(bench.allocator.stats().leased.blocks.current == 0);
    z.reset();
    CHECK_THROWS_AS((void)bench.allocator.acquire_all(bench.stream, reads(x), writes(z)),
                    ContractViolation);
    CHECK(bench.allocator.stats().leased.blocks.current == 0);
  }

  TEST_CASE("SwappableTensor: operands whose number is known at run time are acquired together") {
    SmallBench bench;
    std::vector<Matrix> layers;
    for (int i = 0; i < 3; ++i) {
      layers.push_back(
          Matrix::from_host_sync(bench.allocator, {2, 2}, counted(4, i), bench.stream));
    }
    auto sum = SmallTensor<double, 1>{bench.allocator, {3}};
    std::vector<SwappableBuffer<SmallAllocator>> buffers;
    {
      auto const [read, out, none] =
          bench.allocator.acquire_all(bench.stream, reads(layers), writes(sum), updates(buffers));
      static_assert(std::is_same_v<decltype(read.front().data()), int const*>);
      static_assert(std::is_same_v<decltype(out.data()), double*>);
      REQUIRE(read.size() == 3);
      for (std::size_t i = 0; i < read.size(); ++i) {
        CHECK(read[i].block() == layers[i].id());
        CHECK(read[i].extents() == layers[i].extents());
        CHECK(read[i].access() == Access::read);
      }
      CHECK(out.block() == sum.id());
      CHECK(none.empty());
      CHECK(bench.allocator.stats().leased.blocks.current == 4);
    }
    CHECK(bench.allocator.stats().leased.blocks.current == 0);

    std::array<Matrix*, 2> some{&layers[2], &layers[0]};
    {
      auto const [leases] = bench.allocator.acquire_all(bench.stream, updates(std::as_const(some)));
      static_assert(std::is_same_v<decltype(leases.front().data()), int*>);
      REQUIRE(leases.size() == 2);
      CHECK(leases[0].block() == layers[2].id());
      CHECK(leases[1].block() == layers[0].id());
    }

    layers[1].reset();
    CHECK_THROWS_AS((void)bench.allocator.acquire_all(bench.stream, writes(sum), reads(layers)),
                    ContractViolation);
    some[1] = nullptr;
    CHECK_THROWS_AS((void)bench.allocator.acquire_all(bench.stream, writes(sum), reads(some)),
                    ContractViolation);
    CHECK(bench.allocator.stats().leased.blocks.current == 0);
    static_assert(!LeasableRange<std::vector<int>> && !LeasableRange<Matrix>);
    static_assert(CanRead<std::vector<Matrix> const> && !CanChange<std::vector<Matrix> const>);
    static_assert(CanRead<std::vector<Matrix>> && CanChange<std::vector<Matrix>>);
    static_assert(CanRead<std::array<Matrix const*, 2>> &&
                  !CanChange<std::array<Matrix const*, 2>>);
  }

  TEST_CASE(
      "SwappableTensor: an operand that is empty or belongs to another allocator is refused") {
    SmallBench bench;
    SmallBench elsewhere;
    auto here = make_tensor<int>(bench.allocator, {4});
    auto there = make_tensor<int>(elsewhere.allocator, {1000});
    SmallTensor<int, 1> empty;
    auto const refused = [&](auto operand) {
      CHECK_THROWS_AS((void)bench.allocator.acquire_all(bench.stream, writes(here), operand),
                      ContractViolation);
      CHECK(bench.allocator.stats().leased.blocks.current == 0);
    };
    refused(reads(there));
    refused(updates(empty));

    here.copy_from_host_sync(counted(4, 0), bench.stream);
    there.copy_from_host_sync(counted(1000, 0), elsewhere.stream);
    auto const make = [](auto&&...) {};
    CHECK_THROWS_AS(here.set_recipe(std::chrono::nanoseconds{1}, make, there), ContractViolation);
    CHECK_THROWS_AS(here.set_recipe(std::chrono::nanoseconds{1}, make, empty), ContractViolation);
  }

  TEST_CASE("TensorLease: it is empty by default and after it has ended") {
    SmallBench bench;
    Matrix tensor = make_tensor<int>(bench.allocator, {2, 2});
    Matrix::lease_type lease;
    CHECK(lease.empty());
    CHECK_FALSE(lease);
    lease = tensor.acquire_write(bench.stream);
    CHECK_FALSE(lease.empty());
    CHECK(lease);
    lease.release();
    CHECK(lease.empty());
  }

  TEST_CASE(
      "SwappableTensor: the untyped lease can be taken out and still holds the tensor in place") {
    SmallBench bench;
    auto tensor = make_tensor<int>(bench.allocator, {100});
    auto tensor_lease = tensor.acquire(Access::write, bench.stream);
    void* const address = tensor_lease.data();
    auto lease = std::move(tensor_lease).take_lease();

    CHECK_FALSE(tensor_lease);
    CHECK(lease.data() == address);
    CHECK_THROWS_AS(tensor.swap_out(), ContractViolation);
    lease.release();
    CHECK_NOTHROW(tensor.swap_out());
  }

  TEST_CASE("SwappableTensor: a tensor that was moved from or reset is empty") {
    SmallBench bench;
    auto from =
        SmallTensor<int, 2>::from_host_sync(bench.allocator, {2, 3}, counted(6, 1), bench.stream);
    SmallTensor<int, 2> to{std::move(from)};

    CHECK(to.extents() == Extents<2>{2, 3});
    CHECK(read(to, bench) == counted(6, 1));
    SmallTensor<int, 2> never;
    SmallTensor<int, 2> reset{bench.allocator, {3, 3}};
    reset.reset();
    for (auto* const empty : {&from, &never, &reset}) {
      CHECK(empty->empty());
      CHECK_FALSE(*empty);
      CHECK(empty->size() == 0);
      CHECK(empty->size_bytes() == 0);
      CHECK(empty->extents() == Extents<2>{});
      CHECK(empty->strides() == Extents<2>{});
      CHECK(empty->id() == BlockId{});
      CHECK_THROWS_AS((void)empty->acquire(Access::read, bench.stream), ContractViolation);
      CHECK_THROWS_AS(empty->swap_out(), ContractViolation);
      CHECK_THROWS_AS(empty->swap_in(), ContractViolation);
      CHECK_THROWS_AS((void)empty->residency(), ContractViolation);
      CHECK_THROWS_AS(empty->copy_from_host_sync(std::vector<int>{}, bench.stream),
                      ContractViolation);
      CHECK_THROWS_AS(empty->copy_from_host_sync(counted(6, 1), bench.stream), ContractViolation);
      CHECK_NOTHROW(empty->reset());
    }
  }

  TEST_CASE(
      "SwappableTensor: assignment frees the old block, and self-assignment changes nothing") {
    SmallBench bench;
    auto first =
        SmallTensor<int, 1>::from_host_sync(bench.allocator, {4}, counted(4, 1), bench.stream);
    auto second =
        SmallTensor<int, 1>::from_host_sync(bench.allocator, {6}, counted(6, 9), bench.stream);

    first = std::move(second);
    CHECK(bench.allocator.stats().allocated.blocks.current == 1);
    SmallTensor<int, 1>& same = first;
    first = std::move(same);
    CHECK(first.extents() == Extents<1>{6});
    CHECK(read(first, bench) == counted(6, 9));
  }

  TEST_CASE("SwappableTensor: reset is refused while leased and changes nothing") {
    SmallBench bench;
    auto tensor =
        SmallTensor<int, 1>::from_host_sync(bench.allocator, {6}, counted(6, 1), bench.stream);
    auto lease = tensor.acquire(Access::read, bench.stream);

    CHECK_THROWS_AS(tensor.reset(), ContractViolation);
    CHECK(tensor.extents() == Extents<1>{6});
    lease.release();
    CHECK(read(tensor, bench) == counted(6, 1));
    tensor.reset();
    CHECK(bench.allocator.stats().allocated.blocks.current == 0);
  }

  TEST_CASE("SwappableTensor: tensors are operands of one operation") {
    SmallBench bench;
    auto a = make_tensor<float>(bench.allocator, {10});
    auto b = make_tensor<double>(bench.allocator, {2, 5});
    auto const leases = bench.allocator.acquire_all(
        {a.request(Access::write), b.request(Access::write)}, bench.stream);

    CHECK(leases[0].block() == a.id());
    CHECK(leases[1].block() == b.id());
    CHECK(leases[1].size_bytes() == 80);
  }
}
