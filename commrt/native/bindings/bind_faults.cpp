// SPDX-License-Identifier: Apache-2.0
// Binds what injects faults (COMMRT_CHAOS), and what finds some: looks at values, checksums.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <utility>

#include "bindings/bindings.hpp"
#include "calls/group.hpp"
#include "engine/chaos.hpp"
#include "gil.hpp"
#include "kernels/checksum.hpp"
#include "kernels/finite.hpp"

namespace commrt {

void bind_faults(nb::module_& m) {
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
      .def(nb::new_([](uint64_t seed, int rank, std::vector<FaultRule> rules) {
             return std::make_shared<Chaos>(seed, rank, std::move(rules));
           }), nb::arg("seed"), nb::arg("rank"), nb::arg("rules"))
      .def_prop_ro("num_injected", &Chaos::num_injected, "Faults so far.");

  m.def("inject_faults",
        [](Group& group, std::shared_ptr<Chaos> chaos) {
          const ReleasedGil release;
          const std::lock_guard<std::mutex> lock(group.engine->mutex);
          group.comm->chaos = std::move(chaos);
          group.comm->is_watched = true;
        },
        nb::arg("group"), nb::arg("chaos"), "Inject faults into the operations of a group.");

  m.def("first_not_finite",
        [](int dtype, uint64_t address, int64_t count) {
          const auto type = static_cast<DType>(dtype);
          const auto* const data = reinterpret_cast<const void*>(address);
          const int64_t index = first_not_finite(type, data, count);
          return nb::make_tuple(index, index >= 0 && is_nan_at(type, data, index));
        },
        nb::arg("dtype"), nb::arg("address"), nb::arg("count"),
        "Return the index of the first element that is NaN or infinite, and whether it is NaN; -1: "
        "there is none.");

  m.def("checksum",
        [](uint64_t address, size_t nbytes) {
          return checksum(reinterpret_cast<const void*>(address), nbytes);
        },
        nb::arg("address"), nb::arg("nbytes"), "Return the checksum of memory.");
}

}  // namespace commrt
