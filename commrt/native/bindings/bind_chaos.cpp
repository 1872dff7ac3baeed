// SPDX-License-Identifier: Apache-2.0
// Binds what injects faults (COMMRT_CHAOS).
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <utility>

#include "bindings/bindings.hpp"
#include "calls/group.hpp"
#include "engine/chaos.hpp"

namespace commrt {

void bind_chaos(nb::module_& m) {
  nb::class_<FaultRule>(m, "FaultRule", "One fault, and the operations that it is injected into.")
      .def("__init__",
           [](FaultRule* self, int kind, double seconds, std::vector<int> codes, uint64_t number,
              uint64_t every, uint64_t most, double chance, std::string text) {
             new (self) FaultRule{static_cast<FaultKind>(kind), seconds, std::move(codes), number,
                                  every, most, chance, std::move(text)};
           },
           nb::arg("kind"), nb::arg("seconds"), nb::arg("codes"), nb::arg("number"),
           nb::arg("every"), nb::arg("most"), nb::arg("chance"), nb::arg("text"));

  nb::class_<Chaos>(m, "Chaos", "Injects the faults of one rank.")
      .def(nb::init<uint64_t, int, std::vector<FaultRule>>(), nb::arg("seed"), nb::arg("rank"),
           nb::arg("rules"))
      .def_prop_ro("num_injected", &Chaos::num_injected, "Faults so far.");

  m.def("inject_faults",
        [](Group& group, std::shared_ptr<Chaos> chaos) {
          const nb::gil_scoped_release release;
          const std::lock_guard<std::mutex> lock(group.engine->mutex);
          group.comm->chaos = std::move(chaos);
        },
        nb::arg("group"), nb::arg("chaos"), "Inject faults into the operations of a group.");
}

}  // namespace commrt
