// SPDX-License-Identifier: Apache-2.0
// OperandLeases on a minimal framework, whose storages have no address while they are swapped out.
#include <spillway/device_allocator.hpp>
#include <spillway/interop/framework/operand_leases.hpp>
#include <spillway/sim.hpp>

#include <doctest/doctest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

using namespace spillway;

namespace {

struct ObjectEntry;

/// A storage of the framework, which users share.
struct Object {
  void* address = nullptr;
  ObjectEntry* entry = nullptr;
};
using Objects = std::vector<std::shared_ptr<Object>>;

using Memory = DeviceAllocator<SimPolicies>;

struct ObjectEntry {
  BlockId block{};
  Memory::lease_type lease{};
  std::weak_ptr<Object> object{};
  std::size_t bytes = 0;
  std::uint32_t pins = 0;
  bool is_kept = false;
  bool is_arriving = false;
  bool is_dead = false;
  ObjectEntry* previous = this;
  ObjectEntry* next = this;

  [[nodiscard]] bool has_lease() const { return static_cast<bool>(lease); }
};

struct ObjectFrame {
  bool runs_program = false;
  bool is_counted = false;
  bool is_bounded = false;
  std::vector<ObjectEntry*> pins{};
  [[nodiscard]] int thread_frames() const { return is_counted ? 1 : 0; }
  [[nodiscard]] bool is_open_ended() const { return runs_program; }
};

struct ObjectTraits {
  using allocator_type = Memory;
  using Entry = ObjectEntry;
  using Frame = ObjectFrame;
  using Lease = Memory::lease_type;
  struct Missing {
    Entry* entry = nullptr;
    Object* object = nullptr;
  };

  static constexpr bool has_references = true;
  static bool can_repeat(Frame const& /*frame*/) { return false; }

  static bool is_granted(Missing const& one) { return one.entry->has_lease(); }
  static Access access(Missing const& /*one*/) { return Access::read_write; }
  static void grant(Missing const& one, Lease& lease, SimStream /*stream*/) {
    one.entry->lease = std::move(lease);
    one.object->address = one.entry->lease.data();
  }
  static bool is_swappable(Entry const& entry) { return !entry.is_kept && entry.has_lease(); }
  /// Whether there is no memory for a list of references.
  inline static bool is_out_of_memory = false;
  static Objects references(std::span<Entry* const> entries) {
    if (is_out_of_memory) {
      throw std::bad_alloc{};
    }
    Objects all;
    for (Entry* const entry : entries) {
      all.push_back(entry->object.lock());
    }
    return all;
  }
  static bool
  detach(Entry& entry, std::shared_ptr<Object> const& object, std::vector<Lease>& leases) {
    if (object->entry != &entry) {
      entry.is_kept = true;
      return false;
    }
    object->address = nullptr;
    leases.push_back(std::move(entry.lease));
    return true;
  }
  static int release_interpreter() { return 0; }
};

class ObjectLeases : public framework::OperandLeases<ObjectTraits> {
 public:
  ObjectLeases(Memory& memory, SimStream stream, std::chrono::milliseconds patience)
      : OperandLeases{memory, patience}, stream_{stream} {}
  ~ObjectLeases() {
    while (!entries_.empty()) {
      entries_.back()->lease.release();
      memory().abandon(entries_.back()->block);
      entries_.pop_back();
    }
  }

  /// Null if there is no room.
  std::shared_ptr<Object> make(std::size_t bytes, ObjectFrame* frame = nullptr) {
    auto object = std::make_shared<Object>();
    framework::Refusal refusal;
    bool const has_room = try_allocate_block(
        bytes, stream_, frame, refusal, [&](BlockId block, Memory::lease_type& lease) {
          Guard const guard{mutex_};
          entries_.push_back(std::make_unique<ObjectEntry>());
          ObjectEntry& entry = *entries_.back();
          entry.block = block;
          entry.bytes = bytes;
          entry.object = object;
          object->entry = &entry;
          object->address = lease.data();
          entry.lease = std::move(lease);
          link(entry);
        });
    return has_room ? object : nullptr;
  }
  bool enter(ObjectFrame& frame, Objects const& objects) {
    std::vector<Missing> missing;
    {
      Guard const guard{mutex_};
      count(frame);
      for (auto const& object : objects) {
        ++object->entry->pins;
        frame.pins.push_back(object->entry);
        if (!object->entry->has_lease()) {
          missing.push_back({object->entry, object.get()});
        }
      }
    }
    framework::Refusal refusal;
    return acquire_missing(frame, missing, stream_, refusal);
  }
  void exit(ObjectFrame& frame) {
    release_pins(
        frame.pins,
        [](auto const& /*leases*/) {},
        [](ObjectEntry& entry) { return --entry.pins == 0; },
        [&] { uncount(frame); });
  }
  framework::OperationCounts counts() const {
    Guard const guard{mutex_};
    return counts_;
  }

 private:
  SimStream stream_;
  std::vector<std::unique_ptr<ObjectEntry>> entries_;
};

/// Room for four objects of 1 MiB.
struct Program {
  std::chrono::milliseconds patience = std::chrono::hours{1};  // longer waits are deadlocks
  std::size_t host_bytes = 64_MiB;
  SimApi device{SimOptions{.capacity_bytes = 16_MiB}};
  Memory memory{device, options(host_bytes)};
  SimStream stream = device.create_stream();
  ObjectLeases leases{memory, stream, patience};

  /// Each of several threads uses one of the objects, and when all do so, requests so many bytes
  /// more.
  ///
  /// @returns how many threads do not get them
  int want_together(Objects const& objects, ObjectFrame const& kind, std::size_t bytes) {
    std::atomic<std::size_t> inside{0};
    std::atomic<int> refused{0};
    std::vector<std::jthread> running;
    for (auto const& mine : objects) {
      running.emplace_back([&, mine] {
        ObjectFrame frame = kind;
        CHECK(leases.enter(frame, {mine}));
        ++inside;
        while (inside < objects.size()) {
          std::this_thread::yield();
        }
        refused += leases.make(bytes, &frame) == nullptr ? 1 : 0;
        leases.exit(frame);
      });
    }
    running.clear();
    return refused;
  }

  void wait_for_waiting_threads(std::uint64_t count) const {
    while (leases.counts().waits < count) {
      std::this_thread::yield();
    }
  }

  static Memory::Options options(std::size_t host_bytes) {
    Memory::Options options{.capacity_bytes = 4_MiB};
    options.host.pinned_bytes = host_bytes;
    options.paging.lease_wait = std::chrono::milliseconds{0};
    return options;
  }
};

}  // namespace

TEST_SUITE("operand_leases") {
  TEST_CASE("OperandLeases: under pressure an idle storage has no address until a frame uses it") {
    Program program;
    auto const idle = program.leases.make(2_MiB);
    auto const used = program.leases.make(2_MiB);
    ObjectFrame frame;
    REQUIRE(program.leases.enter(frame, {used}));
    CHECK_FALSE(program.leases.is_under_pressure());

    auto const next = program.leases.make(1_MiB, &frame);

    REQUIRE(next != nullptr);
    CHECK(program.leases.is_under_pressure());
    CHECK(idle->address == nullptr);
    CHECK(used->address != nullptr);
    program.leases.exit(frame);
    CHECK(used->address == nullptr);
    ObjectFrame second;
    REQUIRE(program.leases.enter(second, {idle}));
    CHECK(idle->address == idle->entry->lease.data());
    program.leases.exit(second);
  }

  TEST_CASE("OperandLeases: under pressure an operation with four operands costs one event") {
    Program program;
    Objects objects;
    for (int i = 0; i < 4; ++i) {
      objects.push_back(program.leases.make(256_KiB));
    }
    CHECK(program.leases.reclaim() == 1_MiB);
    ObjectFrame frame;
    REQUIRE(program.leases.enter(frame, objects));
    auto const before = program.device.calls().records;

    program.leases.exit(frame);

    CHECK(program.device.calls().records - before == 1);
    CHECK(program.memory.stats().leased.blocks.current == 0);
  }

  TEST_CASE("OperandLeases: a storage for which the host has no room stays, all others leave") {
    Program program{.host_bytes = 1_MiB};
    auto const large = program.leases.make(2_MiB);
    auto const small = program.leases.make(1_MiB);
    auto const late = program.leases.make(1_MiB);

    CHECK(program.leases.reclaim() == 1_MiB);

    CHECK(program.memory.residency(large->entry->block) == Residency::device);
    CHECK(program.memory.residency(late->entry->block) == Residency::device);
    ObjectFrame frame;
    REQUIRE(program.leases.enter(frame, {large, small}));
    program.leases.exit(frame);
  }

  TEST_CASE("OperandLeases: storages that were freed or have a new address are left alone") {
    Program program;
    auto gone = program.leases.make(1_MiB);
    auto const moved = program.leases.make(1_MiB);
    auto const usual = program.leases.make(1_MiB);
    ObjectEntry const& entry_of_gone = *std::exchange(gone, nullptr)->entry;
    ObjectEntry const& entry_of_moved = *std::exchange(moved->entry, nullptr);

    CHECK(program.leases.start_reclaim() == 1_MiB);

    CHECK(entry_of_gone.has_lease());
    CHECK(entry_of_moved.has_lease());
    CHECK(entry_of_moved.is_kept);
    CHECK(program.leases.counts().strays == 1);
    CHECK(usual->address == nullptr);
  }

  TEST_CASE(
      "OperandLeases: pressure ends after a step without evictions, when everything is resident") {
    Program program;
    auto const a = program.leases.make(3_MiB);
    auto const b = program.leases.make(1_MiB);
    CHECK(program.leases.reclaim() == 4_MiB);
    program.leases.begin_step();
    program.leases.begin_step();
    CHECK(program.leases.is_under_pressure());  // no evictions, but not everything is resident

    ObjectFrame frame;
    REQUIRE(program.leases.enter(frame, {a, b}));
    program.leases.exit(frame);
    program.leases.begin_step();

    CHECK_FALSE(program.leases.is_under_pressure());
    CHECK(program.leases.counts().pressures == 1);
  }

  TEST_CASE("OperandLeases: a thread waits for another thread's frame, and gives up if all threads "
            "wait") {
    Program program;
    auto const a = program.leases.make(2_MiB);
    auto const b = program.leases.make(2_MiB);

    CHECK(program.want_together({a, b}, ObjectFrame{}, 1_MiB) == 1);
    // The memory freed may not suffice for the woken thread, so it may wait once more.
    CHECK(program.leases.counts().waits >= 1);
    CHECK(program.leases.counts().active_frames == 0);
  }

  TEST_CASE(
      "OperandLeases: a thread does not wait for ever for a frame that runs the program's code") {
    Program program{.patience = std::chrono::milliseconds{1}};
    auto const held = program.leases.make(3_MiB);
    ObjectFrame frame{.runs_program = true};
    REQUIRE(program.leases.enter(frame, {held}));

    bool is_refused = false;
    std::jthread{[&] { is_refused = program.leases.make(2_MiB) == nullptr; }}.join();

    CHECK(is_refused);
    CHECK(program.leases.counts().waits == 1);
    program.leases.exit(frame);
    CHECK(program.leases.make(2_MiB) != nullptr);
  }

  TEST_CASE("OperandLeases: calls that release nothing do not make a thread wait longer") {
    Program program{.patience = std::chrono::milliseconds{1}};
    auto const held = program.leases.make(3_MiB);
    ObjectFrame frame{.runs_program = true};
    REQUIRE(program.leases.enter(frame, {held}));

    std::atomic<bool> has_ended{false};
    std::jthread waiting{[&] {
      CHECK(program.leases.make(2_MiB) == nullptr);
      has_ended = true;
    }};
    program.wait_for_waiting_threads(1);
    std::size_t released = 0;
    while (!has_ended) {
      released += program.leases.start_reclaim();
    }
    waiting.join();
    CHECK(released == 0);
    CHECK(program.leases.counts().waits == 1);
    program.leases.exit(frame);
  }

  TEST_CASE("OperandLeases: a thread does not wait for more than the capacity") {
    Program program;
    auto const used = program.leases.make(1_MiB);
    ObjectFrame operation;
    REQUIRE(program.leases.enter(operation, {used}));

    bool is_refused = false;
    std::jthread{[&] { is_refused = program.leases.make(5_MiB) == nullptr; }}.join();

    CHECK(is_refused);
    CHECK(program.leases.counts().waits == 0);
    program.leases.exit(operation);
  }

  TEST_CASE(
      "OperandLeases: operations that release too little do not make a thread wait for ever") {
    Program program{.patience = std::chrono::milliseconds{1}};
    auto const held = program.leases.make(3_MiB);
    auto const small = program.leases.make(256_KiB);
    ObjectFrame frame{.runs_program = true};
    REQUIRE(program.leases.enter(frame, {held}));

    std::atomic<bool> has_ended{false};
    std::jthread waiting{[&] {
      CHECK(program.leases.make(2_MiB) == nullptr);
      has_ended = true;
    }};
    // One of two operations runs at any time, so there is always a reason to wait.
    std::array<ObjectFrame, 2> operations;
    CHECK(program.leases.enter(operations[0], {small}));
    for (std::size_t i = 1; !has_ended; ++i) {
      CHECK(program.leases.enter(operations[i % 2], {small}));
      program.leases.exit(operations[(i + 1) % 2]);
    }
    program.leases.exit(operations[0]);
    program.leases.exit(operations[1]);
    waiting.join();
    program.leases.exit(frame);
    CHECK(program.leases.make(2_MiB) != nullptr);
  }

  TEST_CASE("OperandLeases: threads without room do not wake each other for ever") {
    Program program{.patience = std::chrono::milliseconds{100}};
    Objects const wanted{program.leases.make(2_MiB), program.leases.make(2_MiB)};
    auto const held = program.leases.make(3_MiB);
    ObjectFrame holding{.runs_program = true};
    REQUIRE(program.leases.enter(holding, {held}));

    std::atomic<int> refused{0};
    std::vector<std::jthread> running;
    for (auto const& mine : wanted) {
      running.emplace_back([&, mine] {
        ObjectFrame frame;
        refused += program.leases.enter(frame, {mine}) ? 0 : 1;
        program.leases.exit(frame);
      });
    }
    running.clear();

    CHECK(refused == 2);
    program.leases.exit(holding);
    ObjectFrame frame;
    CHECK(program.leases.enter(frame, wanted));
    program.leases.exit(frame);
  }

  TEST_CASE("OperandLeases: a thread waits for an operation for any time, even while other code "
            "holds memory") {
    Program program{.patience = std::chrono::milliseconds{0}};
    auto const held = program.leases.make(1_MiB);
    auto const used = program.leases.make(2_MiB);
    ObjectFrame holding{.runs_program = true};
    ObjectFrame operation;
    REQUIRE(program.leases.enter(holding, {held}));
    REQUIRE(program.leases.enter(operation, {used}));

    std::shared_ptr<Object> made;
    std::jthread waiting{[&] { made = program.leases.make(2_MiB); }};
    program.wait_for_waiting_threads(1);
    for (int i = 0; i < 1000; ++i) {  // time in which it would give up
      CHECK(program.leases.counts().waits == 1);
      std::this_thread::yield();
    }
    program.leases.exit(operation);
    waiting.join();

    CHECK(made != nullptr);
    program.leases.exit(holding);
  }

  TEST_CASE("OperandLeases: if all threads hold storages and need room, one of them gives up") {
    Program program;
    Objects objects;
    for (int i = 0; i < 3; ++i) {
      objects.push_back(program.leases.make(1_MiB));
    }

    int const refused = program.want_together(objects, ObjectFrame{.runs_program = true}, 2_MiB);

    CHECK(refused >= 1);
    CHECK(refused <= 2);
    CHECK(program.leases.counts().active_frames == 0);
  }

  TEST_CASE("OperandLeases: start_reclaim without memory for references leaves nothing pinned") {
    Program program;
    auto const idle = program.leases.make(2_MiB);
    ObjectTraits::is_out_of_memory = true;

    CHECK_THROWS_AS(program.leases.start_reclaim(), std::bad_alloc);

    ObjectTraits::is_out_of_memory = false;
    CHECK(idle->entry->pins == 0);
    CHECK(program.leases.start_reclaim() == 2_MiB);
  }

  TEST_CASE("OperandLeases: while disabled, a failed allocation swaps nothing out") {
    Program program;
    auto const a = program.leases.make(3_MiB);
    program.leases.enable(false);

    CHECK(program.leases.make(2_MiB) == nullptr);

    CHECK(a->address != nullptr);
    CHECK_FALSE(program.leases.is_under_pressure());
  }

  TEST_CASE("OperandLeases: start_reclaim does nothing while disabled") {
    Program program;
    auto const a = program.leases.make(1_MiB);
    program.leases.enable(false);

    CHECK(program.leases.start_reclaim() == 0);

    CHECK(a->address != nullptr);
    CHECK_FALSE(program.leases.is_under_pressure());
  }
}
