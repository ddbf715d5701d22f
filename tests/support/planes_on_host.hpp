// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/codec.hpp>
#include <spillway/concepts/device_api.hpp>
#include <spillway/policy/codec/identity.hpp>
#include <spillway/policy/codec/kernel_slot.hpp>
#include <spillway/policy/codec/plane_kernels.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include <support/stripes_on_host.hpp>

namespace spillway::test {

/// A run-length code: pairs of a byte and its count. It does not check its input, like nvCOMP's
/// compressors: with bytes that it did not make it may write outside of its target.
struct RunLengths {
  static constexpr unsigned most_planes = 16;

  static std::size_t most_packed_bytes(std::size_t bytes) { return 2 * bytes; }
  static std::size_t work_bytes(std::size_t planes) { return planes * sizeof(std::uint32_t); }

  template <class Launch>
  static void
  compress(Launch const& launch, detail::PlaneBatch const& batch, std::span<std::byte> work) {
    launch(Kernel{batch, reinterpret_cast<std::uint32_t*>(work.data()), true}, batch.count);
  }
  template <class Launch>
  static void
  decompress(Launch const& launch, detail::PlaneBatch const& batch, std::span<std::byte> work) {
    launch(Kernel{batch, reinterpret_cast<std::uint32_t*>(work.data()), false}, batch.count);
  }

 private:
  struct Kernel {
    using Memory = detail::NoMemory;

    void operator()(HostTeam const& /*team*/, Memory& /*memory*/, std::uint64_t i) const {
      auto const* const from = static_cast<std::byte const*>(batch.from[i]);
      auto* const to = static_cast<std::byte*>(batch.to[i]);
      std::span<std::byte const> const source{from, batch.from_bytes[i]};
      work[i] = packs ? pack(source, to) : unpack(source, to);
      batch.done_bytes[i] = work[i];
      batch.statuses[i] = detail::PlaneBatch::success;
    }
    static std::uint32_t pack(std::span<std::byte const> from, std::byte* to) {
      std::uint32_t done = 0;
      for (std::size_t i = 0; i < from.size(); done += 2) {
        std::size_t const begin = i;
        while (i < from.size() && i - begin < 255 && from[i] == from[begin]) {
          ++i;
        }
        to[done] = static_cast<std::byte>(i - begin);
        to[done + 1] = from[begin];
      }
      return done;
    }
    static std::uint32_t unpack(std::span<std::byte const> from, std::byte* to) {
      std::uint32_t done = 0;
      for (std::size_t i = 0; i < from.size(); i += 2) {
        auto const length = static_cast<std::uint32_t>(from[i]);
        std::memset(to + done, static_cast<int>(from[i + 1]), length);
        done += length;
      }
      return done;
    }

    detail::PlaneBatch batch;
    std::uint32_t* work;
    bool packs;
  };
};

/// A codec that works on planes, on a simulated device.
template <class Compressor>
struct PlanesOnHost : Identity {
  using Codec = detail::PlaneCodec<Compressor>;

  static std::size_t stream_bytes(std::size_t bytes) noexcept {
    return detail::most_planed_bytes(bytes);
  }
  template <DeviceApi Device>
  static std::size_t scratch_bytes(Device const& /*device*/) {
    return Codec::scratch_bytes();
  }
  static std::size_t stored_bytes(SlotMemory slot) noexcept { return detail::stored_in_slot(slot); }

  template <DeviceApi Device>
  static void encode_on(Device& device,
                        typename Device::stream_type stream,
                        std::span<std::byte const> from,
                        SlotMemory slot,
                        std::span<std::byte> scratch) {
    Codec::encode(HostLaunch<Device>{device, stream}, from, pieces_of(slot), scratch);
  }
  template <DeviceApi Device>
  static void decode_on(Device& device,
                        typename Device::stream_type stream,
                        SlotMemory slot,
                        std::span<std::byte> to,
                        std::span<std::byte> scratch) {
    Codec::decode(HostLaunch<Device>{device, stream}, pieces_of(slot), to, scratch);
  }
};

using PlanesOnStream = PlanesOnHost<RunLengths>;

}  // namespace spillway::test
