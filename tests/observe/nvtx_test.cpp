// SPDX-License-Identifier: Apache-2.0
#include <spillway/observe/nvtx.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <string>
#include <vector>

using namespace spillway;

namespace {

/// A tool that writes down what it is told, attached the way profilers attach themselves.
struct Tool {
  std::string domain;
  std::vector<std::string> categories{"none"};
  std::vector<std::string> log;
  std::vector<std::size_t> payloads;
};
Tool tool;

nvtxDomainHandle_t create_domain(char const* name) {
  tool.domain = name;
  return reinterpret_cast<nvtxDomainHandle_t>(&tool);
}
void destroy_domain(nvtxDomainHandle_t /*domain*/) {
  tool.log.emplace_back("destroyed");
}
void name_category(nvtxDomainHandle_t /*domain*/, std::uint32_t category, char const* name) {
  CHECK(category == tool.categories.size());
  tool.categories.emplace_back(name);
}
void mark(nvtxDomainHandle_t domain, nvtxEventAttributes_t const* attributes) {
  CHECK(reinterpret_cast<Tool*>(domain) == &tool);
  CHECK(attributes->version == NVTX_VERSION);
  CHECK(attributes->size == sizeof(nvtxEventAttributes_t));
  CHECK(attributes->messageType == NVTX_MESSAGE_TYPE_ASCII);
  CHECK(tool.categories.at(attributes->category) == attributes->message.ascii);
  tool.log.emplace_back(attributes->message.ascii);
  tool.payloads.push_back(attributes->payload.ullValue);
}
nvtxRangeId_t start(nvtxDomainHandle_t /*domain*/, nvtxEventAttributes_t const* attributes) {
  tool.log.push_back(std::string{"start "} + attributes->message.ascii);
  return tool.log.size();
}
void end(nvtxDomainHandle_t /*domain*/, nvtxRangeId_t range) {
  tool.log.push_back("end " + tool.log.at(range - 1).substr(6));
}

template <class Function>
void put(NvtxFunctionTable table, NvtxCallbackIdCore2 id, Function function) {
  *table[id] = reinterpret_cast<NvtxFunctionPointer>(function);
}

int attach(NvtxGetExportTableFunc_t get_table) {
  auto const* callbacks =
      static_cast<NvtxExportTableCallbacks const*>(get_table(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable table = nullptr;
  unsigned size = 0;
  if (callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &table, &size) == 0) {
    return 0;
  }
  put(table, NVTX_CBID_CORE2_DomainCreateA, create_domain);
  put(table, NVTX_CBID_CORE2_DomainDestroy, destroy_domain);
  put(table, NVTX_CBID_CORE2_DomainNameCategoryA, name_category);
  put(table, NVTX_CBID_CORE2_DomainMarkEx, mark);
  put(table, NVTX_CBID_CORE2_DomainRangeStartEx, start);
  put(table, NVTX_CBID_CORE2_DomainRangeEnd, end);
  return 1;
}

}  // namespace

TEST_SUITE("nvtx") {
  // One case: a tool is asked for once in a program.
  TEST_CASE("NvtxMarks: a profiler sees a mark for each record and a range for each step") {
    InitializeInjectionNvtx2_fnptr = attach;
    {
      NvtxMarks marks;
      CHECK(tool.domain == "spillway");
      marks.on_record({.kind = RecordKind::allocate, .bytes = 10});
      marks.on_record({.kind = RecordKind::step});
      marks.on_record({.kind = RecordKind::swap_out, .bytes = std::size_t{5} << 32U});
      marks.on_record({.kind = RecordKind::step});
    }

    CHECK(tool.categories.size() == static_cast<std::size_t>(RecordKind::step) + 2);
    CHECK(tool.categories.back() == "step");
    std::vector<std::string> const expected{
        "allocate", "start step", "swap_out", "end step", "start step", "end step", "destroyed"};
    CHECK(tool.log == expected);
    CHECK(tool.payloads == std::vector<std::size_t>{10, std::size_t{5} << 32U});
  }
}
