// SPDX-License-Identifier: Apache-2.0
#include <spillway/core/types.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <future>
#include <iterator>
#include <limits>
#include <memory>
#include <utility>

#include <support/fake_cuda_call.hpp>

using namespace fake_cuda;

namespace {

/// Enqueues, or adds to the graph if the stream is being captured.
template <class Enqueue>
void enqueue(cudaStream_t handle, Enqueue work) {
  Fake::Stream& stream = fake->stream_of(handle);
  if (stream.is_capturing) {
    stream.captured.push_back(work);
  } else {
    work(*stream.device->sim, stream.sim);
  }
}
/// Enqueues the record of an event or a wait for one, unless the stream is being captured.
template <class Enqueue>
void enqueue_order(cudaStream_t handle, Enqueue work) {
  Fake::Stream& stream = fake->stream_of(handle);
  if (!stream.is_capturing) {
    work(*stream.device->sim, stream.sim);
  }
}

spillway::CopyKind checked_kind(void* to, void const* from, std::size_t n, cudaMemcpyKind kind) {
  bool const to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
  bool const from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
  auto const is_there = [n](void const* p, bool on_device) {
    return fake->contains(p, n, on_device) ||
           (!on_device && fake->options.serves_programs && !fake->contains(p, 1, true));
  };
  require(n == 0 || (is_there(to, to_device) && is_there(from, from_device)));
  require(to_device || from_device, cudaErrorInvalidMemcpyDirection);
  require(n == 0 || !to_device || !from_device || (fake->may_copy(to) && fake->may_copy(from)));
  return !to_device ? spillway::CopyKind::to_host
                    : (from_device ? spillway::CopyKind::on_device : spillway::CopyKind::to_device);
}

Fake::Event& event_of(cudaEvent_t handle) {
  auto* const event = reinterpret_cast<Fake::Event*>(handle);
  require(fake->events.count(event) == 1, cudaErrorInvalidResourceHandle);
  return *event;
}

/// Makes a stream wait for an event of another device: a stream of that device tells it.
void wait_elsewhere(cudaStream_t handle, Fake::Event const& event) {
  auto const passed = std::make_shared<std::promise<void>>();
  event.device->sim->wait(event.device->relay, event.sim);
  event.device->sim->launch(event.device->relay, [passed] { passed->set_value(); });
  Fake::Stream const& stream = fake->stream_of(handle);
  stream.device->sim->launch(stream.sim, [passed] { passed->get_future().wait(); });
}

}  // namespace

FakeCudart::FakeCudart(Options chosen) : options{chosen} {
  devices.resize(static_cast<std::size_t>(options.devices));
  for (Device& device : devices) {
    device.sim = std::make_unique<spillway::SimApi>(
        spillway::SimOptions{.capacity_bytes = options.capacity_bytes, .checked = false});
    device.null_stream = {&device, device.sim->create_stream()};
    device.relay = device.sim->create_stream();
  }
  last_error = cudaSuccess;
  contexts.clear();
  fake = this;
}

FakeCudart::~FakeCudart() {
  fake = nullptr;
  streams.insert(destroyed_streams.begin(), destroyed_streams.end());
  for (Stream* stream : streams) {
    delete stream;
  }
  for (Event* event : events) {
    delete event;
  }
}

void Fake::fail_next(std::string const& name, cudaError_t code) {
  Lock const lock{mutex};
  failures[name] = code;
}
void Fake::unload() {
  Lock const lock{mutex};
  is_unloading = true;
}
void Fake::begin_capture(cudaStream_t stream) {
  Lock const lock{mutex};
  stream_of(stream).is_capturing = true;
  ++captures;
  capture_is_broken = false;
}
Fake::Graph Fake::end_capture(cudaStream_t stream) {
  Lock const lock{mutex};
  stream_of(stream).is_capturing = false;
  for (Stream* const other : streams) {
    other->has_joined = false;
  }
  for (Event* const event : events) {
    event->is_captured = false;
  }
  --captures;
  return std::exchange(stream_of(stream).captured, {});
}
void Fake::launch(Graph const& graph, cudaStream_t stream) {
  Lock const lock{mutex};
  for (auto const& work : graph) {
    enqueue(stream, work);
  }
}
std::size_t Fake::calls(std::string const& name) const {
  Lock const lock{mutex};
  auto const found = call_counts.find(name);
  return found == call_counts.end() ? 0 : found->second;
}
bool Fake::is_set_up(int device) const {
  return devices.at(static_cast<std::size_t>(device)).is_set_up;
}
int Fake::context_references(int device) const {
  return devices.at(static_cast<std::size_t>(device)).references;
}
bool Fake::is_capture_broken() const {
  return capture_is_broken;
}
spillway::SimUsage Fake::usage(int device) const {
  return devices.at(static_cast<std::size_t>(device)).sim->usage();
}
std::size_t Fake::pinned_allocations() const {
  return static_cast<std::size_t>(
      std::count_if(ranges.begin(), ranges.end(), [](auto const& range) {
        return range.second.kind == RangeKind::pinned;
      }));
}
std::size_t Fake::registered_ranges() const {
  return static_cast<std::size_t>(
      std::count_if(ranges.begin(), ranges.end(), [](auto const& range) {
        return range.second.kind == RangeKind::registered;
      }));
}

bool Fake::begin(char const* name, cudaError_t& status) {
  ++call_counts[name];
  if (auto const failure = failures.find(name); failure != failures.end()) {
    status = failure->second;
    failures.erase(failure);
    return false;
  }
  status = is_unloading ? cudaErrorCudartUnloading : cudaSuccess;
  return status == cudaSuccess;
}

/// The runtime sets device 0 up for a thread that has named none.
Fake::Device& Fake::current() {
  if (contexts.empty()) {
    devices[0].is_set_up = true;
    contexts.push_back(context_of(devices[0]));
  }
  return device_of(contexts.back());
}

Fake::Stream& Fake::stream_of(cudaStream_t handle) {
  if (handle == nullptr) {
    return current().null_stream;
  }
  auto* const stream = reinterpret_cast<Stream*>(handle);
  require(streams.count(stream) == 1 && stream->device == &current(),
          cudaErrorInvalidResourceHandle);
  return *stream;
}

/// Mappings that touch count as one range.
bool Fake::contains(void const* p, std::size_t bytes, bool on_device) const {
  std::uintptr_t const end = value_of(p) + bytes;
  std::uintptr_t at = value_of(p);
  for (auto next = ranges.upper_bound(at); at < end; ++next) {
    if (next == ranges.begin()) {
      return false;
    }
    auto const& [start, range] = *std::prev(next);
    bool const is_device = range.kind == RangeKind::device || range.kind == RangeKind::mapped;
    bool const is_first = at == value_of(p);
    if (is_device != on_device || start > at || start + range.bytes <= at ||
        (!is_first && range.kind != RangeKind::mapped)) {
      return false;
    }
    at = start + range.bytes;
    if (at < end && next == ranges.end()) {
      return false;
    }
  }
  return true;
}

bool Fake::may_copy(void const* p) {
  auto const after = ranges.upper_bound(value_of(p));
  if (after == ranges.begin()) {
    return false;
  }
  Range const& range = std::prev(after)->second;
  return range.kind != RangeKind::mapped || range.accessors.count(&current()) != 0;
}

bool Fake::has_passed(cudaEvent_t handle) const {
  Event const& event = event_of(handle);
  return event.device->sim->is_complete(event.sim);
}
bool Fake::refuses_unsafe_calls() {
  bool const refuses = captures != 0 && capture_mode != cudaStreamCaptureModeRelaxed;
  capture_is_broken = capture_is_broken || refuses;
  return refuses;
}
bool Fake::is_capturing_implicitly() const {
  return std::any_of(streams.begin(), streams.end(), [](Stream const* stream) {
    return stream->is_blocking && stream->is_capturing;
  });
}
cudaStream_t Fake::create_stream(bool is_blocking) {
  Device& device = current();
  if (destroyed_streams.empty()) {
    destroyed_streams.push_back(new Stream);
  }
  Stream* const made = destroyed_streams.back();
  destroyed_streams.pop_back();
  *made = {&device, device.sim->create_stream(), is_blocking};
  streams.insert(made);
  return reinterpret_cast<cudaStream_t>(made);
}

extern "C" {

char const* cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaErrorOther";
}
char const* cudaGetErrorString(cudaError_t /*error*/) {
  return "as the fake was told";
}
cudaError_t cudaGetLastError() {
  return std::exchange(last_error, cudaSuccess);
}
cudaError_t cudaPeekAtLastError() {
  return last_error;
}
cudaError_t cudaInitDevice(int device, unsigned /*device_flags*/, unsigned /*flags*/) {
  return call("cudaInitDevice", [&] {
    require(fake->options.has_driver, cudaErrorInsufficientDriver);
    require(device >= 0 && device < fake->options.devices, cudaErrorInvalidDevice);
    fake->devices[static_cast<std::size_t>(device)].is_set_up = true;
  });
}
cudaError_t cudaGetDriverEntryPointByVersion(char const* symbol,
                                             void** function,
                                             unsigned version,
                                             unsigned long long /*flags*/,
                                             cudaDriverEntryPointQueryResult* /*result*/) {
  return call("cudaGetDriverEntryPointByVersion",
              [&] { *function = driver_function(symbol, version); });
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  return call("cudaThreadExchangeStreamCaptureMode", [&] { std::swap(*mode, capture_mode); });
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int /*device*/) {
  return call("cudaDeviceGetAttribute", [&] {
    bool const is_numa = attribute == cudaDevAttrHostNumaId;
    bool const is_integrated = attribute == cudaDevAttrIntegrated;
    bool const is_host_address = attribute == cudaDevAttrCanUseHostPointerForRegisteredMem;
    require(is_numa || is_integrated || is_host_address || fake->options.serves_programs);
    *value = is_numa           ? fake->options.numa_node
             : is_integrated   ? int{fake->options.is_integrated}
             : is_host_address ? int{fake->options.has_host_addresses}
                               : 0;
  });
}

cudaError_t cudaMalloc(void** memory, std::size_t bytes) {
  return call("cudaMalloc", [&] {
    require_safe();
    require(bytes != 0 && bytes < std::numeric_limits<std::size_t>::max() / 2);
    Fake::Device& device = fake->current();
    void* const p = device.sim->try_reserve(bytes);
    require(p != nullptr, cudaErrorMemoryAllocation);
    fake->ranges[value_of(p)] = {bytes, Fake::RangeKind::device, &device};
    *memory = p;
  });
}
cudaError_t cudaFree(void* memory) {
  return call("cudaFree", [&] {
    require_safe();
    auto const found = fake->ranges.find(value_of(memory));
    require(found != fake->ranges.end() && found->second.kind == Fake::RangeKind::device);
    found->second.device->sim->release(memory, found->second.bytes);
    fake->ranges.erase(found);
  });
}
cudaError_t cudaHostAlloc(void** memory, std::size_t bytes, unsigned flags) {
  return call("cudaHostAlloc", [&] {
    require_safe();
    require((flags & cudaHostAllocPortable) != 0 || fake->options.serves_programs);
    Fake::Device& device = fake->current();
    void* const p = device.sim->try_allocate_pinned(bytes, -1);
    require(p != nullptr, cudaErrorMemoryAllocation);
    fake->ranges[value_of(p)] = {bytes, Fake::RangeKind::pinned, &device};
    *memory = p;
  });
}
cudaError_t cudaFreeHost(void* memory) {
  return call("cudaFreeHost", [&] {
    require_safe();
    auto const found = fake->ranges.find(value_of(memory));
    require(found != fake->ranges.end() && found->second.kind == Fake::RangeKind::pinned);
    found->second.device->sim->free_pinned(memory, found->second.bytes);
    fake->ranges.erase(found);
  });
}
cudaError_t cudaHostRegister(void* memory, std::size_t bytes, unsigned flags) {
  return call("cudaHostRegister", [&] {
    require_safe();
    require(flags == (cudaHostRegisterPortable | cudaHostRegisterMapped));
    fake->ranges[value_of(memory)] = {bytes, Fake::RangeKind::registered, &fake->current()};
  });
}
cudaError_t cudaHostUnregister(void* memory) {
  return call("cudaHostUnregister", [&] {
    require_safe();
    auto const found = fake->ranges.find(value_of(memory));
    require(found != fake->ranges.end() && found->second.kind == Fake::RangeKind::registered,
            cudaErrorHostMemoryNotRegistered);
    fake->ranges.erase(found);
  });
}
cudaError_t cudaMemGetInfo(std::size_t* free_bytes, std::size_t* total_bytes) {
  return call("cudaMemGetInfo", [&] {
    spillway::MemoryInfo const info = fake->current().sim->memory_info();
    *free_bytes = info.free_bytes;
    *total_bytes = info.total_bytes;
  });
}

cudaError_t cudaMemcpyAsync(
    void* to, void const* from, std::size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  return call("cudaMemcpyAsync", [&] {
    auto const way = checked_kind(to, from, bytes, kind);
    enqueue(stream, [=](auto& sim, auto s) { sim.copy(to, from, bytes, way, s); });
  });
}
cudaError_t cudaMemcpyPeerAsync(void* to,
                                int /*to_device*/,
                                void const* from,
                                int /*from_device*/,
                                std::size_t bytes,
                                cudaStream_t stream) {
  return call("cudaMemcpyPeerAsync", [&] {
    require(fake->contains(to, bytes, true) && fake->contains(from, bytes, true));
    enqueue(stream, [=](auto& sim, auto s) {
      sim.copy(to, from, bytes, spillway::CopyKind::on_device, s);
    });
  });
}
cudaError_t cudaMemcpyBatchAsync(void* const* to,
                                 void const* const* from,
                                 std::size_t const* sizes,
                                 std::size_t count,
                                 cudaMemcpyAttributes* attributes,
                                 std::size_t* attribute_indices,
                                 std::size_t attribute_count,
                                 cudaStream_t stream) {
  return call("cudaMemcpyBatchAsync", [&] {
    require(stream != nullptr && count != 0 && attribute_count == 1 && attribute_indices[0] == 0);
    require(attributes->srcAccessOrder == cudaMemcpySrcAccessOrderStream);
    require(!fake->stream_of(stream).is_capturing, cudaErrorStreamCaptureUnsupported);
    require(std::find(sizes, sizes + count, 0U) == sizes + count);
    for (std::size_t i = count; i-- > 0;) {  // in reverse order, since CUDA promises no order
      bool const to_device = fake->contains(to[i], sizes[i], true);
      bool const from_device = fake->contains(from[i], sizes[i], true);
      auto const kind = !to_device
                            ? cudaMemcpyDeviceToHost
                            : (from_device ? cudaMemcpyDeviceToDevice : cudaMemcpyHostToDevice);
      auto const way = checked_kind(to[i], from[i], sizes[i], kind);
      Fake::Stream& on = fake->stream_of(stream);
      on.device->sim->copy(to[i], from[i], sizes[i], way, on.sim);
    }
  });
}
cudaError_t cudaMemsetAsync(void* memory, int byte, std::size_t bytes, cudaStream_t stream) {
  return call("cudaMemsetAsync", [&] {
    require(bytes == 0 || fake->contains(memory, bytes, true));
    enqueue(stream, [=](auto& sim, auto s) {
      sim.fill(memory, static_cast<unsigned char>(byte), bytes, s);
    });
  });
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* argument) {
  return call("cudaLaunchHostFunc", [&] {
    auto const plain = reinterpret_cast<spillway::HostFunction>(function);
    enqueue(stream, [=](auto& sim, auto s) { sim.launch_host(s, plain, argument); });
  });
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return call("cudaStreamCreateWithFlags", [&] {
    require(flags == cudaStreamNonBlocking);
    *stream = fake->create_stream(false);
  });
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return call("cudaStreamCreate", [&] { *stream = fake->create_stream(true); });
}
cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  return call("cudaStreamDestroy", [&] {
    Fake::Stream& stream = fake->stream_of(handle);
    stream.device->sim->destroy_stream(stream.sim);
    fake->streams.erase(&stream);
    fake->destroyed_streams.push_back(&stream);
  });
}
cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  Fake::Device* device = nullptr;
  spillway::SimStream sim{};
  cudaError_t const status = call("cudaStreamSynchronize", [&] {
    require_safe();
    Fake::Stream& stream = fake->stream_of(handle);
    require(!stream.is_capturing, cudaErrorStreamCaptureUnsupported);
    device = stream.device;
    sim = stream.sim;
  });
  if (status == cudaSuccess) {
    device->sim->synchronize(sim);  // without the lock: others go on meanwhile
  }
  return status;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  return call("cudaStreamWaitEvent", [&] {
    require(flags == cudaEventWaitDefault);
    Fake::Event const& waited = event_of(event);
    Fake::Stream& waiting = fake->stream_of(stream);
    if (waiting.is_capturing && !waited.is_captured) {
      fake->capture_is_broken = true;
      throw Failure{cudaErrorStreamCaptureIsolation};
    }
    waiting.has_joined = waiting.has_joined || waited.is_captured;
    if (waited.device == waiting.device) {
      enqueue_order(stream, [&](auto& sim, auto s) { sim.wait(s, waited.sim); });
    } else {
      wait_elsewhere(stream, waited);
    }
  });
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  return call("cudaStreamIsCapturing", [&] {
    require(stream != nullptr || !fake->is_capturing_implicitly(), cudaErrorStreamCaptureImplicit);
    *status = fake->stream_of(stream).is_capturing ? cudaStreamCaptureStatusActive
                                                   : cudaStreamCaptureStatusNone;
  });
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  return call("cudaEventCreateWithFlags", [&] {
    Fake::Device& device = fake->current();
    auto* const made =
        new Fake::Event{&device, device.sim->create_event(), (flags & cudaEventBlockingSync) != 0};
    if ((flags & cudaEventDisableTiming) == 0) {
      made->passed_ns = std::make_shared<std::atomic<std::int64_t>>(0);
    }
    fake->events.insert(made);
    *event = reinterpret_cast<cudaEvent_t>(made);
  });
}
cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  return call("cudaEventDestroy", [&] {
    Fake::Event& event = event_of(handle);
    event.device->sim->destroy_event(event.sim);
    fake->events.erase(&event);
    delete &event;
  });
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return call("cudaEventRecord", [&] {
    Fake::Event& recorded = event_of(event);
    Fake::Stream const& recording = fake->stream_of(stream);
    recorded.is_captured = recording.is_capturing || recording.has_joined;
    enqueue_order(stream, [&](auto& sim, auto s) {
      require(recorded.device->sim.get() == &sim, cudaErrorInvalidResourceHandle);
      if (recorded.passed_ns != nullptr) {
        sim.launch(s, [passed_ns = recorded.passed_ns] {
          *passed_ns = std::chrono::steady_clock::now().time_since_epoch().count();
        });
      }
      sim.record(recorded.sim, s);
    });
  });
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  return call("cudaEventQuery", [&] {
    require_safe();
    require(fake->has_passed(event), cudaErrorNotReady);
  });
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
  return call("cudaEventElapsedTime", [&] {
    require_safe();
    Fake::Event& first = event_of(from);
    Fake::Event& last = event_of(to);
    require(first.passed_ns != nullptr && last.passed_ns != nullptr,
            cudaErrorInvalidResourceHandle);
    require(first.device->sim->is_complete(first.sim) && last.device->sim->is_complete(last.sim),
            cudaErrorNotReady);
    *milliseconds = static_cast<float>(*last.passed_ns - *first.passed_ns) / 1e6F;
  });
}
cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  Fake::Device* device = nullptr;
  spillway::SimEvent sim{};
  cudaError_t const status = call("cudaEventSynchronize", [&] {
    require_safe();
    Fake::Event& event = event_of(handle);
    device = event.device;
    sim = event.sim;
  });
  if (status == cudaSuccess) {
    device->sim->synchronize(sim);
  }
  return status;
}

}  // extern "C"
