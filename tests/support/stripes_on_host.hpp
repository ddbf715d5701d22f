// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/codec.hpp>
#include <spillway/concepts/device_api.hpp>
#include <spillway/policy/codec/as_bfloat16.hpp>
#include <spillway/policy/codec/kernel_slot.hpp>
#include <spillway/policy/codec/stripe_kernels.hpp>
#include <spillway/policy/codec/zero_bitmap.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>

namespace spillway::test {

/// The threads of a team, one after the other.
struct HostTeam {
  static constexpr unsigned size = detail::team_size;

  template <class Function>
  void each(Function function) const {
    for (unsigned thread = 0; thread < size; ++thread) {
      function(thread);
    }
  }
  template <class T>
  T exclusive_scan(T* values) const {
    T sum = 0;
    for (unsigned thread = 0; thread < size; ++thread) {
      sum += std::exchange(values[thread], sum);
    }
    return sum;
  }
};

/// Runs the GPU's kernels on a stream of a simulated device: each kernel is one host function.
template <DeviceApi Device>
struct HostLaunch {
  template <class Kernel>
  void operator()(Kernel const& kernel, std::uint64_t teams) const {
    detail::launch_callable(device, stream, [kernel, teams] {
      auto const memory = std::make_unique<typename Kernel::Memory>();
      for (std::uint64_t team = 0; team < teams; ++team) {
        kernel(HostTeam{}, *memory, team);
      }
    });
  }

  Device& device;
  typename Device::stream_type stream;
};

inline detail::KernelSlot pieces_of(SlotMemory slot) {
  detail::KernelSlot pieces;
  for (std::span<std::byte> const piece : slot) {
    pieces.add(piece.data(), piece.size());
  }
  return pieces;
}

/// A codec that works on stripes, on a simulated device.
template <Codec OnHost, class Stripe>
struct StripesOnHost : OnHost {
  static std::size_t stream_bytes(std::size_t bytes) noexcept {
    return detail::most_striped_bytes(bytes);
  }
  template <DeviceApi Device>
  static std::size_t scratch_bytes(Device const& /*device*/) noexcept {
    return 0;
  }
  static std::size_t stored_bytes(SlotMemory slot) noexcept { return detail::stored_in_slot(slot); }

  template <DeviceApi Device>
  static void encode_on(Device& device,
                        typename Device::stream_type stream,
                        std::span<std::byte const> from,
                        SlotMemory slot,
                        std::span<std::byte> /*scratch*/) {
    detail::encode_stripes<Stripe>(HostLaunch<Device>{device, stream}, from, pieces_of(slot));
  }
  template <DeviceApi Device>
  static void decode_on(Device& device,
                        typename Device::stream_type stream,
                        SlotMemory slot,
                        std::span<std::byte> to,
                        std::span<std::byte> /*scratch*/) {
    detail::decode_stripes<Stripe>(HostLaunch<Device>{device, stream}, pieces_of(slot), to);
  }
};

using ZeroBitmapOnStream = StripesOnHost<ZeroBitmap, detail::ZeroBitmapStripe>;
using AsBfloat16OnStream = StripesOnHost<AsBfloat16, detail::Bfloat16Stripe>;

}  // namespace spillway::test
