// SPDX-License-Identifier: Apache-2.0
// Element types and reductions, with the codes of commrt/vocabulary/dtypes.py (a unit test compares).
#pragma once

#include <cstddef>
#include <cstdint>

namespace commrt {

enum class DType : std::uint8_t {
  Bool, I8, I16, I32, I64, U8, U16, U32, U64, F16, BF16, F32, F64, C64, C128,
  F8E4M3, F8E5M2
};
constexpr int kNumDTypes = 17;

enum class RedOp : std::uint8_t {
  Sum, Prod, Min, Max, Avg, Land, Lor, Lxor, Band, Bor, Bxor, PremulSum
};
constexpr int kNumRedOps = 12;

constexpr int kHost = -1;  // as the number of a device

constexpr std::size_t item_size(DType dtype) {
  constexpr std::uint8_t sizes[kNumDTypes] = {1, 1, 2, 4, 8, 1, 2, 4, 8, 2, 2, 4, 8, 8, 16,
                                               1, 1};
  return sizes[static_cast<int>(dtype)];
}

}  // namespace commrt
