// SPDX-License-Identifier: Apache-2.0
// The kernels for any x86-64 (SSE2) or arm64 (NEON) machine.
#define COMMRT_VEC_BYTES 16
#include "kernels/kernels_table.hpp"

namespace commrt {

#if defined(__x86_64__)
constexpr KernelSet kernels_base = make_kernel_set("sse2");
#else
constexpr KernelSet kernels_base = make_kernel_set("neon");
#endif

}  // namespace commrt
