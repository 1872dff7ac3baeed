// SPDX-License-Identifier: Apache-2.0
// Binds Engine, which makes progress for the communicators of a rank.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.hpp"
#include "calls/fusion.hpp"
#include "calls/group.hpp"
#include "engine/engine.hpp"
#include "engine/gloo_calls.hpp"
#include "gil.hpp"

namespace commrt {

void bind_engine(nb::module_& m) {
  nb::class_<Engine>(m, "Engine", "Progress for every communicator of one rank.")
      .def(nb::new_([] { return std::make_shared<Engine>(); }))
      .def("leave", &Engine::leave, nb::call_guard<ReleasedGil>(),
           "Tell the ranks of this node that this one has done its part in all that it started.")
      .def("end_stand_ins", &Engine::end_stand_ins, nb::call_guard<ReleasedGil>(),
           "End communicators where others wait for what stands in for a refused call of this rank.")
      .def("step",
           [](Engine& engine) {
             const Engine::HandsOver hands_over(engine);
             bool advanced;
             GlooGroup::look_everything();
             {
               ReleasedGil release;
               advanced = engine.step();
             }
             if (engine.is_timed_due() && !look_at_timed(engine)) throw nb::python_error();
             if (!wants_gil(engine)) return advanced;
             if (!run_wanted(engine)) throw nb::python_error();
             return true;
           },
           "Run one pass over all operations in flight, a slice of each; True if anything "
           "advanced.")
      .def("start_thread", &Engine::start_thread)
      .def("go_on_by_arrivals", &Engine::go_on_by_arrivals,
           "Go on with operations as messages of other nodes come, without a thread of its own.")
      .def("release_streams", &Engine::release_streams, nb::arg("why"),
           nb::call_guard<ReleasedGil>(),
           "Fail all work on device memory that is under way, and let its streams go.")
      .def("stop_thread", &Engine::stop_thread, nb::call_guard<ReleasedGil>())
      .def("add_bells", &Engine::add_bells, nb::arg("bells"),
           "Let threads of this process sleep until ranks of a node ring.")
      .def_prop_ro("bells", &Engine::all_bells, "Bells in use.")
      .def_prop_ro("has_thread", &Engine::has_thread)
      .def_prop_ro("is_parked", &Engine::is_parked,
                   "Whether its thread sleeps until something is started.")
      .def_prop_ro("idle", &Engine::idle, nb::call_guard<ReleasedGil>(),
                   "Whether nothing is in flight.");
}

}  // namespace commrt
