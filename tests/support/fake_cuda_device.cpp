// SPDX-License-Identifier: Apache-2.0
// Extends the stand-in for the CUDA runtime so that a whole program, such as PyTorch, can run on
// it: it is preloaded, so it is there from the start, and it also has the functions that the
// library itself does not call.
//
// The device has memory, streams, events and copies, but no cores: launching a kernel is an error,
// but for those of the library's codecs (fake_cuda_kernels.cpp).
// SPILLWAY_FAKE_CUDA_BYTES says how much memory, SPILLWAY_FAKE_CUDA_DEVICES how many devices,
// SPILLWAY_FAKE_CUDA_MAPS=1 that they have virtual memory, SPILLWAY_FAKE_CUDA_PEERS=1 that they can
// access each other's.
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <support/fake_cuda_call.hpp>

using namespace fake_cuda;

namespace {

std::size_t number_from(char const* variable, std::size_t otherwise) {
  char const* const text = std::getenv(variable);
  return text == nullptr ? otherwise : std::stoull(text);
}

/// Never destroyed, since programs call CUDA until they end.
[[maybe_unused]] Fake* const preloaded =
    new Fake{{.devices = static_cast<int>(number_from("SPILLWAY_FAKE_CUDA_DEVICES", 1)),
              .capacity_bytes = number_from("SPILLWAY_FAKE_CUDA_BYTES", std::size_t{64} << 20U),
              .has_virtual_memory = number_from("SPILLWAY_FAKE_CUDA_MAPS", 0) != 0,
              .has_peers = number_from("SPILLWAY_FAKE_CUDA_PEERS", 0) != 0,
              .serves_programs = true}};

std::atomic<bool> is_stalled{false};

int ordinal_of(Fake::Device const& device) {
  return static_cast<int>(&device - fake->devices.data());
}

}  // namespace

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  return call("cudaGetDeviceCount", [&] { *count = fake->options.devices; });
}
cudaError_t cudaGetDevice(int* device) {
  return call("cudaGetDevice", [&] { *device = ordinal_of(fake->current()); });
}
cudaError_t cudaSetDevice(int device) {
  return call("cudaSetDevice", [&] {
    require(device >= 0 && device < fake->options.devices, cudaErrorInvalidDevice);
    Fake::Device& chosen = fake->devices[static_cast<std::size_t>(device)];
    chosen.is_set_up = true;
    if (contexts.empty()) {
      contexts.push_back(nullptr);
    }
    contexts.back() = context_of(chosen);
  });
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  return call("cudaGetDeviceProperties", [&] {
    require(device >= 0 && device < fake->options.devices, cudaErrorInvalidDevice);
    *properties = {};
    std::strncpy(properties->name, "a stand-in without cores", sizeof properties->name - 1);
    properties->totalGlobalMem = fake->options.capacity_bytes;
    properties->major = 9;
    properties->multiProcessorCount = 1;
    properties->maxThreadsPerBlock = 1024;
    properties->maxThreadsPerMultiProcessor = 2048;
    properties->warpSize = 32;
  });
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  return call("cudaRuntimeGetVersion", [&] { *version = CUDART_VERSION; });
}
cudaError_t cudaDriverGetVersion(int* version) {
  return call("cudaDriverGetVersion", [&] { *version = CUDART_VERSION; });
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return call("cudaDeviceGetStreamPriorityRange", [&] {
    *least = 0;
    *greatest = -1;
  });
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  return call("cudaDeviceCanAccessPeer",
              [&] { *can = int{fake->options.has_peers && device != peer}; });
}
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
  return call("cudaDeviceEnablePeerAccess", [&] {
    require(fake->options.has_peers, cudaErrorPeerAccessUnsupported);
    require(flags == 0);
    Fake::Device const& other = fake->devices.at(static_cast<std::size_t>(peer));
    require(fake->peer_accesses.emplace(&fake->current(), &other).second,
            cudaErrorPeerAccessAlreadyEnabled);
  });
}
// A handle that another process would get contains the address, so only this process can open it.
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* p) {
  return call("cudaIpcGetMemHandle", [&] {
    auto const found = fake->ranges.find(value_of(p));
    require(found != fake->ranges.end() && found->second.kind == Fake::RangeKind::device);
    std::memcpy(handle, &p, sizeof p);
  });
}
cudaError_t cudaIpcOpenMemHandle(void** p, cudaIpcMemHandle_t handle, unsigned /*flags*/) {
  return call("cudaIpcOpenMemHandle", [&] { std::memcpy(p, &handle, sizeof *p); });
}
cudaError_t cudaIpcCloseMemHandle(void* p) {
  return call("cudaIpcCloseMemHandle", [&] { require(fake->contains(p, 1, true)); });
}
cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t* handle, cudaEvent_t event) {
  return call("cudaIpcGetEventHandle", [&] { std::memcpy(handle, &event, sizeof event); });
}
cudaError_t cudaIpcOpenEventHandle(cudaEvent_t* event, cudaIpcEventHandle_t handle) {
  cudaEvent_t sent = nullptr;
  std::memcpy(&sent, &handle, sizeof sent);
  cudaError_t const status = cudaEventSynchronize(sent);
  return status == cudaSuccess ? cudaEventCreateWithFlags(event, cudaEventDisableTiming) : status;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int /*priority*/) {
  return cudaStreamCreateWithFlags(stream, flags);
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream,
                                     cudaStreamCaptureStatus* status,
                                     unsigned long long* id,
                                     cudaGraph_t* /*graph*/,
                                     cudaGraphNode_t const** /*dependencies*/,
                                     cudaGraphEdgeData const** /*edges*/,
                                     std::size_t* /*count*/) {
  cudaError_t const asked = cudaStreamIsCapturing(stream, status);
  if (asked == cudaSuccess && *status != cudaStreamCaptureStatusNone && id != nullptr) {
    Lock const lock{fake->mutex};
    *id = fake->stream_of(stream).capture->id;
  }
  return asked;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned /*flags*/) {
  return cudaEventRecord(event, stream);
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  return cudaStreamSynchronize(stream);  // done by the time it is asked
}
cudaError_t cudaDeviceSynchronize() {
  std::vector<cudaStream_t> all{nullptr};
  {
    Lock const lock{fake->mutex};
    for (Fake::Stream* const stream : fake->streams) {
      if (stream->device == &fake->current()) {
        all.push_back(reinterpret_cast<cudaStream_t>(stream));
      }
    }
  }
  for (cudaStream_t const stream : all) {
    if (cudaError_t const status = cudaStreamSynchronize(stream); status != cudaSuccess) {
      return status;
    }
  }
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, void const* from, std::size_t bytes, cudaMemcpyKind kind) {
  cudaError_t const status = cudaMemcpyAsync(to, from, bytes, kind, nullptr);
  return status == cudaSuccess ? cudaStreamSynchronize(nullptr) : status;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, void const* p) {
  return call("cudaPointerGetAttributes", [&] {
    *attributes = {};
    attributes->type = fake->contains(p, 1, true)    ? cudaMemoryTypeDevice
                       : fake->contains(p, 1, false) ? cudaMemoryTypeHost
                                                     : cudaMemoryTypeUnregistered;
    attributes->devicePointer = const_cast<void*>(p);
  });
}
cudaError_t __cudaLaunchKernel(cudaKernel_t /*kernel*/,
                               dim3 /*grid*/,
                               dim3 /*block*/,
                               void** /*arguments*/,
                               std::size_t,
                               cudaStream_t) {
  return last_error = cudaErrorNoKernelImageForDevice;
}
cudaError_t cudaLaunchKernelExC(cudaLaunchConfig_t const* /*config*/,
                                void const* /*kernel*/,
                                void** /*arguments*/) {
  return last_error = cudaErrorNoKernelImageForDevice;
}

// Graphs of copies, fills and host functions.
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode /*mode*/) {
  return call("cudaStreamBeginCapture", [&] { fake->begin_capture(stream); });
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  return call("cudaStreamEndCapture", [&] {
    std::shared_ptr<Fake::Capture> const capture = fake->stream_of(stream).capture;
    Fake::Graph captured = fake->end_capture(stream);
    bool const is_broken = capture->is_broken;
    *graph =
        is_broken ? nullptr : reinterpret_cast<cudaGraph_t>(new Fake::Graph(std::move(captured)));
    require(!is_broken, cudaErrorStreamCaptureInvalidated);
  });
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* /*nodes*/, std::size_t* count) {
  return call("cudaGraphGetNodes", [&] { *count = reinterpret_cast<Fake::Graph*>(graph)->size(); });
}
cudaError_t
cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long /*flags*/) {
  return call("cudaGraphInstantiate", [&] {
    *executable =
        reinterpret_cast<cudaGraphExec_t>(new Fake::Graph(*reinterpret_cast<Fake::Graph*>(graph)));
  });
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable,
                                          cudaGraph_t graph,
                                          unsigned long long flags) {
  return cudaGraphInstantiate(executable, graph, flags);
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  return call("cudaGraphLaunch",
              [&] { fake->launch(*reinterpret_cast<Fake::Graph*>(executable), stream); });
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  return call("cudaGraphDestroy", [&] { delete reinterpret_cast<Fake::Graph*>(graph); });
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  return call("cudaGraphExecDestroy", [&] { delete reinterpret_cast<Fake::Graph*>(executable); });
}

// The driver's library under its own name, as PyTorch looks for it.
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  return driver_call("cuDevicePrimaryCtxGetState", [&] {
    *flags = 0;
    *active = fake->devices.at(static_cast<std::size_t>(device)).is_set_up ? 1 : 0;
  });
}
CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = contexts.empty() ? nullptr : contexts.back();
  return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult /*error*/, char const** text) {
  *text = "as the fake was told";
  return CUDA_SUCCESS;
}
// For tests: captures a stream without making a graph.
void spillway_fake_begin_capture(cudaStream_t stream) {
  fake->begin_capture(stream);
}
void spillway_fake_end_capture(cudaStream_t stream) {
  (void)fake->end_capture(stream);
}
/// What is enqueued on the stream from now on runs after `spillway_fake_resume`.
void spillway_fake_stall(cudaStream_t stream) {
  is_stalled.store(true);
  (void)cudaLaunchHostFunc(
      stream, [](void*) { is_stalled.wait(true); }, nullptr);
}
void spillway_fake_resume() {
  is_stalled.store(false);
  is_stalled.notify_all();
}
std::size_t spillway_fake_calls(char const* name) {
  return fake->calls(name);
}

}  // extern "C"
