// SPDX-License-Identifier: Apache-2.0
// Binds MPI's operations on device memory (backends/mpi/attached.py).
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.hpp"
#include "bindings/stand_in_words.hpp"
#include "calls/device_call.hpp"
#include "gil.hpp"
#include "library_calls/mpi_work.hpp"

namespace commrt {

namespace {

using PyMpiWork = PyWork<MpiWork>;

PyDeviceCall start(const PyMpiWork& self, const std::shared_ptr<const MpiDevicePlan>& plan,
                   uint64_t in, uint64_t out, uint64_t stream, bool orders, nb::handle keep_x,
                   nb::handle keep_out, double timeout_s) {
  return started(self, keep_x, keep_out, timeout_s, [&](void* const* kept) {
    return self.own().start(plan, as_memory(in), as_memory(out), stream, orders, kept, timeout_s);
  });
}

}  // namespace

void bind_mpi_work(nb::module_& m) {
  nb::class_<MpiDevicePlan> mpi_plan(m, "MpiDevicePlan",
                                     "Plan of a call of MPI on device memory.");
  bind_words(mpi_plan)
      .def_prop_ro("nbytes", &MpiDevicePlan::memory_nbytes, "Bytes of memory that it takes.")
      .attr("backend") = "mpi";
  m.def("mpi_device_plan",
        [](PlanPtr runs, size_t in_nbytes, size_t out_nbytes, bool in_place,
           bool sends_out) {
          if (!runs->native) {
            throw nb::value_error("mpi_device_plan() was given a plan that MPI does not run: pass "
                                  "one that make_native_template() made");
          }
          auto made = std::make_shared<MpiDevicePlan>();
          made->runs = std::move(runs);
          made->in_nbytes = in_nbytes;
          made->out_nbytes = out_nbytes;
          made->in_place = in_place;
          made->sends_out = sends_out;
          return made;
        },
        nb::arg("runs"), nb::kw_only(), nb::arg("in_nbytes"), nb::arg("out_nbytes"),
        nb::arg("in_place"), nb::arg("sends_out"),
        "`in_place`: MPI may read where it writes; `sends_out`: this rank's input is to lie "
        "in its output.");

  nb::class_<PyMpiWork, PyDeviceWork>(m, "MpiWork",
                                      "A communicator's operations of MPI on device memory.")
      .def("__init__",
           [](PyMpiWork* self, Group& group, const PyDevice& device,
              std::shared_ptr<NcclOrder> order, bool flags, uint32_t first_value) {
             StagerOptions options;
             options.flags = flags;
             options.first_value = first_value;
             make_work(self, group, [&, on = device.device, keeps = device.keeps] {
               return std::make_shared<MpiWork>(*group.comm, *group.engine, on, keeps,
                                                std::move(order), options);
             });
           }, nb::arg("group"), nb::arg("device"), nb::arg("order").none(), nb::arg("flags"),
           nb::arg("first_value") = 0)
      .def("start", &start, nb::arg("plan"), nb::arg("data_in"), nb::arg("data_out"),
           nb::arg("stream"), nb::arg("orders"), nb::arg("keep_x").none(),
           nb::arg("keep_out").none(), nb::arg("timeout_s"),
           "Give the device and the engine all that there is to do.")
      .def("release_rest",
           [](const PyMpiWork& self) {
             ReleasedGil release;
             return static_cast<int>(self.own().release_rest());
           }, "Give back what is left of one that failed: 1 done, 2 never, 0 later.")
      .def("plant",
           [](const PyMpiWork& self, const std::string& name) {
             self.own().planted.plant(name);
           }, nb::arg("name"), "Plant a bug, for tests.");
  m.def("planted_mpi_bugs", &PlantedBug<PlantedInMpi>::names,
        "Names of the bugs that tests can plant in MPI's calls on device memory.");
}

}  // namespace commrt
