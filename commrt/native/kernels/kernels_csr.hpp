// SPDX-License-Identifier: Apache-2.0
// Rows of a sparse matrix times a dense one, with the vectors of one instruction set.
//
// A block of a row of the result stays in registers while the row's entries are added. So each
// entry costs the reading of its row of x, and nothing is written before the end. The last block
// overlaps the one before it where columns fill no vector: what both compute is equal.
#pragma once

#include "kernels/csr.hpp"
#include "kernels/kernels_vector.hpp"

namespace commrt {
namespace {

constexpr int kMostVectors = 8;  // the sums, a value and a product fit into 16 registers
constexpr std::int64_t kAhead = 8;  // entries between a row that is asked for, and its use

template <class T, std::size_t Bytes>
struct Lanes {
  typedef T Values __attribute__((vector_size(Bytes)));
  static constexpr std::int64_t kCount = Bytes / sizeof(T);
};

template <class T>
struct Lanes<T, sizeof(T)> {
  using Values = T;
  static constexpr std::int64_t kCount = 1;
};

// N vectors of one row of the result, from `column` on.
template <class T, class I, std::size_t Bytes, int N>
COMMRT_INLINE void multiply_block(const csr::Product& job, std::int64_t row, std::int64_t column) {
  using Values = typename Lanes<T, Bytes>::Values;
  const I* indptr = static_cast<const I*>(job.a.indptr);
  const I* indices = static_cast<const I*>(job.a.indices);
  const T* data = static_cast<const T*>(job.a.data);
  const T* x = static_cast<const T*>(job.x) + column;
  const std::int64_t final = static_cast<std::int64_t>(indptr[job.last]) - 1;
  const std::int64_t end = indptr[row + 1];
  Values sums[N] = {};
  for (std::int64_t k = indptr[row]; k < end; ++k) {
    const std::int64_t ahead = k + kAhead < final ? k + kAhead : final;
    const Byte* soon = reinterpret_cast<const Byte*>(x + indices[ahead] * job.width);
    for (std::size_t n = 0; n < N * Bytes; n += kLine) __builtin_prefetch(soon + n);
    const T value = data[k];
    const Byte* from = reinterpret_cast<const Byte*>(x + indices[k] * job.width);
    for (int n = 0; n < N; ++n) {
      Values held;
      __builtin_memcpy(&held, from + n * Bytes, Bytes);
      sums[n] += value * held;
    }
  }
  T* to = static_cast<T*>(job.y) + row * job.width + column;
  __builtin_memcpy(to, sums, sizeof(sums));
}

template <class T, class I, std::size_t Bytes, int N>
void multiply_blocks(const csr::Product& job) {
  constexpr std::int64_t step = N * Lanes<T, Bytes>::kCount;
  for (std::int64_t row = job.first; row < job.last; ++row) {
    std::int64_t column = 0;
    for (; column + step <= job.width; column += step) {
      multiply_block<T, I, Bytes, N>(job, row, column);
    }
    if (column < job.width) multiply_block<T, I, Bytes, N>(job, row, job.width - step);
  }
}

// The widest blocks that the columns fill.
template <class T, class I, std::size_t Bytes, int N>
void multiply_widest(const csr::Product& job) {
  if constexpr (N > 1) {
    if (job.width < N * Lanes<T, Bytes>::kCount) return multiply_widest<T, I, Bytes, N - 1>(job);
  }
  multiply_blocks<T, I, Bytes, N>(job);
}

template <class T, class I, std::size_t Bytes = kVec>
void multiply_rows(const csr::Product& job) {
  if constexpr (Bytes > sizeof(T)) {
    if (job.width < Lanes<T, Bytes>::kCount) return multiply_rows<T, I, Bytes / 2>(job);
  }
  multiply_widest<T, I, Bytes, kMostVectors>(job);
}

constexpr csr::MultiplyKernels make_multiply_kernels() {
  return {{{multiply_rows<float, std::int32_t>, multiply_rows<float, std::int64_t>},
           {multiply_rows<double, std::int32_t>, multiply_rows<double, std::int64_t>}}};
}

}  // namespace
}  // namespace commrt
