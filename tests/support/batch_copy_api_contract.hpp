// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/batch_copy_api.hpp>
#include <spillway/core/error.hpp>
#include <spillway/core/types.hpp>

#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <span>
#include <vector>

#include <support/device_rig.hpp>

// What every model of BatchCopyApi owes. A device joins with
// TEST_CASE_TEMPLATE_INVOKE(batch_copy_contract, MyApi); it is made without arguments.

TEST_CASE_TEMPLATE_DEFINE("BatchCopyApi: ", D, batch_copy_contract) {
  using namespace spillway;
  using namespace spillway::test;
  static_assert(BatchCopyApi<D>);
  D device;
  DeviceRig<D> rig{device};
  auto const stream = rig.stream();
  // Every third piece of 1000 bytes, and in the batch in another order than in memory.
  constexpr std::size_t pieces = 61;
  constexpr std::size_t bytes = 1000;
  unsigned char* const memory = rig.device_memory(3 * pieces * bytes);
  unsigned char* const source = rig.pinned(3 * pieces * bytes, 0);
  unsigned char* const target = rig.pinned(3 * pieces * bytes, 0);
  std::vector<std::size_t> sizes(pieces, bytes);
  auto const places = [&](unsigned char* base) {
    std::vector<void*> all;
    for (std::size_t i = 0; i < pieces; ++i) {
      all.push_back(base + 3 * bytes * (i * 7 % pieces));
    }
    return all;
  };
  auto const const_places = [&](unsigned char* base) {
    std::vector<void*> const all = places(base);
    return std::vector<void const*>(all.begin(), all.end());
  };
  if constexpr (holds_bytes<D>()) {
    for (std::size_t i = 0; i < 3 * pieces * bytes; ++i) {
      source[i] = static_cast<unsigned char>(i * 131 + i / 997 + 1);
    }
  }
  auto const wrong_bytes = [&](std::size_t first, std::size_t last) {
    std::size_t wrong = 0;
    if constexpr (holds_bytes<D>()) {
      for (std::size_t i = first; i < last; ++i) {
        bool const is_copied = i / bytes % 3 == 0;
        wrong += target[i] != (is_copied ? source[i] : 0) ? 1U : 0U;
      }
    }
    return wrong;
  };

  SUBCASE("copies what its copies would have, and nothing beside it") {
    device.copy_batch(places(memory), const_places(source), sizes, CopyKind::to_device, stream);
    device.copy_batch(places(target), const_places(memory), sizes, CopyKind::to_host, stream);
    device.synchronize(stream);
    CHECK(wrong_bytes(0, 3 * pieces * bytes) == 0);
  }
  SUBCASE("stands in stream order: after what came before, and before what comes after") {
    unsigned char* const second = rig.device_memory(3 * pieces * bytes);
    device.copy(memory, source, 3 * pieces * bytes, CopyKind::to_device, stream);
    device.copy_batch(places(second), const_places(memory), sizes, CopyKind::on_device, stream);
    device.fill(memory, 0x11, 3 * pieces * bytes, stream);
    device.copy_batch(places(target), const_places(second), sizes, CopyKind::to_host, stream);
    device.synchronize(stream);
    CHECK(wrong_bytes(0, 3 * pieces * bytes) == 0);
  }
  SUBCASE("an event recorded after it stands for all of it") {
    auto const other = rig.stream();
    auto const event = rig.event();
    device.copy_batch(places(memory), const_places(source), sizes, CopyKind::to_device, stream);
    device.record(event, stream);
    device.wait(other, event);
    device.copy_batch(places(target), const_places(memory), sizes, CopyKind::to_host, other);
    device.synchronize(other);
    CHECK(wrong_bytes(0, 3 * pieces * bytes) == 0);
  }
  SUBCASE("empty copies and no copies do nothing") {
    std::vector<std::size_t> none(pieces, 0);
    none[3] = bytes;
    device.copy_batch({}, {}, {}, CopyKind::to_device, stream);
    device.copy_batch(places(memory), const_places(source), none, CopyKind::to_device, stream);
    device.copy_batch(places(target), const_places(memory), none, CopyKind::to_host, stream);
    device.synchronize(stream);
    std::size_t const at = 3 * bytes * (3 * 7 % pieces);
    CHECK(wrong_bytes(at, at + bytes) == 0);
    if constexpr (holds_bytes<D>()) {
      CHECK(target[0] == 0);
    }
  }
  SUBCASE("one copy is a batch too") {
    device.copy_batch(std::array<void*, 1>{memory},
                      std::array<void const*, 1>{source},
                      std::array{bytes},
                      CopyKind::to_device,
                      stream);
    device.copy_batch(std::array<void*, 1>{target},
                      std::array<void const*, 1>{memory},
                      std::array{bytes},
                      CopyKind::to_host,
                      stream);
    device.synchronize(stream);
    CHECK(wrong_bytes(0, bytes) == 0);
  }
  SUBCASE("spans of different lengths are refused") {
    CHECK_THROWS_AS(device.copy_batch(places(memory),
                                      const_places(source),
                                      std::span{sizes}.first(2),
                                      CopyKind::to_device,
                                      stream),
                    ContractViolation);
  }
}
