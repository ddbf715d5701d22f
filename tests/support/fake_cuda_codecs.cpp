// SPDX-License-Identifier: Apache-2.0
// The kernels of the library's codecs on the stand-in for a CUDA device, which has no cores: what
// each of their threads does is done on the host, in the order of the stream.
#include <spillway/policy/codec/stripe_kernels.hpp>

#include <cuda_runtime_api.h>

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include <support/fake_cuda_call.hpp>
#include <support/stripes_on_host.hpp>

namespace {

using spillway::test::HostTeam;

/// The kernels that programs have, by what stands for them on the host.
std::map<void const*, std::string>& kernels() {
  static auto* const all = new std::map<void const*, std::string>;
  return *all;
}

/// What a launch is to run.
class Launch {
 public:
  /// @throws std::bad_alloc
  template <class Kernel>
  static std::unique_ptr<Launch> of(void const* kernel, unsigned teams) {
    auto launch = std::make_unique<Launch>();
    launch->run_ = [kernel = *static_cast<Kernel const*>(kernel), teams] {
      auto const memory = std::make_unique<typename Kernel::Memory>();
      for (unsigned team = 0; team < teams; ++team) {
        kernel(HostTeam{}, *memory, team);
      }
    };
    return launch;
  }
  void run() const { run_(); }

 private:
  std::function<void()> run_;
};

template <class Stripe>
std::unique_ptr<Launch> launch_of(std::string const& name, void const* kernel, unsigned teams) {
  using namespace spillway::detail;
  auto const is = [&](char const* part) { return name.find(part) != std::string::npos; };
  if (is("MeasureStripes")) {
    return Launch::of<MeasureStripes<Stripe>>(kernel, teams);
  }
  if (is("WriteStripes")) {
    return Launch::of<WriteStripes<Stripe>>(kernel, teams);
  }
  if (is("ReadStripes")) {
    return Launch::of<ReadStripes<Stripe>>(kernel, teams);
  }
  return Launch::of<PlaceStripes>(kernel, teams);
}

void run(void* argument) {
  std::unique_ptr<Launch> const launch{static_cast<Launch*>(argument)};
  launch->run();
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
  if (kernel.find("spillway") != std::string::npos && kernel.find("Stripes") != std::string::npos) {
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
  bool const is_bitmap = found->second.find("ZeroBitmapStripe") != std::string::npos;
  auto launch =
      is_bitmap ? launch_of<spillway::detail::ZeroBitmapStripe>(found->second, arguments[0], grid.x)
                : launch_of<spillway::detail::Bfloat16Stripe>(found->second, arguments[0], grid.x);
  cudaError_t const status = cudaLaunchHostFunc(stream, &run, launch.get());
  if (status == cudaSuccess) {
    launch.release();
  }
  return status;
}
}
