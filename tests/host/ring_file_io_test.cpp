// SPDX-License-Identifier: Apache-2.0
#include <spillway/concepts/file_io_api.hpp>
#include <spillway/host/host_ledger.hpp>
#include <spillway/host/posix_file_io.hpp>
#include <spillway/host/ring_file_io.hpp>
#include <spillway/host/slot_io.hpp>
#include <spillway/host/swap_file.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include <support/temporary_folder.hpp>

TEST_SUITE("ring_file_io") {
  using namespace spillway;
  using spillway::detail::HostLedger;
  using spillway::detail::RingFileIo;
  using spillway::detail::SlotAccess;
  using spillway::detail::SlotIo;
  using spillway::detail::SwapFile;

  namespace {

  /// What a fake ring shall do, and what it has observed.
  struct RingState {
    bool is_refused = false;
    std::size_t takes_at_once = 1000;  // of what was entered
    int submit_error = 0;
    std::size_t refusals = 0;  // submissions that are refused for now before one that is not
    int wait_error = 0;
    int result_error = 0;
    std::size_t most_bytes = ~std::size_t{0};  // of one transfer
    bool is_last_first = false;                // transfers end in the other order

    std::size_t refused = 0;  // since the last one that was not
    std::size_t submits = 0;
    std::size_t taken = 0;
    std::size_t most_taken = 0;  // at once
    std::size_t most_taken_bytes = 0;
  };

  /// A ring that makes the calls when a caller waits.
  struct FakeRing {
    struct Opened {
      static constexpr std::size_t depth = 4;

      bool push(FileTransfer& transfer) {
        entered.push_back(&transfer);
        return true;
      }
      int submit() {
        ++state->submits;
        if (state->submit_error != 0) {
          return -state->submit_error;
        }
        if (state->refused < state->refusals) {
          ++state->refused;
          return -EAGAIN;
        }
        state->refused = 0;
        std::size_t const count = std::min(entered.size(), state->takes_at_once);
        for (std::size_t i = 0; i < count; ++i) {
          taken.push_back(entered.front());
          entered.pop_front();
        }
        state->taken += count;
        state->most_taken = std::max(state->most_taken, taken.size());
        std::size_t bytes = 0;
        for (FileTransfer const* each : taken) {
          bytes += each->bytes;
        }
        state->most_taken_bytes = std::max(state->most_taken_bytes, bytes);
        return static_cast<int>(count);
      }
      int wait() const { return -state->wait_error; }
      FileTransfer* pop() {
        if (taken.empty()) {
          return nullptr;
        }
        FileTransfer* const ended = state->is_last_first ? taken.back() : taken.front();
        state->is_last_first ? taken.pop_back() : taken.pop_front();
        FileTransfer part = *ended;
        part.bytes = std::min(part.bytes, state->most_bytes);
        ended->result = state->result_error != 0 ? -state->result_error : file.finish(part);
        return ended;
      }

      std::shared_ptr<RingState> state;
      PosixFileIo::Queue file;
      std::deque<FileTransfer*> entered;
      std::deque<FileTransfer*> taken;
    };

    std::unique_ptr<Opened> try_open(int fd, std::span<std::byte> /*memory*/) const {
      return state->is_refused
                 ? nullptr
                 : std::make_unique<Opened>(Opened{state, PosixFileIo::Queue{fd}, {}, {}});
    }

    std::shared_ptr<RingState> state = std::make_shared<RingState>();
  };

  using FakeRingFileIo = RingFileIo<FakeRing>;
  static_assert(FileIoApi<FakeRingFileIo>);

  constexpr std::size_t part_bytes = 1000;
  constexpr std::size_t parts = 10;

  /// A file of ten parts, each with bytes of its own, and a transfer for each.
  struct Bench {
    explicit Bench(RingState const& state = {}) : ring{std::make_shared<RingState>(state)} {
      REQUIRE(file.try_reserve(parts * part_bytes) == 0);
      for (std::size_t i = 0; i < data.size(); ++i) {
        data[i] = static_cast<std::byte>(i % 251);
      }
    }

    void prepare(bool is_write) {
      for (std::size_t i = 0; i < parts; ++i) {
        transfers[i] = {.memory = (is_write ? data : back).data() + i * part_bytes,
                        .bytes = part_bytes,
                        .offset = i * part_bytes,
                        .is_write = is_write,
                        .next = i + 1 < parts ? &transfers[i + 1] : nullptr};
      }
    }
    /// Begins all transfers together and finishes them in order. Returns the first error.
    int run(bool is_write) {
      prepare(is_write);
      queue.begin(transfers[0]);
      return finish_all();
    }
    int finish_all() {
      int first_error = 0;
      for (FileTransfer& transfer : transfers) {
        int const error = queue.finish(transfer);
        first_error = first_error != 0 ? first_error : error;
      }
      return first_error;
    }
    [[nodiscard]] bool is_back() {
      std::fill(back.begin(), back.end(), std::byte{0xEE});
      return run(false) == 0 && back == data;
    }

    TemporaryFolder folder;
    FakeRing ring;
    SwapFile<FakeRingFileIo> file{folder.path(), false, FakeRingFileIo{ring}};
    std::vector<std::byte> data = std::vector<std::byte>(parts * part_bytes);
    std::vector<std::byte> back = data;
    SwapFile<FakeRingFileIo>::Queue queue{file.make_queue({})};
    std::array<FileTransfer, parts> transfers{};
  };

  /// Transfers of one size that write to a file side by side.
  struct LargeWrites {
    LargeWrites(std::size_t count, std::size_t bytes) : memory(bytes), transfers(count) {
      REQUIRE(file.try_reserve(count * bytes) == 0);
    }
    void begin() {
      std::uint64_t offset = 0;
      for (FileTransfer& transfer : transfers) {
        transfer = {
            .memory = memory.data(), .bytes = memory.size(), .offset = offset, .is_write = true};
        queue.begin(transfer);
        offset += memory.size();
      }
    }
    void finish() {
      for (FileTransfer& transfer : transfers) {
        CHECK(queue.finish(transfer) == 0);
      }
    }

    TemporaryFolder folder;
    FakeRing ring;
    SwapFile<FakeRingFileIo> file{folder.path(), false, FakeRingFileIo{ring}};
    std::vector<std::byte> memory;
    SwapFile<FakeRingFileIo>::Queue queue{file.make_queue({})};
    std::vector<FileTransfer> transfers;
  };

  }  // namespace

  TEST_CASE("RingFileIo: transfers begun together are submitted to the kernel together") {
    for (bool const is_last_first : {false, true}) {
      Bench now{{.is_last_first = is_last_first}};

      CHECK(now.queue.can_begin());
      CHECK(now.queue.name() == "io_uring");
      CHECK(now.run(true) == 0);
      CHECK(now.ring.state->taken == parts);
      CHECK(now.ring.state->most_taken == FakeRing::Opened::depth);
      CHECK(now.is_back());
    }
  }

  TEST_CASE("RingFileIo: a transfer that was never begun is made by finish") {
    Bench now;
    now.prepare(true);

    CHECK(now.finish_all() == 0);

    CHECK(now.ring.state->taken == parts);
    CHECK(now.is_back());
  }

  TEST_CASE("RingFileIo: bytes in flight are limited, but one transfer is always allowed") {
    constexpr std::size_t large = 6 << 20;
    LargeWrites now{3, large};
    now.begin();
    now.finish();
    CHECK(now.ring.state->most_taken_bytes == large);
  }

  TEST_CASE("RingFileIo: a transfer larger than the limit on bytes in flight runs alone") {
    LargeWrites now{2, 9 << 20};
    now.begin();
    REQUIRE(now.ring.state->taken == 1);
    now.finish();
    CHECK(now.ring.state->taken == 2);
    CHECK(now.ring.state->most_taken == 1);
  }

  TEST_CASE("RingFileIo: finished transfers make room for others") {
    LargeWrites now{2, 4 << 20};  // each half of what may be in flight
    for (int round = 0; round < 3; ++round) {
      now.ring.state->most_taken = 0;
      now.begin();
      now.finish();
      CHECK(now.ring.state->most_taken == 2);
    }
  }

  TEST_CASE("RingFileIo: short transfers are continued") {
    Bench now{{.most_bytes = 300}};

    CHECK(now.run(true) == 0);
    CHECK(now.ring.state->taken == 4 * parts);
    CHECK(now.is_back());
  }

  TEST_CASE("RingFileIo: an error of a transfer is returned as its number") {
    for (int const error : {EIO, ENOSPC, ENODEV}) {
      Bench now{{.result_error = error}};
      CHECK(now.run(true) == error);
      CHECK(now.queue.name() == "io_uring");
    }
  }

  TEST_CASE("RingFileIo: a transfer that the kernel postpones or cancels is made by a plain call") {
    for (int const error : {EAGAIN, ECANCELED}) {
      Bench now{{.result_error = error}};
      CHECK(now.run(true) == 0);
      CHECK(now.is_back());
    }
  }

  TEST_CASE("RingFileIo: entries that the kernel did not take are submitted again") {
    Bench now{{.takes_at_once = 1}};

    CHECK(now.run(true) == 0);
    CHECK(now.ring.state->taken == parts);
    CHECK(now.ring.state->submits >= parts);
    CHECK(now.is_back());
  }

  TEST_CASE(
      "RingFileIo: if the kernel refuses a ring, plain calls are used, and the name says so") {
    Bench now{{.is_refused = true}};

    CHECK_FALSE(now.queue.can_begin());
    CHECK(now.queue.name() == "pread, pwrite");
    CHECK(now.run(true) == 0);
    CHECK(now.is_back());
    CHECK(now.ring.state->taken == 0);
  }

  TEST_CASE("SlotIo: a ring that was refused for one direction gives the file calls their name") {
    for (SlotAccess const first : {SlotAccess::read, SlotAccess::write}) {
      TemporaryFolder folder;
      FakeRing ring;
      SwapFile<FakeRingFileIo> file{folder.path(), false, FakeRingFileIo{ring}};
      std::mutex mutex;
      HostLedger ledger;
      SlotIo<FakeRingFileIo> io{mutex, ledger, &file};

      CHECK(io.open_queue(first, {}));
      ring.state->is_refused = true;
      CHECK_FALSE(
          io.open_queue(first == SlotAccess::read ? SlotAccess::write : SlotAccess::read, {}));

      CHECK(io.file_calls() == "pread, pwrite");
    }
  }

  TEST_CASE("RingFileIo: a ring whose submission fails is replaced by plain calls") {
    Bench now{{.submit_error = ENXIO}};

    CHECK(now.run(true) == 0);

    CHECK(now.queue.name() == "pread, pwrite, since io_uring failed");
    CHECK_FALSE(now.queue.can_begin());
    CHECK(now.ring.state->submits == 1);
    CHECK(now.is_back());
  }

  TEST_CASE("RingFileIo: transfers in a failed ring are waited for, and the rest use plain calls") {
    Bench now{{.wait_error = EBADF}};

    CHECK(now.run(true) == 0);

    CHECK(now.ring.state->taken == FakeRing::Opened::depth);
    CHECK(now.is_back());
    CHECK(now.ring.state->taken == FakeRing::Opened::depth);  // it is not asked again
  }

  TEST_CASE("RingFileIo: interrupted waits and temporary shortage in the kernel are not errors") {
    for (int const error : {EINTR, EAGAIN, EBUSY}) {
      Bench now{{.wait_error = error}};
      CHECK(now.run(true) == 0);
      CHECK(now.queue.name() == "io_uring");
      CHECK(now.is_back());
    }
  }

  TEST_CASE("RingFileIo: a kernel that takes no transfer for long is replaced by plain calls") {
    for (RingState const& state : {RingState{.submit_error = EAGAIN},
                                   RingState{.submit_error = EBUSY},
                                   RingState{.takes_at_once = 0}}) {
      Bench now{state};
      CHECK(now.run(true) == 0);
      CHECK(now.queue.name() == "pread, pwrite, since io_uring failed");
      CHECK(now.is_back());
    }
  }

  TEST_CASE("RingFileIo: a kernel that takes a transfer now and then is not given up") {
    Bench now{{.takes_at_once = 1, .refusals = 700}};
    CHECK(now.run(true) == 0);
    CHECK(now.queue.name() == "io_uring");
    CHECK(now.is_back());
  }
}
