// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/device_capabilities.hpp>
#include <spillway/core/error.hpp>
#include <spillway/core/types.hpp>
#include <spillway/swappable_tensor.hpp>

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <type_traits>
#include <utility>

namespace spillway::dlpack {

// The structures of DLPack 1.1 (github.com/dmlc/dlpack, include/dlpack/dlpack.h), laid out as its
// ABI demands, under names of our own: a program may include the original header as well and
// reinterpret_cast between the two.

inline constexpr std::uint32_t major_version = 1;
inline constexpr std::uint32_t minor_version = 1;
inline constexpr std::uint64_t flag_read_only = 1U << 0U;

/// DLDeviceType; only what the library can export or import.
enum class DeviceType : std::int32_t { cpu = 1, cuda = 2, cuda_host = 3 };

/// DLDataTypeCode.
enum class TypeCode : std::uint8_t {
  signed_integer = 0,
  unsigned_integer = 1,
  floating_point = 2,
  opaque = 3,
  bfloat = 4,
  complex = 5,
  boolean = 6
};

struct Version {
  std::uint32_t major;
  std::uint32_t minor;
};
struct Device {
  DeviceType type;
  std::int32_t id;
};
struct DataType {
  TypeCode code;
  std::uint8_t bits;
  std::uint16_t lanes;
};
struct Tensor {
  void* data;
  Device device;
  std::int32_t ndim;
  DataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // in elements
  std::uint64_t byte_offset;
};
/// DLManagedTensorVersioned: the consumer calls `deleter(self)` exactly once.
struct ManagedTensor {
  Version version;
  void* manager_ctx;
  void (*deleter)(ManagedTensor* self);
  std::uint64_t flags;
  Tensor dl_tensor;
};
static_assert(std::is_standard_layout_v<ManagedTensor> && sizeof(Tensor) == 48 &&
              sizeof(ManagedTensor) == 80);

/// A complex number of any library: `std::complex`, or one for device code such as
/// `cuda::std::complex`.
template <class T>
concept ComplexNumber = std::floating_point<typename T::value_type> &&
                            sizeof(T) == 2 * sizeof(typename T::value_type) &&
                        requires(T const z) {
  { z.real() } -> std::convertible_to<typename T::value_type>;
  { z.imag() } -> std::convertible_to<typename T::value_type>;
};

/// The DLPack type of `T`. Types that C++20 has no name for, such as half precision, become opaque
/// bytes. A structure of more than one byte becomes a vector of opaque bytes.
template <class T>
[[nodiscard]] constexpr DataType data_type() noexcept {
  static_assert(sizeof(T) <= std::numeric_limits<std::uint16_t>::max());
  [[maybe_unused]] constexpr auto bits = static_cast<std::uint8_t>(sizeof(T) * 8);
  if constexpr (std::is_same_v<T, bool>) {
    return {TypeCode::boolean, bits, 1};
  } else if constexpr (std::is_floating_point_v<T>) {
    return {TypeCode::floating_point, bits, 1};
  } else if constexpr (std::is_unsigned_v<T>) {
    return {TypeCode::unsigned_integer, bits, 1};
  } else if constexpr (std::is_integral_v<T>) {
    return {TypeCode::signed_integer, bits, 1};
  } else if constexpr (ComplexNumber<T> && sizeof(T) * 8 == bits) {
    // Not `std::complex<long double>`, whose size in bits does not fit into `bits`.
    return {TypeCode::complex, bits, 1};
  } else {
    return {TypeCode::opaque, 8, static_cast<std::uint16_t>(sizeof(T))};
  }
}

/// The device that an allocator's memory is on, in DLPack's terms: a CUDA device if the device has
/// an ordinal, else host memory.
template <class D>
[[nodiscard]] Device device_of(D const& device) noexcept {
  if constexpr (NumberedApi<D>) {
    return {DeviceType::cuda, static_cast<std::int32_t>(device.ordinal())};
  } else {
    return {DeviceType::cpu, 0};
  }
}

/// Hands a leased tensor to a DLPack consumer. The tensor stays resident and does not move until
/// the consumer calls the deleter, which ends the lease.
///
/// A lease for `Access::read` is exported read-only. The allocator must outlive what is exported.
///
/// @param lease   from `SwappableTensor::acquire`; taken over
/// @param device  of the allocator: `device_of(allocator.device())`
/// @param type    what the elements are, e.g. `{TypeCode::floating_point, 16, 1}` for half
///                precision; as large as `T`
/// @throws ContractViolation if the lease has ended or `type` is not as large as `T`;
///         std::bad_alloc. `lease` still holds the lease then
/// @stream  the consumer must work on the stream that the lease was acquired on, or make that
///          stream wait for its own before it calls the deleter; so the stream must live until then
/// @threads the deleter may run on any thread except that of a host function or of a simulated
///          kernel, since it calls the allocator
template <class T, std::size_t Rank, Pager P>
[[nodiscard]] ManagedTensor* export_tensor(TensorLease<T, Rank, P>&& lease,
                                           Device device,
                                           DataType type = data_type<std::remove_const_t<T>>(),
                                           CallSite site = {}) {
  struct Context {
    ManagedTensor managed{};
    std::array<std::int64_t, Rank> shape{};
    std::array<std::int64_t, Rank> strides{};
    typename P::lease_type lease;
  };
  expects(static_cast<bool>(lease), "the lease has ended: only a held lease can be exported", site);
  expects(std::size_t{type.bits} * type.lanes == sizeof(T) * 8,
          "the DLPack type must be as large as the tensor's element",
          site);
  auto context = std::make_unique<Context>();
  for (std::size_t i = 0; i < Rank; ++i) {
    context->shape[i] = static_cast<std::int64_t>(lease.extents()[i]);
    context->strides[i] = static_cast<std::int64_t>(lease.strides()[i]);
  }
  context->managed = ManagedTensor{
      .version = {major_version, minor_version},
      .manager_ctx = context.get(),
      .deleter = [](ManagedTensor* self) { delete static_cast<Context*>(self->manager_ctx); },
      .flags = lease.access() == Access::read ? flag_read_only : 0,
      .dl_tensor = {.data = const_cast<std::remove_const_t<T>*>(lease.data()),
                    .device = device,
                    .ndim = static_cast<std::int32_t>(Rank),
                    .dtype = type,
                    .shape = context->shape.data(),
                    .strides = context->strides.data(),
                    .byte_offset = 0}};
  context->lease = std::move(lease).take_lease();
  return &context.release()->managed;
}

/// Makes a tensor with the elements of a DLPack tensor, which are copied: memory that another
/// library owns cannot leave the device.
///
/// @param memory  a `DeviceAllocator`
/// @param from    `dl_tensor` of what the producer exported: row-major and without gaps, in memory
///                of the host or of the allocator's device. The caller calls the deleter of the
///                export, which may be done right after this call
/// @param stream  the work that writes the elements has run or is enqueued on it
/// @param type    what the elements are, as for `export_tensor`
/// @throws ContractViolation for another element type, another number of dimensions, an extent
///         below 1, strides of another order, memory elsewhere, or a stream that is being captured
///         into a graph; as `SwappableTensor`
/// @stream  copies on `stream` and waits on the host until `from` is not needed any more
template <class T, std::size_t Rank, Pager P>
  requires requires(P& memory) {
    memory.device();
  }
[[nodiscard]] SwappableTensor<T, Rank, P> import_sync(P& memory,
                                                      Tensor const& from,
                                                      typename P::stream_type stream,
                                                      DataType type = data_type<T>(),
                                                      CallSite site = {}) {
  expects(std::size_t{type.bits} * type.lanes == sizeof(T) * 8,
          "the DLPack type must be as large as the tensor's element",
          site);
  expects(from.dtype.code == type.code && from.dtype.bits == type.bits &&
              from.dtype.lanes == type.lanes,
          "the elements of the DLPack tensor have another type",
          site);
  expects(from.ndim == static_cast<std::int32_t>(Rank),
          "the DLPack tensor has another number of dimensions",
          site);
  Extents<Rank> extents{};
  std::size_t stride = 1;
  for (std::size_t i = Rank; i-- > 0;) {
    expects(from.shape[i] > 0, "an extent of the DLPack tensor is below 1", site);
    extents[i] = static_cast<std::size_t>(from.shape[i]);
    expects(from.strides == nullptr || extents[i] == 1 ||
                static_cast<std::size_t>(from.strides[i]) == stride,
            "the DLPack tensor is not row-major without gaps: make it contiguous first",
            site);
    stride *= extents[i];  // the tensor refuses a size that overflows
  }
  Device const here = device_of(memory.device());
  bool const is_on_device = from.device.type == DeviceType::cuda;
  expects(is_on_device
              ? here.type == DeviceType::cuda && here.id == from.device.id
              : from.device.type == DeviceType::cpu || from.device.type == DeviceType::cuda_host,
          "the DLPack tensor is neither in host memory nor on the allocator's device",
          site);
  if constexpr (CapturingApi<typename P::device_type>) {
    expects(!memory.device().is_capturing(stream),
            "the stream is being captured into a graph, so the copy would not be made now",
            site);
  }

  auto const* const elements =
      reinterpret_cast<T const*>(static_cast<std::byte const*>(from.data) + from.byte_offset);
  SwappableTensor<T, Rank, P> tensor{memory, extents, site};
  if (is_on_device) {
    auto const lease = tensor.acquire_write(stream, site);
    memory.device().copy(lease.data(), elements, tensor.size_bytes(), CopyKind::on_device, stream);
    memory.device().synchronize(stream);
  } else {
    tensor.copy_from_host_sync({elements, tensor.size()}, stream, site);
  }
  return tensor;
}

}  // namespace spillway::dlpack
