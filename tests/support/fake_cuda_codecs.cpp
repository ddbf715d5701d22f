// SPDX-License-Identifier: Apache-2.0
// The kernels of the library's codecs on the stand-in for a CUDA device, which has no cores: what
// each of their threads does is done on the host, in the order of the stream.
#include <spillway/core/types.hpp>
#include <spillway/policy/codec/stripe_kernels.hpp>

#include <cuda_runtime_api.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include <support/fake_cuda_call.hpp>
#include <support/stripes_on_host.hpp>

namespace {

using spillway::detail::KernelSlot;
using spillway::detail::StripeMemory;
using spillway::test::HostTeam;

/// The kernels that programs have, by what stands for them on the host.
std::map<void const*, std::string>& kernels() {
  static auto* const all = new std::map<void const*, std::string>;
  return *all;
}

struct Launch {
  std::string kernel;
  unsigned stripes;
  std::byte* memory;
  std::uint64_t bytes;
  KernelSlot slot;

  [[nodiscard]] bool is(char const* name) const { return kernel.find(name) != std::string::npos; }

  template <class Stripe>
  void run() const {
    using Kernels = spillway::detail::StripeKernels<Stripe>;
    if (is("place_stripes")) {
      std::array<std::uint64_t, HostTeam::size> sums{};
      Kernels::place_stripes(HostTeam{}, sums.data(), bytes, slot);
      return;
    }
    auto const shared = std::make_unique<StripeMemory>();
    for (std::uint64_t stripe = 0; stripe < stripes; ++stripe) {
      if (is("measure_stripes")) {
        Kernels::measure_stripe(HostTeam{}, *shared, memory, bytes, slot, stripe);
      } else if (is("write_stripes")) {
        Kernels::write_stripe(HostTeam{}, *shared, memory, bytes, slot, stripe);
      } else {
        Kernels::read_stripe(HostTeam{}, *shared, slot, memory, bytes, stripe);
      }
    }
  }
};

void run(void* argument) {
  std::unique_ptr<Launch> const launch{static_cast<Launch*>(argument)};
  if (launch->is("ZeroBitmapStripe")) {
    launch->run<spillway::detail::ZeroBitmapStripe>();
  } else {
    launch->run<spillway::detail::Bfloat16Stripe>();
  }
}

template <class T>
T argument(void** arguments, int i) {
  return *static_cast<T*>(arguments[i]);
}

}  // namespace

extern "C" {

// Called before `main` for each kernel of a program.
void __cudaRegisterFunction(void** /*image*/,
                            char const* host,
                            char* /*device*/,
                            char const* name,
                            int,
                            uint3*,
                            uint3*,
                            dim3*,
                            dim3*,
                            int*) {
  std::string const kernel{name};
  if (kernel.find("spillway") != std::string::npos && kernel.find("stripes") != std::string::npos) {
    kernels()[host] = kernel;
  }
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, void const* kernel) {
  *attributes = {};
  return kernels().count(kernel) != 0 ? cudaSuccess : cudaErrorInvalidDeviceFunction;
}

cudaError_t cudaHostGetDevicePointer(void** on_device, void* on_host, unsigned /*flags*/) {
  return fake_cuda::call("cudaHostGetDevicePointer", [&] {
    fake_cuda::require(fake_cuda::fake->contains(on_host, 1, false));
    *on_device = on_host;
  });
}

cudaError_t cudaLaunchKernel(void const* kernel,
                             dim3 grid,
                             dim3 /*block*/,
                             void** arguments,
                             std::size_t /*shared_bytes*/,
                             cudaStream_t stream) {
  auto const found = kernels().find(kernel);
  if (found == kernels().end()) {
    return fake_cuda::last_error = cudaErrorNoKernelImageForDevice;
  }
  auto launch = std::make_unique<Launch>(Launch{found->second, grid.x, nullptr, 0, {}});
  if (launch->is("place_stripes")) {
    launch->bytes = argument<std::uint64_t>(arguments, 0);
    launch->slot = argument<KernelSlot>(arguments, 1);
  } else if (launch->is("read_stripes")) {
    launch->slot = argument<KernelSlot>(arguments, 0);
    launch->memory = argument<std::byte*>(arguments, 1);
    launch->bytes = argument<std::uint64_t>(arguments, 2);
  } else {
    launch->memory = argument<std::byte*>(arguments, 0);
    launch->bytes = argument<std::uint64_t>(arguments, 1);
    launch->slot = argument<KernelSlot>(arguments, 2);
  }
  cudaError_t const status = cudaLaunchHostFunc(stream, &run, launch.get());
  if (status == cudaSuccess) {
    launch.release();
  }
  return status;
}
}
