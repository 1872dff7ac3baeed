// SPDX-License-Identifier: Apache-2.0
// Binds what waits in Python sleep by: Bells and Backoff.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unordered_map.h>
#include <nanobind/stl/vector.h>

#include <utility>

#include "bindings/bindings.hpp"
#include "calls/end_watch.hpp"
#include "calls/group.hpp"
#include "engine/backoff.hpp"
#include "engine/bell.hpp"
#include "engine/liveness.hpp"
#include "engine/rank_states.hpp"
#include "gil.hpp"

namespace commrt {

namespace {

// The wait of a loop in Python: its rank tells others of the node that it waits.
class LoopWait : public Backoff {
 public:
  LoopWait(Engine* engine, int spins) : Backoff(engine, spins), teller_(engine) {}
  void pause_until(double until_s, bool rests) {
    {
      ReleasedGil release;
      const bool looks_at_clock = rests ? rest(until_s) : pause(until_s);
      if (looks_at_clock) teller_.tell(now_s());
    }
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  }

 private:
  WaitTeller teller_;
};

}  // namespace

void bind_waiting(nb::module_& m) {
  nb::class_<Bells>(m, "Bells", "Words by which ranks of a node wake each other.")
      .def(nb::new_([](const std::string& name, uint64_t address, uint64_t region_nbytes, int members,
                       int own) {
             return std::make_shared<Bells>(name, reinterpret_cast<void*>(address), region_nbytes,
                                            members, own);
           }), nb::arg("name"), nb::arg("address"), nb::arg("region_nbytes"), nb::arg("members"),
           nb::arg("own"), "Take over zeroed memory that the ranks share.")
      .def_ro("name", &Bells::name)
      .def_ro("own", &Bells::own, "Number of this rank among the members.")
      .def("is_asleep", &Bells::is_asleep, nb::arg("member"),
           "Whether a member sleeps, or is about to.")
      .def("ring", &Bells::ring, nb::arg("member"), "Wake a member, if it sleeps.");

  m.def("bells_of_threads", &Bells::of_threads, nb::arg("name"), nb::arg("members"),
        nb::arg("own"), "Return bells for ranks that are threads of this process.");

  nb::class_<Liveness>(m, "Liveness", "Which ranks of a world are gone, and how that was noticed.")
      .def(nb::new_([](std::vector<int> descriptors, std::vector<std::string> names,
                       std::vector<int> numbers) {
             return std::make_shared<Liveness>(std::move(descriptors), std::move(names),
                                               std::move(numbers));
           }),
           nb::arg("descriptors"), nb::arg("names"), nb::arg("numbers") = std::vector<int>(),
           "For each rank, take over a descriptor of its process (os.pidfd_open); -1: it has none. "
           "The numbers are those of the processes here; 0 or left out: not known.")
      .def("let_go", &Liveness::let_go,
           "Close the descriptors: nobody asks any more. What is known stays.")
      .def("ask_mpi",
           [](Liveness& self, uint64_t comm, const std::vector<int>& places) {
             self.ask_mpi(static_cast<Handle>(comm), places);
           }, nb::arg("comm"), nb::arg("places"),
           "Ask MPI, too, which has each member at a rank of its communicator.")
      .def("look", &Liveness::look, nb::arg("anew") = false,
           "Ask the kernel, unless that was done just now; True if any rank is gone.")
      .def("has_ended", &Liveness::has_ended, nb::arg("member"),
           "Whether it has ended without a word, or cannot be reached, as far as is known.")
      .def("how", &Liveness::how, nb::arg("member"),
           "How it was noticed that a rank is gone; empty where it lives, as far as is known.")
      .def("is_stopped", &Liveness::is_stopped, nb::arg("member"),
           "Whether the kernel says now that it is stopped, by a signal or a debugger.")
      .def("name", &Liveness::name, nb::arg("member"), "What messages call the process.");

  m.def("load_mpi_failures",
        [](const std::unordered_map<std::string, uint64_t>& found) {
          const std::string missing = MpiFailures::load(found);
          if (!missing.empty()) throw nb::value_error(("libmpi has no " + missing).c_str());
        }, nb::arg("found"),
        "Take addresses and constants by which MPI says which ranks have failed.");

  nb::class_<LoopWait>(m, "Backoff",
                       "How a thread waits that looks again and again. The engine's bell wakes it; "
                       "None is the engine of this process, if it has one.")
      .def("__init__",
           [](LoopWait* self, Engine* engine, int spins) {
             new (self) LoopWait(engine != nullptr ? engine : Engine::only_one(), spins);
           }, nb::arg("engine").none() = nb::none(), nb::arg("spins") = 0, nb::keep_alive<1, 2>())
      .def("pause", [](LoopWait& self, double limit_s) { self.pause_until(now_s() + limit_s, false); },
           nb::arg("limit_s"),
           "To be called after a look that found nothing: return for the next look, after a "
           "yield or a sleep of at most so long.")
      .def("rest", [](LoopWait& self, double limit_s) { self.pause_until(now_s() + limit_s, true); },
           nb::arg("limit_s"), "The same without yields before the sleep.");

  nb::class_<EndWatch>(m, "EndWatch",
                       "How a thread waits for the first of many operations that ends. With "
                       "has_core it yields before it sleeps; without, it sleeps at once.")
      .def(nb::init<std::shared_ptr<Engine>, bool>(), nb::arg("engine"), nb::arg("has_core"))
      .def("wait",
           [](EndWatch& self, const nb::list& requests, bool is_curious, double limit_s) {
             std::vector<EndWatch::Watched> watched;
             watched.reserve(requests.size());
             for (nb::handle each : requests) {
               const auto& request = nb::cast<const Request&>(each);
               watched.push_back({request.op(), request.comm()});
             }
             const ReleasedGil release;
             auto found = self.wait(watched, is_curious, limit_s);
             watched.clear();
             return found;
           }, nb::arg("requests"), nb::kw_only(), nb::arg("is_curious"), nb::arg("limit_s"),
           "Make progress until some of the requests have ended, and return their indices. None: "
           "time is up, wake() was called, or test() has something to do. So it is after any "
           "progress, too, if the caller is_curious. By one thread.")
      .def("wake", &EndWatch::wake, "End this wait, or the next one. For any thread.");
}

}  // namespace commrt
