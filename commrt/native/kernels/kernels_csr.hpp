// SPDX-License-Identifier: Apache-2.0
// Rows of a sparse matrix times a dense one, with the vectors of one instruction set.
//
// A block of a row of the result stays in registers while the row's entries are added. So each
// entry costs the reading of its row of x, and nothing is written before the end. The last vector
// of a row overlaps the one before it where columns fill no vector: what both compute is equal.
#pragma once

#include "kernels/csr.hpp"
#include "kernels/kernels_vector.hpp"

namespace commrt {
namespace {

constexpr int kMostVectors = 8;  // the sums, a value and a product fit into 16 registers
// Wide rows are asked for some entries ahead. Of narrow ones the core has enough on its way
// itself: to ask costs more than it gives (measured below 256 bytes).
constexpr std::size_t kAskedBytes = 256;
constexpr std::int64_t kAhead = 8;

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

// N vectors of one row of the result, from `column` on; the last one begins `last` columns further.
template <class T, class I, std::size_t Bytes, int N>
COMMRT_INLINE void multiply_block(const csr::Product& job, std::int64_t row, std::int64_t column,
                                  std::int64_t last) {
  using L = Lanes<T, Bytes>;
  const I* indptr = static_cast<const I*>(job.a.indptr);
  const I* indices = static_cast<const I*>(job.a.indices);
  const T* data = static_cast<const T*>(job.a.data);
  const T* x = static_cast<const T*>(job.x) + column;
  const std::int64_t width = L::kCount == 1 ? 1 : job.width;  // lanes of one are for one column
  const std::int64_t final = static_cast<std::int64_t>(indptr[job.last]) - 1;
  const std::int64_t end = indptr[row + 1];
  typename L::Values sums[N] = {};
  for (std::int64_t k = indptr[row]; k < end; ++k) {
    if constexpr (N * Bytes >= kAskedBytes) {
      const std::int64_t ahead = k + kAhead < final ? k + kAhead : final;
      const Byte* soon = reinterpret_cast<const Byte*>(x + indices[ahead] * width);
      for (std::size_t n = 0; n < N * Bytes; n += kLine) __builtin_prefetch(soon + n);
    }
    const T value = data[k];
    const T* from = x + indices[k] * width;
    for (int n = 0; n < N; ++n) {
      typename L::Values held;
      __builtin_memcpy(&held, from + (n == N - 1 ? last : n * L::kCount), Bytes);
      sums[n] += value * held;
    }
  }
  T* to = static_cast<T*>(job.y) + row * width + column;
  for (int n = 0; n < N; ++n) {
    __builtin_memcpy(to + (n == N - 1 ? last : n * L::kCount), &sums[n], Bytes);
  }
}

// Every row: blocks of the most vectors, then one of N vectors for the columns that are left.
template <class T, class I, std::size_t Bytes, int N>
void multiply_blocks(const csr::Product& given) {
  const csr::Product job = given;  // a copy, which no store can change: it stays in registers
  constexpr std::int64_t lanes = Lanes<T, Bytes>::kCount;
  constexpr std::int64_t step = kMostVectors * lanes;
  const std::int64_t whole = job.width / step * step;
  const std::int64_t rest = job.width - whole;
  for (std::int64_t row = job.first; row < job.last; ++row) {
    for (std::int64_t column = 0; column < whole; column += step) {
      multiply_block<T, I, Bytes, kMostVectors>(job, row, column, step - lanes);
    }
    if constexpr (N == 1) multiply_block<T, I, Bytes, 1>(job, row, job.width - lanes, 0);
    if constexpr (N > 1) multiply_block<T, I, Bytes, N>(job, row, whole, rest - lanes);
  }
}

// N is the number of vectors for the columns that are left.
template <class T, class I, std::size_t Bytes, int N>
void multiply_with(const csr::Product& job, std::int64_t vectors) {
  if constexpr (N > 0) {
    if (vectors < N) return multiply_with<T, I, Bytes, N - 1>(job, vectors);
  }
  multiply_blocks<T, I, Bytes, N>(job);
}

template <class T, class I, std::size_t Bytes = kVec>
void multiply_rows(const csr::Product& job) {
  constexpr std::int64_t lanes = Lanes<T, Bytes>::kCount;
  if constexpr (Bytes > sizeof(T)) {
    if (job.width < lanes) return multiply_rows<T, I, Bytes / 2>(job);
  }
  const std::int64_t rest = job.width % (kMostVectors * lanes);
  multiply_with<T, I, Bytes, kMostVectors>(job, (rest + lanes - 1) / lanes);
}

constexpr csr::MultiplyKernels make_multiply_kernels() {
  return {{{multiply_rows<float, std::int32_t>, multiply_rows<float, std::int64_t>},
           {multiply_rows<double, std::int32_t>, multiply_rows<double, std::int64_t>}}};
}

}  // namespace
}  // namespace commrt
