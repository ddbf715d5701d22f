// SPDX-License-Identifier: Apache-2.0
#include <spillway/core/fence.hpp>
#include <spillway/core/types.hpp>

int main() {
  using namespace spillway::literals;
  spillway::Fence const fence{spillway::Ticket{spillway::StreamIndex{1}, 4_KiB}};
  return fence.is_empty() ? 1 : 0;
}
