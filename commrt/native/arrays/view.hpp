// SPDX-License-Identifier: Apache-2.0
// The engine's view of an array in host memory, and how it reads numpy's arrays.
#pragma once

#include <Python.h>

#include <cstdint>

#include "types.hpp"

namespace commrt {

// The facts that the engine needs of an array.
struct View {
  void* data = nullptr;
  int64_t count = 0;
  DType dtype = DType::F32;
  bool writable = false;
  uint64_t stream = 0;  // of an array on a device
  int device = kHost;
};

// Fills `view` from a C-contiguous, native-endian numpy array of a known type. False, with
// no Python error set, for everything else: the caller then asks Python.
bool view_of_numpy(PyObject* object, View& view);
bool is_numpy_array(PyObject* object);  // with any strides and of any type
// Fills in where the first element of an array of numpy's or of a subclass lies at this moment, and
// how many bytes its elements have. False for everything else.
bool memory_of_numpy(PyObject* object, const void*& address, int64_t& nbytes);
// The facts that calls which move boxes need of a numpy array, with any strides.
constexpr int kMostNumpyDims = 8;
struct StridedView {
  void* data = nullptr;
  int ndim = 0;
  int64_t shape[kMostNumpyDims], strides[kMostNumpyDims];  // strides in bytes
  DType dtype = DType::F32;
  bool writable = false;
  bool is_distinct = false;  // no two of its elements share memory
  bool is_contiguous = false;  // as C arrays are
};
// False, with no Python error set, for arrays that are not aligned, of an unknown type or byte
// order, or of more dimensions, and for everything else.
bool strided_view_of_numpy(PyObject* object, StridedView& view);
void register_numpy_type(int type_num, int dtype_code);
// The code of numpy's dtype; -1 where it is none, or of a type or byte order that is not known.
int code_of_numpy_type(PyObject* dtype);

// Looks numpy's C functions up, once, as the module is imported. False with a Python error set.
bool load_numpy();

}  // namespace commrt
