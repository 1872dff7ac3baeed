// SPDX-License-Identifier: Apache-2.0
// Binds the names of what the engine calls in Python, for the test that compares them.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.hpp"
#include "calls/group_methods.hpp"
#include "python_callbacks.hpp"

namespace commrt {

void bind_callbacks(nb::module_& m) {
  m.def("callback_names", &callback_names,
        "Names that commrt/called_by_engine.py must have a place for.");
  m.def("group_method_names", &group_methods::names,
        "Names that a Communicator must have, as the engine asks it for them.");
  m.def("fusion_method_names", &fusion_methods::names,
        "Names that its service `fusion` must have, as the engine asks it for them.");
}

}  // namespace commrt
