// SPDX-License-Identifier: Apache-2.0
// Walks frames to the program's own (call_sites.hpp).
#include "recording/call_sites.hpp"

#include <frameobject.h>

namespace commrt {

namespace {

// Programs that compile code for ever would otherwise keep it for ever.
constexpr size_t kMostSites = 1 << 16;

int instruction_of(PyFrameObject* frame) {
#if PY_VERSION_HEX >= 0x030B0000
  return PyFrame_GetLasti(frame);
#else
  return frame->f_lasti;
#endif
}

}  // namespace

void CallSites::clear() {
  std::unordered_map<Key, nb::object, Hash> gone;
  gone.swap(known_);
  for (const auto& [key, site] : gone) Py_DECREF(key.code);
}

nb::object CallSites::of_running() {
  PyFrameObject* const frame = PyEval_GetFrame();
  return frame == nullptr ? nowhere_ : of_caller(frame);
}

nb::object CallSites::of_caller(PyFrameObject* frame) {
  nb::object at = nb::borrow(reinterpret_cast<PyObject*>(frame));
  for (bool is_first = true; at.is_valid(); is_first = false) {
    auto* const here = reinterpret_cast<PyFrameObject*>(at.ptr());
    const nb::object code = nb::steal(reinterpret_cast<PyObject*>(PyFrame_GetCode(here)));
    const Key key{code.ptr(), instruction_of(here)};
    const auto found = known_.find(key);
    nb::object site = found != known_.end() ? found->second : look(here, key);
    if (!site.is_none() && (is_first || !site.is(core_))) return site;
    at = nb::steal(reinterpret_cast<PyObject*>(PyFrame_GetBack(here)));
  }
  return beyond_(nb::handle(reinterpret_cast<PyObject*>(frame)));
}

nb::object CallSites::look(PyFrameObject* frame, const Key& key) {
  nb::object site = classify_(nb::handle(reinterpret_cast<PyObject*>(frame)));
  if (known_.size() >= kMostSites) clear();
  if (known_.emplace(key, site).second) Py_INCREF(key.code);
  return site;
}

}  // namespace commrt
