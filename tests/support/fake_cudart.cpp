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

/// The stream, if work may be enqueued on it.
Fake::Stream& usable(cudaStream_t handle) {
  Fake::Stream& stream = fake->stream_of(handle);
  if (&stream == &stream.device->null_stream) {
    for (Fake::Stream const* const other : fake->streams) {
      if (other->device == stream.device && other->is_blocking) {
        require_uncaptured(other->capture, cudaErrorStreamCaptureImplicit);
      }
    }
  }
  require(stream.capture == nullptr || !stream.capture->is_broken,
          cudaErrorStreamCaptureInvalidated);
  return stream;
}

/// Enqueues, or adds to the graph if the stream is being captured.
template <class Enqueue>
void enqueue(cudaStream_t handle, Enqueue work) {
  Fake::Stream& stream = usable(handle);
  if (stream.capture != nullptr) {
    stream.capture->graph.push_back(work);
    ++stream.before[&stream];
  } else {
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

/// A captured stream waits for an event, or an uncaptured one for a captured event: it joins.
void wait_in_capture(Fake::Stream& stream, Fake::Event const& event) {
  if (stream.capture != nullptr && stream.capture != event.capture) {
    fake->break_capture(*stream.capture);
    if (event.capture == nullptr) {
      throw Failure{cudaErrorStreamCaptureIsolation};
    }
    fake->break_capture(*event.capture);
    throw Failure{cudaErrorStreamCaptureMerge};
  }
  require(!event.capture->has_ended, cudaErrorCapturedEvent);
  if (&stream == &stream.device->null_stream) {
    require_uncaptured(event.capture, cudaErrorStreamCaptureImplicit);
  }
  stream.capture = event.capture;
  for (auto const& [other, count] : event.before) {
    std::size_t& known = stream.before[other];
    known = std::max(known, count);
  }
}

/// Makes a stream wait for an event of another device: a stream of that device tells it.
void wait_elsewhere(Fake::Stream const& stream, Fake::Event const& event) {
  auto const passed = std::make_shared<std::promise<void>>();
  event.device->sim->wait(event.device->relay, event.sim);
  event.device->sim->launch(event.device->relay, [passed] { passed->set_value(); });
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
void Fake::begin_capture(cudaStream_t handle) {
  Lock const lock{mutex};
  Stream& stream = stream_of(handle);
  require(handle != nullptr, cudaErrorStreamCaptureUnsupported);
  require(stream.capture == nullptr, cudaErrorIllegalState);
  stream.capture = std::make_shared<Capture>(Capture{next_capture++, &stream});
  captures.push_back(stream.capture);
  capture_is_broken = false;
}
Fake::Graph Fake::end_capture(cudaStream_t handle) {
  Lock const lock{mutex};
  Stream& stream = stream_of(handle);
  std::shared_ptr<Capture> const capture = stream.capture;
  require(capture != nullptr, cudaErrorIllegalState);
  require(capture->origin == &stream, cudaErrorStreamCaptureUnmatched);
  Captured const joined = stream.before;
  for (Stream* const other : streams) {
    if (other->capture == capture) {
      auto const own = other->before.find(other);
      auto const known = joined.find(other);
      if (own != other->before.end() && (known == joined.end() || known->second < own->second)) {
        break_capture(*capture);
      }
      other->capture = nullptr;
      other->before.clear();
    }
  }
  capture->has_ended = true;
  captures.erase(std::find(captures.begin(), captures.end(), capture));
  return capture->is_broken ? Graph{} : std::exchange(capture->graph, {});
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

bool Fake::has_passed(cudaEvent_t handle) {
  Event const& event = event_of(handle);
  require_uncaptured(event.capture, cudaErrorCapturedEvent);
  return event.device->sim->is_complete(event.sim);
}
bool Fake::refuses_unsafe_calls() {
  if (capture_mode == cudaStreamCaptureModeRelaxed) {
    return false;
  }
  for (auto const& capture : captures) {
    break_capture(*capture);
  }
  return !captures.empty();
}
void Fake::break_capture(Capture& capture) {
  if (!capture.has_ended) {
    capture.is_broken = true;
    capture_is_broken = true;
  }
}
bool Fake::is_capturing_implicitly(Device const& device) const {
  return std::any_of(streams.begin(), streams.end(), [&](Stream const* stream) {
    return stream->device == &device && stream->is_blocking && stream->capture != nullptr;
  });
}
cudaStream_t Fake::create_stream(bool is_blocking) {
  Device& device = current();
  if (destroyed_streams.empty()) {
    destroyed_streams.push_back(new Stream);
  }
  Stream* const made = destroyed_streams.back();
  destroyed_streams.pop_back();
  *made = {&device, device.sim->create_stream(), is_blocking, {}, {}};
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
    require(usable(stream).capture == nullptr, cudaErrorStreamCaptureUnsupported);
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
    enqueue(stream, [=](auto& sim, auto s) {
      sim.launch(s, [=] {
        is_host_function = true;
        function(argument);
        is_host_function = false;
      });
    });
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
    if (stream.capture != nullptr) {
      fake->break_capture(*stream.capture);
    }
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
    Fake::Stream& stream = usable(handle);
    require_uncaptured(stream.capture, cudaErrorStreamCaptureUnsupported);
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
    Fake::Stream& waiting = usable(stream);
    if (waiting.capture != nullptr || waited.capture != nullptr) {
      wait_in_capture(waiting, waited);
    } else if (waited.device == waiting.device) {
      waiting.device->sim->wait(waiting.sim, waited.sim);
    } else {
      wait_elsewhere(waiting, waited);
    }
  });
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  return call("cudaStreamIsCapturing", [&] {
    Fake::Stream const& asked = fake->stream_of(stream);
    require(stream != nullptr || !fake->is_capturing_implicitly(*asked.device),
            cudaErrorStreamCaptureImplicit);
    *status = asked.capture == nullptr   ? cudaStreamCaptureStatusNone
              : asked.capture->is_broken ? cudaStreamCaptureStatusInvalidated
                                         : cudaStreamCaptureStatusActive;
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
    Fake::Stream const& recording = usable(stream);
    require(recorded.device == recording.device, cudaErrorInvalidResourceHandle);
    recorded.capture = recording.capture;
    recorded.before = recording.before;
    if (recording.capture == nullptr) {
      spillway::SimApi& sim = *recording.device->sim;
      if (recorded.passed_ns != nullptr) {
        sim.launch(recording.sim, [passed_ns = recorded.passed_ns] {
          *passed_ns = std::chrono::steady_clock::now().time_since_epoch().count();
        });
      }
      sim.record(recorded.sim, recording.sim);
    }
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
    require_uncaptured(first.capture, cudaErrorCapturedEvent);
    require_uncaptured(last.capture, cudaErrorCapturedEvent);
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
    require_uncaptured(event.capture, cudaErrorCapturedEvent);
    device = event.device;
    sim = event.sim;
  });
  if (status == cudaSuccess) {
    device->sim->synchronize(sim);
  }
  return status;
}

}  // extern "C"
