// SPDX-License-Identifier: Apache-2.0
// The base of commrt's public native methods. They bind like Python functions, have a name and a
// docstring, and are called directly (a vectorcall).
#pragma once

#include <Python.h>

namespace commrt {

struct MethodDescriptor {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  PyObject* name;      // interned
  PyObject* doc;
  PyObject* function;  // a Python function for calls that are not plain, or null
};

// Returns a new type for descriptors of `nbytes` that begin with a MethodDescriptor; null with
// Python's error set. `name` is "module.Type" and must last.
PyTypeObject* make_descriptor_type(const char* name, int nbytes);

// Returns a new descriptor of the type, without its own fields; null with Python's error set.
// Takes over the references.
MethodDescriptor* make_descriptor(PyTypeObject* type, vectorcallfunc vectorcall, PyObject* name,
                                  PyObject* doc, PyObject* function);

}  // namespace commrt
