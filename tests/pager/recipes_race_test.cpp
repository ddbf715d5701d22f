// SPDX-License-Identifier: Apache-2.0
// Many threads that use, write and recompute the same blocks.
#include <spillway/sim.hpp>
#include <spillway/swappable_buffer.hpp>

#include <doctest/doctest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <random>
#include <shared_mutex>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include <support/pattern.hpp>

TEST_SUITE("recipes_race") {
  namespace {

  using namespace spillway::literals;
  using spillway::Access;
  using Allocator = spillway::DeviceAllocator<>;
  using Buffer = spillway::SwappableBuffer<Allocator>;
  using Stream = Allocator::stream_type;

  constexpr std::size_t block_bytes = 64_KiB;

  Allocator::Options small(std::size_t capacity_bytes) {
    Allocator::Options options{.capacity_bytes = capacity_bytes};
    options.bounce_bytes = 64_KiB;
    options.host.pinned_bytes = 16_MiB;
    options.host.slab_bytes = 64_KiB;
    options.paging.poison_vacated = true;
    return options;
  }

  /// Rows of blocks: each of a row but the first is made from the one before it and from the first
  /// of the next row.
  class Rows {
   public:
    static constexpr std::size_t rows = 5;
    static constexpr std::size_t columns = 4;

    Rows(Allocator& allocator, Stream stream) : allocator_{&allocator}, blocks_(rows) {
      for (auto& row : blocks_) {
        row = std::vector<Block>(columns);
        for (Block& block : row) {
          block.buffer = Buffer{allocator, block_bytes};
          block.content = write(block.buffer, stream);
        }
      }
      for (std::size_t row = 0; row < rows; ++row) {
        for (std::size_t column = 1; column < columns; ++column) {
          give_recipe(row, column);
        }
      }
    }

    /// Reads a block and checks its contents; its operands may be written meanwhile.
    void read(std::size_t row, std::size_t column, Stream stream) {
      Block& block = blocks_[row][column];
      std::shared_lock const lock{block.mutex};
      auto const lease = block.buffer.acquire(Access::read, stream);
      kernels_.check(device(), stream, lease.data(), block_bytes, block.content);
    }
    /// Gives the block new contents; blocks made from it keep theirs.
    void overwrite(std::size_t row, std::size_t column, Stream stream) {
      Block& block = blocks_[row][column];
      std::scoped_lock const lock{block.mutex};
      block.content = write(block.buffer, stream);
    }
    /// Makes a block again from its operands, if no thread is using those.
    void renew(std::size_t row, std::size_t column, Stream stream) {
      Block& block = blocks_[row][column];
      std::unique_lock const lock{block.mutex, std::try_to_lock};
      std::unique_lock const left{blocks_[row][column - 1].mutex, std::try_to_lock};
      std::unique_lock const below{blocks_[(row + 1) % rows][0].mutex, std::try_to_lock};
      if (lock && left && below) {
        block.content = write(block.buffer, stream);
        give_recipe(row, column);
      }
    }
    /// Changes a block in place, for which the first of the next row is read, and extends its
    /// recipe by that.
    void change(std::size_t row, std::size_t column, Stream stream) {
      Block& block = blocks_[row][column];
      Block& below = blocks_[(row + 1) % rows][0];
      std::unique_lock const lock{block.mutex, std::try_to_lock};
      std::shared_lock const read{below.mutex, std::try_to_lock};
      if (!lock || !read) {
        return;
      }
      spillway::LeaseRequest const request{
          block.buffer.id(), Access::read_write, /*extends_recipe=*/true};
      auto const leases = allocator_->acquire_all({&request, 1}, stream);
      auto const apply = [this, from = block.content, to = ++writes_](Stream on, void* made) {
        kernels_.check(device(), on, made, block_bytes, from);
        kernels_.write(device(), on, made, block_bytes, to);
        return to;
      };
      block.content = apply(stream, leases.front().data());
      allocator_->extend_recipe(leases.front(),
                                std::array{below.buffer.id()},
                                std::chrono::nanoseconds{0},
                                [this, apply, content = below.content](
                                    Stream on, std::span<void const* const> operands, void* made) {
                                  check_operand(on, operands.front(), content);
                                  apply(on, made);
                                });
    }
    /// Frees a block, from which others may be made, and puts a new one in its place.
    void replace(std::size_t row, std::size_t column, Stream stream) {
      Block& block = blocks_[row][column];
      Buffer fresh{*allocator_, block_bytes};
      std::scoped_lock const lock{block.mutex};
      block.content = write(fresh, stream);
      block.buffer = std::move(fresh);
    }
    void swap_out(std::size_t row, std::size_t column) {
      Block& block = blocks_[row][column];
      std::scoped_lock const lock{block.mutex};
      block.buffer.swap_out();
    }

    [[nodiscard]] support::PatternKernels& kernels() noexcept { return kernels_; }

   private:
    struct Block {
      Buffer buffer;
      std::shared_mutex mutex;  // the program's own lock: a block is not read while it is written
      std::uint64_t content = 0;
    };

    [[nodiscard]] spillway::SimApi& device() const { return allocator_->device(); }
    [[nodiscard]] std::uint64_t write(Buffer& buffer, Stream stream) {
      auto const lease = buffer.acquire(Access::write, stream);
      std::uint64_t const content = ++writes_;
      kernels_.write(device(), stream, lease.data(), block_bytes, content);
      return content;
    }
    void check_operand(Stream stream, void const* operand, std::uint64_t content) {
      // NOLINTNEXTLINE(cppcoreguidelines-pro-type-const-cast): the kernel only reads
      kernels_.check(device(), stream, const_cast<void*>(operand), block_bytes, content);
    }
    void give_recipe(std::size_t row, std::size_t column) {
      Block& block = blocks_[row][column];
      Block const& left = blocks_[row][column - 1];
      Block const& below = blocks_[(row + 1) % rows][0];
      allocator_->set_recipe(
          block.buffer.id(),
          {left.buffer.id(), below.buffer.id()},
          std::chrono::nanoseconds{0},
          [this, contents = std::array{left.content, below.content}, content = block.content](
              Stream stream, std::span<void const* const> operands, void* result) {
            for (std::size_t i = 0; i < contents.size(); ++i) {
              check_operand(stream, operands[i], contents[i]);
            }
            kernels_.write(device(), stream, result, block_bytes, content);
          });
    }

    Allocator* allocator_;
    support::PatternKernels kernels_;
    std::atomic<std::uint64_t> writes_{0};
    std::vector<std::vector<Block>> blocks_;
  };

  /// Runs four threads that use the same blocks, each at random from `seed`.
  void run(Allocator& allocator, std::uint64_t seed) {
    auto& device = allocator.device();
    auto const first_stream = device.create_stream();
    Rows blocks{allocator, first_stream};
    std::vector<std::jthread> threads;
    for (std::uint64_t thread = 0; thread < 4; ++thread) {
      threads.emplace_back([&, thread] {
        std::mt19937_64 random{4 * seed + thread};
        auto const stream = device.create_stream();
        for (std::size_t i = 0; i < 400; ++i) {
          std::size_t const row = random() % Rows::rows;
          std::size_t const column = random() % Rows::columns;
          std::size_t const made = 1 + random() % (Rows::columns - 1);  // one that has a recipe
          try {
            switch (random() % 11) {
            case 0:
              blocks.overwrite(row, 0, stream);
              break;
            case 1:
              blocks.swap_out(row, column);
              break;
            case 2:
            case 3:
              blocks.renew(row, made, stream);
              break;
            case 4:
              allocator.compact(4 * block_bytes);
              break;
            case 5:
              blocks.change(row, made, stream);
              break;
            case 6:
              blocks.replace(row, column, stream);
              break;
            default:
              blocks.read(row, column, stream);
            }
          } catch (spillway::OutOfDeviceMemory const&) {
            // The host pool is full, too, and the operands of other threads fill the device.
          } catch (spillway::OutOfHostMemory const&) {
            // A block was to be swapped out that cannot be made again.
          }
        }
        allocator.retire_stream(stream);
        device.destroy_stream(stream);
      });
    }
    threads.clear();
    allocator.synchronize();
    CHECK_MESSAGE(blocks.kernels().failures() == 0, blocks.kernels().first_failure());
    CHECK(allocator.stats().recomputations.count > 0);
    MESSAGE(allocator.stats().recomputations.count
            << " recomputations, " << allocator.stats().swap_outs.count << " swap-outs");
    allocator.retire_stream(first_stream);
    device.destroy_stream(first_stream);
  }

  }  // namespace

  TEST_CASE("recipes: threads that read, write and drop the same blocks see what was written") {
    // Which threads meet is left to chance, so there are several rounds.
    for (std::uint64_t seed = 1; seed <= 8; ++seed) {
      CAPTURE(seed);
      Allocator::Options options = small(10 * block_bytes);  // for half of the blocks
      if (seed % 2 == 0) {                                   // the host has no room for more
        options.host.pinned_bytes = 10 * block_bytes;
        options.paging.lease_wait = std::chrono::milliseconds{0};
      }
      spillway::SimApi device{{.capacity_bytes = 64_MiB}};
      Allocator allocator{device, options};
      run(allocator, seed);
    }
  }
}
