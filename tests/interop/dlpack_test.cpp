// SPDX-License-Identifier: Apache-2.0
#include <spillway/interop/dlpack.hpp>

#include <doctest/doctest.h>

#include <array>
#include <complex>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include <support/small_allocator.hpp>

using namespace spillway;
using namespace spillway::literals;
using support::SmallAllocator;
using support::SmallBench;

namespace {

/// DLManagedTensorVersioned as the ABI has it: fixed-size fields, in this order, naturally aligned.
struct AbiManagedTensor {
  std::uint32_t major;
  std::uint32_t minor;
  void* manager_ctx;
  void (*deleter)(AbiManagedTensor*);
  std::uint64_t flags;
  void* data;
  std::int32_t device_type;
  std::int32_t device_id;
  std::int32_t ndim;
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
  std::int64_t* shape;
  std::int64_t* strides;
  std::uint64_t byte_offset;
};

// The offsets of the structures within each other.
using dlpack::ManagedTensor;
static_assert(sizeof(AbiManagedTensor) == sizeof(ManagedTensor));
static_assert(offsetof(ManagedTensor, manager_ctx) == offsetof(AbiManagedTensor, manager_ctx));
static_assert(offsetof(ManagedTensor, deleter) == offsetof(AbiManagedTensor, deleter));
static_assert(offsetof(ManagedTensor, flags) == offsetof(AbiManagedTensor, flags));
static_assert(offsetof(ManagedTensor, dl_tensor) == offsetof(AbiManagedTensor, data));
constexpr std::size_t inner = offsetof(ManagedTensor, dl_tensor);
static_assert(inner + offsetof(dlpack::Tensor, device) == offsetof(AbiManagedTensor, device_type));
static_assert(inner + offsetof(dlpack::Tensor, ndim) == offsetof(AbiManagedTensor, ndim));
static_assert(inner + offsetof(dlpack::Tensor, dtype) == offsetof(AbiManagedTensor, code));
static_assert(inner + offsetof(dlpack::Tensor, shape) == offsetof(AbiManagedTensor, shape));
static_assert(inner + offsetof(dlpack::Tensor, strides) == offsetof(AbiManagedTensor, strides));
static_assert(inner + offsetof(dlpack::Tensor, byte_offset) ==
              offsetof(AbiManagedTensor, byte_offset));
static_assert(offsetof(dlpack::DataType, bits) == 1 && offsetof(dlpack::DataType, lanes) == 2 &&
              sizeof(dlpack::DataType) == 4);
static_assert(offsetof(dlpack::Device, id) == 4 && sizeof(dlpack::Device) == 8);

/// What a consumer sees that knows only the ABI.
AbiManagedTensor read_abi(ManagedTensor const* managed) {
  AbiManagedTensor abi{};
  std::memcpy(&abi, managed, sizeof abi);
  return abi;
}

template <class T>
constexpr bool is_type(dlpack::TypeCode code, int bits, int lanes) {
  constexpr auto type = dlpack::data_type<T>();
  return type.code == code && type.bits == bits && type.lanes == lanes;
}

/// Stands for the type of a library for device code.
struct DeviceComplex {
  using value_type = float;
  [[nodiscard]] float real() const { return parts[0]; }
  [[nodiscard]] float imag() const { return parts[1]; }
  float parts[2];
};
struct Triple {
  float x, y, z;
};
struct Half {
  std::uint16_t bits;
};
struct Large {
  std::array<char, 300> bytes;
};

template <class T, std::size_t Rank>
ManagedTensor*
exported(SmallBench& bench, SwappableTensor<T, Rank, SmallAllocator>& tensor, Access access) {
  return dlpack::export_tensor(tensor.acquire(access, bench.stream),
                               dlpack::device_of(bench.allocator.device()));
}

struct Consumer {
  void operator()(ManagedTensor* tensor) const { tensor->deleter(tensor); }
};
using Consumed = std::unique_ptr<ManagedTensor, Consumer>;

}  // namespace

TEST_SUITE("dlpack") {
  TEST_CASE("data_type: gives the code, bits and lanes of each element type") {
    using dlpack::TypeCode;
    CHECK(is_type<bool>(TypeCode::boolean, 8, 1));
    CHECK(is_type<std::int8_t>(TypeCode::signed_integer, 8, 1));
    CHECK(is_type<std::int64_t>(TypeCode::signed_integer, 64, 1));
    CHECK(is_type<std::uint8_t>(TypeCode::unsigned_integer, 8, 1));
    CHECK(is_type<std::uint32_t>(TypeCode::unsigned_integer, 32, 1));
    CHECK(is_type<float>(TypeCode::floating_point, 32, 1));
    CHECK(is_type<double>(TypeCode::floating_point, 64, 1));
    CHECK(is_type<std::complex<float>>(TypeCode::complex, 64, 1));
    CHECK(is_type<std::complex<double>>(TypeCode::complex, 128, 1));
    CHECK(is_type<std::complex<long double>>(TypeCode::opaque, 8, sizeof(long double) * 2));
    CHECK(is_type<DeviceComplex>(TypeCode::complex, 64, 1));
    CHECK(is_type<std::byte>(TypeCode::opaque, 8, 1));
    CHECK(is_type<Triple>(TypeCode::opaque, 8, 12));
    CHECK(is_type<Large>(TypeCode::opaque, 8, 300));
    static_assert(static_cast<int>(TypeCode::signed_integer) == 0);
    static_assert(static_cast<int>(TypeCode::unsigned_integer) == 1);
    static_assert(static_cast<int>(TypeCode::floating_point) == 2);
    static_assert(static_cast<int>(TypeCode::opaque) == 3);
    static_assert(static_cast<int>(TypeCode::bfloat) == 4);
    static_assert(static_cast<int>(TypeCode::complex) == 5);
    static_assert(static_cast<int>(TypeCode::boolean) == 6);
  }

  TEST_CASE("device_of: a CUDA device has its ordinal, everything else is host memory") {
    struct Gpu : SimApi {
      [[nodiscard]] static int ordinal() noexcept { return 3; }
    };
    Gpu const gpu;
    SimApi const sim;

    CHECK(static_cast<int>(dlpack::device_of(gpu).type) == 2);
    CHECK(dlpack::device_of(gpu).id == 3);
    CHECK(static_cast<int>(dlpack::device_of(sim).type) == 1);
    CHECK(dlpack::device_of(sim).id == 0);
  }

  TEST_CASE("export_tensor: a consumer that knows only the ABI can read the tensor") {
    SmallBench bench;
    std::vector<std::int32_t> const values{1, 2, 3, 4, 5, 6};
    auto tensor = SwappableTensor<std::int32_t, 2, SmallAllocator>::from_host_sync(
        bench.allocator, {2, 3}, values, bench.stream);
    Consumed const managed{exported(bench, tensor, Access::read_write)};
    bench.device.synchronize(bench.stream);
    auto const abi = read_abi(managed.get());

    CHECK(abi.major == 1);
    CHECK(abi.device_type == 1);
    CHECK(abi.device_id == 0);
    CHECK(abi.ndim == 2);
    CHECK(abi.code == 0);
    CHECK(abi.bits == 32);
    CHECK(abi.lanes == 1);
    CHECK(abi.shape[0] == 2);
    CHECK(abi.shape[1] == 3);
    CHECK(abi.strides[0] == 3);
    CHECK(abi.strides[1] == 1);
    CHECK(abi.byte_offset == 0);
    CHECK(reinterpret_cast<std::uintptr_t>(abi.data) % 256 == 0);
    auto const* const elements = static_cast<std::int32_t const*>(abi.data);
    CHECK(std::vector<std::int32_t>{elements, elements + 6} == values);
  }

  TEST_CASE("export_tensor: a tensor without dimensions has a null shape") {
    SmallBench bench;
    SwappableTensor<double, 0, SmallAllocator> tensor{bench.allocator, {}};
    Consumed const managed{exported(bench, tensor, Access::write)};

    CHECK(managed->dl_tensor.ndim == 0);
    CHECK(managed->dl_tensor.data != nullptr);
  }

  TEST_CASE("export_tensor: only a lease for reading is exported as read-only") {
    SmallBench bench;
    auto tensor = make_tensor<float>(bench.allocator, {4});
    Consumed{exported(bench, tensor, Access::write)};

    for (auto const access : {Access::read, Access::write, Access::read_write}) {
      Consumed const managed{exported(bench, tensor, access)};
      CHECK(managed->flags == (access == Access::read ? 1U : 0U));
    }
  }

  TEST_CASE("export_tensor: the block stays in place until the deleter runs") {
    SmallBench bench;
    auto tensor = make_tensor<float>(bench.allocator, {100'000});  // 400 of 1024 KB
    auto other = make_tensor<float>(bench.allocator, {100'000});
    (void)other.acquire(Access::write, bench.stream);
    Consumed managed{exported(bench, tensor, Access::write)};
    void* const address = managed->dl_tensor.data;

    CHECK_THROWS_AS(tensor.swap_out(), ContractViolation);
    CHECK_THROWS_AS(tensor.reset(), ContractViolation);
    auto third = make_tensor<float>(bench.allocator, {100'000});  // evicts the other one
    CHECK(tensor.residency() == Residency::device);
    CHECK(other.residency() != Residency::device);
    CHECK_THROWS_AS((void)make_tensor<float>(bench.allocator, {200'000}), OutOfDeviceMemory);
    bench.allocator.compact();
    CHECK(tensor.acquire(Access::read, bench.stream).data() == address);

    managed.reset();
    CHECK(bench.allocator.stats().leased.blocks.current == 0);
    CHECK_NOTHROW((void)make_tensor<float>(bench.allocator, {200'000}));
    CHECK(tensor.residency() != Residency::device);
  }

  TEST_CASE("export_tensor: the deleter may run on another thread, after the tensor is gone") {
    SmallBench bench;
    auto tensor = make_tensor<float>(bench.allocator, {1000});
    Consumed managed{exported(bench, tensor, Access::write)};
    tensor = {};
    REQUIRE(bench.allocator.stats().allocated.blocks.current == 1);

    std::thread{[&managed] { managed.reset(); }}.join();
    CHECK(bench.allocator.stats().allocated.blocks.current == 0);
  }

  TEST_CASE("export_tensor: two exports of one tensor are two leases") {
    SmallBench bench;
    auto tensor = make_tensor<float>(bench.allocator, {1000});
    Consumed{exported(bench, tensor, Access::write)};
    Consumed first{exported(bench, tensor, Access::read)};
    Consumed second{exported(bench, tensor, Access::read)};

    CHECK(first->dl_tensor.data == second->dl_tensor.data);
    first.reset();
    CHECK_THROWS_AS(tensor.swap_out(), ContractViolation);
    second.reset();
    CHECK_NOTHROW(tensor.swap_out());
  }

  TEST_CASE("export_tensor: a lease that has ended or was moved from cannot be exported") {
    SmallBench bench;
    auto const device = dlpack::device_of(bench.allocator.device());
    auto tensor = make_tensor<float>(bench.allocator, {1000});
    auto lease = tensor.acquire(Access::write, bench.stream);
    Consumed const managed{dlpack::export_tensor(std::move(lease), device)};

    CHECK_THROWS_AS((void)dlpack::export_tensor(std::move(lease), device), ContractViolation);
    auto ended = tensor.acquire(Access::read, bench.stream);
    ended.release();
    CHECK_THROWS_AS((void)dlpack::export_tensor(std::move(ended), device), ContractViolation);
    CHECK(bench.allocator.stats().leased.blocks.current == 1);
  }

  TEST_CASE("export_tensor: an error names the line of the program") {
    SmallBench bench;
    auto const device = dlpack::device_of(bench.allocator.device());
    TensorLease<float, 1, SmallAllocator> ended;
    std::string text;
    try {
      (void)dlpack::export_tensor(std::move(ended), device);
    } catch (ContractViolation const& error) {
      text = error.what();
    }
    CHECK(text.starts_with(__FILE__));
    CHECK(text.find(": export_tensor: the lease has ended") != std::string::npos);
  }

  TEST_CASE("export_tensor: the caller may choose another element type of the same size") {
    SmallBench bench;
    auto const device = dlpack::device_of(bench.allocator.device());
    auto tensor = make_tensor<Half>(bench.allocator, {8});
    auto lease = tensor.acquire(Access::write, bench.stream);

    CHECK_THROWS_AS((void)dlpack::export_tensor(
                        std::move(lease), device, {dlpack::TypeCode::floating_point, 32, 1}),
                    ContractViolation);
    REQUIRE(lease);  // still held
    Consumed const managed{
        dlpack::export_tensor(std::move(lease), device, {dlpack::TypeCode::bfloat, 16, 1})};
    CHECK(read_abi(managed.get()).code == 4);
    CHECK(read_abi(managed.get()).bits == 16);
  }

  TEST_CASE("import_sync: the elements of host memory are copied") {
    SmallBench bench;
    std::vector<std::int32_t> values{0, 1, 2, 3, 4, 5, 6};
    std::array<std::int64_t, 3> shape{2, 1, 3};
    std::array<std::int64_t, 3> strides{3, 77, 1};  // of a dimension of one element any stride
    dlpack::Tensor from{.data = values.data(),
                        .device = {dlpack::DeviceType::cpu, 0},
                        .ndim = 3,
                        .dtype = dlpack::data_type<std::int32_t>(),
                        .shape = shape.data(),
                        .strides = strides.data(),
                        .byte_offset = sizeof(std::int32_t)};
    auto const import = [&] {
      return dlpack::import_sync<std::int32_t, 3>(bench.allocator, from, bench.stream);
    };
    auto tensor = import();
    values.assign(7, -1);
    tensor.swap_out();
    std::vector<std::int32_t> copied(6);
    tensor.copy_to_host_sync(copied, bench.stream);
    CHECK(tensor.extents() == Extents<3>{2, 1, 3});
    CHECK(copied == std::vector<std::int32_t>{1, 2, 3, 4, 5, 6});

    from.strides = nullptr;  // row-major
    from.device.type = dlpack::DeviceType::cuda_host;
    tensor = import();
    tensor.copy_to_host_sync(copied, bench.stream);
    CHECK(copied == std::vector<std::int32_t>(6, -1));
  }

  TEST_CASE("import_sync: what cannot be imported is refused by name") {
    SmallBench bench;
    std::vector<float> values(6);
    std::array<std::int64_t, 2> shape{2, 3};
    std::array<std::int64_t, 2> strides{3, 1};
    dlpack::Tensor const good{.data = values.data(),
                              .device = {dlpack::DeviceType::cpu, 0},
                              .ndim = 2,
                              .dtype = dlpack::data_type<float>(),
                              .shape = shape.data(),
                              .strides = strides.data(),
                              .byte_offset = 0};
    auto const refusal = [&](auto const& change) -> std::string {
      dlpack::Tensor from = good;
      change(from);
      try {
        (void)dlpack::import_sync<float, 2>(bench.allocator, from, bench.stream);
      } catch (ContractViolation const& error) {
        return error.what();
      }
      return "not refused";
    };
    auto const says = [](std::string const& text, char const* what) {
      CAPTURE(text);
      CHECK(text.starts_with(__FILE__));
      CHECK(text.find(what) != std::string::npos);
    };
    CHECK(refusal([](auto&) {}) == "not refused");
    says(refusal([](auto& from) { from.dtype.bits = 64; }), "have another type");
    says(refusal([](auto& from) { from.dtype.code = dlpack::TypeCode::signed_integer; }),
         "have another type");
    says(refusal([](auto& from) { from.dtype.lanes = 2; }), "have another type");
    says(refusal([](auto& from) { from.ndim = 1; }), "another number of dimensions");
    says(refusal([](auto& from) { from.device.type = dlpack::DeviceType::cuda; }), "neither in");
    says(refusal([](auto& from) { from.device.type = dlpack::DeviceType{8}; }), "neither in");
    strides = {1, 2};
    says(refusal([](auto&) {}), "make it contiguous");
    strides = {3, 1};
    shape = {0, 3};
    says(refusal([](auto&) {}), "below 1");
    shape = {2, -3};
    says(refusal([](auto&) {}), "below 1");
    shape = {std::int64_t{1} << 62, 8};
    says(refusal([](auto& from) { from.strides = nullptr; }), "does not fit in 64 bits");
    CHECK(bench.allocator.stats().allocated.blocks.current == 0);
  }

  TEST_CASE("import_sync: memory of the allocator's device is copied on the device") {
    struct Gpu : SimApi {
      using SimApi::SimApi;
      [[nodiscard]] static int ordinal() noexcept { return 1; }
      [[nodiscard]] bool is_capturing(SimStream /*stream*/) const noexcept { return captures; }
      bool captures = false;
    };
    Gpu device{{.capacity_bytes = 64_MiB}};
    DeviceAllocator<PoliciesFor<Gpu>> memory{device, {.capacity_bytes = 1_MiB}};
    auto const stream = memory.create_stream();
    std::vector<float> values{1, 2, 3, 4};
    using GpuTensor = SwappableTensor<float, 1, DeviceAllocator<PoliciesFor<Gpu>>>;
    auto tensor = GpuTensor::from_host_sync(memory, {4}, values, stream);
    Consumed const managed{
        dlpack::export_tensor(tensor.acquire_read(stream), dlpack::device_of(device))};
    auto const import = [&](dlpack::Tensor const& from) {
      return dlpack::import_sync<float, 1>(memory, from, stream);
    };
    auto const copy = import(managed->dl_tensor);
    std::vector<float> copied(4);
    copy.copy_to_host_sync(copied, stream);
    CHECK(copied == values);
    CHECK(copy.id() != tensor.id());

    dlpack::Tensor elsewhere = managed->dl_tensor;
    elsewhere.device.id = 0;
    CHECK_THROWS_AS((void)import(elsewhere), ContractViolation);

    device.captures = true;  // the copy would become part of the graph, and waiting for it would
    CHECK_THROWS_AS((void)import(managed->dl_tensor), ContractViolation);  // break the capture
    device.captures = false;
  }
}
