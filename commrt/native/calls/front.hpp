// SPDX-License-Identifier: Apache-2.0
// What a program holds of a group: its methods, and none of its parts.
#pragma once

#include <nanobind/nanobind.h>

namespace commrt {

namespace nb = nanobind;

struct Front {
  nb::object group;
};

// Returns the Group that an object is, or that it is the front of: borrowed, and null for anything
// else. The object must outlive its use.
PyObject* group_of(PyObject* object);

}  // namespace commrt
