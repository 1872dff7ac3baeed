// SPDX-License-Identifier: Apache-2.0
// Kernels on sparse matrices in compressed rows (CSR): the product with a dense matrix, and the
// transpose. Nothing here checks indices: commrt/layers/graphs/csr.py does so once for a matrix.
#pragma once

#include <cstddef>
#include <cstdint>

#include "types.hpp"

namespace commrt::csr {

// A matrix; both arrays of indices have 4 bytes an element, or both have 8. Entries of a row may
// have any order, and the same place several times.
struct Matrix {
  const void* indptr;
  const void* indices;
  const void* data;
};

// Rows first to last of y = A x, where x and y have `width` columns, row by row without gaps.
struct Product {
  Matrix a;
  const void* x;
  void* y;
  std::int64_t first;
  std::int64_t last;
  std::int64_t width;
};

using MultiplyFn = void (*)(const Product&);

// For float32 and float64 in this order, with indices of 4 and 8 bytes.
struct MultiplyKernels {
  MultiplyFn of[2][2];
};

// Adds the products of each row in the order of its entries, each rounded: the same bits with
// every instruction set.
void multiply(int index_nbytes, DType dtype, const Product& product);

// Writes the transpose: indptr has num_columns + 1 elements. Entries of a row are in the order of
// the rows that they come from.
void transpose(int index_nbytes, DType dtype, Matrix a, std::int64_t num_rows,
               std::int64_t num_columns, void* indptr, void* indices, void* data);

}  // namespace commrt::csr
