// SPDX-License-Identifier: Apache-2.0
// Binds programs of streams.
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/bind_device.hpp"
#include "bindings/bindings.hpp"
#include "device_calls/stream_program.hpp"

namespace commrt {

namespace {

using Commands = nb::ndarray<const std::int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

std::shared_ptr<StreamProgram> make_program(Commands table, int size, int dtype,
                                            std::size_t itemsize, double real,
                                            std::int64_t integer, std::int64_t divisor) {
  if (table.shape(1) != kStreamColumns) {
    throw nb::value_error(("commands have " + std::to_string(table.shape(1)) +
                           " columns; expected " + std::to_string(kStreamColumns))
                              .c_str());
  }
  if (dtype < 0 || dtype >= kNumDTypes || size < 1 || itemsize == 0)
    throw nb::value_error(("make_stream_program() was given size=" + std::to_string(size) +
                           ", dtype=" + std::to_string(dtype) + " and itemsize=" +
                           std::to_string(itemsize) + "; expected a size and an itemsize of at " +
                           "least 1, and a dtype code from 0 to " + std::to_string(kNumDTypes - 1))
                              .c_str());
  auto program = std::make_shared<StreamProgram>();
  program->dtype = static_cast<DType>(dtype);
  program->itemsize = itemsize;
  program->factor = Scale{real, integer};
  program->divisor = divisor;
  program->size = size;
  const std::int64_t* row = table.data();
  for (std::size_t i = 0; i < table.shape(0); ++i, row += kStreamColumns)
    program->commands.push_back({static_cast<StreamStep>(row[0]), row[1], row[2], row[3], row[4],
                                 row[5], row[6], row[7]});
  if (const char* why = program->problem()) {
    throw nb::value_error(
        (std::string("make_stream_program() refuses these commands: ") + why).c_str());
  }
  return program;
}

}  // namespace

void bind_programs(nb::module_& m) {
  nb::class_<StreamProgram>(m, "StreamProgram", "Commands that a stream runs for a schedule.")
      .def_prop_ro("num_commands", [](const StreamProgram& one) { return one.commands.size(); })
      .def_ro("num_parts", &StreamProgram::parts)
      .def_ro("size", &StreamProgram::size)
      .def_ro("extents", &StreamProgram::extents);
  m.def("make_stream_program", &make_program, nb::arg("commands"), nb::kw_only(), nb::arg("size"),
        nb::arg("dtype"), nb::arg("itemsize"), nb::arg("real"), nb::arg("integer"),
        nb::arg("divisor"), "A program of the commands in the rows.");

  m.def("stream_steps", [] {
    return std::vector<std::string>(kStreamStepNames, kStreamStepNames + kNumStreamSteps);
  }, "Names of a program's steps, by their codes.");
}

}  // namespace commrt
