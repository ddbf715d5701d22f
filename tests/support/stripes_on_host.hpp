// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/codec.hpp>
#include <spillway/concepts/device_api.hpp>
#include <spillway/policy/codec/as_bfloat16.hpp>
#include <spillway/policy/codec/stripe_kernels.hpp>
#include <spillway/policy/codec/zero_bitmap.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>

namespace spillway::test {

/// The threads of a team, one after the other.
struct HostTeam {
  static constexpr unsigned size = detail::most_map_words;

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

/// A codec of which a stream of a simulated device runs the kernels that a GPU runs: one host
/// function is one kernel.
template <Codec OnHost, class Stripe>
struct StripesOnHost : OnHost {
  using Kernels = detail::StripeKernels<Stripe>;

  static std::size_t stream_bytes(std::size_t bytes) noexcept {
    return detail::most_striped_bytes(bytes);
  }
  static std::size_t stored_bytes(SlotMemory slot) noexcept { return detail::striped_bytes(slot); }

  template <DeviceApi Device>
  static void encode_on(Device& device,
                        typename Device::stream_type stream,
                        std::span<std::byte const> from,
                        SlotMemory slot) {
    detail::KernelSlot const pieces = pieces_of(slot);
    detail::launch_callable(device, stream, [=] {
      each_stripe(from.size(), [&](detail::StripeMemory& memory, std::uint64_t stripe) {
        Kernels::measure_stripe(HostTeam{}, memory, from.data(), from.size(), pieces, stripe);
      });
    });
    detail::launch_callable(device, stream, [=] {
      std::array<std::uint64_t, HostTeam::size> sums{};
      Kernels::place_stripes(HostTeam{}, sums.data(), from.size(), pieces);
    });
    detail::launch_callable(device, stream, [=] {
      each_stripe(from.size(), [&](detail::StripeMemory& memory, std::uint64_t stripe) {
        Kernels::write_stripe(HostTeam{}, memory, from.data(), from.size(), pieces, stripe);
      });
    });
  }

  template <DeviceApi Device>
  static void decode_on(Device& device,
                        typename Device::stream_type stream,
                        SlotMemory slot,
                        std::span<std::byte> to) {
    detail::launch_callable(device, stream, [pieces = pieces_of(slot), to] {
      each_stripe(to.size(), [&](detail::StripeMemory& memory, std::uint64_t stripe) {
        Kernels::read_stripe(HostTeam{}, memory, pieces, to.data(), to.size(), stripe);
      });
    });
  }

 private:
  static detail::KernelSlot pieces_of(SlotMemory slot) {
    detail::KernelSlot pieces;
    for (std::span<std::byte> const piece : slot) {
      pieces.add(piece.data(), piece.size());
    }
    return pieces;
  }
  template <class Kernel>
  static void each_stripe(std::size_t bytes, Kernel kernel) {
    auto const memory = std::make_unique<detail::StripeMemory>();
    for (std::uint64_t stripe = 0; stripe < detail::stripes_of(bytes); ++stripe) {
      kernel(*memory, stripe);
    }
  }
};

using ZeroBitmapOnStream = StripesOnHost<ZeroBitmap, detail::ZeroBitmapStripe>;
using AsBfloat16OnStream = StripesOnHost<AsBfloat16, detail::Bfloat16Stripe>;

}  // namespace spillway::test
