// SPDX-License-Identifier: Apache-2.0
// Reads numpy's arrays (view.hpp).
#define NPY_NO_DEPRECATED_API NPY_1_7_API_VERSION
#include "arrays/view.hpp"

#include <numpy/arrayobject.h>

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <utility>

namespace commrt {

namespace {

constexpr int kUnknown = -1;

int dtype_codes[512];

int by_size(bool is_signed, size_t itemsize) {
  switch (itemsize) {
    case 1: return static_cast<int>(is_signed ? DType::I8 : DType::U8);
    case 2: return static_cast<int>(is_signed ? DType::I16 : DType::U16);
    case 4: return static_cast<int>(is_signed ? DType::I32 : DType::U32);
    case 8: return static_cast<int>(is_signed ? DType::I64 : DType::U64);
    default: return kUnknown;
  }
}

bool fill_dtype_codes() {
  std::fill(std::begin(dtype_codes), std::end(dtype_codes), kUnknown);
  auto set = [](int type_num, DType dtype) { dtype_codes[type_num] = static_cast<int>(dtype); };
  set(NPY_BOOL, DType::Bool);
  dtype_codes[NPY_BYTE] = by_size(true, sizeof(char));
  dtype_codes[NPY_SHORT] = by_size(true, sizeof(short));
  dtype_codes[NPY_INT] = by_size(true, sizeof(int));
  dtype_codes[NPY_LONG] = by_size(true, sizeof(long));
  dtype_codes[NPY_LONGLONG] = by_size(true, sizeof(long long));
  dtype_codes[NPY_UBYTE] = by_size(false, sizeof(char));
  dtype_codes[NPY_USHORT] = by_size(false, sizeof(short));
  dtype_codes[NPY_UINT] = by_size(false, sizeof(int));
  dtype_codes[NPY_ULONG] = by_size(false, sizeof(long));
  dtype_codes[NPY_ULONGLONG] = by_size(false, sizeof(long long));
  set(NPY_HALF, DType::F16);
  set(NPY_FLOAT, DType::F32);
  set(NPY_DOUBLE, DType::F64);
  set(NPY_CFLOAT, DType::C64);
  set(NPY_CDOUBLE, DType::C128);
  return true;
}

int dtype_code(int type_num) {
  static const bool filled = fill_dtype_codes();
  (void)filled;
  if (type_num < 0 || type_num >= static_cast<int>(std::size(dtype_codes))) return kUnknown;
  return dtype_codes[type_num];
}

// True if no two elements can share memory: each dimension's step, the shortest first, goes beyond
// all that the shorter ones reach.
bool has_distinct_elements(const StridedView& view, int64_t itemsize) {
  std::pair<int64_t, int64_t> steps[kMostNumpyDims];
  int num = 0;
  for (int i = 0; i < view.ndim; ++i) {
    if (view.shape[i] == 0) return true;
    if (view.shape[i] > 1) steps[num++] = {std::abs(view.strides[i]), view.shape[i]};
  }
  std::sort(steps, steps + num);
  int64_t reach = itemsize;
  for (int i = 0; i < num; ++i) {
    if (steps[i].first < reach) return false;
    reach += steps[i].first * (steps[i].second - 1);
  }
  return true;
}

}  // namespace

bool load_numpy() { return _import_array() >= 0; }

void register_numpy_type(int type_num, int code) {
  dtype_code(0);
  if (type_num < 0 || type_num >= static_cast<int>(std::size(dtype_codes))) return;
  dtype_codes[type_num] = code;
}

int code_of_numpy_type(PyObject* dtype) {
  if (!PyArray_DescrCheck(dtype)) return kUnknown;
  const auto* descr = reinterpret_cast<const PyArray_Descr*>(dtype);
  return descr->byteorder == '>' ? kUnknown : dtype_code(descr->type_num);
}

bool is_numpy_array(PyObject* object) { return PyArray_CheckExact(object); }

bool memory_of_numpy(PyObject* object, const void*& address, int64_t& nbytes) {
  if (!PyArray_Check(object)) return false;
  auto* array = reinterpret_cast<PyArrayObject*>(object);
  address = PyArray_DATA(array);
  nbytes = PyArray_ITEMSIZE(array);
  const npy_intp* const dims = PyArray_DIMS(array);
  for (int i = 0, ndim = PyArray_NDIM(array); i < ndim; ++i) nbytes *= dims[i];
  return true;
}

bool view_of_numpy(PyObject* object, View& view) {
  if (!PyArray_CheckExact(object)) return false;
  auto* array = reinterpret_cast<PyArrayObject*>(object);
  const int flags = PyArray_FLAGS(array);
  if ((flags & (NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_ALIGNED)) !=
      (NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_ALIGNED)) {
    return false;
  }
  PyArray_Descr* descr = PyArray_DESCR(array);
  const int code = dtype_code(descr->type_num);
  if (code == kUnknown || descr->byteorder == '>') return false;
  int64_t count = 1;
  for (int i = 0; i < PyArray_NDIM(array); ++i) count *= PyArray_DIM(array, i);
  view.data = PyArray_DATA(array);
  view.count = count;
  view.dtype = static_cast<DType>(code);
  view.writable = (flags & NPY_ARRAY_WRITEABLE) != 0;
  return true;
}

bool strided_view_of_numpy(PyObject* object, StridedView& view) {
  if (!PyArray_CheckExact(object)) return false;
  auto* array = reinterpret_cast<PyArrayObject*>(object);
  const int flags = PyArray_FLAGS(array), ndim = PyArray_NDIM(array);
  const PyArray_Descr* const descr = PyArray_DESCR(array);
  const int code = dtype_code(descr->type_num);
  if ((flags & NPY_ARRAY_ALIGNED) == 0 || code == kUnknown || descr->byteorder == '>' ||
      ndim > kMostNumpyDims) {
    return false;
  }
  view.data = PyArray_DATA(array);
  view.ndim = ndim;
  std::copy_n(PyArray_DIMS(array), ndim, view.shape);
  std::copy_n(PyArray_STRIDES(array), ndim, view.strides);
  view.dtype = static_cast<DType>(code);
  view.writable = (flags & NPY_ARRAY_WRITEABLE) != 0;
  view.is_contiguous = (flags & NPY_ARRAY_C_CONTIGUOUS) != 0;
  view.is_distinct = has_distinct_elements(view, PyArray_ITEMSIZE(array));
  return true;
}

}  // namespace commrt
