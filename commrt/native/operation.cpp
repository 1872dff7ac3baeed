// SPDX-License-Identifier: Apache-2.0
// The public methods: one callable per row of commrt/operations.py, cached plans, no detours.
//
// An Operation is a method descriptor with a vectorcall: `comm.allreduce(x)` reaches it
// without a bound method. What it does not recognise at a glance (an array that is not
// numpy, an unknown plan, a wrong argument) it hands to `Communicator._call`, which either
// runs the call or raises the precise error.
#define NPY_NO_DEPRECATED_API NPY_1_7_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL commrt_numpy
#define NO_IMPORT_ARRAY
#include "group.hpp"
#include "method_descriptor.hpp"

#include <new>

namespace commrt {

namespace {

struct Operation {
  MethodDescriptor head;
  int coll;
  bool takes_x, has_root, reduces, in_place;
};

struct Words {  // interned once: keyword names are compared by address
  PyObject *out, *op, *factor, *root, *nonblocking, *call;
  PyObject* reductions[kNumRedOps];
};
Words words;

const char* const kReductions[kNumRedOps] = {"sum",  "prod", "min",  "max", "avg", "land",
                                     "lor",  "lxor", "band", "bor", "bxor", "premul_sum"};

int reduction_code(PyObject* name) {
  for (int i = 0; i < kNumRedOps; ++i) {
    if (name == words.reductions[i]) return i;
  }
  if (!PyUnicode_CheckExact(name)) return -1;
  for (int i = 0; i < kNumRedOps; ++i) {
    if (PyUnicode_Compare(name, words.reductions[i]) == 0) return i;
  }
  return -1;
}

PyObject* hand_over(Operation* self, PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames) {
  if (nargs < 1) {
    PyErr_Format(PyExc_TypeError, "%U() needs a communicator: call it as comm.%U(...)",
                 self->head.name, self->head.name);
    return nullptr;
  }
  PyObject* method = PyObject_GetAttr(args[0], words.call);
  if (method == nullptr) return nullptr;
  PyObject* positional = PyTuple_New(nargs - 1);
  PyObject* keywords = PyDict_New();
  PyObject* result = nullptr;
  if (positional != nullptr && keywords != nullptr) {
    for (Py_ssize_t i = 1; i < nargs; ++i) {
      Py_INCREF(args[i]);
      PyTuple_SET_ITEM(positional, i - 1, args[i]);
    }
    bool fine = true;
    const Py_ssize_t nkw = kwnames != nullptr ? PyTuple_GET_SIZE(kwnames) : 0;
    for (Py_ssize_t i = 0; i < nkw && fine; ++i) {
      fine = PyDict_SetItem(keywords, PyTuple_GET_ITEM(kwnames, i), args[nargs + i]) == 0;
    }
    if (fine) {
      result = PyObject_CallFunctionObjArgs(method, self->head.name, positional, keywords, nullptr);
    }
  }
  Py_XDECREF(positional);
  Py_XDECREF(keywords);
  Py_DECREF(method);
  return result;
}

bool overlaps(const View& a, const View& b) {
  const auto* a0 = static_cast<const unsigned char*>(a.data);
  const auto* b0 = static_cast<const unsigned char*>(b.data);
  const auto* a1 = a0 + static_cast<size_t>(a.count) * item_size(a.dtype);
  const auto* b1 = b0 + static_cast<size_t>(b.count) * item_size(b.dtype);
  return a0 < b1 && b0 < a1;
}

PyObject* call_operation(PyObject* callable, PyObject* const* args, size_t nargsf,
                         PyObject* kwnames) {
  auto* self = reinterpret_cast<Operation*>(callable);
  const Py_ssize_t nargs = PyVectorcall_NARGS(nargsf);
  const Py_ssize_t expected = self->takes_x ? 2 : 1;
  auto slow = [&] { return hand_over(self, args, nargs, kwnames); };
  if (nargs != expected || !nb::isinstance<Group>(nb::handle(args[0]))) return slow();
  Group& group = *nb::inst_ptr<Group>(nb::handle(args[0]));
  if (group.slow || group.comm->broken.load(std::memory_order_relaxed) ||
      Engine::forked.load(std::memory_order_relaxed)) return slow();

  PyObject* out_object = nullptr;
  int reduction = 0;
  PyObject* factor = nullptr;
  long root = 0;
  bool nonblocking = false;
  double timeout_s = group.timeout_s;
  const Py_ssize_t nkw = kwnames != nullptr ? PyTuple_GET_SIZE(kwnames) : 0;
  for (Py_ssize_t i = 0; i < nkw; ++i) {
    PyObject* key = PyTuple_GET_ITEM(kwnames, i);
    PyObject* value = args[nargs + i];
    if (key == words.out && self->takes_x) {
      if (value != Py_None) out_object = value;
    } else if (key == words.op && self->reduces) {
      reduction = reduction_code(value);
      if (reduction < 0) return slow();
    } else if (key == words.factor && self->reduces) {
      if (!PyFloat_CheckExact(value)) return slow();
      factor = value;
    } else if (key == words.root && self->has_root) {
      if (!PyLong_CheckExact(value)) return slow();
      root = PyLong_AsLong(value);
      if (root == -1 && PyErr_Occurred()) PyErr_Clear();
      if (root < 0 || root >= group.comm->size) return slow();
    } else if (key == words.nonblocking) {
      if (!PyBool_Check(value)) return slow();
      nonblocking = value == Py_True;
    } else {
      return slow();
    }
  }

  View x, out;
  if (self->takes_x) {
    if (!view_of_numpy(args[1], x)) return slow();
    if (out_object == nullptr) {
      if (!self->in_place) return slow();
      out = x;
    } else if (!view_of_numpy(out_object, out) || out.dtype != x.dtype) {
      return slow();
    }
  }
  const PlanKey key{x.count, PlanKey::pack(self->coll, x.dtype, reduction, x.device),
                    static_cast<int32_t>(root)};
  const PlanPtr* found = group.find_plan(key);
  if (found == nullptr) return slow();
  const PlanPtr plan = *found;
  if ((factor != nullptr) != (plan->redop == RedOp::PremulSum)) return slow();
  if (factor != nullptr &&
      (x.dtype < DType::F16 || plan->factor.real != PyFloat_AS_DOUBLE(factor))) return slow();
  if (self->takes_x) {
    if (plan->in_elems != 0 && plan->in_elems != x.count) return slow();
    if (plan->out_elems != 0) {
      if (out.count != plan->out_elems || !out.writable) return slow();
      const bool same = out.data == x.data;
      if ((!same && overlaps(x, out)) || (same && !self->in_place && x.count != 0)) return slow();
    }
  }
  PyObject* result = out_object != nullptr ? out_object : self->takes_x ? args[1] : Py_None;
  if (plan->out_elems == 0 && !plan->returns_out) result = Py_None;
  try {
    nb::object value = run_plan(nb::handle(args[0]), plan, x.data, out.data,
                                self->takes_x ? nb::handle(args[1]) : nb::handle(),
                                nb::handle(out_object), nb::handle(result),
                                nb::handle(self->head.name), nonblocking, timeout_s);
    return value.release().ptr();
  } catch (nb::python_error& e) {
    e.restore();
    return nullptr;
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
    return nullptr;
  } catch (const std::exception& e) {
    PyErr_SetString(PyExc_RuntimeError, e.what());
    return nullptr;
  }
}

PyTypeObject* operation_type = nullptr;

}  // namespace

void bind_operation(nb::module_& m) {
  words.out = PyUnicode_InternFromString("out");
  words.op = PyUnicode_InternFromString("op");
  words.factor = PyUnicode_InternFromString("factor");
  words.root = PyUnicode_InternFromString("root");
  words.nonblocking = PyUnicode_InternFromString("nonblocking");
  words.call = PyUnicode_InternFromString("_call");
  for (int i = 0; i < kNumRedOps; ++i) words.reductions[i] = PyUnicode_InternFromString(kReductions[i]);

  operation_type = make_descriptor_type("commrt._native.Operation", sizeof(Operation));
  if (operation_type == nullptr) throw nb::python_error();
  m.attr("Operation") = nb::borrow(reinterpret_cast<PyObject*>(operation_type));

  m.def("make_operation",
        [](nb::str name, nb::str doc, int coll, bool takes_x, bool has_root, bool reduces,
           bool in_place) -> nb::object {
          auto* self = reinterpret_cast<Operation*>(
              make_descriptor(operation_type, call_operation, name.release().ptr(),
                              doc.release().ptr(), nullptr));
          if (self == nullptr) throw nb::python_error();
          self->coll = coll;
          self->takes_x = takes_x;
          self->has_root = has_root;
          self->reduces = reduces;
          self->in_place = in_place;
          return nb::steal(reinterpret_cast<PyObject*>(self));
        },
        nb::arg("name"), nb::arg("doc"), nb::arg("coll"), nb::arg("takes_x"),
        nb::arg("has_root"), nb::arg("reduces"), nb::arg("in_place"),
        "Make the method descriptor of one operation.");
}

}  // namespace commrt
