// SPDX-License-Identifier: Apache-2.0
// Functions of cuFile for the stand-in for the CUDA runtime, whose device memory is host memory.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <set>

#include <cufile.h>
#include <support/fake_cufile.hpp>
#include <unistd.h>

namespace {

std::set<FakeCufile::File*> files;

struct Call {
  int fd;
  std::byte* memory;
  std::size_t* bytes;
  off_t* offset;
  off_t* memory_offset;
  ssize_t* result;
  bool is_write;
};

void run(void* argument) noexcept {
  Call const call = *static_cast<Call*>(argument);
  delete static_cast<Call*>(argument);
  std::byte* const memory = call.memory + *call.memory_offset;
  ++(call.is_write ? FakeCufile::writes : FakeCufile::reads);
  *call.result = FakeCufile::state().result != 0 ? FakeCufile::state().result
                 : call.is_write ? ::pwrite(call.fd, memory, *call.bytes, *call.offset)
                                 : ::pread(call.fd, memory, *call.bytes, *call.offset);
}

CUfileError_t enqueue(CUfileHandle_t handle, Call call, CUstream stream) {
  auto* const file = static_cast<FakeCufile::File*>(handle);
  if (files.count(file) == 0) {
    return {CU_FILE_HANDLE_NOT_REGISTERED, CUDA_SUCCESS};
  }
  if (!FakeCufile::state().has_streams) {
    return {CU_FILE_ASYNC_NOT_SUPPORTED, CUDA_SUCCESS};
  }
  call.fd = file->fd;
  auto* const argument = new Call{call};
  if (cudaLaunchHostFunc(stream, &run, argument) != cudaSuccess) {
    delete argument;
    return {CU_FILE_CUDA_DRIVER_ERROR, CUDA_ERROR_UNKNOWN};
  }
  return {CU_FILE_SUCCESS, CUDA_SUCCESS};
}

}  // namespace

FakeCufile::State& FakeCufile::state() {
  static State state;
  return state;
}
std::size_t FakeCufile::open_files() {
  return files.size();
}

extern "C" {

CUfileError_t cuFileDriverOpen() {
  return {FakeCufile::state().has_driver ? CU_FILE_SUCCESS : CU_FILE_DRIVER_NOT_INITIALIZED,
          CUDA_SUCCESS};
}

CUfileError_t cuFileHandleRegister(CUfileHandle_t* handle, CUfileDescr_t* description) {
  if (description->type != CU_FILE_HANDLE_TYPE_OPAQUE_FD || !FakeCufile::state().takes_files) {
    return {CU_FILE_IO_NOT_SUPPORTED, CUDA_SUCCESS};
  }
  for (FakeCufile::File const* file : files) {
    if (file->fd == description->handle.fd) {
      return {CU_FILE_HANDLE_ALREADY_REGISTERED, CUDA_SUCCESS};
    }
  }
  *handle = *files.insert(new FakeCufile::File{description->handle.fd}).first;
  return {CU_FILE_SUCCESS, CUDA_SUCCESS};
}

void cuFileHandleDeregister(CUfileHandle_t handle) {
  auto* const file = static_cast<FakeCufile::File*>(handle);
  files.erase(file);
  delete file;
}

CUfileError_t cuFileReadAsync(CUfileHandle_t handle,
                              void* memory,
                              std::size_t* bytes,
                              off_t* offset,
                              off_t* memory_offset,
                              ssize_t* result,
                              CUstream stream) {
  return enqueue(handle,
                 {-1, static_cast<std::byte*>(memory), bytes, offset, memory_offset, result, false},
                 stream);
}

CUfileError_t cuFileWriteAsync(CUfileHandle_t handle,
                               void* memory,
                               std::size_t* bytes,
                               off_t* offset,
                               off_t* memory_offset,
                               ssize_t* result,
                               CUstream stream) {
  return enqueue(handle,
                 {-1, static_cast<std::byte*>(memory), bytes, offset, memory_offset, result, true},
                 stream);
}
}
