// SPDX-License-Identifier: Apache-2.0
// The function that each kernels_<isa>.cpp provides to kernels.cpp.
#pragma once

#include "kernels/channel_norm.hpp"
#include "kernels/csr.hpp"
#include "kernels/kernels.hpp"
#include "kernels/wire.hpp"

namespace commrt {

struct KernelSet {
  const char* name;
  CombineFn combine[kNumDTypes][kNumRedOps];
  void (*copy_streaming)(void* dst, const void* src, std::size_t nbytes);
  WireKernels wire[kNumWireFormats][2];  // of float32, of float64
  csr::MultiplyKernels multiply_csr;
  channel_norm::Kernels channel_norm[2];  // of float32, of float64
};

extern const KernelSet kernels_base;  // sse2 or neon: every machine of its kind has it
#if defined(__x86_64__)
extern const KernelSet kernels_avx2;
extern const KernelSet kernels_avx512;
#endif

}  // namespace commrt
