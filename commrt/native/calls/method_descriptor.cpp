// SPDX-License-Identifier: Apache-2.0
#include "calls/method_descriptor.hpp"

#include <structmember.h>

#include <cstddef>

namespace commrt {

namespace {

void dealloc(PyObject* object) {
  auto* self = reinterpret_cast<MethodDescriptor*>(object);
  PyTypeObject* type = Py_TYPE(object);
  Py_XDECREF(self->name);
  Py_XDECREF(self->doc);
  Py_XDECREF(self->function);
  PyObject_Free(object);
  Py_DECREF(type);
}

PyObject* bind_to_instance(PyObject* self, PyObject* instance, PyObject*) {
  if (instance == nullptr || instance == Py_None) {
    Py_INCREF(self);
    return self;
  }
  return PyMethod_New(self, instance);
}

PyObject* repr(PyObject* object) {
  return PyUnicode_FromFormat("<commrt operation %U>",
                              reinterpret_cast<MethodDescriptor*>(object)->name);
}

PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(MethodDescriptor, vectorcall), READONLY, nullptr},
    {"__name__", T_OBJECT, offsetof(MethodDescriptor, name), READONLY, nullptr},
    {"__qualname__", T_OBJECT, offsetof(MethodDescriptor, name), READONLY, nullptr},
    {"__doc__", T_OBJECT, offsetof(MethodDescriptor, doc), READONLY, nullptr},
    // inspect finds the signature through it; absent where there is no function.
    {"__wrapped__", T_OBJECT_EX, offsetof(MethodDescriptor, function), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr}};

}  // namespace

PyTypeObject* make_descriptor_type(const char* name, int nbytes) {
  PyType_Slot slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
                         {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
                         {Py_tp_descr_get, reinterpret_cast<void*>(bind_to_instance)},
                         {Py_tp_repr, reinterpret_cast<void*>(repr)},
                         {Py_tp_members, members},
                         {0, nullptr}};
  PyType_Spec spec = {name, nbytes, 0,
                      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_METHOD_DESCRIPTOR |
                          Py_TPFLAGS_HAVE_VECTORCALL,
                      slots};
  return reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
}

MethodDescriptor* make_descriptor(PyTypeObject* type, vectorcallfunc vectorcall, PyObject* name,
                                  PyObject* doc, PyObject* function) {
  auto* self = reinterpret_cast<MethodDescriptor*>(_PyObject_New(type));
  if (self == nullptr) return nullptr;
  self->vectorcall = vectorcall;
  PyUnicode_InternInPlace(&name);
  self->name = name;
  self->doc = doc;
  self->function = function;
  return self;
}

}  // namespace commrt
