// SPDX-License-Identifier: Apache-2.0
#include <spillway/concepts/device_capabilities.hpp>
#include <spillway/device/host/host_paged_api.hpp>
#include <spillway/device/sim/model_api.hpp>
#include <spillway/device/sim/sim_api.hpp>
#include <spillway/testing/stepped_sim_api.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <span>

// Which optional concepts the library's devices model. Each device below fails one of these
// concepts in one requirement.

namespace {

using namespace spillway;
using spillway::testing::SteppedSimApi;

struct AllOfThem : HostPagedApi {
  void copy_batch(std::span<void* const>,
                  std::span<void const* const>,
                  std::span<std::size_t const>,
                  CopyKind,
                  stream_type);
  [[nodiscard]] bool is_capturing(stream_type) const;
  [[nodiscard]] static bool is_one_stream(stream_type) noexcept;
  [[nodiscard]] int ordinal() const noexcept;
  void compute(stream_type, std::uint64_t);
  [[nodiscard]] std::uint64_t finish_time_ns() const;
  std::size_t run_all();
  struct HostWorker {
    void launch(HostFunction, void*);
  };
  [[nodiscard]] HostWorker* make_host_worker(stream_type);
  [[maybe_unused]] static constexpr bool pins_slowly = true;
  [[maybe_unused]] static constexpr bool has_cheap_pieces = true;
  [[nodiscard]] bool shares_host_memory() const noexcept;
  [[nodiscard]] bool checks_reads() const noexcept;
  [[nodiscard]] bool is_host_function_caller() const;
  [[nodiscard]] event_type create_timed_event();
  [[nodiscard]] std::uint64_t elapsed_ns(event_type, event_type);
};
static_assert(BatchCopyApi<AllOfThem> && VirtualMemoryApi<AllOfThem> && VacatingApi<AllOfThem>);
static_assert(ByteHoldingApi<AllOfThem> && CapturingApi<AllOfThem> && CheapPiecesApi<AllOfThem>);
static_assert(RemappingApi<AllOfThem>);
static_assert(PerThreadStreamApi<AllOfThem> && NumberedApi<AllOfThem> && KernelTimeApi<AllOfThem>);
static_assert(VirtualClockApi<AllOfThem> && SteppedApi<AllOfThem> && ForkingApi<AllOfThem>);
static_assert(HostWorkApi<AllOfThem> && SlowPinningApi<AllOfThem> && SharedMemoryApi<AllOfThem>);
static_assert(AddressableApi<AllOfThem> && ReadCheckingApi<AllOfThem> && TimingApi<AllOfThem>);
static_assert(HostCallCheckingApi<AllOfThem>);

struct NoDevice {
  [[maybe_unused]] static constexpr bool holds_bytes = true;
  [[maybe_unused]] static constexpr bool is_addressable = true;
  [[maybe_unused]] static constexpr bool pins_slowly = true;
  [[maybe_unused]] static constexpr bool has_cheap_pieces = true;
  [[nodiscard]] int ordinal() const noexcept;
  std::size_t run_all();
};
static_assert(!ByteHoldingApi<NoDevice> && !NumberedApi<NoDevice> && !SteppedApi<NoDevice>);
static_assert(!SlowPinningApi<NoDevice> && !AddressableApi<NoDevice>);
static_assert(!CheapPiecesApi<NoDevice>);

struct BatchOfMutableSources : AllOfThem {
  void copy_batch(std::span<void* const>,
                  std::span<void* const>,
                  std::span<std::size_t const>,
                  CopyKind,
                  stream_type);
};
static_assert(!BatchCopyApi<BatchOfMutableSources>);

struct UnmapMayThrow : AllOfThem {
  void unmap(void*, std::size_t);
};
static_assert(!VirtualMemoryApi<UnmapMayThrow> && !VacatingApi<UnmapMayThrow>);

struct VacatesWithoutStream : AllOfThem {
  void vacate(void*, std::size_t);
};
static_assert(VirtualMemoryApi<VacatesWithoutStream> && !VacatingApi<VacatesWithoutStream>);

struct MovesWithoutSize : AllOfThem {
  void move_mapped(void*, void*);
};
static_assert(CheapPiecesApi<MovesWithoutSize> && !RemappingApi<MovesWithoutSize>);

struct HoldsNoBytes : AllOfThem {
  static constexpr bool holds_bytes = false;
};
static_assert(!ByteHoldingApi<HoldsNoBytes>);

struct CaptureChangesTheDevice : AllOfThem {
  [[nodiscard]] bool is_capturing(stream_type);
};
static_assert(!CapturingApi<CaptureChangesTheDevice>);

struct StreamsOfAnObject : AllOfThem {
  [[nodiscard]] bool is_one_stream(stream_type) const noexcept;
};
static_assert(!PerThreadStreamApi<StreamsOfAnObject>);

struct CallerOfAnObject : AllOfThem {
  [[nodiscard]] bool is_caller(stream_type) const noexcept;
};
static_assert(!CallerStreamApi<CallerOfAnObject>);

struct OrdinalIsAName : AllOfThem {
  [[nodiscard]] char const* ordinal() const noexcept;
};
static_assert(!NumberedApi<OrdinalIsAName>);

struct ComputeWithoutTime : AllOfThem {
  void compute(stream_type);
};
static_assert(!KernelTimeApi<ComputeWithoutTime>);

struct FinishTimeIsSigned : AllOfThem {
  [[nodiscard]] std::int64_t finish_time_ns() const;
};
static_assert(!VirtualClockApi<FinishTimeIsSigned>);

struct RunAllCountsNothing : AllOfThem {
  void run_all();
};
static_assert(!SteppedApi<RunAllCountsNothing>);

struct WorkerTakesNoArgument : AllOfThem {
  struct HostWorker {
    void launch(HostFunction);
  };
  [[nodiscard]] HostWorker* make_host_worker(stream_type);
};
static_assert(!HostWorkApi<WorkerTakesNoArgument>);

struct HasDearPieces : AllOfThem {
  [[maybe_unused]] static constexpr bool has_cheap_pieces = false;
};
static_assert(!CheapPiecesApi<HasDearPieces> && !RemappingApi<HasDearPieces>);

struct PinsFast : AllOfThem {
  [[maybe_unused]] static constexpr bool pins_slowly = false;
};
static_assert(!SlowPinningApi<PinsFast>);

struct SharingChangesTheDevice : AllOfThem {
  [[nodiscard]] bool shares_host_memory() noexcept;
};
static_assert(!SharedMemoryApi<SharingChangesTheDevice>);

struct ReadsAreCounted : AllOfThem {
  [[nodiscard]] int checks_reads() const noexcept;
};
static_assert(!ReadCheckingApi<ReadsAreCounted>);

struct HostFunctionsChangeTheDevice : AllOfThem {
  [[nodiscard]] bool is_host_function_caller();
};
static_assert(!HostCallCheckingApi<HostFunctionsChangeTheDevice>);

struct NotAddressable : AllOfThem {
  [[maybe_unused]] static constexpr bool is_addressable = false;
};
static_assert(!AddressableApi<NotAddressable> && !AddressableApi<HoldsNoBytes>);

struct LaunchesWithoutStream : AllOfThem {
  void launch(void (*work)());
};
static_assert(LaunchingApi<AllOfThem> && !LaunchingApi<LaunchesWithoutStream>);

struct ElapsedTimeIsSigned : AllOfThem {
  [[nodiscard]] std::int64_t elapsed_ns(event_type, event_type);
};
static_assert(!TimingApi<ElapsedTimeIsSigned>);

struct ForkInTheChildMayThrow : AllOfThem {
  void after_fork_in_child();
};
static_assert(!ForkingApi<ForkInTheChildMayThrow>);

}  // namespace

TEST_CASE("Device concepts: which ones each device of the library models") {
  CHECK((BatchCopyApi<SimApi> && BatchCopyApi<SteppedSimApi> && BatchCopyApi<ModelApi>));
  CHECK((!BatchCopyApi<HostApi>));
  CHECK((VirtualMemoryApi<SimApi> && VirtualMemoryApi<HostPagedApi>));
  CHECK((!VirtualMemoryApi<HostApi>));
  CHECK((VacatingApi<HostPagedApi> && !VacatingApi<SimApi>));
  CHECK((CheapPiecesApi<HostPagedApi> && !CheapPiecesApi<SimApi>));
  CHECK((RemappingApi<HostPagedApi> && !RemappingApi<SimApi>));
  CHECK((ByteHoldingApi<SimApi> && ByteHoldingApi<HostApi> && !ByteHoldingApi<ModelApi>));
  CHECK((CallerStreamApi<HostApi> && !CallerStreamApi<SimApi>));
  CHECK((!CapturingApi<SimApi> && !PerThreadStreamApi<SimApi> && !NumberedApi<SimApi>));
  CHECK((KernelTimeApi<SimApi> && KernelTimeApi<ModelApi> && !KernelTimeApi<HostApi>));
  CHECK((VirtualClockApi<ModelApi> && !VirtualClockApi<SimApi> && !VirtualClockApi<SteppedSimApi>));
  CHECK((SteppedApi<SteppedSimApi> && !SteppedApi<SimApi> && !SteppedApi<ModelApi>));
  CHECK((AddressableApi<SimApi> && AddressableApi<HostApi> && !AddressableApi<ModelApi>));
  CHECK((ReadCheckingApi<SimApi> && !ReadCheckingApi<HostApi>));
  CHECK((HostCallCheckingApi<SimApi> && !HostCallCheckingApi<HostApi>));
  CHECK((LaunchingApi<SimApi> && LaunchingApi<HostApi>));
  CHECK((ForkingApi<HostApi> && ForkingApi<HostPagedApi> && !ForkingApi<SimApi>));
  CHECK((!TimingApi<SimApi> && !TimingApi<HostApi>));
  CHECK((!HostWorkApi<SimApi> && !SlowPinningApi<SimApi> && !SharedMemoryApi<SimApi>));
}
