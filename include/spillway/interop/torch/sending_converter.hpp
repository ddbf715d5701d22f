// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/interop/torch/operands.hpp>

#include <cstddef>
#include <optional>
#include <vector>

#include <c10/core/Storage.h>

#if defined(__linux__) && __has_include(<torch/csrc/distributed/rpc/tensorpipe_utils.h>)
#  define SPILLWAY_TORCH_HAS_RPC 1
#  ifndef USE_TENSORPIPE
#    define USE_TENSORPIPE
#  endif
#  include <torch/csrc/distributed/rpc/tensorpipe_utils.h>

namespace torch::distributed::rpc {
// A weak symbol, since PyTorch may have been built without it.
extern __attribute__((weak))
std::array<std::atomic<TensorpipeDeviceTypeConverter const*>,
           static_cast<std::size_t>(c10::DeviceType::COMPILE_TIME_MAX_DEVICE_TYPES)>
    device_type_converter_registry;
}  // namespace torch::distributed::rpc
#endif

namespace spillway::torch {

#ifdef SPILLWAY_TORCH_HAS_RPC

/// Prepares tensors of remote procedure calls for TensorPipe, which takes their addresses on
/// threads of its own and reads them until they have been sent. An error there would end the
/// process.
///
/// A tensor that may be swapped out is swapped in, and passed on as if its memory were not
/// PyTorch's, since PyTorch copies such memory. On devices other than the CPU PyTorch makes no
/// copy, so the tensor is kept resident for good.
template <class Site>
class SendingConverter final : public ::torch::distributed::rpc::TensorpipeDeviceTypeConverter {
 public:
  using Original = ::torch::distributed::rpc::TensorpipeDeviceTypeConverter;
  using Frame = typename Site::State::Hook::Frame;

  explicit SendingConverter(Original const& original) : original_{&original} {}

  std::optional<std::vector<char>>
  prepareTensorForSending(c10::Storage const& storage,
                          std::vector<c10::Stream> const& streams,
                          ::tensorpipe::Message& message) const override {
    c10::StorageImpl* const memory = storage.unsafeGetStorageImpl();
    if (memory == nullptr || !Site::Leases::is_ours(*memory)) {
      return original_->prepareTensorForSending(storage, streams, message);
    }
    bool const has_copy = Site::device().is_cpu();
    Frame frame;
    frame.enter_named({Operand{memory, nullptr, {/*keeps=*/!has_copy, false}}});
    if (!has_copy) {
      return original_->prepareTensorForSending(storage, streams, message);
    }
    c10::Storage const borrowed{
        c10::Storage::use_byte_size_t{},
        storage.nbytes(),
        c10::DataPtr{memory->_mutable_data_ptr_no_checks().get(), storage.device()}};
    auto copy = original_->prepareTensorForSending(borrowed, streams, message);
    if (!copy) {
      frame.enter_named({Operand{memory, nullptr, {/*keeps=*/true, false}}});
    }
    return copy;
  }
  at::DataPtr allocateTensorForReceiving(c10::DeviceIndex index,
                                         std::size_t length,
                                         std::vector<c10::Stream> const& streams,
                                         ::tensorpipe::Allocation& allocation) const override {
    return original_->allocateTensorForReceiving(index, length, streams, allocation);
  }

 private:
  Original const* original_;
};

#endif

/// Installs the preparation for remote procedure calls, for as long as the process lives.
template <class Site>
void install_sending_converter() {
#ifdef SPILLWAY_TORCH_HAS_RPC
  auto* const converters = &::torch::distributed::rpc::device_type_converter_registry;
  if (converters != nullptr) {
    auto& converter = (*converters)[static_cast<std::size_t>(Site::device().type())];
    if (auto const* const original = converter.load()) {
      converter = new SendingConverter<Site>{*original};
    }
  }
#endif
}

}  // namespace spillway::torch
