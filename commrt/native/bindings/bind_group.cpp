// SPDX-License-Identifier: Apache-2.0
// Binds Group (the communicator's native base) and Request.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unordered_map.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <utility>

#include "bindings/bindings.hpp"
#include "calls/front.hpp"
#include "calls/fusion.hpp"
#include "calls/call_check.hpp"
#include "calls/group.hpp"
#include "engine/backoff.hpp"
#include "engine/device_work.hpp"
#include "engine/gloo_calls.hpp"
#include "engine/p2p.hpp"
#include "engine/relay.hpp"
#include "engine/relay_carrier.hpp"
#include "engine/told_afar.hpp"
#include "gil.hpp"

namespace commrt {

namespace {

double time_plan(Group& group, const PlanPtr& plan, uint64_t in, uint64_t out, int repetitions,
                 double timeout_s) {
  ReleasedGil release;
  Engine& engine = *group.engine;
  const double begin = now_s();
  std::unique_lock<std::mutex> lock(engine.mutex);
  for (int i = 0; i < repetitions; ++i) {
    const void* from = reinterpret_cast<const void*>(in);
    void* to = reinterpret_cast<void*>(out);
    const bool is_short = plan->run_short && group.comm->quiet();
    auto op = is_short
                  ? group.comm->run_short(plan, from, to, group.comm->spins_with_gil(plan.get()))
                  : group.comm->start(plan, from, to, nullptr, true);
    if (op == nullptr) continue;
    if (plan->gloo != nullptr) {
      lock.unlock();
      WaitResult ended;
      {
        const TakenGil acquired;
        ended = wait_for(group, op, std::max(1e-3, begin + timeout_s - now_s()));
        if (ended == WaitResult::Interrupted) throw nb::python_error();
      }
      lock.lock();
      if (ended == WaitResult::TimedOut) return -1;
    }
    Backoff backoff(engine, group.comm->spins_of(plan.get()));
    backoff.sleep_soon(group.comm->off_node->is_relay);
    auto give = [&lock] {
      if (!Relay::is_due()) return;
      lock.unlock();
      {
        const TakenGil acquired;
        RelayCarrier::give_everything();
      }
      lock.lock();
    };
    give();
    while (!op->finished()) {
      if (engine.step_locked(kNoLimit)) {
        backoff.reset();
        give();
        continue;
      }
      lock.unlock();
      backoff.pause(begin + timeout_s);
      if (now_s() - begin > timeout_s) return -1;
      lock.lock();
    }
    give();
    group.comm->recycle(std::move(op));
  }
  return now_s() - begin;
}

nb::list records_of(const Group& group) {
  std::vector<Record> last;
  auto take = [&last](const std::vector<Record>& ring, uint64_t end) {
    for (uint64_t seq = end > Comm::kRecords ? end - Comm::kRecords : 0; seq < end; ++seq) {
      last.push_back(ring[seq % Comm::kRecords]);
    }
  };
  {
    std::lock_guard<std::mutex> lock(group.engine->mutex);
    take(group.comm->records, group.comm->next_seq);
    take(group.comm->message_records, group.comm->p2p->next_seq());
  }
  std::stable_sort(last.begin(), last.end(), [](const Record& a, const Record& b) {
    return a.start_ticks < b.start_ticks;
  });
  nb::list rows;
  for (const Record& r : last) {
    rows.append(nb::make_tuple(r.seq, r.coll, r.dtype, r.redop, r.count, r.root, r.state,
                               r.start_ticks, r.end_ticks, r.stream, r.device, r.peer, r.tag));
  }
  return rows;
}

}  // namespace

void bind_group(nb::module_& m) {
  nb::class_<Request>(m, "Request",
                      "One started operation. Keep it, and wait() for it: the buffers belong "
                      "to the engine until then.")
      .def("wait", &Request::wait, nb::kw_only(), nb::arg("stream") = nb::none(),
           nb::arg("timeout_s") = nb::none(),
           "Return the operation's output once it is complete. Idempotent; raises the same "
           "error every time. timeout_s defaults to the communicator's. Ctrl-C leaves the "
           "request pending.")
      .def("synchronize",
           [](Request& self, nb::object timeout_s) { return self.wait(nb::none(), timeout_s); },
           nb::kw_only(), nb::arg("timeout_s") = nb::none(),
           "Block the host until the operation is complete; for host arrays the same as wait().")
      .def("test", &Request::test,
           "Run a little progress; True once complete. Raises the operation's error.")
      .def("raise_if_late",
           [](Request& self, double limit_s) {
             if (!self.done()) self.outcome_after(WaitResult::TimedOut, limit_s);
           }, nb::arg("limit_s"),
           "Raise what a wait that began so long ago would raise, unless it has ended.")
      .def("be_quiet", &Request::be_quiet, "Do not warn where it is dropped.")
      .def("take_back", &Request::take_back, nb::arg("why"),
           "End a message that its peer does not know of, or has not asked for.")
      .def_prop_ro("done", &Request::done, "Whether the operation has ended, without progress.")
      .def_prop_ro("seq", &Request::seq, "Sequence number on its communicator.")
      .def_prop_ro("operation", &Request::operation, "Name of the operation.")
      .def_prop_ro("received_nbytes", &Request::received_nbytes,
                   "Bytes that a receive has taken, or all of a multi_sendrecv; -1 for other "
                   "operations.")
      .def_prop_ro("each_received_nbytes", &Request::each_received_nbytes,
                   "Bytes that each receive of the operation has taken, in their order.")
      .def_prop_ro("source", &Request::source, "Rank a receive took its message from.")
      .def_prop_ro("timeout_s", &Request::timeout_s,
                   "Default limit of its waits, in seconds.")
      .def_prop_ro("device", &Request::device,
                   "Number of the device of its buffers; None for host memory.")
      .def_prop_ro("stream", &Request::stream,
                   "Stream it is ordered with, as an integer; None for host memory.")
      .def("__repr__", &Request::repr)
      .def("__bool__", [](const Request& self) -> bool {
        throw nb::type_error(("the truth of a request is not its completion: call test() or "
                              "wait() on " + std::string(self.repr().c_str())).c_str());
      });

  nb::class_<PlanFamily>(m, "PlanFamily", "Calls that differ only in their lengths.")
      .def("named", &PlanFamily::named, nb::arg("label"),
           "Return its template of that name, to be added for more lengths; None: it has none.")
      .def_prop_ro("unit", &PlanFamily::unit, "Elements of the full vector for each of a count.");
  nb::class_<Front>(m, "Front", nb::is_weak_referenceable(), nb::dynamic_attr(),
                    "What a program holds of a group: its methods, and none of its parts.")
      .def("__init__",
           [](Front* front, nb::object group) {
             if (!nb::isinstance<Group>(group)) throw nb::type_error("Front: group is no Group");
             new (front) Front{std::move(group)};
           },
           nb::arg("group"))
      .def_prop_ro("rank", [](const Front& f) { return nb::inst_ptr<Group>(f.group)->comm->rank; },
                   "This process's rank.")
      .def_prop_ro("size", [](const Front& f) { return nb::inst_ptr<Group>(f.group)->comm->size; },
                   "Number of ranks.")
      .def_prop_ro("name", [](const Front& f) { return nb::inst_ptr<Group>(f.group)->comm->name; },
                   "Its name in messages.");

  nb::class_<Group>(m, "Group", nb::is_weak_referenceable(), nb::dynamic_attr(),
                    "Native base of Communicator.")
      .def(nb::init<std::shared_ptr<Engine>, int, int, const std::string&>(),
           nb::arg("engine"), nb::arg("rank"), nb::arg("size"), nb::arg("name"))
      .def_prop_ro("rank", [](const Group& g) { return g.comm->rank; })
      .def_prop_ro("size", [](const Group& g) { return g.comm->size; })
      .def_prop_ro("name", [](const Group& g) { return g.comm->name; })
      .def_prop_ro("next_seq", [](const Group& g) {
        const ReleasedGil release;
        const std::lock_guard<std::mutex> lock(g.engine->mutex);
        return g.comm->next_seq;
      })
      .def_prop_ro("failure", [](const Group& g) {
        return g.comm->broken.load(std::memory_order_acquire) ? g.comm->failure : std::string();
      })
      .def_prop_ro("failed_by_death",
                   [](const Group& g) { return g.comm->broken && g.comm->failed_by_death; })
      .def_prop_ro("calls_differ",
                   [](const Group& g) { return g.comm->broken && g.comm->calls_differ; },
                   "Whether it has ended because its ranks called differently, as `failure` says.")
      .def_prop_ro("is_damaged", [](const Group& g) { return g.comm->broken && g.comm->is_damaged; },
                   "Whether it has ended because a message did not fit its checksum.")
      .def_rw("_timeout_s", &Group::timeout_s)
      .def_rw("_nan_check", &Group::nan_check)
      .def_rw("_slow", &Group::slow)
      .def_rw("call_check", &Group::check, nb::arg().none(),
              "Compares calls across ranks before they run; None outside check mode.")
      .def_prop_rw("has_checksums", [](const Group& g) { return g.comm->checksums; },
                   [](Group& g, bool wanted) {
                     const std::lock_guard<std::mutex> lock(g.engine->mutex);
                     g.comm->checksums = wanted;
                     g.comm->is_watched = wanted || g.comm->chaos != nullptr;
                   }, "Whether messages have checksums; equal on all ranks.")
      .def_prop_rw("compare_every", [](const Group& g) { return g.comm->trails.every(); },
                   [](Group& g, uint64_t calls) {
                     const std::lock_guard<std::mutex> lock(g.engine->mutex);
                     g.comm->trails.set_every(calls);
                   }, "The number of calls to a library after which ranks compare them; 0: never.")
      .def_prop_rw("keeps_records", [](const Group& g) { return g.comm->keeps_records; },
                   [](Group& g, bool wanted) {
                     const std::lock_guard<std::mutex> lock(g.engine->mutex);
                     g.comm->keeps_records = wanted;
                   }, "Whether its last collectives can be told.")
      .def_prop_rw("guards_arrays", [](const Group& g) { return g.comm->guards; },
                   [](Group& g, bool wanted) {
                     const std::lock_guard<std::mutex> lock(g.engine->mutex);
                     g.comm->guards = wanted;
                   }, "Whether writes to arrays of nonblocking calls are found.")
      .def_prop_ro("num_plans", [](const Group& g) { return g.plans.num_plans(); })
      .def_prop_ro("plans_nbytes", [](const Group& g) { return g.plans.nbytes(); },
                   "Bytes of the plans that it keeps, and of what new ones are made of.")
      .def_prop_rw("plans_limit_nbytes", [](const Group& g) { return g.plans.limit_nbytes; },
                   [](Group& g, size_t nbytes) { g.plans.limit_nbytes = nbytes; },
                   "Most bytes of them.")
      .def("kept_plans", [](const Group& g) { return g.plans.all(); },
           "Return the plans that it keeps, the last used first.")
      .def_prop_ro("num_device_work", [](const Group& g) { return g.device_work.size(); })
      .def_prop_ro("idle", [](const Group& g) {
        const auto all = g.device_work;  // another thread may make some meanwhile
        const ReleasedGil release;
        for (const auto& work : all) {
          if (work->outstanding() != 0) return false;
        }
        std::lock_guard<std::mutex> lock(g.engine->mutex);
        return g.comm->idle();
      })
      .def("set_failure", [](Group& g, const std::string& why, bool by_death) {
        std::lock_guard<std::mutex> lock(g.engine->mutex);
        g.comm->break_down(why, by_death);
        g.comm->tell_failure(g.comm->next_seq);
      }, nb::arg("why"), nb::arg("by_death") = false)
      .def("end_on_all_ranks",
           [](Group& g, const std::string& why) {
             const ReleasedGil release;
             const std::lock_guard<std::mutex> lock(g.engine->mutex);
             g.comm->revoke(why);
           }, nb::arg("why"),
           "End all operations in flight and all later ones, here and on every other rank.")
      .def("known_end",
           [](Group& g, bool later) {
             const ReleasedGil release;
             const std::lock_guard<std::mutex> lock(g.engine->mutex);
             const uint64_t seq = later ? UINT64_MAX >> 2 : g.comm->next_seq;
             if (g.comm->broken) return std::make_pair(g.comm->failure, g.comm->failed_by_death);
             const GaveUp found = g.comm->who_gave_up(seq, false, !later);
             return std::make_pair(found.why, found.has_died && g.comm->who_is_dead() != 0);
           }, nb::arg("later") = false,
           "Return why the next operation, or one that is later, cannot be done, and whether a "
           "rank's death is the reason; empty: no rank has failed, as far as is known. Ranks that "
           "have left by themselves count for the next one alone.")
      .def("has_given_up",
           [](Group& g, int rank) {
             const ReleasedGil release;
             const std::lock_guard<std::mutex> lock(g.engine->mutex);
             return g.comm->link(rank).kind == LinkKind::Shared && g.comm->gave_up(rank, g.comm->next_seq);
           }, nb::arg("rank"),
           "Return whether another rank of this node does not take part in the next operation.")
      .def("_refuse",
           [](Group& g, const std::string& reason) {
             const ReleasedGil release;
             const std::lock_guard<std::mutex> lock(g.engine->mutex);
             return g.comm->refusals.refuse(reason);
           }, nb::arg("reason"),
           "Take a place in the order of calls for one that was refused; the other ranks' operation "
           "fails. False: peers have yet to look at earlier ones.")
      .def("refuse_message",
           [](Group& g, int peer, int tag, const std::string& reason, bool is_send) {
             const ReleasedGil release;
             const std::lock_guard<std::mutex> lock(g.engine->mutex);
             if (is_send) {
               g.comm->p2p->refuse_send(peer, tag, reason);
             } else {
               g.comm->p2p->refuse_recv(peer, tag, reason);
             }
           }, nb::arg("peer"), nb::arg("tag"), nb::arg("reason"), nb::arg("is_send"),
           "Take the place of a message that was refused here: its peer hears of that.")
      .def("_why_next_is_refused",
           [](Group& g) {
             const ReleasedGil release;
             const std::lock_guard<std::mutex> lock(g.engine->mutex);
             return g.comm->refusals.why_next();
           }, "Return why other ranks have refused their next operation; empty: they have not.")
      .def("pass_over",
           [](Group& g) {
             const ReleasedGil release;
             const std::lock_guard<std::mutex> lock(g.engine->mutex);
             g.comm->refusals.pass_over();
           }, "Count the next operation, which runs nowhere: some rank has refused it, or the ranks met.")
      .def("_set_spins", [](Group& g, int spins) {
        std::lock_guard<std::mutex> lock(g.engine->mutex);  // a progress thread looks at it
        g.comm->spin_before_yield = spins;
      })
      .def_prop_ro("least_spins", [](const Group& g) {
        std::lock_guard<std::mutex> lock(g.engine->mutex);
        return g.engine->spins_locked(g.comm->spin_before_yield);
      }, "Number of looks of a wait, now, before it yields.")
      .def("_attach_arena",
           [](Group& g, uint64_t address, uint64_t region, uint64_t lane,
              const std::vector<int>& members) {
             std::lock_guard<std::mutex> lock(g.engine->mutex);
             g.comm->attach_arena(reinterpret_cast<void*>(address), region, lane, members);
           })
      .def("attach_bells",
           [](Group& g, std::shared_ptr<Bells> bells, const std::vector<int>& members) {
             const std::lock_guard<std::mutex> lock(g.engine->mutex);
             g.comm->attach_bells(std::move(bells), members);
           }, nb::arg("bells"), nb::arg("members"),
           "Let peers be woken: for each rank its number among the bells' members, or -1.")
      .def("attach_liveness",
           [](Group& g, std::shared_ptr<Liveness> liveness, const std::vector<int>& members) {
             const std::lock_guard<std::mutex> lock(g.engine->mutex);
             g.comm->attach_liveness(std::move(liveness), members);
           }, nb::arg("liveness").none(), nb::arg("members"),
           "Know what becomes of peers: for each rank its number among the members, or -1.")
      .def("who_died", [](Group& g, int peer) {
             const std::lock_guard<std::mutex> lock(g.engine->mutex);
             return g.comm->who_died(peer);
           }, nb::arg("peer") = -1,
           "Return which rank's process has ended; empty: none. One that has left counts only as "
           "the peer.")
      .def("attach_segment",
           [](Group& g, uint64_t address, uint64_t part_nbytes) {
             {
               const ReleasedGil release;
               const std::lock_guard<std::mutex> lock(g.engine->mutex);
               g.comm->attach_segment(reinterpret_cast<void*>(address), part_nbytes);
             }
             g.plans.forget_all();  // those made so far do not know what peers may reach
           }, nb::arg("address"), nb::arg("part_nbytes"),
           "Add a segment to the symmetric heap: a part for each on-node rank.")
      .def("add_mirror",
           [](Group& g, uint64_t address, uint64_t nbytes, uint64_t original) {
             std::lock_guard<std::mutex> lock(g.engine->mutex);
             return g.comm->add_mirror(reinterpret_cast<void*>(address), nbytes,
                                       reinterpret_cast<void*>(original));
           }, nb::arg("address"), nb::arg("nbytes"), nb::arg("original"),
           nb::call_guard<ReleasedGil>(),
           "Tell that memory of the symmetric heap is mapped at another address, too.")
      .def("remove_mirror",
           [](Group& g, uint64_t address) {
             std::lock_guard<std::mutex> lock(g.engine->mutex);
             g.comm->remove_mirror(reinterpret_cast<void*>(address));
           }, nb::arg("address"), nb::call_guard<ReleasedGil>())
      .def("_detach",
           [](Group& g) {
             std::lock_guard<std::mutex> lock(g.engine->mutex);
             g.comm->detach();
           }, nb::call_guard<ReleasedGil>())
      .def("attach_mpi", [](Group& g, uint64_t comm, int tag, const std::vector<int>& ranks) {
        std::lock_guard<std::mutex> lock(g.engine->mutex);
        g.comm->attach_mpi(static_cast<Handle>(comm), tag, ranks);
      })
      .def("attach_relay",
           [](Group& g, std::shared_ptr<Relay> relay, int tag, const std::vector<int>& ranks) {
             const std::lock_guard<std::mutex> lock(g.engine->mutex);
             g.comm->attach_relay(std::move(relay), tag, ranks);
           }, nb::arg("relay"), nb::arg("tag"), nb::arg("ranks"))
      .def("tell_afar",
           [](Group& g, ToldByTag& told, int tag) {
             const std::lock_guard<std::mutex> lock(g.engine->mutex);
             g.comm->tell_afar(told.of(tag));
           }, nb::arg("told"), nb::arg("tag"), "Let ranks of other nodes ask what this one does.")
      .def("probe_latency_ns",
           [](Group& g, int peer, int rounds, double timeout_s) {
             return g.comm->probe_latency(peer, rounds, timeout_s);
           }, nb::call_guard<ReleasedGil>())
      .def("probe_slots_ns",
           [](Group& g, int peer, size_t window, double timeout_s) {
             const SlotTimes found = g.comm->probe_slots(peer, window, timeout_s);
             return std::make_pair(found.same_ns, found.moving_ns);
           }, nb::arg("peer"), nb::arg("window_nbytes"), nb::arg("timeout_s"),
           nb::call_guard<ReleasedGil>(),
           "Return ns per line in one slot again and again, and through a window.")
      .def("set_slot_window", [](Group& g, size_t nbytes) {
        std::lock_guard<std::mutex> lock(g.engine->mutex);
        g.comm->slot_window = std::min(nbytes, g.comm->layout.lane_nbytes);
      }, nb::arg("nbytes"), "Let payloads pass through so much of each lane; 0: not at all.")
      .def("waiting_source",
           [](Group& g, int tag, int first) {
             const std::lock_guard<std::mutex> lock(g.engine->mutex);
             return g.comm->p2p->waiting(tag, first, g.comm->size).source;
           }, nb::arg("tag"), nb::arg("first"), nb::call_guard<ReleasedGil>(),
           "Return a rank whose message of this tag no receive has asked for, looking from "
           "`first` on; -1: there is none.")
      .def("waiting_message",
           [](Group& g, int tag, int first, int num) {
             const std::lock_guard<std::mutex> lock(g.engine->mutex);
             const Waiting found = g.comm->p2p->waiting(tag, first, num, true);
             return std::make_tuple(found.source, found.nbytes, static_cast<int>(found.type), found.refusal);
           }, nb::arg("tag"), nb::arg("first"), nb::arg("num"),
           nb::call_guard<ReleasedGil>(),
           "Return source, bytes and type code of a message of this tag that no receive has asked for, "
           "looking at `num` ranks from `first` on; source -1: there is none. The last is why its "
           "sender has refused it, or None; such a message is taken.")
      .def("not_started", [](const Group& g, uint64_t seq) { return g.comm->not_started(seq); })
      .def("plan_family",
           [](Group& g, int coll, int dtype, int redop, int root, int64_t unit, bool is_plain) {
             const uint32_t what = PlanKey::pack(coll, static_cast<DType>(dtype), redop, kHost);
             return g.plans.add_family({-1, what, root}, unit, is_plain);
           }, nb::arg("coll"), nb::arg("dtype"), nb::arg("redop"), nb::arg("root"),
           nb::arg("unit"), nb::arg("is_plain"),
           "Make a family of calls that differ only in lengths; the dispatcher knows plain ones.")
      .def("name_family",
           [](Group& g, const PlanFamily& family, int coll, int dtype, int redop, int root,
              nb::str name) {
             const uint32_t what = PlanKey::pack(coll, static_cast<DType>(dtype), redop, kHost);
             g.named.add({PlanKey::kNoCount, what, root}, std::move(name), family.key());
           }, nb::arg("family"), nb::arg("coll"), nb::arg("dtype"), nb::arg("redop"),
           nb::arg("root"), nb::arg("name"),
           "Let the dispatcher find the family of calls that name this algorithm.")
      .def("box_family",
           [](Group& g, std::shared_ptr<BoxTemplate> boxes) {
             return g.plans.add_family(std::move(boxes));
           }, nb::arg("template"), "Make a family of calls that move boxes.")
      .def("box_plan",
           [](Group& g, PlanFamily& family, std::vector<int64_t> numbers,
              const std::vector<int64_t>& strides) -> PlanPtr {
             if (family.boxes() == nullptr) {
               throw std::invalid_argument("calls of this family move no boxes: expected one of "
                                           "box_family()");
             }
             return g.plans.box_plan(family, std::move(numbers), strides, *g.comm);
           }, nb::arg("family"), nb::arg("numbers"), nb::arg("strides"),
           "Return the plan of a call that moves boxes, made if need be: where they begin and end, "
           "and the strides of all arrays.")
      .def("add_template",
           [](Group& g, PlanFamily& family, int64_t lo, int64_t hi,
              std::shared_ptr<PlanTemplate> made) {
             g.plans.add_range(family, lo, hi, std::move(made));
           }, nb::arg("family"), nb::arg("lo"), nb::arg("hi"), nb::arg("template"),
           "Let a family make the plans of vectors of `lo` to below `hi` elements.")
      .def("drop_family", [](Group& g, const FamilyPtr& family) { g.plans.drop_family(family); },
           nb::arg("family"), "Drop a family with its plans.")
      .def("least_used_family", [](const Group& g) { return g.plans.too_much(); },
           "Return the family to drop, where all of them take too much; else None.")
      .def("find_plan",
           [](Group& g, const PlanFamily& family, int64_t count,
              std::vector<int64_t> counts) -> PlanPtr {
             PlanKey key = family.key();
             key.count = count;
             const PlanPtr* found;
             if (counts.empty()) {
               found = g.plans.find(key);
               if (found == nullptr) found = g.plans.make(key, *g.comm);
             } else {
               const VectorKey vector{key, std::move(counts)};
               found = g.plans.find(vector, nullptr, 0);
               if (found == nullptr) found = g.plans.make(vector, nullptr, 0, count, *g.comm);
             }
             return found == nullptr ? nullptr : *found;
           }, nb::arg("family"), nb::arg("count"), nb::arg("counts"),
           "Return the plan of a call, made of its family's template if need be; None: neither.")
      .def("keep_plan",
           [](Group& g, const PlanFamily& family, int64_t count, std::vector<int64_t> counts,
              PlanPtr plan) {
             PlanKey key = family.key();
             key.count = count;
             if (counts.empty()) {
               g.plans.keep(key, std::move(plan));
             } else {
               g.plans.keep(VectorKey{key, std::move(counts)}, std::move(plan));
             }
           }, nb::arg("family"), nb::arg("count"), nb::arg("counts"), nb::arg("plan"),
           "Keep the plan of a call.")
      .def("_forget_plans", [](Group& g) {
        g.plans.forget_all();
        std::shared_ptr<Op> spare;  // it ends without the lock: its plan may call Python
        const std::lock_guard<std::mutex> lock(g.engine->mutex);
        spare = g.comm->take_spare();
      })
      .def("_records", &records_of,
           "The last operations, oldest first: (seq, coll, dtype, redop, count, root, state, "
           "start_ticks, end_ticks, stream, device, peer, tag). Collectives and messages are "
           "numbered each by themselves; a message has 64 (send) or 65 (recv) for coll.")
      .def("run_plan",
           [](nb::handle self, PlanPtr plan, uint64_t in, uint64_t out, nb::handle keep_x,
              nb::handle keep_out, nb::handle result, nb::handle operation, bool nonblocking,
              double timeout_s) {
             return run_plan(self, plan, reinterpret_cast<const void*>(in),
                             reinterpret_cast<void*>(out), keep_x, keep_out, result, operation,
                             nonblocking, timeout_s);
           }, nb::arg("plan"), nb::arg("data_in"), nb::arg("data_out"),
           nb::arg("keep_x").none(), nb::arg("keep_out").none(), nb::arg("result").none(),
           nb::arg("operation"), nb::arg("nonblocking"), nb::arg("timeout_s"))
      .def("time_plan", &time_plan, nb::arg("plan"), nb::arg("data_in"), nb::arg("data_out"),
           nb::arg("repetitions"), nb::arg("timeout_s"),
           "Seconds of `repetitions` blocking runs back to back, without Python in between; the "
           "engine's lock is held throughout unless a run has to wait for long.")
      .def("send_bytes",
           [](nb::handle self, uint64_t data, uint64_t nbytes, int dest, int tag,
              nb::handle keep, nb::handle operation, bool nonblocking, double timeout_s,
              TypeCode type) {
             const Side x{{reinterpret_cast<void*>(data), nbytes, dest, tag, type, false}, keep};
             return run_send(self, x, operation, nonblocking, timeout_s);
           }, nb::arg("data"), nb::arg("nbytes"), nb::arg("dest"), nb::arg("tag"),
           nb::arg("keep").none(), nb::arg("operation"), nb::arg("nonblocking"),
           nb::arg("timeout_s"), nb::arg("type") = kAnyType,
           "`type` is the code of the element type, which its receive must have; without it any may.")
      .def("recv_bytes",
           [](nb::handle self, uint64_t data, uint64_t capacity, int source, int tag,
              nb::handle keep, nb::handle result, nb::handle operation, bool nonblocking,
              double timeout_s, TypeCode type) {
             const Side out{{reinterpret_cast<void*>(data), capacity, source, tag, type, false},
                            keep};
             return run_recv(self, out, result, operation, nonblocking, timeout_s);
           }, nb::arg("data"), nb::arg("capacity"), nb::arg("source"), nb::arg("tag"),
           nb::arg("keep").none(), nb::arg("result"), nb::arg("operation"),
           nb::arg("nonblocking"), nb::arg("timeout_s"), nb::arg("type") = kAnyType)
      .def("sendrecv_bytes",
           [](nb::handle self, uint64_t data, uint64_t nbytes, int dest, int sendtag,
              uint64_t out_data, uint64_t capacity, int source, int recvtag, nb::handle keep_x,
              nb::handle keep_out, nb::handle result, nb::handle operation, bool nonblocking,
              double timeout_s, TypeCode sent_type, TypeCode received_type) {
             const Side x{{reinterpret_cast<void*>(data), nbytes, dest, sendtag, sent_type, false},
                          keep_x};
             const Side out{{reinterpret_cast<void*>(out_data), capacity, source, recvtag,
                             received_type, false}, keep_out};
             return run_sendrecv(self, x, out, result, operation, nonblocking, timeout_s);
           }, nb::arg("data"), nb::arg("nbytes"), nb::arg("dest"), nb::arg("sendtag"),
           nb::arg("out_data"), nb::arg("capacity"), nb::arg("source"), nb::arg("recvtag"),
           nb::arg("keep_x").none(), nb::arg("keep_out").none(), nb::arg("result"),
           nb::arg("operation"), nb::arg("nonblocking"), nb::arg("timeout_s"),
           nb::arg("sent_type") = kAnyType, nb::arg("received_type") = kAnyType);

  m.def("region_nbytes", [](int members, uint64_t lane_nbytes) {
    return RegionLayout(members, lane_nbytes).nbytes;
  }, "Bytes of shared memory per rank for a group of `members` on-node ranks.");
  m.def("inline_nbytes", [] { return std::pair(kInlineBytes, kMostInlineBytes); },
        "Bytes that a message's line has room for, and with the lines that belong to it.");
  m.def("view_of_numpy", [](nb::handle object) -> nb::object {
    View view;
    if (!view_of_numpy(object.ptr(), view)) return nb::none();
    return nb::make_tuple(reinterpret_cast<uint64_t>(view.data), view.count,
                          static_cast<int>(view.dtype), view.writable);
  }, "(address, count, dtype code, writable) of a plain numpy array, else None.");
  m.def("register_numpy_type", &register_numpy_type);
  m.def("load_mpi", [](const std::unordered_map<std::string, uint64_t>& addresses,
                       uint64_t byte_type, uint64_t in_place, int err_truncate) {
    const std::string missing = mpi().load(addresses);
    if (!missing.empty()) {
      throw nb::value_error(("libmpi has no " + missing + ", which commrt needs: use another MPI "
                             "library")
                                .c_str());
    }
    mpi().byte_type = static_cast<Handle>(byte_type);
    mpi().in_place = reinterpret_cast<void*>(in_place);
    mpi().err_truncate = err_truncate;
  }, nb::arg("addresses"), nb::arg("byte_type"), nb::arg("in_place"), nb::arg("err_truncate"));
  m.def("mpi_abort", [](uint64_t comm, int code) {
    if (mpi().loaded) mpi().abort(static_cast<Handle>(comm), code);
  });
  m.def("mark_forked", [] { Engine::forked.store(true); });
  m.def("drop_ended", &drop_ended);
  m.def("leaves_arrays", [] { return leaves_arrays; },
        "Return whether this thread leaves arrays of devices to others.");
  m.def("leave_arrays", [](bool leaves) { leaves_arrays = leaves; }, nb::arg("leaves"),
        "Whether this thread drops no arrays of devices that calls have kept.");
}

}  // namespace commrt
