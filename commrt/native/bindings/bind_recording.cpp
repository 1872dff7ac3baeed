// SPDX-License-Identifier: Apache-2.0
// Binds what a log is recorded with: the ring, places in the program, and recorded methods.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <structmember.h>

#include <cstddef>
#include <new>

#include "bindings/bindings.hpp"
#include "calls/group.hpp"
#include "calls/recorded_method.hpp"

namespace commrt {

namespace {

// A callable without a Python function in between. It holds what it records in memory of C++.
struct RecordedMethod {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  PyObject* name;
  PyObject* function;  // inspect finds the signature through it
  RecordedCalls* calls;
};

PyObject* call_recorded(PyObject* callable, PyObject* const* args, size_t nargsf,
                        PyObject* kwnames) {
  try {
    RecordedCalls& calls = *reinterpret_cast<RecordedMethod*>(callable)->calls;
    return calls.call(args, nargsf, kwnames).release().ptr();
  } catch (nb::python_error& error) {
    error.restore();
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

int traverse(PyObject* object, visitproc visit, void* arg) {
  const auto* self = reinterpret_cast<RecordedMethod*>(object);
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(self->function);
  return self->calls->visit([&](PyObject* each) { return visit(each, arg); });
}

int clear(PyObject* object) {
  reinterpret_cast<RecordedMethod*>(object)->calls->forget_owner();
  return 0;
}

void dealloc(PyObject* object) {
  auto* self = reinterpret_cast<RecordedMethod*>(object);
  PyTypeObject* type = Py_TYPE(object);
  PyObject_GC_UnTrack(object);
  Py_XDECREF(self->name);
  Py_XDECREF(self->function);
  delete self->calls;
  PyObject_GC_Del(object);
  Py_DECREF(type);
}

PyObject* repr(PyObject* object) {
  return PyUnicode_FromFormat("<commrt %U, recorded>",
                              reinterpret_cast<RecordedMethod*>(object)->name);
}

PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(RecordedMethod, vectorcall), READONLY, nullptr},
    {"__name__", T_OBJECT, offsetof(RecordedMethod, name), READONLY, nullptr},
    {"__wrapped__", T_OBJECT, offsetof(RecordedMethod, function), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr}};

PyTypeObject* recorded_type = nullptr;

void make_type() {
  static PyType_Slot slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
                                {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
                                {Py_tp_clear, reinterpret_cast<void*>(clear)},
                                {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
                                {Py_tp_repr, reinterpret_cast<void*>(repr)},
                                {Py_tp_members, members},
                                {0, nullptr}};
  static PyType_Spec spec = {"commrt._native.RecordedMethod", sizeof(RecordedMethod), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
                             slots};
  recorded_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  if (recorded_type == nullptr) throw nb::python_error();
}

nb::object make_method(const nb::str& name, std::unique_ptr<RecordedCalls> calls) {
  auto* const self = PyObject_GC_New(RecordedMethod, recorded_type);
  if (self == nullptr) throw nb::python_error();
  self->vectorcall = call_recorded;
  self->name = Py_NewRef(name.ptr());
  self->function = Py_NewRef(calls->function.ptr());
  self->calls = calls.release();
  auto* const object = reinterpret_cast<PyObject*>(self);
  PyObject_GC_Track(object);
  return nb::steal(object);
}

nb::object unless_none(const nb::object& object) {
  return object.is_none() ? nb::object() : object;
}

}  // namespace

void bind_recording(nb::module_& m) {
  nb::class_<RecordCounter>(m, "RecordCounter",
                            "Counter of the calls of a group, or of the messages of a pair.")
      .def(nb::init<>())
      .def_rw("next", &RecordCounter::next);

  nb::class_<RecordRing>(m, "RecordRing", "The latest calls of this process's ranks.")
      .def(nb::init<size_t>(), nb::arg("maxlen"))
      .def("__len__", &RecordRing::size)
      .def_prop_ro("maxlen", &RecordRing::capacity, "Most records that it keeps.")
      .def_prop_ro("num_dropped", &RecordRing::num_dropped,
                   "Records that later ones have pushed out.")
      .def("reserve", &RecordRing::reserve, "Take the memory.")
      .def("resize", &RecordRing::resize, nb::arg("maxlen"), "Keep so many from now on.")
      .def("clear", &RecordRing::clear, "Forget all of them.")
      .def("append",
           [](RecordRing& self, nb::handle kind, nb::handle site) {
             auto& counter = nb::cast<RecordCounter&>(kind.attr("counter"));
             return self.append(kind.ptr(), site.ptr(), counter, monotonic_ns());
           }, nb::arg("kind"), nb::arg("site"), "Add a call that begins now; return its number.")
      .def("end", &RecordRing::end, nb::arg("first"), nb::arg("num") = 1,
           "The end of so many was seen, of those that have none so far.")
      .def("fail", &RecordRing::fail, nb::arg("first"), nb::arg("num"), nb::arg("error"),
           "They have failed.")
      .def("take_back", &RecordRing::take_back, nb::arg("first"), nb::arg("num") = 1,
           "They were refused here: they count on no rank.")
      .def("kind_of", &RecordRing::kind_of, nb::arg("number"),
           "Kind of a record's call, which equal calls share; None: it is gone.")
      .def("snapshot", &RecordRing::snapshot,
           "Return (kind, site, seq, start in ns, end in ns) of each, oldest first.");

  nb::class_<CallSites>(m, "CallSites", "Places that calls have come from.")
      .def(nb::init<nb::object, nb::object, nb::object, nb::object>(), nb::arg("classify"),
           nb::arg("beyond"), nb::arg("core"), nb::arg("nowhere"))
      .def("of_caller",
           [](CallSites& self, nb::handle frame) {
             if (!PyFrame_Check(frame.ptr())) {
               throw nb::type_error((std::string("of_caller() was given an object of type ") +
                                     Py_TYPE(frame.ptr())->tp_name +
                                     "; expected a frame, as sys._getframe() returns")
                                        .c_str());
             }
             return self.of_caller(reinterpret_cast<PyFrameObject*>(frame.ptr()));
           }, nb::arg("frame"),
           "Return where the user's program called; `core` for calls of commrt's own.")
      .def("of_running", &CallSites::of_running, "The same of the frame that runs now.")
      .def("clear", &CallSites::clear, "Forget all of them.");

  make_type();
  m.def("record_method",
        [](const nb::str& name, nb::object function, const nb::object& owner,
           std::shared_ptr<RecordRing> ring, std::shared_ptr<CallSites> sites, std::string reads,
           nb::object look, nb::object watch, nb::object raised, const nb::object& calls,
           const nb::object& asked) {
          auto made = std::make_unique<RecordedCalls>();
          made->function = std::move(function);
          made->owner = unless_none(owner);
          made->ring = std::move(ring);
          made->sites = std::move(sites);
          made->reads = std::move(reads);
          made->look = std::move(look);
          made->watch = std::move(watch);
          made->raised = std::move(raised);
          made->calls = unless_none(calls);
          made->asked = unless_none(asked);
          return make_method(name, std::move(made));
        },
        nb::arg("name"), nb::arg("function"), nb::arg("owner").none(), nb::arg("ring"),
        nb::arg("sites"), nb::kw_only(), nb::arg("reads"), nb::arg("look"), nb::arg("watch"),
        nb::arg("raised"), nb::arg("calls") = nb::none(), nb::arg("asked") = nb::none(),
        "Return a callable that runs a function, with a record of each call.");
}

}  // namespace commrt
