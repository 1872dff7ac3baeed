// SPDX-License-Identifier: Apache-2.0
// Finds the group of what a program holds.
#include "calls/front.hpp"

#include "calls/group.hpp"

namespace commrt {

namespace {

enum class Kind { Neither, Group, Front };

struct Seen {
  PyTypeObject* type = nullptr;
  Kind kind = Kind::Neither;
};

Kind asked(PyObject* object) {
  if (nb::isinstance<Front>(nb::handle(object))) return Kind::Front;
  return nb::isinstance<Group>(nb::handle(object)) ? Kind::Group : Kind::Neither;
}

// The classes that were seen are kept for ever: asking nanobind takes longer.
Kind kind_of(PyObject* object) {
  static Seen seen[8];
  PyTypeObject* const type = Py_TYPE(object);
  for (Seen& known : seen) {
    if (type == known.type) return known.kind;
    if (known.type != nullptr) continue;
    const Kind kind = asked(object);
    if (kind == Kind::Neither) return kind;
    Py_INCREF(type);
    known = {type, kind};
    return kind;
  }
  return asked(object);
}

}  // namespace

PyObject* group_of(PyObject* object) {
  switch (kind_of(object)) {
    case Kind::Front: return nb::inst_ptr<Front>(nb::handle(object))->group.ptr();
    case Kind::Group: return object;
    case Kind::Neither: break;
  }
  return nullptr;
}

}  // namespace commrt
