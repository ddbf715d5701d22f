// SPDX-License-Identifier: Apache-2.0
// A library that gives large-model support to a program in C++ that uses PyTorch's CPU tensors,
// without changing or compiling the program:
//
//   SPILLWAY_LIMIT_MIB=4096 LD_PRELOAD=$PWD/libspillway_preload.so ./program
//
// SPILLWAY_LEAST_BYTES=N lets tensors of N bytes and more leave, instead of 8192. To test a
// program, SPILLWAY_RECLAIM_MS=N also swaps out all tensors that are not in use every N
// milliseconds.
#include <spillway/interop/torch.hpp>

#include <charconv>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include <ATen/ATen.h>
#include <dlfcn.h>
#include <pthread.h>
#include <torch/csrc/jit/serialization/pickler_helper.h>

namespace {

using Support = spillway::torch::HostSupport;

/// Returns the number in an environment variable, or 0 if it is not set.
///
/// @throws std::invalid_argument if it is no whole number up to `most`
[[nodiscard]] std::size_t number_in(char const* variable, std::size_t most) {
  char const* const text = std::getenv(variable);
  if (text == nullptr || *text == '\0') {
    return 0;
  }
  char const* const end = text + std::strlen(text);
  std::size_t number = 0;
  auto const [past, error] = std::from_chars(text, end, number);
  if (error != std::errc{} || past != end || number > most) {
    throw std::invalid_argument{std::string{"spillway: "} + variable + " is '" + text +
                                "': set it to a whole number up to " + std::to_string(most)};
  }
  return number;
}

void print_statistics() {
  spillway::Stats const stats = Support::stats();
  std::fprintf(stderr,
               "spillway: at most %zu of %zu MiB of tensors were on the device; %zu MiB were "
               "swapped out\n",
               static_cast<std::size_t>(stats.resident.bytes.peak) >> 20U,
               static_cast<std::size_t>(stats.allocated.bytes.peak) >> 20U,
               static_cast<std::size_t>(stats.swap_outs.bytes) >> 20U);
}

/// Installs support when the library is loaded, which is after PyTorch and before `main`.
struct Installed {
  Installed() {
    std::chrono::milliseconds period{0};
    try {
      constexpr std::size_t most = std::numeric_limits<std::size_t>::max();
      constexpr std::size_t day_ms = 24UL * 60 * 60 * 1000;
      spillway::torch::InstallOptions options;
      options.limit = number_in("SPILLWAY_LIMIT_MIB", most >> 20U) << 20U;
      options.least_bytes = number_in("SPILLWAY_LEAST_BYTES", most);
      period = std::chrono::milliseconds{number_in("SPILLWAY_RECLAIM_MS", day_ms)};
      Support::install(options);
    } catch (std::exception const& error) {
      std::fprintf(stderr, "%s\n", error.what());
      std::_Exit(1);
    }
    (void)std::atexit(&print_statistics);
    if (period.count() != 0) {
      std::thread{[period] {
        try {
          for (;;) {
            (void)Support::reclaim();
            std::this_thread::sleep_for(period);
          }
        } catch (std::exception const& error) {
          std::fprintf(stderr, "%s\n", error.what());
        }
      }}.detach();
    }
  }
} const installed;

struct Start {
  void* (*function)(void*);
  void* argument;
};

/// Whether a thread's function belongs to OpenMP. Such a thread runs parts of an operation that
/// another thread has begun.
[[nodiscard]] bool is_of_openmp(void* function) {
  Dl_info found{};
  if (::dladdr(function, &found) == 0) {
    return false;
  }
  std::string const library = std::filesystem::path{found.dli_fname}.filename();
  return library.rfind("libgomp", 0) == 0 || library.rfind("libomp", 0) == 0 ||
         library.rfind("libiomp", 0) == 0;
}

void* run_with_hook(void* start) {
  std::unique_ptr<Start> const owned{static_cast<Start*>(start)};
  Start const call = *owned;
  Support::set_hook(true);
  return call.function(call.argument);
}

/// Returns a tensor on a copy of another one's storage, in memory that never leaves.
[[nodiscard]] at::Tensor copied(at::Tensor const& tensor) {
  std::size_t const bytes = tensor.storage().nbytes();
  at::DataPtr memory = Support::installed().tensors.allocate_small(bytes);
  {
    spillway::torch::HeldStorages<spillway::torch::HostSite<>> held{/*may_write=*/false};
    held.add(tensor.storage());
    held.enter();
    std::memcpy(memory.get(), tensor.storage().data(), bytes);
  }
  c10::Storage storage{c10::Storage::use_byte_size_t{}, bytes, std::move(memory)};
  return at::empty({0}, at::kByte).set_(std::move(storage));
}

}  // namespace

/// Takes the place of PyTorch's function, which gives a tensor's address to the function that
/// writes it to a file.
torch::jit::WriteableTensorData torch::jit::getWriteableTensorData(at::Tensor const& tensor,
                                                                   bool to_cpu) {
  static auto const get = reinterpret_cast<decltype(&getWriteableTensorData)>(
      ::dlsym(RTLD_NEXT, "_ZN5torch3jit22getWriteableTensorDataERKN2at6TensorEb"));
  WriteableTensorData data = get(tensor, to_cpu);
  if (Support::is_ours(data.tensor_)) {
    data.tensor_ = copied(data.tensor_);
  }
  return data;
}

/// Takes the place of the system's function, so that the threads of the program have the hook.
extern "C" int pthread_create(pthread_t* thread,
                              pthread_attr_t const* attributes,
                              void* (*function)(void*),
                              void* argument) {
  static auto const create =
      reinterpret_cast<decltype(&pthread_create)>(::dlsym(RTLD_NEXT, "pthread_create"));
  if (is_of_openmp(reinterpret_cast<void*>(function))) {
    return create(thread, attributes, function, argument);
  }
  auto start = std::make_unique<Start>(Start{function, argument});
  int const error = create(thread, attributes, &run_with_hook, start.get());
  if (error == 0) {
    (void)start.release();  // the thread owns it
  }
  return error;
}
