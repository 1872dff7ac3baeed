// SPDX-License-Identifier: Apache-2.0
// Sums of two values that fit into a message line. There the general kernels take longer to
// get ready than to add; these are plain loops in the caller, with the same results.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/kernels.hpp"

namespace commrt {

enum class FewSum : std::uint8_t { None, U32, U64, F32, F64 };

inline FewSum few_sum_of(DType dtype, RedOp op) {
  if (op != RedOp::Sum && op != RedOp::Avg && op != RedOp::PremulSum) return FewSum::None;
  switch (dtype) {
    case DType::I32:
    case DType::U32: return FewSum::U32;
    case DType::I64:
    case DType::U64: return FewSum::U64;
    case DType::F32: return FewSum::F32;
    case DType::F64: return FewSum::F64;
    default: return FewSum::None;
  }
}

template <class T>
inline void add_few(void* dst, const void* a, const void* b, std::size_t n) {
  for (std::size_t at = 0; at < n * sizeof(T); at += sizeof(T)) {
    T one, other;
    std::memcpy(&one, static_cast<const unsigned char*>(a) + at, sizeof(T));
    std::memcpy(&other, static_cast<const unsigned char*>(b) + at, sizeof(T));
    one += other;
    std::memcpy(static_cast<unsigned char*>(dst) + at, &one, sizeof(T));
  }
}

// dst[i] = a[i] + b[i] for a few elements; dst may be a or b. False if `sum` is none.
inline bool add_few(FewSum sum, void* dst, const void* a, const void* b, std::size_t n) {
  switch (sum) {
    case FewSum::F32: add_few<float>(dst, a, b, n); return true;
    case FewSum::F64: add_few<double>(dst, a, b, n); return true;
    case FewSum::U32: add_few<std::uint32_t>(dst, a, b, n); return true;
    case FewSum::U64: add_few<std::uint64_t>(dst, a, b, n); return true;
    case FewSum::None: break;
  }
  return false;
}

}  // namespace commrt
