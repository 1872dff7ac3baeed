// SPDX-License-Identifier: Apache-2.0
// The kernels for AVX-512 (F, BW, DQ, VL); CMakeLists.txt gives this file the flags.
#if defined(__x86_64__)
#if !defined(__AVX512F__) || !defined(__AVX512BW__) || !defined(__AVX512DQ__) || \
    !defined(__AVX512VL__) || !defined(__BMI2__)
#error "compile this file with -mavx512f -mavx512bw -mavx512dq -mavx512vl -mbmi2"
#endif
#define COMMRT_VEC_BYTES 64
#include "kernels/kernels_table.hpp"

namespace commrt {

constexpr KernelSet kernels_avx512 = make_kernel_set("avx512");

}  // namespace commrt
#endif
