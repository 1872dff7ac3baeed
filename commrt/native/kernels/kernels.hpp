// SPDX-License-Identifier: Apache-2.0
// Reductions and copies of contiguous memory, dispatched to the instruction set at run time.
//
// Results depend on the inputs and their order alone: not on the instruction set, on
// alignment, or on how a vector is cut into pieces. The exception are the sign and payload
// of a NaN that sum and prod return.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "types.hpp"

namespace commrt {

// The destinations, of two, that are written with non-temporal stores. These pay for results that
// leave the cache before they are read. Publish such results after store_fence().
enum class Store : std::uint8_t { Plain = 0, Stream = 1, Stream2 = 2, StreamBoth = 3 };

// The factor of inputs: `real` for floats and complex, `integer` for integers. An integer type
// takes its low bits, so that every factor of the type can be said.
struct Scale {
  double real = 1;
  std::int64_t integer = 1;
  bool operator==(const Scale& other) const {
    return real == other.real && integer == other.integer;
  }
};

// dst[i] = srcs[0][i] op srcs[1][i] op ... op srcs[nsrc-1][i], from left to right, one pass.
//
// - nsrc >= 1; one input is copied, bit for bit unless scaled.
// - dst may be exactly one of the srcs (any one); any other overlap is not allowed.
// - dst2, unless null, receives the same values; it overlaps nothing else.
// - Unless `scaled` is null, inputs k with bit k % 64 of scaled[k / 64] are multiplied by
//   factor first (rounded to the type, or to float32 for the 8- and 16-bit floats). For sum, avg
//   and premul_sum of floats and complex, and premul_sum of integers; ignored elsewhere.
// - Pointers need no alignment; n counts elements.
//
// Integers wrap. The 8- and 16-bit floats are reduced in float32 and rounded once (to nearest
// even; float8_e4m3fn, which has no infinity, goes beyond 464 to NaN). min and max give the
// quiet NaN 0x7fc0... if any of at least two inputs is NaN, and
// take -0 as less than +0. Logical reductions of at least two inputs give 0 or 1. avg is the
// sum: floats scale their inputs, integers call divide_inplace on the total.
using CombineFn = void (*)(void* dst, void* dst2, const void* const* srcs, int nsrc,
                           std::size_t n, const std::uint64_t* scaled, Scale factor,
                           Store store);

// The kernel of a pair that dtypes.check_reduction allows; nullptr for the others.
CombineFn combine_for(DType dtype, RedOp op);

// x[i] /= divisor toward zero, for integers; divisor > 0.
void divide_inplace(DType dtype, void* x, std::size_t n, std::int64_t divisor);

void copy_streaming(void* dst, const void* src, std::size_t nbytes);

// Copies nbytes between buffers that do not overlap.
inline void copy(void* dst, const void* src, std::size_t nbytes, bool streaming = false) {
  if (streaming)
    copy_streaming(dst, src, nbytes);
  else
    std::memcpy(dst, src, nbytes);
}

inline bool streams_first(Store store) { return (static_cast<int>(store) & 1) != 0; }
inline bool streams_second(Store store) { return (static_cast<int>(store) & 2) != 0; }
inline Store store_of(bool first, bool second) {
  return static_cast<Store>((first ? 1 : 0) | (second ? 2 : 0));
}
// The store kind for a kernel whose only destination is what is the second elsewhere.
inline Store store_of_second(Store store) {
  return streams_second(store) ? Store::Stream : Store::Plain;
}

// Orders earlier non-temporal stores of this thread before its later stores.
inline void store_fence() {
#if defined(__x86_64__)
  __builtin_ia32_sfence();
#else
  __atomic_thread_fence(__ATOMIC_RELEASE);
#endif
}

// Instruction sets. The best one of the machine is in use from the start; use_isa is for
// tests and returns false, changing nothing, where the machine lacks that set.
const char* isa();
bool use_isa(const char* name);
int num_isas();
const char* isa_name(int index);  // those of this machine, best last

}  // namespace commrt
