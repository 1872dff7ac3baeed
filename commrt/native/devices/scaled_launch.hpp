// SPDX-License-Identifier: Apache-2.0
// Launches that avg and premul_sum need beside sums: products with a factor, and quotients. It
// checks what a launch asks for, and runs it for devices without kernels.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/kernels.hpp"
#include "types.hpp"

namespace commrt {

// Bits that say what a scaled sum multiplies and adds, as the kernels have them.
inline constexpr unsigned kScaleDst = 1, kScaleSrc = 2;
inline constexpr unsigned kWithoutDst = 4;  // dst = src, scaled or not: dst is not read
inline constexpr unsigned kMostScaleBits = 7;

// Why there is no such launch; null where there is.
inline const char* why_no_scaled_sum(DType dtype, unsigned which) {
  if (which > kMostScaleBits) return "launch_scaled_sum(): `which` has bits beyond 1, 2 and 4";
  if (!combine_for(dtype, RedOp::PremulSum))
    return "launch_scaled_sum(): premul_sum is not defined for the type";
  return nullptr;
}

inline const char* why_no_divide(DType dtype, std::int64_t divisor) {
  if (divisor < 1) return "launch_divide(): the divisor must be 1 or more";
  switch (dtype) {
    case DType::I8: case DType::I16: case DType::I32: case DType::I64:
    case DType::U8: case DType::U16: case DType::U32: case DType::U64: return nullptr;
    default: return "launch_divide(): only integers are divided; floats scale their inputs";
  }
}

inline void run_scaled_sum(DType dtype, void* dst, const void* src, std::size_t count,
                           unsigned which, Scale factor) {
  const bool alone = (which & kWithoutDst) != 0;
  const void* const inputs[] = {alone ? src : dst, src};
  const std::uint64_t scaled = alone ? (which & kScaleSrc) >> 1 : which & 3u;
  combine_for(dtype, RedOp::PremulSum)(dst, nullptr, inputs, alone ? 1 : 2, count, &scaled, factor,
                                       Store::Plain);
}

}  // namespace commrt
