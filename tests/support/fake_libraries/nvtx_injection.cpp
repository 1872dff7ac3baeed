// SPDX-License-Identifier: Apache-2.0
// What a profiler is to the real NVTX: a library that it injects, which takes the calls. Named by
// NVTX_INJECTION64_PATH; compiled with NVTX's own headers, for tests.
#include <nvtx3/nvToolsExt.h>

#define nvtxDomainCreateA fake_create
#define nvtxDomainRangePushEx fake_push
#define nvtxDomainRangePop fake_pop
#include "fake_nvtx.cpp"

extern "C" int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get_table) {
  const auto* const callbacks =
      static_cast<const NvtxExportTableCallbacks*>(get_table(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable table = nullptr;
  unsigned int count = 0;
  if (callbacks == nullptr ||
      callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &table, &count) == 0 ||
      count <= NVTX_CBID_CORE2_DomainRangePop) {
    return 0;
  }
  const auto take = [&](unsigned int which, auto* function) {
    *table[which] = reinterpret_cast<NvtxFunctionPointer>(function);
  };
  take(NVTX_CBID_CORE2_DomainCreateA, &fake_create);
  take(NVTX_CBID_CORE2_DomainRangePushEx, &fake_push);
  take(NVTX_CBID_CORE2_DomainRangePop, &fake_pop);
  return 1;
}
