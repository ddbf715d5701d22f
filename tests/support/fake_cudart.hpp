// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/device/sim/sim_api.hpp>

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

/// Stands in for the CUDA runtime and driver in a test program that defines their functions itself
/// (fake_cudart.cpp, fake_cuda_driver.cpp), so that `CudaApi` can be run, and made to fail, where
/// there is no GPU.
///
/// Devices are `SimApi`s. As strict as the documentation allows CUDA to be: every failure becomes
/// the thread's last error, "not ready" included; work is refused on a stream of a device that is
/// not current; host functions may make no calls; batches are refused as CUDA refuses them; a new
/// stream gets the handle of one that was destroyed. It says nothing about a real driver.
///
/// Each of the following is refused and breaks the captures that it concerns: a call that takes
/// effect at once, unless the thread is relaxed; asking or waiting for a captured stream or event;
/// a captured stream's wait for an event from outside the capture; work on the null stream while a
/// blocking stream of its device is captured; destroying a captured stream. A stream that waits for
/// a captured event joins the capture, and has to be joined back before the end.
///
/// Threads  thread-safe; one object at a time.
class FakeCudart {
 public:
  struct Options {
    int devices = 2;
    std::size_t capacity_bytes = 64U << 20U;
    bool has_virtual_memory = true;
    bool has_rdma = false;  ///< memory that is mapped can be made for GPUDirect RDMA
    bool has_driver = true;
    bool has_stream_waits = true;  ///< streams can wait for a word of memory
    int numa_node = -1;
    bool is_integrated = false;
    bool has_host_addresses = true;  ///< registered memory has the same address on the device
    bool has_peers = false;          ///< devices can access each other's memory
    bool serves_programs = false;    ///< memory need not be pinned, and more attributes are known
  };

  explicit FakeCudart(Options options);
  FakeCudart() : FakeCudart(Options{}) {}
  FakeCudart(FakeCudart const&) = delete;
  FakeCudart& operator=(FakeCudart const&) = delete;
  ~FakeCudart();

  /// The next call of that name fails with `code` and has no effect.
  void fail_next(std::string const& name, cudaError_t code);
  /// From now on every call fails as at the end of a program.
  void unload();
  /// Copies, fills and host functions of a graph, in the order in which they were captured, which
  /// agrees with the order of its streams and events.
  using Graph = std::vector<std::function<void(spillway::SimApi&, spillway::SimStream)>>;

  /// As `cudaStreamBeginCapture` in global mode.
  void begin_capture(cudaStream_t stream);
  /// Ends the capture, broken or not; the graph of a broken one is empty.
  Graph end_capture(cudaStream_t stream);
  void launch(Graph const& graph, cudaStream_t stream);

  /// How often a function was called, whether it failed or not.
  [[nodiscard]] std::size_t calls(std::string const& name) const;
  /// True once the device's context was made.
  [[nodiscard]] bool is_set_up(int device) const;
  [[nodiscard]] int context_references(int device) const;
  /// Whether the last capture that was begun has been broken.
  [[nodiscard]] bool is_capture_broken() const;
  [[nodiscard]] spillway::SimUsage usage(int device) const;
  [[nodiscard]] std::size_t pinned_allocations() const;
  [[nodiscard]] std::size_t registered_ranges() const;

  struct Device;
  struct Stream;
  /// How much of the captured work of each stream comes before some point.
  using Captured = std::map<Stream const*, std::size_t>;
  struct Capture {
    unsigned long long id = 0;
    Stream* origin = nullptr;
    Graph graph{};
    bool is_broken = false;
    bool has_ended = false;
  };
  struct Stream {
    Device* device = nullptr;
    spillway::SimStream sim{};
    bool is_blocking = false;            ///< the null stream and this one wait for each other
    std::shared_ptr<Capture> capture{};  ///< null while the stream is not captured
    Captured before{};                   ///< what its next work in the capture comes after
  };
  struct Device {
    std::unique_ptr<spillway::SimApi> sim;
    Stream null_stream;
    spillway::SimStream relay{};  // runs what tells streams of other devices about events
    int references = 0;
    bool is_set_up = false;
  };
  struct Event {
    Device* device = nullptr;
    spillway::SimEvent sim{};
    bool is_blocking = false;
    std::shared_ptr<std::atomic<std::int64_t>> passed_ns{};  // of one with a time stamp
    std::shared_ptr<Capture> capture{};  // in which it was recorded last, also if that has ended
    Captured before{};
  };
  enum class RangeKind : std::uint8_t { device, mapped, pinned, registered };
  struct Range {
    std::size_t bytes = 0;
    RangeKind kind{};
    Device* device = nullptr;
    std::set<Device const*> accessors{};  // of a mapped range: those that may access it
  };
  struct Physical {
    Device* device = nullptr;
    spillway::SimPhysical sim{};
    std::size_t bytes = 0;
    bool is_rdma_capable = false;
  };

  // The functions' common part; see fake_cuda_call.hpp.
  [[nodiscard]] bool begin(char const* name, cudaError_t& status);
  [[nodiscard]] Device& current();
  [[nodiscard]] Stream& stream_of(cudaStream_t stream);
  [[nodiscard]] bool contains(void const* p, std::size_t bytes, bool on_device) const;
  /// Whether `cudaMemcpyAsync` on the current device accepts the address `p` of any device: mapped
  /// memory only if the device may access it.
  [[nodiscard]] bool may_copy(void const* p);
  [[nodiscard]] bool has_passed(cudaEvent_t event);
  [[nodiscard]] bool refuses_unsafe_calls();
  void break_capture(Capture& capture);
  /// Whether a blocking stream of the device is captured, so that its null stream cannot be used.
  [[nodiscard]] bool is_capturing_implicitly(Device const& device) const;
  [[nodiscard]] cudaStream_t create_stream(bool is_blocking);

  Options options;
  mutable std::recursive_mutex mutex;
  std::vector<Device> devices;
  std::map<std::uintptr_t, Range> ranges;
  std::map<std::uintptr_t, std::size_t> reserved_addresses;
  std::map<std::uintptr_t, Range> mapped_without_access;
  std::set<std::pair<Device const*, Device const*>> peer_accesses;  // which device may access which
  std::set<Stream*> streams;
  std::vector<Stream*> destroyed_streams;
  std::set<Event*> events;
  std::map<CUmemGenericAllocationHandle, Physical> physical;
  CUmemGenericAllocationHandle next_physical = 1;
  std::map<std::string, std::size_t> call_counts;
  std::map<std::string, cudaError_t> failures;
  std::vector<std::shared_ptr<Capture>> captures;  // under way
  unsigned long long next_capture = 1;
  bool capture_is_broken = false;
  bool is_unloading = false;
};
