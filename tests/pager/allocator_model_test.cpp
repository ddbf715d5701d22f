// SPDX-License-Identifier: Apache-2.0
// Random programs against an allocator on a stepped device, with an oracle that knows what every
// block must hold. Faults of the device are injected; nothing may be lost. Every second program
// makes blocks again by recipes, and most have blocks with codecs. In half of the programs, calls
// find no memory for their own lists now and then. Every fifth program has a file that fails: bytes
// may then be lost, but each loss that a kernel saw must be reported.
#include <spillway/device_allocator.hpp>
#include <spillway/page_arena.hpp>
#include <spillway/policy/codec/identity.hpp>
#include <spillway/policy/codec/zero_bitmap.hpp>
#include <spillway/policy/eviction/queue_eviction.hpp>
#include <spillway/policy/eviction/ranked_eviction.hpp>
#include <spillway/policy/fit/best_fit.hpp>
#include <spillway/policy/null_policies.hpp>
#include <spillway/policy/prefetch/reverse_order.hpp>
#include <spillway/policy/recompute/recompute_if_cheaper.hpp>
#include <spillway/sim.hpp>
#include <spillway/testing/faulty_file_io.hpp>
#include <spillway/testing/stepped_sim_api.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <new>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include <support/counted_allocations.hpp>
#include <support/pattern.hpp>
#include <support/short_memory_device.hpp>
#include <support/stripes_on_host.hpp>

namespace {

using namespace spillway::literals;
using spillway::Access;
using spillway::BlockId;
using spillway::testing::FaultyFileIo;

struct Stepped : spillway::SimPolicies {
  using device = support::ShortMemoryDevice<spillway::testing::SteppedSimApi>;
  using recompute = spillway::RecomputeIfCheaper;  // uses no real time, so seeds are repeatable
  using file_io = FaultyFileIo;
  using lock = spillway::NullLock;
};
struct Lru : Stepped {
  using eviction = spillway::LruEviction;
  using prefetch = spillway::NoPrefetch;
};
struct FifoBestFit : Stepped {
  using eviction = spillway::FifoEviction;
  using fit = spillway::BestFit;
  using prefetch = spillway::ReverseOrder;
};
struct Size : Stepped {
  using eviction = spillway::SizeEviction;
};
struct CostUncompacted : Stepped {
  using eviction = spillway::CostEviction;
  using compaction = spillway::NoCompaction;
};

struct Remapped : Stepped {
  using arena = spillway::MappedPages;
};
struct Stable : Stepped {
  using arena = spillway::StableAddresses;
};
struct RemoteApi : Stepped::device {
  using Stepped::device::ShortMemoryDevice;
  [[maybe_unused]] static constexpr bool is_addressable = false;  // codecs work on what is staged
};
struct Remote : Stepped {
  using device = RemoteApi;
};

/// What the oracle knows of one block.
struct Expected {
  BlockId id{};
  std::size_t bytes = 0;
  std::optional<std::uint64_t> content;  // seed of the pattern; nothing if it has no valid bytes
  void* address = nullptr;               // at its last use
};

template <class Policies>
class Program {
 public:
  using Device = typename Policies::device;
  using Allocator = spillway::DeviceAllocator<Policies>;

  explicit Program(std::uint64_t seed)
      : random_{seed}, io_{seed % 2 == 0}, allocator_{device_, options(seed, io_)}, seed_{seed} {
    for (auto& stream : streams_) {
      stream = device_.create_stream();
    }
  }
  ~Program() {
    leases_.clear();
    for (Expected const& block : blocks_) {
      allocator_.abandon(block.id);
    }
    for (auto const stream : streams_) {
      allocator_.retire_stream(stream);
    }
  }
  Program(Program const&) = delete;
  Program& operator=(Program const&) = delete;

  void run(std::size_t operations) {
    for (std::size_t i = 0; i < operations; ++i) {
      has_fault_ = draw(16) == 0;
      if (has_fault_) {
        device_.fail(fallible[draw(fallible.size())], 1 + draw(2));
      }
      is_at_step_ = false;
      bool is_short = false;
      try {
        operate_with_little_memory();
      } catch (spillway::OutOfDeviceMemory const&) {
        ++out_of_memory;
        leases_.clear();  // as its message advises
      } catch (spillway::OutOfHostMemory const&) {
        ++out_of_memory;
      } catch (std::bad_alloc const&) {
        REQUIRE(has_short_memory_);
        is_short = true;
        ++shortages;
      } catch (spillway::DeviceError const&) {
        REQUIRE(has_fault_);
        ++faults;
      } catch (spillway::FileTierError const&) {
        find_lost();
      }
      disarm();
      if (is_short) {
        check_at_rest();
      }
      if (draw(32) == 0) {
        plant_file_faults(operations - i < operations / 4);
        device_.run_random(random_());
        io_.plant({});
      }
      if (i % 4096 == 0) {
        settle();
      }
    }
    has_fault_ = false;
    leases_.clear();
    allocator_.set_capacity(capacity_bytes);
    capacity_in_force_ = capacity_bytes;
    allocator_.set_first_host_tier(spillway::HostTier::pinned);
    run_out_of_memory();
    check_all_and_free();
    settle();
  }

  [[nodiscard]] support::PatternKernels const& kernels() const { return kernels_; }
  [[nodiscard]] spillway::Stats stats() const { return allocator_.stats(); }
  [[nodiscard]] spillway::HostPoolStats host_stats() const { return allocator_.host_stats(); }
  std::size_t out_of_memory = 0;
  std::size_t dropped_orphans = 0;
  std::size_t faults = 0;
  std::size_t shortages = 0;         // operations that failed without memory for lists
  std::size_t losses = 0;            // blocks of which an acquire said that their bytes are lost
  std::size_t reported_at_step = 0;  // losses that `begin_step` reported

 private:
  static constexpr std::size_t capacity_bytes = 1_MiB;
  static constexpr std::size_t most_live_bytes = 3_MiB;
  static constexpr std::size_t page_bytes = 4_KiB;

  static std::size_t rounded(std::size_t bytes) {
    bool const has_pages = spillway::MappingArena<spillway::ArenaOf<Policies>>;
    return spillway::round_up(bytes, has_pages ? page_bytes : spillway::granule_bytes);
  }

  static constexpr std::array fallible{spillway::SimCall::allocate_pinned,
                                       spillway::SimCall::copy,
                                       spillway::SimCall::fill,
                                       spillway::SimCall::launch_host,
                                       spillway::SimCall::create_event,
                                       spillway::SimCall::record,
                                       spillway::SimCall::wait,
                                       spillway::SimCall::create_physical,
                                       spillway::SimCall::map};

  static bool has_file(std::uint64_t seed) { return seed % 5 >= 3; }
  static typename Allocator::Options options(std::uint64_t seed, FaultyFileIo const& io) {
    typename Allocator::Options options{.capacity_bytes = capacity_bytes};
    options.file_io = io;
    options.bounce_bytes = 64_KiB;
    options.host.pinned_bytes = 1_MiB;
    if (has_file(seed)) {
      options.host.file_bytes = 512_KiB;
      options.host.file = std::filesystem::temp_directory_path().string();
    } else {
      options.host.pageable_bytes = 512_KiB;
    }
    if constexpr (!spillway::AddressableApi<Device>) {
      options.host.pinned_bytes = 0;  // where codecs do nothing
      (has_file(seed) ? options.host.file_bytes : options.host.pageable_bytes) = 1536_KiB;
    }
    options.host.slab_bytes = 256_KiB;
    options.host.staging_bytes = 64_KiB;
    options.paging.poison_vacated = true;
    if (seed % 2 == 0) {
      options.paging.few_ranges = 8;  // so that a part of the arena is searched first
    }
    if (seed % 3 != 0) {
      options.initial_bytes = 0;
      options.growth_bytes = 32_KiB;
      options.grows_in_place = seed % 3 == 1;
    }
    return options;
  }

  std::uint64_t draw(std::uint64_t below) { return random_() % below; }
  auto any_stream() { return streams_[draw(streams_.size())]; }

  /// From here on no device call, no recipe and no allocation of this operation fails.
  void disarm() {
    has_fault_ = false;
    shortage_.reset();
    for (spillway::SimCall const call : fallible) {
      device_.fail(call, 0);
    }
  }

  /// Runs everything that is enqueued, and checks that the allocator's own view agrees with the
  /// oracle.
  void settle() {
    plant_file_faults(false);
    device_.run_all();
    io_.plant({});
    kernels_.forget();
    check_reports();
    spillway::Stats const stats = allocator_.stats();
    std::size_t bytes = 0;
    std::size_t requested = 0;
    std::size_t resident = 0;
    for (Expected const& block : blocks_) {
      bytes += rounded(block.bytes);
      requested += block.bytes;
      auto const residency = allocator_.residency(block.id);
      if (residency == spillway::Residency::device || residency == spillway::Residency::moving_in) {
        resident += rounded(block.bytes);
      }
    }
    std::size_t orphans = 0;  // freed, and kept for dropped blocks
    allocator_.for_each_block([&](BlockId, spillway::detail::BlockRecord const& block) {
      if (block.is_abandoned) {
        if (!block.is_uncounted) {
          ++orphans;
          bytes += block.bytes;
          requested += block.requested_bytes;
        }
        resident += block.is_resident() ? block.bytes : 0;
      }
    });
    REQUIRE((orphans == 0 || has_recipes_));
    REQUIRE(stats.allocated.blocks.current == blocks_.size() + orphans);
    REQUIRE(stats.allocated.bytes.current == bytes);
    REQUIRE(stats.requested_bytes.current == requested);
    REQUIRE(stats.resident.bytes.current == resident);
    REQUIRE(stats.capacity_bytes == capacity_in_force_);
    REQUIRE(resident <= std::min<std::size_t>(capacity_in_force_, stats.reserved_bytes));
    REQUIRE(stats.free_bytes ==
            std::min<std::size_t>(capacity_in_force_, stats.reserved_bytes) - resident);
    REQUIRE(stats.resident.bytes.peak <= stats.peak_reserved_bytes);
    REQUIRE(stats.peak_reserved_bytes <= capacity_bytes);
  }

  /// Lowers the capacity or raises it again. Where leases do not allow it, it stays as it was.
  void change_capacity() {
    std::size_t const wanted = draw(2) == 0 ? capacity_bytes : 128_KiB + draw(7) * 128_KiB;
    allocator_.set_capacity(wanted);
    capacity_in_force_ = wanted;
    spillway::Stats const now = allocator_.stats();
    REQUIRE(now.resident.bytes.current <= wanted);
    bool const gives_back_all =
        options(seed_, io_).grows_in_place || spillway::MappingArena<spillway::ArenaOf<Policies>>;
    if (gives_back_all && !has_fault_ && !has_recipes_ && !has_codecs_ && leases_.empty() &&
        now.reserved_bytes > wanted) {
      for (Expected const& block : blocks_) {  // the rest does not fit into host memory
        if (allocator_.residency(block.id) == spillway::Residency::device) {
          REQUIRE_THROWS_AS(allocator_.swap_out(block.id), spillway::OutOfHostMemory);
        }
      }
    }
  }

  void operate_with_little_memory() {
    operands_.clear();
    if (has_short_memory_ && draw(4) == 0) {
      blocks_.reserve(blocks_.size() + 1);  // for what the operation notes here
      leases_.reserve(leases_.size() + 1);
      operands_.reserve(8);
      std::uint64_t const more = draw(std::uint64_t{1} << draw(6));
      shortage_.emplace(more, 1 + (draw(4) == 0 ? draw(5) : 0));
    }
    try {
      operate();
    } catch (...) {
      shortage_.reset();
      throw;
    }
  }

  /// Checks what must hold between any two operations.
  void check_at_rest() {
    std::size_t unsettled = 0;
    std::size_t leases = 0;
    std::size_t resident = 0;
    allocator_.for_each_block([&](BlockId, spillway::detail::BlockRecord const& block) {
      if (block.is_in_transit() || block.state() == spillway::detail::BlockState::filling) {
        ++unsettled;
      }
      leases += block.leases;
      resident += block.is_resident() ? block.bytes : 0;
    });
    REQUIRE(unsettled == 0);
    REQUIRE(leases == leases_.size());
    REQUIRE(allocator_.stats().resident.bytes.current == resident);
  }

  void operate() {
    switch (draw(16)) {
    case 0:
    case 1:
    case 2:
      return create();
    case 3:
      return destroy();
    case 4:
      if (Expected* block = any_block(); block != nullptr && !is_leased(block->id)) {
        allocator_.swap_out(block->id);
      }
      return;
    case 5:
      if (Expected* block = any_block(); block != nullptr) {
        operands_.push_back(block->id);
        allocator_.swap_in(block->id);
      }
      return;
    case 6:
      if (draw(16) == 0) {
        is_at_step_ = true;
        allocator_.begin_step();
        is_at_step_ = false;
      }
      return;
    case 7:
      switch (draw(64)) {
      case 0:
      case 1:
        (void)allocator_.compact(draw(256_KiB));
        return;
      case 2:
        (void)allocator_.trim_sync();
        return;
      case 3:
        return change_capacity();
      case 4:
      case 5:
      case 6:
      case 7:
      case 8:
      case 9:
        return choose_codec();
      case 10:
        return allocator_.set_first_host_tier(draw(2) == 0 ? spillway::HostTier::pageable
                                                           : spillway::HostTier::pinned);
      case 11:
        (void)allocator_.trim_host_sync();
        return;
      case 12:
        return allocator_.order_after_all(any_stream());
      default:
        return;
      }
    case 8:
      leases_.clear();
      return;
    case 9:
      return use_several();
    case 10:
      return give_recipe();
    default:
      return use_one();
    }
  }

  void create() {
    std::size_t const bytes = 1 + draw(std::size_t{256} << draw(9));
    std::size_t live = 0;
    for (Expected const& block : blocks_) {
      live += block.bytes;
    }
    if (live + bytes > most_live_bytes) {
      return destroy();
    }
    blocks_.push_back({allocator_.allocate(bytes), bytes, std::nullopt, nullptr});
    if (draw(2) == 0) {
      choose_codec();
    }
  }

  void destroy() {
    if (blocks_.empty()) {
      return;
    }
    destroy(blocks_[draw(blocks_.size())]);
  }
  void destroy(Expected& block) {
    std::swap(block, blocks_.back());
    if (!is_leased(blocks_.back().id)) {
      allocator_.deallocate(blocks_.back().id);
      blocks_.pop_back();
    }
  }

  Expected* any_block() { return blocks_.empty() ? nullptr : &blocks_[draw(blocks_.size())]; }

  /// Uses under a lease that is still held are ordered by whoever holds it, so leave those alone.
  Expected* any_block_to_use() {
    Expected* const block = any_block();
    return block != nullptr && is_leased(block->id) ? nullptr : block;
  }

  [[nodiscard]] bool is_leased(BlockId id) const {
    return std::any_of(
        leases_.begin(), leases_.end(), [&](auto const& lease) { return lease.block() == id; });
  }

  void use_one() {
    Expected* const block = any_block_to_use();
    if (block == nullptr) {
      return;
    }
    auto const stream = any_stream();
    Access const access = access_to(*block);
    operands_.push_back(block->id);
    auto lease = allocator_.acquire(block->id, access, stream);
    use(*block, access, lease.data(), stream);
    if (draw(8) == 0) {
      leases_.push_back(std::move(lease));
    }
  }

  void use_several() {
    std::vector<Expected*> operands;
    std::vector<spillway::LeaseRequest> requests;
    for (std::size_t i = 0; i < 2 + draw(3); ++i) {
      Expected* const block = any_block_to_use();
      if (block != nullptr &&
          std::find(operands.begin(), operands.end(), block) == operands.end()) {
        operands.push_back(block);
        operands_.push_back(block->id);
        requests.push_back({block->id, access_to(*block)});
      }
    }
    auto const stream = any_stream();
    auto const leases = allocator_.acquire_all(requests, stream);
    for (std::size_t i = 0; i < operands.size(); ++i) {
      use(*operands[i], requests[i].access, leases[i].data(), stream);
    }
  }

  /// Gives a block a recipe that makes it from some others with their present contents, which the
  /// recipe checks. The recipe may fail, like other enqueued work.
  void give_recipe() {
    Expected* const block = any_block_to_use();
    if (!has_recipes_ || block == nullptr || !block->content ||
        allocator_.residency(block->id) == spillway::Residency::none) {
      return;
    }
    struct Content {
      std::size_t bytes;
      std::uint64_t seed;
    };
    std::vector<BlockId> operands;
    std::vector<Content> contents;
    for (std::size_t i = draw(3); i-- != 0;) {
      Expected* const operand = any_block_to_use();
      if (operand != nullptr && operand->content && operand->id != block->id) {
        operands.push_back(operand->id);
        contents.push_back({operand->bytes, *operand->content});
      }
    }
    Content const result{block->bytes, *block->content};
    allocator_.set_recipe(
        block->id,
        operands,
        std::chrono::nanoseconds{draw(4) == 0 ? draw(2'000) : 0},
        [this, contents, result](typename Device::stream_type stream,
                                 std::span<void const* const> addresses,
                                 void* address) {
          support::AmpleMemory const ample;
          for (std::size_t i = 0; i < contents.size(); ++i) {
            void* const from = const_cast<void*>(addresses[i]);  // NOLINT: the kernel only reads
            kernels_.check(device_, stream, from, contents[i].bytes, contents[i].seed);
          }
          kernels_.write(device_, stream, address, result.bytes, result.seed);
          if (has_fault_ && draw(4) == 0) {
            throw spillway::DeviceError{"the recipe fails once its work is enqueued"};
          }
        });
    if (!operands.empty() && draw(2) == 0) {  // as a program does with intermediate results
      destroy(*std::find_if(blocks_.begin(), blocks_.end(), [&](Expected const& one) {
        return one.id == operands.front();
      }));
      allocator_.for_each_block([&](BlockId, spillway::detail::BlockRecord const& one) {
        dropped_orphans += one.is_uncounted ? 1 : 0;
      });
    }
  }

  /// Lossless codecs, and tags; blocks of only some tags can be encoded to fewer bytes.
  void choose_codec() {
    Expected* const block = any_block();
    if (!has_codecs_ || block == nullptr) {
      return;
    }
    switch (draw(4)) {
    case 0:
      return allocator_.template set_codec<spillway::Identity>(block->id);
    case 1:
      return allocator_.template set_codec<spillway::test::ZeroBitmapOnStream>(block->id, draw(64));
    default:
      return allocator_.template set_codec<spillway::ZeroBitmap>(block->id, draw(64));
    }
  }

  Access access_to(Expected const& block) {
    return block.content ? static_cast<Access>(draw(3)) : Access::write;
  }

  /// The kernel of one use. No fault may be injected into it, since it stands for the program's
  /// work.
  void use(Expected& block, Access access, void* address, typename Device::stream_type stream) {
    disarm();
    if constexpr (requires { allocator_.stable_address(block.id); }) {
      REQUIRE(address == allocator_.stable_address(block.id));
      REQUIRE((block.address == nullptr || block.address == address));
      block.address = address;
    }
    if (access != Access::write) {
      kernels_.check(device_, stream, address, block.bytes, *block.content);
    }
    if (access != Access::read) {
      lines_.push_back(access == Access::write ? ++line_count_ : lines_[*block.content]);
      block.content = lines_.size() - 1;
      kernels_.write(device_, stream, address, block.bytes, *block.content);
    }
  }

  /// Requests leases of more bytes than the device has, since the random operations of a short
  /// program may never do so.
  void run_out_of_memory() {
    constexpr std::size_t parts = 4;
    std::vector<BlockId> fillers;
    auto const fill = [&] {
      for (std::size_t i = 0; i <= parts; ++i) {
        fillers.push_back(allocator_.allocate(capacity_bytes / parts));
        leases_.push_back(allocator_.acquire(fillers.back(), Access::write, any_stream()));
      }
    };
    REQUIRE_THROWS_AS(fill(), std::bad_alloc);  // of either kind of memory
    ++out_of_memory;
    leases_.clear();
    for (BlockId const id : fillers) {
      allocator_.deallocate(id);
    }
  }

  /// Checks that every block can still be read. Each is freed after it was read, because the
  /// program may have filled both the device and the host pool.
  void check_all_and_free() {
    while (!blocks_.empty()) {
      std::size_t const before = blocks_.size();
      std::erase_if(blocks_, [this](Expected& block) {
        try {
          check(block);
        } catch (spillway::OutOfDeviceMemory const&) {
          return false;
        } catch (spillway::FileTierError const&) {
          note_lost(block);
        }
        allocator_.deallocate(block.id);
        return true;
      });
      REQUIRE(blocks_.size() < before);
    }
  }

  void check(Expected& block) {
    if (block.content) {
      auto const stream = any_stream();
      auto const lease = allocator_.acquire(block.id, Access::read, stream);
      kernels_.check(device_, stream, lease.data(), block.bytes, *block.content);
    }
  }

  /// Makes some of the next file calls fail, if this program has a file that does. @param of_writes
  /// whether a write may fail, too, after which the file gets no more blocks until one succeeds
  void plant_file_faults(bool of_writes) {
    if (!has_file_faults_ || draw(4) != 0) {
      return;
    }
    FaultyFileIo::Faults planted;
    planted.failing_from = draw(512_KiB);
    planted.failing_to = planted.failing_from + (std::uint64_t{4096} << draw(8));
    planted.read_error = EIO;
    planted.write_error = of_writes && draw(16) == 0 ? EIO : 0;
    planted.is_truncated = draw(16) == 0;
    planted.most_bytes = draw(4) == 0 ? 1000 : planted.most_bytes;
    io_.plant(planted);
  }

  /// After an operation that failed because bytes are lost: finds the blocks that have none.
  void find_lost() {
    REQUIRE(has_file_faults_);
    disarm();
    if (std::exchange(is_at_step_, false)) {
      ++reported_at_step;
      are_orphans_told_ = true;
      return;
    }
    for (Expected& block : blocks_) {
      if (block.content &&
          std::find(operands_.begin(), operands_.end(), block.id) != operands_.end() &&
          is_lost(block).value_or(false)) {
        note_lost(block);
      }
    }
  }
  /// Returns whether an acquire says that the block's bytes are lost; nothing if it has no room.
  std::optional<bool> is_lost(Expected const& block) {
    try {
      (void)allocator_.acquire(block.id, Access::read, any_stream());
    } catch (spillway::FileTierError const&) {
      return true;
    } catch (std::bad_alloc const&) {
      return std::nullopt;
    }
    return false;
  }
  void note_lost(Expected& block) {
    REQUIRE(is_lost(block) != false);  // each acquire says so
    told_lines_.insert(lines_[*block.content]);
    block.content.reset();
    ++losses;
  }

  /// Checks that each wrong byte that a kernel saw was reported or is reported now: by `acquire`
  /// for a block that still has these bytes, else by `begin_step`. A block that was made again by
  /// its recipe no longer has them.
  void check_reports() {
    if (!has_file_faults_) {
      REQUIRE_MESSAGE(kernels_.failures() == 0, kernels_.first_failure());
      return;
    }
    for (std::uint64_t const content : kernels_.take_failed()) {
      open_lines_[lines_[content]] = false;
    }
    if (std::exchange(are_orphans_told_, false)) {
      for (auto& [line, is_told] : open_lines_) {
        is_told = true;
      }
    }
    bool has_orphans = false;
    std::erase_if(open_lines_, [&](auto const& open) {
      std::uint64_t const line = open.first;
      CAPTURE(line);
      auto const block = std::find_if(blocks_.begin(), blocks_.end(), [&](Expected const& one) {
        return one.content && lines_[*one.content] == line;
      });
      if (block != blocks_.end()) {
        leases_.clear();
        std::optional<bool> const answer = is_lost(*block);
        if (!answer) {
          return false;
        }
        if (*answer) {
          note_lost(*block);
        } else {
          check(*block);
          device_.run_all();
          REQUIRE(kernels_.take_failed().empty());
        }
      }
      has_orphans = has_orphans || !(open.second || told_lines_.contains(line));
      return true;
    });
    if (has_orphans) {
      REQUIRE_THROWS_AS(allocator_.begin_step(), spillway::FileTierError);
      ++reported_at_step;
    }
  }

  std::mt19937_64 random_;
  FaultyFileIo io_;
  support::PatternKernels kernels_;  // before the device, whose end runs what is enqueued
  Device device_{{.capacity_bytes = capacity_bytes + 64_KiB, .granularity_bytes = page_bytes}};
  Allocator allocator_;
  std::array<typename Device::stream_type, 3> streams_{};
  std::vector<Expected> blocks_;
  std::vector<typename Allocator::lease_type> leases_;
  std::vector<BlockId> operands_;  // of this operation
  // By content: the line that it belongs to, which begins when a block is overwritten as a whole.
  // If bytes are lost, so is all that is made of them in place.
  std::vector<std::uint64_t> lines_;
  std::uint64_t line_count_ = 0;
  std::unordered_set<std::uint64_t> told_lines_;  // of which an `acquire` said that they are lost
  // Lines of wrong bytes that a kernel saw and that are not settled yet, and whether `begin_step`
  // has reported losses since.
  std::map<std::uint64_t, bool> open_lines_;
  bool are_orphans_told_ = false;  // `begin_step` has reported losses since the last check
  bool is_at_step_ = false;
  std::uint64_t seed_;
  bool has_recipes_ = seed_ % 2 == 0;
  bool has_codecs_ = seed_ % 3 != 1;
  bool has_file_faults_ = seed_ % 5 == 4;
  bool has_short_memory_ = seed_ / 2 % 2 == 0;
  std::optional<support::ShortMemory> shortage_;
  std::size_t capacity_in_force_ = capacity_bytes;
  bool has_fault_ = false;  // a device call of this operation fails
};

std::uint64_t first_seed() {
  char const* const text = std::getenv("SPILLWAY_TEST_SEED");
  return text != nullptr ? std::strtoull(text, nullptr, 10) : 20260101;
}

constexpr std::size_t most_operations = 50'000;

std::size_t operations_per_program() {
  char const* const text = std::getenv("SPILLWAY_TEST_OPERATIONS");
  return text != nullptr ? std::strtoull(text, nullptr, 10) : most_operations;
}

}  // namespace

TEST_SUITE("allocator_model") {
  TEST_CASE_TEMPLATE_DEFINE("DeviceAllocator: random programs lose no byte: ", Policies, programs) {
    std::uint64_t encoded_raw_bytes = 0;
    std::uint64_t encoded_stored_bytes = 0;
    for (std::uint64_t seed = first_seed(); seed < first_seed() + 5; ++seed) {
      CAPTURE(seed);
      Program<Policies> program{seed};
      program.run(operations_per_program());
      spillway::Stats const stats = program.stats();
      MESSAGE("seed " << seed << ": " << program.kernels().checks() << " checks, "
                      << stats.swap_outs.count << " swap-outs, " << stats.swap_ins.count
                      << " swap-ins, " << stats.drops.count << " drops, " << stats.moves.count
                      << " moves, " << stats.recomputations.count << " recomputations, "
                      << program.dropped_orphans << " dropped orphans seen, " << program.faults
                      << " faults, " << program.shortages << " shortages, " << program.out_of_memory
                      << " out of memory, " << program.losses << " blocks lost, "
                      << program.reported_at_step << " losses reported by begin_step");
      // The program must have done the things that this test is for.
      CHECK(program.kernels().checks() > operations_per_program() / 10);
      CHECK(stats.swap_outs.count > 0);
      CHECK(stats.swap_ins.count > 0);
      CHECK(stats.drops.count > 0);
      CHECK((stats.recomputations.count > 0) == (seed % 2 == 0));
      CHECK((program.dropped_orphans > 0) == (seed % 2 == 0));
      spillway::HostPoolStats const host = program.host_stats();
      CHECK((host.encoded_raw_bytes > 0) == (seed % 3 != 1));
      encoded_raw_bytes += host.encoded_raw_bytes;
      encoded_stored_bytes += host.encoded_stored_bytes;
      CHECK(program.faults > 0);
      CHECK((program.shortages > 0) == (seed / 2 % 2 == 0));
      CHECK((program.losses > 0) == (seed % 5 == 4));
      if (seed % 5 != 4 || operations_per_program() >= most_operations) {  // a short one may not
        CHECK((program.reported_at_step > 0) == (seed % 5 == 4));
      }
      CHECK(program.out_of_memory > 0);
    }
    // A single program may have hardly any blocks that become smaller.
    CHECK(encoded_stored_bytes < encoded_raw_bytes);
  }
  TEST_CASE_TEMPLATE_INVOKE(
      programs, Stepped, Lru, FifoBestFit, Size, CostUncompacted, Remapped, Stable, Remote);
}
