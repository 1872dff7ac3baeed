// SPDX-License-Identifier: Apache-2.0
// Binds programs of streams, and the exchange between processes that runs them.
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "bind_device.hpp"
#include "peer_exchange.hpp"

namespace commrt {

namespace {

using Commands = nb::ndarray<const std::int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

unsigned char* at(std::uint64_t address) { return reinterpret_cast<unsigned char*>(address); }

std::shared_ptr<StreamProgram> make_program(Commands table, int size, int dtype,
                                            std::size_t itemsize, double real,
                                            std::int64_t integer, std::int64_t divisor) {
  if (table.shape(1) != kStreamColumns) throw nb::value_error("a command has 8 columns");
  if (dtype < 0 || dtype >= kNumDTypes || size < 1 || itemsize == 0)
    throw nb::value_error("no such type or number of ranks");
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
  if (const char* why = program->problem()) throw nb::value_error(why);
  return program;
}

}  // namespace

void bind_programs(nb::module_& m) {
  nb::class_<StreamProgram>(m, "StreamProgram", "What a stream runs for a schedule.")
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

  nb::class_<PeerExchange>(m, "PeerExchange", "Exchange memory that peers have opened.")
      .def("_run",
           [](PeerExchange& self, const StreamProgram& program, std::uint64_t x,
              std::uint64_t out, std::uint64_t scratch, Stream stream, bool orders) {
             if (program.size != self.size)
               throw std::invalid_argument("a program of another number of ranks");
             for (std::size_t i = kFirstPeerBase; i < program.extents.size(); ++i)
               if (program.extents[i] > self.half_nbytes)
                 throw std::invalid_argument("a program that publishes more than there is room");
             Event end = 0;
             DeviceStatus status;
             {
               nb::gil_scoped_release release;
               status = self.run(program, at(x), at(out), at(scratch), stream, orders,
                                 orders ? nullptr : &end);
             }
             check_device(status);
             return end;
           },
           nb::arg("program"), nb::arg("x"), nb::arg("out"), nb::arg("scratch"),
           nb::arg("stream"), nb::arg("orders"),
           "Give a program to the device; the event of its end, or 0 with `orders`.")
      .def("_give_event", &PeerExchange::give_event, nb::arg("event"),
           nb::call_guard<nb::gil_scoped_release>())
      .def("_give_up",
           [](PeerExchange& self) {
             DeviceStatus status;
             {
               nb::gil_scoped_release release;
               status = self.give_up();
             }
             check_device(status);
           })
      .def("_close",
           [](PeerExchange& self) {
             DeviceStatus status;
             {
               nb::gil_scoped_release release;
               status = self.close();
             }
             check_device(status);
           })
      .def_prop_ro("lost", &PeerExchange::lost)
      .def_ro("half_nbytes", &PeerExchange::half_nbytes)
      .def_prop_rw(
          "planted", [](const PeerExchange& self) { return kPlantedInExchangeNames[static_cast<int>(self.planted)]; },
          [](PeerExchange& self, const std::string& name) {
            for (int i = 0; i < kNumPlantedInExchange; ++i) {
              if (name == kPlantedInExchangeNames[i]) {
                self.planted = static_cast<PlantedInExchange>(i);
                return;
              }
            }
            throw nb::value_error("no such bug to plant");
          })
      .def("_count_from", &PeerExchange::count_from, nb::arg("value"),
           nb::call_guard<nb::gil_scoped_release>());
  m.def("peer_exchange_flags_nbytes", &PeerExchange::flags_nbytes, nb::arg("size"),
        "Bytes of flags that exchange memory begins with.");
  m.def("planted_in_exchange", [] {
    return std::vector<std::string>(kPlantedInExchangeNames,
                                    kPlantedInExchangeNames + kNumPlantedInExchange);
  }, "Bugs that tests plant in the exchange.");
  m.def("make_peer_exchange",
        [](const PyDevice& device, int rank, const std::vector<std::uint64_t>& memory,
           std::size_t half_nbytes) {
          if (rank < 0 || rank >= static_cast<int>(memory.size()))
            throw nb::value_error("the rank is none of those with memory");
          std::vector<unsigned char*> places;
          for (std::uint64_t address : memory) places.push_back(at(address));
          DeviceStatus status = DeviceStatus::Ok;
          std::shared_ptr<PeerExchange> made;
          {
            nb::gil_scoped_release release;
            made = std::make_shared<PeerExchange>(device.device, device.keeps, rank,
                                                  std::move(places), half_nbytes, &status);
          }
          check_device(status);
          return made;
        },
        nb::arg("device"), nb::arg("rank"), nb::arg("memory"), nb::arg("half_nbytes"),
        "One rank's exchange; `memory` is where each rank's is mapped here.");
}

}  // namespace commrt
