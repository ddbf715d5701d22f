// SPDX-License-Identifier: Apache-2.0
#include <spillway/concepts/device_capabilities.hpp>
#include <spillway/device/host/host_paged_api.hpp>
#include <spillway/device/sim/model_api.hpp>
#include <spillway/device/sim/sim_api.hpp>
#include <spillway/testing/stepped_sim_api.hpp>

#include <cstddef>
#include <cstdint>
#include <span>

// Which abilities the library's devices have, and what does not count as one: each device below
// misses an ability by one thing.

namespace {

using namespace spillway;
using spillway::testing::SteppedSimApi;

static_assert(BatchCopyApi<SimApi> && BatchCopyApi<SteppedSimApi> && BatchCopyApi<ModelApi>);
static_assert(!BatchCopyApi<HostApi>);
static_assert(VirtualMemoryApi<SimApi> && VirtualMemoryApi<HostPagedApi>);
static_assert(!VirtualMemoryApi<HostApi>);
static_assert(VacatingApi<HostPagedApi> && !VacatingApi<SimApi>);
static_assert(ByteHoldingApi<SimApi> && ByteHoldingApi<HostApi> && !ByteHoldingApi<ModelApi>);
static_assert(CallerStreamApi<HostApi> && !CallerStreamApi<SimApi>);
static_assert(!CapturingApi<SimApi> && !PerThreadStreamApi<SimApi> && !NumberedApi<SimApi>);
static_assert(KernelTimeApi<SimApi> && KernelTimeApi<ModelApi> && !KernelTimeApi<HostApi>);
static_assert(VirtualClockApi<ModelApi> && !VirtualClockApi<SimApi> &&
              !VirtualClockApi<SteppedSimApi>);
static_assert(SteppedApi<SteppedSimApi> && !SteppedApi<SimApi> && !SteppedApi<ModelApi>);

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
};
static_assert(BatchCopyApi<AllOfThem> && VirtualMemoryApi<AllOfThem> && VacatingApi<AllOfThem>);
static_assert(ByteHoldingApi<AllOfThem> && CapturingApi<AllOfThem>);
static_assert(PerThreadStreamApi<AllOfThem> && NumberedApi<AllOfThem> && KernelTimeApi<AllOfThem>);
static_assert(VirtualClockApi<AllOfThem> && SteppedApi<AllOfThem>);

struct NoDevice {
  [[maybe_unused]] static constexpr bool holds_bytes = true;
  [[nodiscard]] int ordinal() const noexcept;
  std::size_t run_all();
};
static_assert(!ByteHoldingApi<NoDevice> && !NumberedApi<NoDevice> && !SteppedApi<NoDevice>);

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

}  // namespace
