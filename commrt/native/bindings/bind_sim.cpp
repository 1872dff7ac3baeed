// SPDX-License-Identifier: Apache-2.0
// Binds simulated devices and their world (commrt/devices/simulated.py).
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/bind_device.hpp"
#include "devices/device_error.hpp"
#include "devices/sim_world.hpp"
#include "gil.hpp"

namespace commrt {
namespace {

using sim::World;

struct PySimDevice : PyDevice {
  sim::SimDevice* sim() const { return static_cast<sim::SimDevice*>(device); }
};

struct PyWorld {
  std::shared_ptr<World> world;
};

template <class F>
auto locked(World& world, F function) {
  ReleasedGil free;
  std::lock_guard<std::mutex> guard(world.mutex);
  return function();
}

sim::Options options_of(const nb::dict& given) {
  sim::Options options;
  const auto take = [&given](const char* name, auto& field) {
    if (given.contains(name)) field = nb::cast<std::decay_t<decltype(field)>>(given[name]);
  };
  take("seed", options.seed);
  take("queues", options.queues);
  take("preempt", options.preempt);
  take("check_order", options.check_order);
  take("poison", options.poison);
  take("alloc_syncs", options.alloc_syncs);
  take("free_syncs", options.free_syncs);
  take("pinned_alloc_syncs", options.pinned_alloc_syncs);
  take("first_launch_syncs", options.first_launch_syncs);
  take("legacy_stream_syncs", options.legacy_stream_syncs);
  take("pageable_copies_block", options.pageable_copies_block);
  take("host_copies_block", options.host_copies_block);
  take("most_commands", options.most_commands);
  take("unrecorded_wait_passes", options.unrecorded_wait_passes);
  take("wait_keeps_record", options.wait_keeps_record);
  take("capture_forbids", options.capture_forbids);
  take("ipc_checks", options.ipc_checks);
  take("memory_flags", options.memory_flags);
  return options;
}

}  // namespace

void bind_sim(nb::module_& m, nb::class_<PyDevice>& device) {
  nb::class_<PySimDevice>(m, "SimDevice", device, nb::dynamic_attr(),
                          "A simulated device; SimWorld makes them.")
      .def_prop_ro("name", [](const PySimDevice& d) { return d.sim()->name; }, "In messages.")
      .def("fail_after", [](const PySimDevice& d, std::uint64_t commands) {
        locked(*d.sim()->world, [&] { d.sim()->fail_in = commands; });
      }, nb::arg("commands"), "Let the device fail for good at the n-th command from now.")
      .def("num_graph_commands", [](const PySimDevice& d, Graph graph) {
        return locked(*d.sim()->world, [&]() -> std::size_t {
          const auto found = d.sim()->graphs.find(graph);
          return found == d.sim()->graphs.end() ? 0
                                                : found->second.recording->entries.size();
        });
      }, nb::arg("graph"), "Number of commands that a graph was captured from.");

  nb::class_<PyWorld>(m, "SimWorld", "Simulated devices and host threads, by one seed.")
      .def("__init__", [](PyWorld* self, const nb::dict& options) {
        new (self) PyWorld{std::make_shared<World>(options_of(options))};
      }, nb::arg("options"))
      .def("device", [](const PyWorld& w, const std::string& name, int ordinal) {
        PySimDevice made;
        made.device = w.world->add_device(name, ordinal);
        made.keeps = w.world;
        return made;
      }, nb::arg("name"), nb::arg("ordinal") = -1, "Return a new device: one process's view.")
      .def("step", [](const PyWorld& w) {
        return locked(*w.world, [&] { return w.world->step_device(); });
      }, "Run one command that can run; false if there is none.")
      .def("begin", [](const PyWorld& w, const std::vector<std::string>& names) {
        ReleasedGil free;
        w.world->begin(names);
      }, nb::arg("names"), "Announce host threads, which then attach() and detach().")
      .def("attach", [](const PyWorld& w, int index) {
        ReleasedGil free;
        w.world->attach(index);
      }, nb::arg("index"), "Be a host thread; returns at its first turn.")
      .def("detach", [](const PyWorld& w) {
        ReleasedGil free;
        w.world->detach();
      }, "End as a host thread.")
      .def_prop_ro("violations", [](const PyWorld& w) {
        return locked(*w.world, [&] { return w.world->violations; });
      }, "The first 64 violations that were found.")
      .def_prop_ro("num_violations", [](const PyWorld& w) {
        return locked(*w.world, [&] { return w.world->num_violations; });
      }, "Number of violations.")
      .def_prop_ro("deadlock", [](const PyWorld& w) {
        return locked(*w.world, [&] { return w.world->deadlock; });
      }, "Reason why nothing can go on; empty if something can.")
      .def_prop_ro("commands", [](const PyWorld& w) {
        return locked(*w.world, [&] { return w.world->commands; });
      }, "Number of commands that the devices were given.")
      .def_prop_ro("pending", [](const PyWorld& w) {
        return locked(*w.world, [&] {
          std::size_t all = 0;
          for (auto& one : w.world->devices)
            for (auto& queue : one->queues) all += queue.commands.size();
          return all;
        });
      }, "Commands that have not run.")
      .def_prop_ro("digest", [](const PyWorld& w) {
        return locked(*w.world, [&] { return w.world->digest; });
      }, "A number that says what ran when: equal for equal runs.")
      .def_prop_ro("live", [](const PyWorld& w) {
        const auto counts = locked(*w.world, [&] { return w.world->live(); });
        nb::dict made;
        for (const auto& [name, count] : counts) made[name] = count;
        return made;
      }, "Numbers of things that were made and not given back, by kind.")
      .def_prop_ro("live_nbytes", [](const PyWorld& w) {
        return locked(*w.world, [&] { return w.world->memory.live_nbytes(); });
      }, "Bytes that were allocated and not freed.");
}

}  // namespace commrt
