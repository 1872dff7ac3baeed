// SPDX-License-Identifier: Apache-2.0
// The transpose of a matrix in compressed rows: a counting sort by columns.
#include "kernels/csr.hpp"

#include <algorithm>

namespace commrt::csr {
namespace {

template <class I, class T>
void transposed(const Matrix& a, std::int64_t num_rows, std::int64_t num_columns, I* indptr,
                I* indices, T* data) {
  const I* from_indptr = static_cast<const I*>(a.indptr);
  const I* from_indices = static_cast<const I*>(a.indices);
  const T* from_data = static_cast<const T*>(a.data);
  const std::int64_t count = num_rows ? static_cast<std::int64_t>(from_indptr[num_rows]) : 0;
  // First the number of entries of each column, one place further on; then their sums.
  std::fill_n(indptr, num_columns + 1, I{0});
  for (std::int64_t k = 0; k < count; ++k) ++indptr[from_indices[k] + 1];
  for (std::int64_t c = 0; c < num_columns; ++c) indptr[c + 1] += indptr[c];
  for (std::int64_t row = 0; row < num_rows; ++row) {
    for (std::int64_t k = from_indptr[row]; k < from_indptr[row + 1]; ++k) {
      const I at = indptr[from_indices[k]]++;
      indices[at] = static_cast<I>(row);
      data[at] = from_data[k];
    }
  }
  // Each place has moved on to where the next one began.
  std::copy_backward(indptr, indptr + num_columns, indptr + num_columns + 1);
  indptr[0] = 0;
}

template <class I>
void transposed_by(DType dtype, const Matrix& a, std::int64_t num_rows, std::int64_t num_columns,
                   void* indptr, void* indices, void* data) {
  I* to_indptr = static_cast<I*>(indptr);
  I* to_indices = static_cast<I*>(indices);
  if (dtype == DType::F32) {
    transposed(a, num_rows, num_columns, to_indptr, to_indices, static_cast<float*>(data));
  } else {
    transposed(a, num_rows, num_columns, to_indptr, to_indices, static_cast<double*>(data));
  }
}

}  // namespace

void transpose(int index_nbytes, DType dtype, Matrix a, std::int64_t num_rows,
               std::int64_t num_columns, void* indptr, void* indices, void* data) {
  if (index_nbytes == 4) {
    transposed_by<std::int32_t>(dtype, a, num_rows, num_columns, indptr, indices, data);
  } else {
    transposed_by<std::int64_t>(dtype, a, num_rows, num_columns, indptr, indices, data);
  }
}

}  // namespace commrt::csr
