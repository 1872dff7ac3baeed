// SPDX-License-Identifier: Apache-2.0
// Reads address, type, length and stream of an array on a device, without calling Python functions.
//
// Known are commrt's own arrays, cupy's, torch's, and what has __cuda_array_interface__, each by
// what its library documents. Whatever is out of the ordinary, such as strides, managed memory,
// or a device that is not open yet, is left to commrt/arrays/device.py, which says what is wrong.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

#include "devices/device.hpp"
#include "types.hpp"

namespace commrt {

namespace nb = nanobind;

struct DeviceView {
  std::uint64_t address = 0;
  std::int64_t count = 0;
  DType dtype = DType::F32;
  bool writable = false;
  nb::object device;   // as Python knows it
  Stream stream = 0;   // the current one, as current_stream_of() in arrays/device.py says
  // True if the array says that a stream orders it, which is `exported`.
  bool exports = false;
  Stream exported = 0;
};

// Fills `view` from a C-contiguous array of a known type. False, with no Python error set, for
// everything else: the caller then asks Python. Throws only what is no Exception, as Ctrl-C.
bool view_on_device(PyObject* array, DeviceView& view);

// Returns the current stream of the library that an array comes from; `array` may be None. Asks
// Python if the library is not known here.
Stream current_stream_of(nb::handle array, nb::handle device);

}  // namespace commrt
