// SPDX-License-Identifier: Apache-2.0
// Binds the staging of device memory (commrt/staging.py).
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>

#include "bind_device.hpp"
#include "device_error.hpp"
#include "group.hpp"
#include "staged_messages.hpp"
#include "staging.hpp"

namespace commrt {

namespace {

// Runs without the GIL, and raises what the device says.
template <class F>
auto guarded(F function) {
  DeviceStatus status = DeviceStatus::Ok;
  std::string text;
  {
    nb::gil_scoped_release release;
    try {
      return function();
    } catch (const DeviceFailure& failure) {
      status = failure.status;
      text = failure.what();
    }
  }
  check_device(device_fails(status, text));
  return decltype(function())();
}

struct PyStager {
  std::shared_ptr<Stager> stager;
  std::shared_ptr<Engine> engine;
};

struct PyMessageStager {
  std::shared_ptr<MessageStager> stager;
  std::shared_ptr<Engine> engine;
};

struct PyStagedCall {
  std::shared_ptr<StagedCall> call;
  std::shared_ptr<Engine> engine;
  DeviceWork& work() const { return *call->work; }
};

// How a wait ended: 0 done or failed, 1 out of time, 2 with a signal.
int synchronize(const PyStagedCall& self, double timeout_s) {
  constexpr double kSignalPeriod_s = 0.05;
  constexpr unsigned kLooks = 64;
  Engine& engine = *self.engine;
  DeviceWork& work = self.work();
  const double deadline = now_s() + timeout_s;
  Backoff backoff(2000);
  for (;;) {
    const bool ended = guarded([&] {
      const double next = now_s() + kSignalPeriod_s;
      for (unsigned look = 1;; ++look) {
        if (work.has_ended(*self.call)) return true;
        if (engine.step()) {
          backoff.reset();
        } else {
          work.advance(self.call);
          if (work.simulated() || look % (kLooks * 64) == 0) work.ask_device(self.call);
          if (work.has_ended(*self.call)) return true;
          if (engine.wants_python()) return false;
          work.pause(backoff);
        }
        if (look % kLooks == 0 && now_s() > std::min(next, deadline)) return false;
      }
    });
    if (ended) return 0;
    if (engine.wants_python() && !run_wanted(engine)) return 2;
    guarded([&] {
      work.ask_device(self.call);
      return 0;
    });
    if (guarded([&] { return work.has_ended(*self.call); })) return 0;
    if (PyErr_CheckSignals() != 0) return 2;
    if (now_s() > deadline) return 1;
  }
}

// Starts a call, which takes references to what it is to keep.
template <class F>
PyStagedCall started(const std::shared_ptr<Engine>& engine, const DeviceWork& work,
                     nb::handle first, nb::handle second, F start) {
  PyStagedCall made{nullptr, engine};
  if (engine->has_ended()) drop_ended(*engine);
  void* kept[2] = {first.is_none() ? nullptr : first.inc_ref().ptr(),
                   second.is_none() ? nullptr : second.inc_ref().ptr()};
  try {
    made.call = guarded([&] { return start(kept); });
  } catch (...) {
    // Where the device had begun with it, the arrays stay alive for ever.
    if (!work.failed()) {
      for (void* object : kept) Py_XDECREF(static_cast<PyObject*>(object));
    }
    throw;
  }
  return made;
}

PyStagedCall start(const PyStager& self, const std::shared_ptr<const StagedPlan>& plan,
                   uint64_t in, uint64_t out, uint64_t stream, bool orders, nb::handle keep_x,
                   nb::handle keep_out, double timeout_s) {
  return started(self.engine, *self.stager, keep_x, keep_out, [&](void* const* kept) {
    return self.stager->start(plan,
                              {reinterpret_cast<unsigned char*>(in),
                               reinterpret_cast<unsigned char*>(out)},
                              stream, orders, kept, timeout_s);
  });
}

PyStagedCall start_arrays(const PyStager& self, const std::shared_ptr<const StagedPlan>& plan,
                          const std::vector<uint64_t>& addresses, uint64_t stream, bool orders,
                          nb::handle keep, double timeout_s) {
  std::vector<unsigned char*> arrays;
  arrays.reserve(addresses.size());
  for (const uint64_t address : addresses) {
    arrays.push_back(reinterpret_cast<unsigned char*>(address));
  }
  return started(self.engine, *self.stager, keep, nb::none(), [&](void* const* kept) {
    return self.stager->start(plan, std::move(arrays), stream, orders, kept, timeout_s);
  });
}

using MessageRow = std::tuple<uint64_t, uint64_t, int, int>;

PyStagedCall start_messages(const PyMessageStager& self, const std::vector<MessageRow>& sends,
                            const std::vector<MessageRow>& recvs, uint64_t stream, bool orders,
                            nb::handle keep, double timeout_s) {
  MessageLists lists;
  auto fill = [](const std::vector<MessageRow>& rows, std::vector<Message>& list) {
    for (const auto& [address, nbytes, peer, tag] : rows) {
      list.push_back({reinterpret_cast<void*>(address), nbytes, peer, tag, false});
    }
  };
  fill(sends, lists.sends);
  fill(recvs, lists.recvs);
  return started(self.engine, *self.stager, keep, nb::none(), [&](void* const* kept) {
    return self.stager->start(lists, stream, orders, kept, timeout_s);
  });
}

// Of each receive of a call of messages, what has come so far.
std::vector<uint64_t> received_nbytes(const PyStagedCall& self) {
  const Op* const op = self.call->messages.get();
  if (op == nullptr) return {};
  const std::lock_guard<std::mutex> own(self.engine->mutex);
  return op->p2p->parts->received;
}

// What a call of messages waits for; empty where it waits for nobody.
std::string waits_for(const PyStagedCall& self) {
  const Op* const op = self.call->messages.get();
  if (op == nullptr) return "";
  const std::lock_guard<std::mutex> own(self.engine->mutex);
  return op->finished() ? "" : op->comm->p2p->waits_for(*op);
}

using CopyRow = std::tuple<int, size_t, size_t, size_t, size_t>;

std::vector<StagedCopy> copies_of(const std::vector<CopyRow>& rows) {
  std::vector<StagedCopy> copies;
  copies.reserve(rows.size());
  for (const auto& [array, at, stride, nbytes, pinned] : rows) {
    if (nbytes != 0) copies.push_back({array, at, stride, nbytes, pinned});
  }
  return copies;
}

// Of a launch, with numbers of the call's arrays.
StagedLaunch launch_of(int kind, int op, int dtype, int buffer, size_t buffer_nbytes,
                       const std::vector<int>& arrays, uint64_t table, size_t table_nbytes,
                       size_t terms_at, uint32_t num_boxes, uint64_t units) {
  if (arrays.size() > static_cast<size_t>(kMostLaunchArrays)) {
    throw nb::value_error("one launch takes no more arrays than that");
  }
  StagedLaunch made;
  made.launch.kind = static_cast<BoxKind>(kind);
  made.launch.op = static_cast<RedOp>(op);
  made.launch.dtype = static_cast<DType>(dtype);
  made.launch.buffer_nbytes = buffer_nbytes;
  made.launch.table = reinterpret_cast<const unsigned char*>(table);
  made.launch.table_nbytes = table_nbytes;
  made.launch.terms_at = terms_at;
  made.launch.num_boxes = num_boxes;
  made.launch.units = units;
  made.buffer = buffer;
  made.arrays = arrays;
  if (const char* why = why_no_launch(made.launch)) throw nb::value_error(why);
  return made;
}

template <class Bug, class S>
void plant(S& stager, const std::string& name, const char* const* names, int count) {
  for (int i = 0; i < count; ++i) {
    if (name == names[i]) {
      stager.planted = static_cast<Bug>(i);
      return;
    }
  }
  throw nb::value_error(("no bug is called " + name).c_str());
}

// What Stager and MessageStager have alike.
template <class Py>
void bind_work(nb::class_<Py>& type) {
  type.def("give_up",
           [](const Py& self, const std::string& why) {
             nb::gil_scoped_release release;
             self.stager->give_up("revoked", why);
           }, nb::arg("why"), "Fail what is under way, and let its streams go.")
      .def("refuse_capture",
           [](const Py& self, uint64_t stream) {
             guarded([&] {
               self.stager->refuse_capture(stream);
               return 0;
             });
           }, nb::arg("stream"), "Raise CaptureError where a stream is captured.")
      .def("close", [](const Py& self) { self.stager->close(); },
           nb::call_guard<nb::gil_scoped_release>(), "Give everything back that is not in use.")
      .def_prop_ro("outstanding", [](const Py& self) { return self.stager->outstanding(); },
                   "Calls whose end the host has not seen.")
      .def_prop_ro("num_events", [](const Py& self) { return self.stager->num_events(); },
                   "Events that wait for the next call.")
      .def_prop_ro("pinned_nbytes",
                   [](const Py& self) {
                     nb::gil_scoped_release release;
                     return self.stager->pinned_nbytes();
                   }, "Pinned memory for data.")
      .def_prop_ro("failed", [](const Py& self) { return self.stager->failed(); },
                   "Whether something failed, so that nothing more is taken.");
}

// Makes the work of a communicator on a device.
template <class S, class Py>
void make_work(Py* self, Group& group, const PyDevice& device, int slots, size_t first_nbytes,
               size_t most_nbytes, uint32_t first_value) {
  const StagerOptions options{slots, first_nbytes, most_nbytes, first_value};
  Device* const native = device.device;
  const std::shared_ptr<void> keeps = device.keeps;
  auto made = guarded([&] {
    return std::make_shared<S>(*group.comm, *group.engine, native, keeps, options);
  });
  group.engine->add_device_work(made);
  if (group.engine->has_thread() && !made->simulated()) group.engine->start_watch();
  group.device_work.push_back(made);
  new (self) Py{std::move(made), group.engine};
}

}  // namespace

void bind_staging(nb::module_& m) {
  nb::class_<StagedLaunch>(m, "StagedLaunch", "A launch of boxes that is part of a call.")
      .def("__init__",
           [](StagedLaunch* self, int kind, int op, int dtype, int buffer, size_t buffer_nbytes,
              const std::vector<int>& arrays, uint64_t table, size_t table_nbytes,
              size_t terms_at, uint32_t num_boxes, uint64_t units) {
             new (self) StagedLaunch(launch_of(kind, op, dtype, buffer, buffer_nbytes, arrays,
                                               table, table_nbytes, terms_at, num_boxes, units));
           },
           nb::kw_only(), nb::arg("kind"), nb::arg("op"), nb::arg("dtype"), nb::arg("buffer"),
           nb::arg("buffer_nbytes"), nb::arg("arrays"), nb::arg("table"),
           nb::arg("table_nbytes"), nb::arg("terms_at"), nb::arg("num_boxes"), nb::arg("units"));

  nb::class_<StagedPart>(m, "StagedPart", "What is copied for a piece, and what the host runs.")
      .def("__init__",
           [](StagedPart* self, PlanPtr runs, const std::vector<CopyRow>& in,
              const std::vector<CopyRow>& out, size_t out_at,
              std::optional<std::vector<size_t>> table, std::vector<StagedLaunch> packs,
              std::vector<StagedLaunch> unpacks) {
             const bool has_table = table.has_value();
             new (self) StagedPart{std::move(runs),  std::move(packs), std::move(unpacks),
                                   copies_of(in),    copies_of(out),   out_at,
                                   table ? *table : std::vector<size_t>{}, has_table};
           },
           nb::arg("runs"), nb::arg("copies_in"), nb::arg("copies_out"), nb::kw_only(),
           nb::arg("out_at") = 0, nb::arg("table") = nb::none(),
           nb::arg("packs") = std::vector<StagedLaunch>{},
           nb::arg("unpacks") = std::vector<StagedLaunch>{},
           "Rows are (array, offset there, stride there from piece to piece, bytes, offset in "
           "pinned memory); `table` are offsets of the host's arrays.");

  nb::class_<StagedPlan>(m, "StagedPlan", "What a call on device memory does, by its pieces.")
      .def("__init__",
           [](StagedPlan* self, std::vector<StagedPart> parts, int64_t pieces,
              size_t slot_nbytes, bool serial) {
             const size_t given = parts.size();
             if (pieces < 1 || given == 0 || (given > 2 && given != static_cast<size_t>(pieces))) {
               throw nb::value_error("as many parts as pieces are expected, or the first and last");
             }
             new (self) StagedPlan{std::move(parts), pieces, (slot_nbytes + 63) / 64 * 64, serial};
           },
           nb::arg("parts"), nb::arg("pieces"), nb::arg("slot_nbytes"),
           nb::arg("serial") = false)
      .def_prop_ro("pieces", [](const StagedPlan& p) { return p.pieces; },
                   "Parts that are copied and combined one after the other.");

  nb::class_<PyStagedCall>(m, "StagedCall", "One started call on device memory.")
      .def("wait_on",
           [](const PyStagedCall& self, uint64_t stream) {
             guarded([&] {
               self.work().refuse_capture(stream);
               self.work().wait_on(self.call, stream);
               return 0;
             });
           }, nb::arg("stream"), "Let a stream wait for the end.")
      .def("synchronize",
           [](const PyStagedCall& self, double timeout_s) {
             const int how = synchronize(self, timeout_s);
             if (how == 2) throw nb::python_error();
             drop_ended(*self.engine);
             return how == 0;
           }, nb::arg("timeout_s"), "Block the host until the end; False where time ran out.")
      .def("test",
           [](const PyStagedCall& self) {
             if (!self.call->ended()) {
               guarded([&] {
                 if (!self.engine->step()) self.work().ask_device(self.call);
                 self.work().advance(self.call);
                 return 0;
               });
             }
             if (self.engine->has_ended()) drop_ended(*self.engine);
             return guarded([&] { return self.work().has_ended(*self.call); });
           }, "Run a little progress; whether it has ended.")
      .def_prop_ro("ended",
                   [](const PyStagedCall& self) {
                     nb::gil_scoped_release release;
                     return self.work().has_ended(*self.call);
                   }, "Whether it has ended, without progress.")
      .def_prop_ro("failure", [](const PyStagedCall& self) -> nb::object {
        if (!self.call->failed()) return nb::none();
        return nb::make_tuple(self.call->kind, self.call->error);
      }, "(kind, text) of what went wrong; None where nothing did.")
      .def("let_be",
           [](const PyStagedCall& self) {
             guarded([&] {
               self.work().let_be(self.call);
               return 0;
             });
           }, "Give the device all of it, as nobody will ask for it again.")
      .def_prop_ro("received_nbytes", &received_nbytes, "Bytes of each receive, so far.")
      .def_prop_ro("waits_for", &waits_for, "What messages wait for; empty: nobody.")
      .def_prop_ro("seq", [](const PyStagedCall& self) { return self.call->seq; },
                   "Sequence number of its first piece.");

  nb::class_<PyStager> stager(m, "Stager", "A communicator's collectives on one device.");
  stager
      .def("__init__", &make_work<Stager, PyStager>, nb::arg("group"), nb::arg("device"),
           nb::arg("slots"), nb::arg("first_nbytes"), nb::arg("most_nbytes"),
           nb::arg("first_value") = 0)
      .def("start", &start, nb::arg("plan"), nb::arg("data_in"), nb::arg("data_out"),
           nb::arg("stream"), nb::arg("orders"), nb::arg("keep_x").none(),
           nb::arg("keep_out").none(), nb::arg("timeout_s"),
           "Give the device and the engine all that there is to do.")
      .def("start_arrays", &start_arrays, nb::arg("plan"), nb::arg("addresses"),
           nb::arg("stream"), nb::arg("orders"), nb::arg("keep"), nb::arg("timeout_s"),
           "The same of any number of arrays.")
      .def("plant",
           [](const PyStager& self, const std::string& name) {
             plant<Planted>(*self.stager, name, kPlantedNames, kNumPlanted);
           }, nb::arg("name"), "Plant a bug, for tests.");
  bind_work(stager);

  nb::class_<PyMessageStager> messages(m, "MessageStager",
                                       "A communicator's messages on one device.");
  messages
      .def("__init__", &make_work<MessageStager, PyMessageStager>, nb::arg("group"),
           nb::arg("device"), nb::arg("slots"), nb::arg("first_nbytes"), nb::arg("most_nbytes"),
           nb::arg("first_value") = 0)
      .def("start", &start_messages, nb::arg("sends"), nb::arg("recvs"), nb::arg("stream"),
           nb::arg("orders"), nb::arg("keep"), nb::arg("timeout_s"),
           "Start messages, rows of (address, bytes, peer, tag), as one operation.")
      .def("plant",
           [](const PyMessageStager& self, const std::string& name) {
             plant<PlantedMessage>(*self.stager, name, kPlantedMessageNames,
                                   kNumPlantedMessages);
           }, nb::arg("name"), "Plant a bug, for tests.");
  bind_work(messages);
  messages.def_prop_ro("num_leaving",
                       [](const PyMessageStager& self) {
                         nb::gil_scoped_release release;
                         return self.stager->num_leaving();
                       }, "Calls whose copy to the host is not seen.");

  m.def("planted_bugs", [] {
    return std::vector<std::string>(kPlantedNames + 1, kPlantedNames + kNumPlanted);
  }, "Names of the bugs that tests can plant in the staging of device memory.");
  m.def("planted_message_bugs", [] {
    return std::vector<std::string>(kPlantedMessageNames + 1,
                                    kPlantedMessageNames + kNumPlantedMessages);
  }, "The same, of messages of device memory.");
}

}  // namespace commrt
