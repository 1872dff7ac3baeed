// SPDX-License-Identifier: Apache-2.0
// The kernels for AVX2 with F16C; CMakeLists.txt gives this file the flags.
#if defined(__x86_64__)
#if !defined(__AVX2__) || !defined(__F16C__) || defined(__FMA__)
#error "compile this file with -mavx2 -mf16c -mno-fma"
#endif
#define COMMRT_VEC_BYTES 32
#include "kernels/kernels_table.hpp"

namespace commrt {

constexpr KernelSet kernels_avx2 = make_kernel_set("avx2");

}  // namespace commrt
#endif
