// SPDX-License-Identifier: Apache-2.0
// Reads torch's tensors in host memory, without calling Python functions.
//
// A tensor's layout in memory differs by torch's version, and the engine does not link torch. So it
// calls the table of functions that torch offers to C for this (dlpack_exchange.hpp).
#pragma once

#include <nanobind/nanobind.h>

#include "arrays/view.hpp"

namespace commrt {

namespace nb = nanobind;

// Fills `view` from a dense contiguous tensor of a known type in host memory, of the class
// torch.Tensor or torch.nn.Parameter itself. False, with no Python error set, for everything else:
// the caller then asks Python.
bool view_of_tensor(PyObject* object, View& view);

// The facts that a log needs of an array.
struct Extent {
  int64_t count = 0;
  DType dtype = DType::F32;
  bool on_host = true;
};

// Fills `extent` from a dense tensor of such a class and type, of any strides, on any device.
bool extent_of_tensor(PyObject* object, Extent& extent);

// Fills `view` from one of numpy's arrays or torch's tensors.
inline bool view_on_host(PyObject* object, View& view) {
  return view_of_numpy(object, view) || view_of_tensor(object, view);
}

// True if the elements of a dense tensor of such a class, of any strides and type, on any device, lie
// in its storage. False, with no Python error set, also where torch does not say.
bool has_memory(PyObject* object);

// Fills in where the first element of a dense tensor of such a class lies at this moment, of any
// strides and type, on any device, and how many bytes its elements have. Their storage may have
// fewer: the bytes are -1 then. False, with no Python error set, for everything else.
bool memory_of_tensor(PyObject* object, const void*& address, std::int64_t& nbytes);

void bind_tensor_view(nb::module_& m);

}  // namespace commrt
