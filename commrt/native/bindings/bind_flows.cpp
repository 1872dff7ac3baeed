// SPDX-License-Identifier: Apache-2.0
// Binds the simulation of schedules on networks (commrt/sim/simulate.py).
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>

#include "bindings/bindings.hpp"
#include "sim/flow_simulation.hpp"

namespace commrt {

namespace {

template <class T>
using In = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Out = nb::ndarray<nb::numpy, T>;

template <class T>
std::vector<T> values(const In<T>& given) {
  return {given.data(), given.data() + given.size()};
}

template <class T>
Out<T> to_numpy(std::vector<T> found) {
  auto* kept = new std::vector<T>(std::move(found));
  nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return Out<T>(kept->data(), {kept->size()}, owner);
}

template <class T>
bool is_row_table(const std::vector<T>& starts, std::size_t rows, std::size_t values) {
  return starts.size() == rows + 1 && starts.front() == 0 &&
         std::is_sorted(starts.begin(), starts.end()) &&
         static_cast<std::size_t>(starts.back()) == values;
}

void check(const RankRoutes& routes, std::size_t ranks, std::size_t links) {
  bool right = is_row_table(routes.pairs, ranks, routes.peers.size()) &&
               is_row_table(routes.ways, routes.peers.size(), routes.starts.size() - 1) &&
               is_row_table(routes.starts, routes.starts.size() - 1, routes.links.size());
  for (std::int32_t link : routes.links)
    right = right && link >= 0 && static_cast<std::size_t>(link) < links;
  for (std::size_t i = 0; right && i + 1 < routes.ways.size(); ++i)
    right = routes.ways[i] < routes.ways[i + 1];
  if (!right) throw nb::value_error("routes: rows of rows that fit, of links that there are");
}

// A run of one schedule. It keeps what it reads of Python alive.
class Simulation {
 public:
  Simulation(nb::list programs, nb::list bounds, In<std::int32_t> bounds_of_rank,
             std::int64_t itemsize, In<double> shared, In<double> per_flow, In<double> latencies,
             In<std::int64_t> pairs, In<std::int32_t> peers, In<std::int64_t> ways,
             In<std::int64_t> starts, In<std::int32_t> links, const SimulatedCosts& costs)
      : kept_(programs) {
    AllSteps all;
    std::int64_t base = 0;
    for (nb::handle one : programs) {
      const auto& steps = nb::cast<const StepColumns&>(one);
      all.push_back({&steps, base});
      base += steps.size();
    }
    for (nb::handle tables : bounds)
      bounds_.push_back(nb::cast<std::vector<std::vector<std::int64_t>>>(tables));
    if (bounds_of_rank.size() != all.size() || shared.size() != per_flow.size() ||
        shared.size() != latencies.size() || starts.size() == 0)
      throw nb::value_error("simulation: tables of different lengths");
    std::vector<std::vector<const std::vector<std::int64_t>*>> of_rank;
    for (std::size_t rank = 0; rank < all.size(); ++rank) {
      of_rank.emplace_back();
      for (const auto& edges : bounds_.at(bounds_of_rank.data()[rank]))
        of_rank.back().push_back(&edges);
    }
    RankRoutes routes{values(pairs), values(peers), values(ways), values(starts), values(links)};
    check(routes, all.size(), shared.size());
    run_ = std::make_unique<FlowSimulation>(std::move(all), std::move(of_rank), itemsize,
                                            LinkRates{values(shared), values(per_flow)},
                                            values(latencies), std::move(routes), costs);
  }

  FlowSimulation& run() { return *run_; }

  template <class T, class Field>
  Out<T> of_messages(Field field) const {
    std::vector<T> found;
    found.reserve(run_->messages().size());
    for (const SimulatedMessage& one : run_->messages())
      found.push_back(static_cast<T>(field(one)));
    return to_numpy<T>(std::move(found));
  }
  template <class T, class Field>
  Out<T> of_links(Field field) const {
    std::vector<T> found;
    for (std::size_t i = 0; i < run_->link_nbytes().size(); ++i)
      found.push_back(static_cast<T>(field(run_->sharing(), static_cast<std::int32_t>(i))));
    return to_numpy<T>(std::move(found));
  }

 private:
  nb::list kept_;
  std::vector<std::vector<std::vector<std::int64_t>>> bounds_;
  std::unique_ptr<FlowSimulation> run_;
};

using M = SimulatedMessage;

// Python's names of the columns; each is a new array.
nb::dict messages(const Simulation& self) {
  nb::dict found;
  found["send"] = self.of_messages<std::int64_t>([](const M& m) { return m.send; });
  found["recv"] = self.of_messages<std::int64_t>([](const M& m) { return m.recv; });
  found["nbytes"] = self.of_messages<double>([](const M& m) { return m.nbytes; });
  found["posted_us"] = self.of_messages<double>([](const M& m) { return m.posted; });
  found["begun_us"] = self.of_messages<double>([](const M& m) { return m.begun; });
  found["flowing_us"] = self.of_messages<double>([](const M& m) { return m.flowing; });
  found["ended_us"] = self.of_messages<double>([](const M& m) { return m.ended; });
  found["way"] = self.of_messages<std::int32_t>([](const M& m) { return m.way; });
  found["bottleneck"] = self.of_messages<std::int32_t>([](const M& m) { return m.bottleneck; });
  found["sharers"] = self.of_messages<std::int32_t>([](const M& m) { return m.sharers; });
  return found;
}

nb::dict links(Simulation& self) {
  nb::dict found;
  found["nbytes"] = to_numpy<double>(self.run().link_nbytes());
  found["busy_us"] = to_numpy<double>(self.run().link_busy_us());
  found["peak_rate"] = self.of_links<double>(
      [](const FairSharing& s, std::int32_t link) { return s.peak_rate(link); });
  found["peak_flows"] = self.of_links<std::int32_t>(
      [](const FairSharing& s, std::int32_t link) { return s.peak_flows(link); });
  return found;
}

nb::dict steps(Simulation& self) {
  nb::dict found;
  found["ready_us"] = to_numpy<double>(self.run().ready());
  found["done_us"] = to_numpy<double>(self.run().done());
  found["cause"] = to_numpy<std::int64_t>(self.run().causes());
  return found;
}

void bind_costs(nb::module_& m) {
  nb::class_<SimulatedCosts>(m, "SimulatedCosts", "Costs beside those of links.")
      .def(nb::init<>())
      .def_rw("send_overhead_us", &SimulatedCosts::send_overhead_us)
      .def_rw("receive_overhead_us", &SimulatedCosts::receive_overhead_us)
      .def_rw("reduce_us_per_byte", &SimulatedCosts::reduce_us_per_byte)
      .def_rw("copy_us_per_byte", &SimulatedCosts::copy_us_per_byte)
      .def_rw("eager_nbytes", &SimulatedCosts::eager_nbytes)
      .def_rw("handshake", &SimulatedCosts::handshake)
      .def_rw("local_latency_us", &SimulatedCosts::local_latency_us)
      .def_rw("local_rate", &SimulatedCosts::local_rate)
      .def_rw("contention_penalty", &SimulatedCosts::contention_penalty)
      .def_rw("in_order", &SimulatedCosts::in_order)
      .def_rw("queued_nbytes", &SimulatedCosts::queued_nbytes)
      .def_rw("burst_nbytes", &SimulatedCosts::burst_nbytes);
}

void bind_simulation(nb::module_& m) {
  nb::class_<Simulation>(m, "FlowSimulation", "A schedule on a network, event by event.")
      .def(nb::init<nb::list, nb::list, In<std::int32_t>, std::int64_t, In<double>, In<double>,
                    In<double>, In<std::int64_t>, In<std::int32_t>, In<std::int64_t>,
                    In<std::int64_t>, In<std::int32_t>, const SimulatedCosts&>(),
           nb::kw_only(), nb::arg("programs"), nb::arg("bounds"), nb::arg("bounds_of_rank"),
           nb::arg("itemsize"), nb::arg("shared"), nb::arg("per_flow"), nb::arg("latencies"),
           nb::arg("pairs"), nb::arg("peers"), nb::arg("ways"), nb::arg("starts"),
           nb::arg("links"), nb::arg("costs"))
      .def("advance", [](Simulation& self, std::int64_t events) {
             nb::gil_scoped_release released;
             return self.run().advance(events);
           },
           nb::arg("events"),
           "Handle up to so many events; return whether nothing is left to happen.")
      .def_prop_ro("num_done", [](Simulation& self) { return self.run().num_done(); })
      .def_prop_ro("time_us", [](Simulation& self) { return self.run().last_done(); })
      .def_prop_ro("num_events", [](Simulation& self) { return self.run().num_events(); })
      .def_prop_ro("num_shared", [](Simulation& self) { return self.run().sharing().num_shared(); })
      .def("messages", &messages, "Return the columns of all messages.")
      .def("links", &links, "Return the columns of all links.")
      .def("steps", &steps, "Return the columns of the steps of all ranks.")
      .def("plant_bug",
           [](Simulation& self, const std::string& name) {
             self.run().sharing().planted.plant(name);
           },
           nb::arg("name"), "Let the sharing of links be wrong, for tests.");
  m.def("planted_sharing_bugs", &PlantedBug<PlantedInSharing>::names,
        "Return the names of the bugs that plant_bug() knows.");
}

}  // namespace

void bind_flows(nb::module_& m) {
  bind_costs(m);
  bind_simulation(m);
}

}  // namespace commrt
