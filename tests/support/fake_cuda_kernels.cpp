// SPDX-License-Identifier: Apache-2.0
// The library's kernels on the stand-in for a CUDA device, which has no cores: the host does the
// work of each of their threads, in stream order.
#include <spillway/device/cuda/copy_kernel.hpp>
#include <spillway/policy/codec/plane_kernels.hpp>
#include <spillway/policy/codec/stripe_kernels.hpp>

#include <cuda_runtime_api.h>

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <support/fake_cuda_call.hpp>
#include <support/stripes_on_host.hpp>

namespace {

using spillway::test::HostTeam;

/// The work of one launch, which frees itself.
using Work = std::function<void()>;

template <class Kernel>
Work work_of(void const* kernel, unsigned teams) {
  return [kernel = *static_cast<Kernel const*>(kernel), teams] {
    auto const memory = std::make_unique<typename Kernel::Memory>();
    for (unsigned team = 0; team < teams; ++team) {
      kernel(HostTeam{}, *memory, team);
    }
  };
}

/// The library's kernels, by two parts of their names.
struct KnownKernel {
  std::string name;
  std::string stripe;
  Work (*work_of)(void const*, unsigned);
};

template <class Stripe>
void add_stripes(std::vector<KnownKernel>& all, char const* stripe) {
  using namespace spillway::detail;
  all.push_back({"MeasureStripes", stripe, &work_of<MeasureStripes<Stripe>>});
  all.push_back({"WriteStripes", stripe, &work_of<WriteStripes<Stripe>>});
  all.push_back({"ReadStripes", stripe, &work_of<ReadStripes<Stripe>>});
}

std::vector<KnownKernel> const& known_kernels() {
  using namespace spillway::detail;
  static auto const* const all = [] {
    auto* const made = new std::vector<KnownKernel>;
    add_stripes<ZeroBitmapStripe>(*made, "ZeroBitmapStripe");
    add_stripes<Bfloat16Stripe>(*made, "Bfloat16Stripe");
    made->push_back({"CopyBlocks", "128", &work_of<FewCopyBlocks>});
    made->push_back({"CopyBlocks", "1000", &work_of<ManyCopyBlocks>});
    made->push_back({"PlaceStripes", "", &work_of<PlaceStripes>});
    made->push_back({"SplitPlanes", "", &work_of<SplitPlanes>});
    made->push_back({"PlacePlanes", "", &work_of<PlacePlanes>});
    made->push_back({"WritePlanes", "", &work_of<WritePlanes>});
    made->push_back({"MakeSpare", "", &work_of<MakeSpare>});
    made->push_back({"FetchPlanes", "", &work_of<FetchPlanes>});
    made->push_back({"JoinPlanes", "", &work_of<JoinPlanes>});
    return made;
  }();
  return *all;
}

KnownKernel const* find_kernel(std::string const& name) {
  auto const has = [&](std::string const& part) { return name.find(part) != std::string::npos; };
  for (KnownKernel const& known : known_kernels()) {
    if (has("run_teams") && has(known.name) && has(known.stripe)) {
      return &known;
    }
  }
  return nullptr;
}

/// The program's kernels, by their host-side stub addresses.
std::map<void const*, KnownKernel const*>& kernels() {
  static auto* const all = new std::map<void const*, KnownKernel const*>;
  return *all;
}

void run(void* argument) {
  std::unique_ptr<Work> const work{static_cast<Work*>(argument)};
  (*work)();
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
  if (KnownKernel const* const known = find_kernel(name)) {
    kernels()[host] = known;
  }
}

/// Loads the kernel, which takes effect at once.
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, void const* kernel) {
  return fake_cuda::call("cudaFuncGetAttributes", [&] {
    fake_cuda::require_safe();
    *attributes = {};
    fake_cuda::require(kernels().count(kernel) != 0, cudaErrorInvalidDeviceFunction);
  });
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
  auto work = std::make_unique<Work>(found->second->work_of(arguments[0], grid.x));
  cudaError_t const status = cudaLaunchHostFunc(stream, &run, work.get());
  if (status == cudaSuccess) {
    work.release();
  }
  return status;
}
}
