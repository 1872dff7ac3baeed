// SPDX-License-Identifier: Apache-2.0
// Binds the kernels of matrices in compressed rows as _native.csr. Memory is said by address:
// commrt/layers/graphs/csr.py checks.
#include <nanobind/nanobind.h>

#include <string>

#include "bindings/bindings.hpp"
#include "gil.hpp"
#include "kernels/csr.hpp"

namespace nb = nanobind;

namespace commrt {
namespace {

using Address = std::uint64_t;

template <class T = void>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

DType checked(int index_nbytes, int dtype) {
  const bool is_float = dtype == static_cast<int>(DType::F32) ||
                        dtype == static_cast<int>(DType::F64);
  if (!is_float || (index_nbytes != 4 && index_nbytes != 8)) {
    throw nb::value_error(("csr: dtype code " + std::to_string(dtype) + " with indices of " +
                           std::to_string(index_nbytes) +
                           " bytes: expected float32 or float64, and 4 or 8 bytes")
                              .c_str());
  }
  return static_cast<DType>(dtype);
}

}  // namespace

void bind_csr(nb::module_& m) {
  nb::module_ s = m.def_submodule("csr", "Kernels on sparse matrices in compressed rows.");
  s.def(
      "multiply",
      [](int index, int dtype, Address indptr, Address indices, Address data, Address x, Address y,
         std::int64_t first, std::int64_t last, std::int64_t width) {
        const DType type = checked(index, dtype);
        ReleasedGil released;
        csr::multiply(index, type,
                      {{at(indptr), at(indices), at(data)}, at(x), at(y), first, last, width});
      },
      nb::arg("index_nbytes"), nb::arg("dtype"), nb::arg("indptr"), nb::arg("indices"),
      nb::arg("data"), nb::arg("x"), nb::arg("y"), nb::arg("first"), nb::arg("last"),
      nb::arg("width"), "Write rows first to last of y = A x; without the GIL.");
  s.def(
      "transpose",
      [](int index, int dtype, Address indptr, Address indices, Address data,
         std::int64_t num_rows, std::int64_t num_columns, Address to_indptr, Address to_indices,
         Address to_data) {
        const DType type = checked(index, dtype);
        ReleasedGil released;
        csr::transpose(index, type, {at(indptr), at(indices), at(data)}, num_rows, num_columns,
                       at(to_indptr), at(to_indices), at(to_data));
      },
      nb::arg("index_nbytes"), nb::arg("dtype"), nb::arg("indptr"), nb::arg("indices"),
      nb::arg("data"), nb::arg("num_rows"), nb::arg("num_columns"), nb::arg("to_indptr"),
      nb::arg("to_indices"), nb::arg("to_data"), "Write the transpose; without the GIL.");
}

}  // namespace commrt
