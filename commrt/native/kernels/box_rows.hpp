// SPDX-License-Identifier: Apache-2.0
// Copies of short rows, and walks over the rows of boxes, for boxes.cpp and box_twins.cpp.
#pragma once

#include <cstring>
#include <type_traits>

#include "kernels/boxes.hpp"

namespace commrt {

constexpr size_t kBatchBytes = 4096;  // of short rows that are handled at once
constexpr int64_t kLineBytes = 64;
constexpr int64_t kAtOnce = 8;  // rows

// Over the elements of two boxes of one shape.

Walk walk_between(const Box& box, const Box& other);

// Calls run(at_first, at_second, rows, first_stride, second_stride) for all rows of a walk.
template <class First, class Second, class Run>
void each_run(const Walk& walk, First* first, Second* second, Run run) {
  if (walk.ndim == 0) {
    run(first, second, int64_t{1}, int64_t{0}, int64_t{0});
    return;
  }
  const int inner = walk.ndim - 1;
  int64_t at[kMostDims] = {};
  for (;;) {
    run(first, second, walk.shape[inner], walk.first[inner], walk.second[inner]);
    int dim = inner - 1;
    for (; dim >= 0; --dim) {
      first += walk.first[dim];
      second += walk.second[dim];
      if (++at[dim] < walk.shape[dim]) break;
      first -= walk.first[dim] * walk.shape[dim];
      second -= walk.second[dim] * walk.shape[dim];
      at[dim] = 0;
    }
    if (dim < 0) return;
  }
}

// Calls run(row_nbytes as a constant) where there are loops for such rows.
template <class Run>
bool with_short_row(size_t row_nbytes, Run run) {
  switch (row_nbytes) {
    case 1: run(std::integral_constant<size_t, 1>{}); return true;
    case 2: run(std::integral_constant<size_t, 2>{}); return true;
    case 4: run(std::integral_constant<size_t, 4>{}); return true;
    case 8: run(std::integral_constant<size_t, 8>{}); return true;
    case 12: run(std::integral_constant<size_t, 12>{}); return true;
    case 16: run(std::integral_constant<size_t, 16>{}); return true;
    case 24: run(std::integral_constant<size_t, 24>{}); return true;
    case 32: run(std::integral_constant<size_t, 32>{}); return true;
    default: return false;
  }
}

// Copies eight rows; `kToWhole`: they are to lie one after another, `kFromWhole`: they do.
// Those of up to 8 bytes are all loaded before any is stored: a store per load took 1.8 to 3.6
// times as long. Longer ones do not stay in registers, and took 0.6 times as long that way.
template <size_t kBytes, bool kToWhole, bool kFromWhole>
inline void copy_eight(unsigned char* to, const unsigned char* from, int64_t to_stride,
                       int64_t from_stride) {
  struct Row {
    unsigned char bytes[kBytes];
  };
  if (kToWhole) to_stride = kBytes;
  if (kFromWhole) from_stride = kBytes;
  if (kBytes > sizeof(uint64_t)) {
    for (int k = 0; k < kAtOnce; ++k) {
      std::memcpy(to + k * to_stride, from + k * from_stride, kBytes);
    }
    return;
  }
  Row held[kAtOnce];
  if (kFromWhole) {
    std::memcpy(held, from, sizeof held);
  } else {
    for (int k = 0; k < kAtOnce; ++k) std::memcpy(&held[k], from + k * from_stride, kBytes);
  }
  if (kToWhole) {
    std::memcpy(to, held, sizeof held);
  } else {
    for (int k = 0; k < kAtOnce; ++k) std::memcpy(to + k * to_stride, &held[k], kBytes);
  }
}

template <size_t kBytes, bool kToWhole, bool kFromWhole>
void copy_each(unsigned char* to, const unsigned char* from, int64_t rows, int64_t to_stride,
               int64_t from_stride) {
  int64_t i = 0;
  for (; i + kAtOnce <= rows; i += kAtOnce) {
    copy_eight<kBytes, kToWhole, kFromWhole>(to, from, to_stride, from_stride);
    to += kAtOnce * to_stride;
    from += kAtOnce * from_stride;
  }
  for (; i < rows; ++i) {
    std::memcpy(to, from, kBytes);
    to += to_stride;
    from += from_stride;
  }
}

inline void fetch_to_write(const unsigned char* line) {
#if defined(__x86_64__)
  asm volatile("prefetchw %0" : : "m"(*line));  // GCC's own fetches for reading, unless told
#else
  __builtin_prefetch(line, 1);
#endif
}

inline void fetch_to_read(const unsigned char* line) { __builtin_prefetch(line, 0); }

}  // namespace commrt
