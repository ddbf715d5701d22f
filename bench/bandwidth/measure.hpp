// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/types.hpp>
#include <spillway/host/host_tier.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <future>
#include <optional>
#include <string>
#include <vector>

#include "bandwidth.hpp"
#include "device_blocks.hpp"
#include "plain_copies.hpp"
#include "raw_file.hpp"
#include "through_allocator.hpp"
#include "through_streams.hpp"
#include "timing.hpp"

namespace bandwidth {

/// Measures one device. Ours and what it is compared with take turns, so that whatever else the
/// machine does hits both.
template <class Policies>
class Measurement {
 public:
  using Device = typename Policies::device;

  Measurement(Device& device, Settings const& settings, Report const& report)
      : device_{device}, settings_{settings}, report_{report} {}

  void run() {
    for (std::size_t size = settings_.min_size_bytes; size <= settings_.max_size_bytes; size *= 4) {
      std::size_t const count = std::max<std::size_t>(1, settings_.total_bytes / size);
      for (spillway::HostTier const tier : settings_.tiers) {
        measure({tier, count == 1 ? Layout::one : Layout::packed, size, count});
        if (count > 1 && settings_.through == Through::streams) {
          measure({tier, Layout::scattered, size, count});
          if (tier == HostTier::file) {
            measure({tier, Layout::apart, size, count});
          }
        }
      }
    }
  }

 private:
  using HostTier = spillway::HostTier;
  static constexpr std::size_t plain_call_bytes = 8_MiB;  // of sequential plain file I/O
  using CopyKind = spillway::CopyKind;

  struct Case {
    HostTier tier{};
    Layout layout{};
    std::size_t size_bytes = 0;
    std::size_t count = 0;

    [[nodiscard]] std::size_t bytes() const noexcept { return size_bytes * count; }
  };

  /// Of both sets of blocks and everything that carries them without us.
  struct Peers {
    std::array<DeviceBlocks<Device>, 2> sets;
    std::array<PlainCopies<Device>, 2> plain;
    // Where there are several blocks; with memory of their own, as the cache sees it.
    std::array<std::optional<PlainCopies<Device>>, 2> naive;
    std::vector<std::byte> memory;               // of the pageable tier's peer
    std::array<std::optional<RawFile>, 2> file;  // of the file tier's
  };

  [[nodiscard]] spillway::HostPoolOptions pool_options(Case const& now) const {
    spillway::HostPoolOptions options;
    options.staging_bytes = settings_.staging_bytes;
    options.staging_chunks = settings_.staging_chunks;
    std::size_t bytes = 2 * now.bytes();
    if (settings_.codec != CodecName::identity) {
      bytes += bytes / 8;  // a slot is taken for the worst case
    }
    switch (now.tier) {
    case HostTier::pinned:
      options.pinned_bytes = options.initial_pinned_bytes = bytes;
      break;
    case HostTier::pageable:
      options.pageable_bytes = bytes;
      break;
    case HostTier::file:
      options.file_bytes = bytes;
      options.file = settings_.file_folder;
      options.file_direct_io = true;
      options.file_checksums = settings_.has_file_checksums;
      break;
    }
    return options;
  }

  void measure(Case const& now) {
    Peers peers{
        {DeviceBlocks<Device>{device_, now.size_bytes, now.count, now.layout, settings_.seed},
         DeviceBlocks<Device>{device_, now.size_bytes, now.count, now.layout, settings_.seed + 1}},
        {PlainCopies<Device>{device_, now.bytes()}, PlainCopies<Device>{device_, now.bytes()}},
        {},
        {},
        {}};
    for (auto& naive : peers.naive) {
      if (now.tier == HostTier::pinned && now.count > 1) {
        naive.emplace(device_, now.bytes(), now.count);
      }
    }
    spillway::HostPoolOptions const options = pool_options(now);
    if (settings_.through == Through::streams) {
      ThroughStreams<Device> carrier{device_,
                                     options,
                                     now.size_bytes,
                                     {&peers.sets[0], &peers.sets[1]},
                                     now.layout,
                                     settings_.seed};
      measure(now, carrier, peers);
    } else {
      ThroughAllocator<Policies> carrier{
          device_, options, now.size_bytes, now.count, settings_.codec};
      measure(now, carrier, peers);
    }
  }

  template <class Carrier>
  void measure(Case const& now, Carrier& carrier, Peers& peers) {
    check(now, carrier, peers);
    spillway::HostPoolStats const stats = carrier.stats();
    bool const is_direct = stats.is_file_direct;
    if (now.tier == HostTier::pageable) {
      peers.memory.resize(2 * now.bytes());
    }
    for (auto& file : peers.file) {
      if (now.tier == HostTier::file) {
        bool const is_random = now.layout == Layout::apart;
        file.emplace(settings_.file_folder,
                     now.bytes(),
                     is_random ? now.size_bytes : plain_call_bytes,
                     is_direct,
                     is_random,
                     settings_.seed);
        file->write(now.bytes());
      }
    }
    for (Direction const direction : settings_.directions) {
      Row row{.direction = direction,
              .tier = now.tier,
              .layout = now.layout,
              .size_bytes = now.size_bytes,
              .count = now.count,
              .stored_share = stored_share(stats, 2 * now.bytes()),
              .is_file_direct = is_direct,
              .is_file_checked = stats.is_file_checked,
              .file_calls = std::string{stats.file_calls}};
      time(row, carrier, peers);
      report_(row);
    }
  }

  /// Of `bytes` bytes that have left, what is stored of each: those that no codec was given are
  /// stored as they are.
  [[nodiscard]] static double stored_share(spillway::HostPoolStats const& stats,
                                           std::size_t bytes) {
    return 1 + (static_cast<double>(stats.encoded_stored_bytes) -
                static_cast<double>(stats.encoded_raw_bytes)) /
                   static_cast<double>(bytes);
  }

  /// Sends everything out and back, and looks at every byte. Afterwards memory is backed and slots
  /// have contents.
  template <class Carrier>
  void check(Case const& now, Carrier& carrier, Peers& peers) {
    for (std::size_t set = 0; set < 2; ++set) {
      PlainCopies<Device>& plain = peers.plain[set];
      std::uint64_t const tag = settings_.seed + set * now.count;
      carrier.for_each_block(set, [&](std::size_t i, std::byte* block) {
        plain.put_sync(block, now.size_bytes, tag + i, settings_);
      });
      carrier.enqueue_out(set);
      carrier.synchronize(set);
      carrier.wipe_sync(set);
      carrier.enqueue_in(set);
      carrier.synchronize(set);
      carrier.for_each_block(set, [&](std::size_t i, std::byte* block) {
        plain.expect_sync(block, now.size_bytes, tag + i, settings_);
      });
      plain.enqueue_one(peers.sets[set].memory(), now.bytes(), CopyKind::to_host);
      plain.synchronize();
    }
  }

  template <class Carrier>
  void time(Row& row, Carrier& carrier, Peers& peers) {
    std::size_t const bytes = row.size_bytes * row.count;
    bool const has_out = row.direction != Direction::in;
    bool const has_in = row.direction != Direction::out;
    std::size_t const moved_bytes = bytes * (has_out && has_in ? 2 : 1);
    Times ours;
    Times raw;
    Times naive;
    Times copies;
    Times memcpy_alone;
    for (std::size_t i = 0; i < settings_.repetitions; ++i) {
      if (has_out) {
        carrier.prepare_out(0);
      }
      if (has_in) {
        carrier.prepare_in(1);
      }
      // Whoever comes first finds other things in the cache than whoever comes second.
      for (std::size_t turn = 0; turn < 3; ++turn) {
        switch ((turn + i) % 3) {
        case 0:
          ours.add([&] { run_ours(carrier, has_out, has_in); });
          break;
        case 1:
          raw.add([&] {
            row.tier == HostTier::file ? run_file(peers, bytes, has_out, has_in)
                                       : run_plain(peers, bytes, has_out, has_in);
          });
          break;
        default:
          if (peers.naive[0]) {
            naive.add([&] { run_naive(peers, row.size_bytes, has_out, has_in); });
          } else if (row.tier == HostTier::file) {
            copies.add([&] { run_plain(peers, bytes, has_out, has_in); });
          }
        }
      }
      if (row.tier == HostTier::pageable) {
        std::memset(peers.memory.data(), static_cast<int>(i), bytes);
        memcpy_alone.add(
            [&] { std::memcpy(peers.memory.data() + bytes, peers.memory.data(), bytes); });
      }
    }
    row.ours = ours.rate(moved_bytes);
    row.raw = raw.rate(moved_bytes);
    row.naive = naive.rate(moved_bytes);
    row.copies = copies.rate(moved_bytes);
    row.memcpy_alone = memcpy_alone.rate(bytes);
  }

  template <class Carrier>
  static void run_ours(Carrier& carrier, bool has_out, bool has_in) {
    if (has_out) {
      carrier.enqueue_out(0);
    }
    if (has_in) {
      carrier.enqueue_in(1);
    }
    for (std::size_t set = has_out ? 0U : 1U; set < (has_in ? 2U : 1U); ++set) {
      carrier.synchronize(set);
    }
  }
  void run_plain(Peers& peers, std::size_t bytes, bool has_out, bool has_in) {
    if (has_out) {
      peers.plain[0].enqueue_one(peers.sets[0].memory(), bytes, CopyKind::to_host);
    }
    if (has_in) {
      peers.plain[1].enqueue_one(peers.sets[1].memory(), bytes, CopyKind::to_device);
    }
    synchronize(peers.plain[0], peers.plain[1], has_out, has_in);
  }
  void run_naive(Peers& peers, std::size_t size_bytes, bool has_out, bool has_in) {
    if (has_out) {
      peers.naive[0]->enqueue_each(peers.sets[0].blocks(), size_bytes, CopyKind::to_host);
    }
    if (has_in) {
      peers.naive[1]->enqueue_each(peers.sets[1].blocks(), size_bytes, CopyKind::to_device);
    }
    synchronize(*peers.naive[0], *peers.naive[1], has_out, has_in);
  }
  static void
  synchronize(PlainCopies<Device>& out, PlainCopies<Device>& in, bool has_out, bool has_in) {
    if (has_out) {
      out.synchronize();
    }
    if (has_in) {
      in.synchronize();
    }
  }
  /// Both at once: a thread for each. @throws std::runtime_error where either fails
  void run_file(Peers& peers, std::size_t bytes, bool has_out, bool has_in) {
    std::future<void> writer;  // waits for its thread when it ends
    if (has_out && has_in) {
      writer = std::async(std::launch::async, [&] { peers.file[0]->write(bytes); });
    } else if (has_out) {
      peers.file[0]->write(bytes);
    }
    if (has_in) {
      peers.file[1]->read(bytes);
    }
    if (writer.valid()) {
      writer.get();
    }
  }

  Device& device_;
  Settings const& settings_;
  Report const& report_;
};

}  // namespace bandwidth
