// SPDX-License-Identifier: Apache-2.0
// Makes plans out of the arrays and facts that Python's planning hands over.
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>

#include "bindings/bindings.hpp"
#include "calls/group.hpp"
#include "engine/gloo_calls.hpp"

namespace commrt {

namespace {

using Table = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Pointers = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Bits = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Landings = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// The ways in which peers may use buffers in the symmetric heap; empty if there is no such heap.
struct Reach {
  Bits exposable, operand_exposable;  // per instruction
  Bits deliverable;  // per output
  Landings landings; // per output, in elements of the peer's result
};

constexpr int kLocal = 0;

Ref read_ref(const Plan& plan, const std::vector<int>& peer_index, const int32_t* row) {
  Ref ref{};
  ref.is_message = row[0] != kLocal;
  if (ref.is_message) {
    if (row[1] < 0 || row[1] >= static_cast<int>(peer_index.size()) || peer_index[row[1]] < 0) {
      throw std::invalid_argument("the program has a message with rank " + std::to_string(row[1]) +
                                  ", which is not among the plan's peers: add the rank to `peers`");
    }
    ref.peer = peer_index[row[1]];
    ref.k = row[2];
    return ref;
  }
  ref.space = row[1];
  ref.lo = row[2];
  ref.hi = row[3];
  if (ref.space < 0 || ref.space >= static_cast<int>(plan.spaces.size()) || ref.lo < 0 ||
      ref.hi <= ref.lo ||
      ref.hi >= static_cast<int>(plan.spaces[ref.space].offsets.size())) {
    throw std::invalid_argument(
        "blocks " + std::to_string(ref.lo) + " to " + std::to_string(ref.hi) + " of space " +
        std::to_string(ref.space) + " are no slice of the plan's " +
        std::to_string(plan.spaces.size()) + " spaces: expected one block or more of one space");
  }
  return ref;
}

void read_instructions(Plan& plan, const Comm& comm, const Table& inputs,
                       const Pointers& input_ptr, const Table& outputs,
                       const Pointers& output_ptr, const Pointers& deps,
                       const Pointers& dep_ptr, const std::vector<int>& peer_index,
                       bool scales, const Reach& reach) {
  const bool reaches = reach.exposable.shape(0) != 0;
  if (reaches && (reach.exposable.shape(0) != dep_ptr.shape(0) - 1 ||
                  reach.operand_exposable.shape(0) != dep_ptr.shape(0) - 1 ||
                  reach.deliverable.shape(0) != outputs.shape(0) ||
                  reach.landings.shape(0) != outputs.shape(0))) {
    throw std::invalid_argument(
        "the tables of what peers may reach do not fit the program: expected exposable and "
        "operand_exposable for each of its " + std::to_string(dep_ptr.shape(0) - 1) +
        " instructions, deliverable and landings for each of its " +
        std::to_string(outputs.shape(0)) + " outputs");
  }
  const size_t m = dep_ptr.shape(0) - 1;
  auto rows = [](const Table& table, int32_t at) { return table.data() + at * 4; };
  plan.instrs.resize(m);
  for (size_t i = 0; i < m; ++i) {
    Instr& ins = plan.instrs[i];
    for (int32_t at = input_ptr.data()[i]; at < input_ptr.data()[i + 1]; ++at) {
      const Ref ref = read_ref(plan, peer_index, rows(inputs, at));
      const bool from_user =
          !ref.is_message && plan.spaces[ref.space].kind == SpaceKind::In;
      if (scales && from_user) {
        const size_t nin = static_cast<size_t>(input_ptr.data()[i + 1] - input_ptr.data()[i]);
        const size_t place = ins.inputs.size();
        ins.scaled_bits.resize(nin / 64 + 1);
        ins.scaled_bits[place / 64] |= uint64_t{1} << (place % 64);
      }
      ins.inputs.push_back(ref);
    }
    for (int32_t at = output_ptr.data()[i]; at < output_ptr.data()[i + 1]; ++at) {
      Ref ref = read_ref(plan, peer_index, rows(outputs, at));
      if (reaches && ref.is_message) {
        ref.deliverable = reach.deliverable.data()[at];
        ref.landing_nbytes = reach.landings.data()[at] * static_cast<int64_t>(plan.itemsize);
      }
      (ref.is_message ? ins.sends : ins.local_outs).push_back(ref);
    }
    for (int32_t at = dep_ptr.data()[i]; at < dep_ptr.data()[i + 1]; ++at) {
      ins.deps.push_back(deps.data()[at]);
    }
    if (reaches) {
      ins.exposable = reach.exposable.data()[i];
      ins.operand_exposable = reach.operand_exposable.data()[i];
    }
    if (ins.inputs.empty()) {
      throw std::invalid_argument("instruction " + std::to_string(i) + " has no input: expected at "
                                  "least one");
    }
    auto over_mpi = [&](const Ref& ref) {
      return ref.is_message &&
             const_cast<Comm&>(comm).link(plan.peers[ref.peer].rank).kind == LinkKind::Mpi;
    };
    for (const Ref& ref : ins.inputs) ins.has_mpi = ins.has_mpi || over_mpi(ref);
    for (const Ref& ref : ins.sends) ins.has_mpi = ins.has_mpi || over_mpi(ref);
  }
}

PlanPtr make_schedule_plan(const Group& group, int coll, int dtype, int redop, int root,
                           int64_t in_elems, int64_t out_elems, const std::string& label,
                           const std::vector<std::pair<int, std::vector<int64_t>>>& spaces,
                           const std::vector<std::tuple<int, int, int>>& peers, Table inputs,
                           Pointers input_ptr, Table outputs, Pointers output_ptr, Pointers deps,
                           Pointers dep_ptr, int64_t fragments, int64_t lane_nbytes, int depth,
                           int slot_reuse, int spins, int64_t most_inline, int store, int adaptive,
                           double factor, int64_t integer_factor, int64_t divisor, bool alone,
                           bool returns_out, int64_t itemsize, uint64_t user_function,
                           nb::object user_owner, bool rounds_scaled,
                           bool shows_result, Bits exposable, Bits operand_exposable,
                           Bits deliverable, Landings landings,
                           const std::vector<int64_t>& instr_fragments,
                           const std::vector<std::pair<int64_t, int64_t>>& peer_fragments) {
  auto plan = std::make_shared<Plan>();
  plan->shows_result = shows_result;
  plan->coll = coll;
  plan->dtype = static_cast<DType>(dtype);
  plan->redop = static_cast<RedOp>(redop);
  plan->root = root;
  plan->in_elems = in_elems;
  plan->out_elems = out_elems;
  plan->label = label;
  plan->itemsize = static_cast<size_t>(itemsize);
  if (!user_owner.is_none()) {
    plan->user = {reinterpret_cast<UserFn>(user_function), user_function == 0,
                  own_object(user_owner.ptr())};
  }
  plan->depth = depth;
  plan->spins = spins;
  plan->inline_nbytes = std::clamp(static_cast<size_t>(most_inline), kInlineBytes, kMostInlineBytes);
  plan->store = static_cast<Store>(store);
  plan->adaptive = static_cast<Store>(adaptive);
  plan->choice.start_with(plan->store, plan->adaptive);
  // Results that do not stay in the cache anyway: each line is then read before it is written.
  constexpr int64_t kBeyondCache = 16 << 20;
  plan->heap_choice.start_with(
      store_of(false, std::max(in_elems, out_elems) *
                          static_cast<int64_t>(plan->itemsize) >= kBeyondCache),
      Store::Stream2);
  plan->factor = {factor, integer_factor};
  plan->rounds_scaled = rounds_scaled;
  plan->divide_out = divisor > 1;
  plan->divisor = divisor;
  plan->returns_out = returns_out;
  for (const auto& [kind, offsets] : spaces) {
    if (offsets.size() < 2) {
      throw std::invalid_argument("space " + std::to_string(plan->spaces.size()) +
                                  " has no blocks: expected at least two offsets, the ends of one "
                                  "block");
    }
    plan->spaces.push_back({static_cast<SpaceKind>(kind), offsets, 0});
  }
  std::vector<int> peer_index(static_cast<size_t>(group.comm->size), -1);
  for (const auto& [rank, sends, recvs] : peers) {
    if (rank < 0 || rank >= group.comm->size || rank == group.comm->rank) {
      throw std::invalid_argument("peer " + std::to_string(rank) + " is not another rank: expected "
                                  "0 to " + std::to_string(group.comm->size - 1) + " without " +
                                  std::to_string(group.comm->rank) + ", which is this rank");
    }
    const size_t index = plan->peers.size();
    peer_index[rank] = static_cast<int>(index);
    plan->peers.push_back({rank, sends, recvs});
    if (peer_fragments.empty()) continue;
    plan->peers.back().send_fragments = peer_fragments.at(index).first;
    plan->peers.back().recv_fragments = peer_fragments.at(index).second;
  }
  if (!plan->user) plan->combine = combine_for(plan->dtype, plan->redop);
  read_instructions(*plan, *group.comm, inputs, input_ptr, outputs, output_ptr, deps, dep_ptr,
                    peer_index, factor != 1.0 || plan->redop == RedOp::PremulSum,
                    {exposable, operand_exposable, deliverable, landings});
  for (size_t i = 0; i < instr_fragments.size(); ++i) {
    plan->instrs.at(i).fragments = instr_fragments[i];
  }
  constexpr int kMostInputs = 64;  // as many as a word has bits (Plan::compute)
  plan->shows_raw = plan->redop == RedOp::Avg && group.comm->size <= kMostInputs &&
                    std::none_of(plan->instrs.begin(), plan->instrs.end(), [](const Instr& ins) {
                      return ins.scaled() != nullptr && ins.inputs.size() == 1 &&
                             !ins.local_outs.empty();
                    });
  const bool logical = plan->redop >= RedOp::Land && plan->redop <= RedOp::Lxor;
  // An operand that meets no other is copied; "and" with itself gives its truth.
  if (alone && logical) plan->truth = combine_for(plan->dtype, RedOp::Land);
  plan->finish(fragments, static_cast<size_t>(lane_nbytes), slot_reuse,
               group.comm->slot_window);
  if (plan->run_short) plan->flatten(*group.comm);
  return plan;
}

// A plan is never changed once it exists: operations in flight and persistent calls use it.
PlanPtr with_factor(const PlanPtr& plan, Group& group, double factor, int64_t integer_factor) {
  const Scale scale{factor, integer_factor};
  if (plan->factor == scale) return plan;
  std::lock_guard<std::mutex> lock(group.engine->mutex);  // of plan->choice
  auto changed = std::make_shared<Plan>(*plan);
  changed->factor = scale;
  // The copied short instructions point into the instructions of the original.
  if (changed->run_short) changed->flatten(*group.comm);
  return changed;
}

PlanPtr make_native_plan(int coll, int dtype, int redop, int root, int64_t in_elems,
                         int64_t out_elems, const std::string& label, uint64_t datatype,
                         uint64_t op, uint64_t comm, int count, bool returns_out,
                         const std::vector<int>& send_counts, const std::vector<int>& send_at,
                         const std::vector<int>& recv_counts, const std::vector<int>& recv_at) {
  auto plan = std::make_shared<Plan>();
  plan->coll = coll;
  plan->dtype = static_cast<DType>(dtype);
  plan->redop = static_cast<RedOp>(redop);
  plan->root = root;
  plan->in_elems = in_elems;
  plan->out_elems = out_elems;
  plan->label = label;
  plan->itemsize = item_size(plan->dtype);
  plan->native = true;
  plan->returns_out = returns_out;
  plan->call = {static_cast<Handle>(datatype), static_cast<Handle>(op),
                static_cast<Handle>(comm), count, send_counts, send_at, recv_counts, recv_at};
  return plan;
}

PlanPtr make_gloo_plan(const std::shared_ptr<GlooGroup>& group, int coll, int dtype, int redop,
                       int root, int64_t in_elems, int64_t out_elems, const std::string& label,
                       bool returns_out, double factor, nb::object method, nb::object arguments,
                       PlanPtr agreement, int64_t digest) {
  auto plan = std::make_shared<Plan>();
  plan->coll = coll;
  plan->dtype = static_cast<DType>(dtype);
  plan->redop = static_cast<RedOp>(redop);
  plan->root = root;
  plan->in_elems = in_elems;
  plan->out_elems = out_elems;
  plan->label = label;
  plan->itemsize = item_size(plan->dtype);
  plan->native = true;
  plan->returns_out = returns_out;
  plan->combine = combine_for(plan->dtype, plan->redop);
  plan->factor.real = factor;
  auto how = std::make_shared<GlooPlan>();
  how->group = group;
  how->method = own_object(method.ptr());
  how->arguments = own_object(arguments.ptr());
  how->agreement = std::move(agreement);
  how->digest = digest;
  plan->gloo = std::move(how);
  return plan;
}

}  // namespace

void bind_plan(nb::module_& m) {
  nb::class_<Plan>(m, "Plan", "One rank's operation, ready to be started any number of times.")
      .def_ro("label", &Plan::label)
      .def_ro("in_elems", &Plan::in_elems)
      .def_ro("out_elems", &Plan::out_elems)
      .def_ro("fragments", &Plan::fragments)
      .def_ro("slots", &Plan::slots)
      .def_ro("slot_nbytes", &Plan::slot_nbytes)
      .def_ro("tmp_nbytes", &Plan::tmp_nbytes)
      .def("with_factor", &with_factor, nb::arg("group"), nb::arg("factor"),
           nb::arg("integer_factor"), nb::call_guard<nb::gil_scoped_release>(),
           "This plan of a premul_sum with another factor; the same object if it is the same.")
      .def_prop_ro("instructions", [](const Plan& plan) { return plan.instrs.size(); });
  m.def("make_schedule_plan", &make_schedule_plan, nb::arg("group"), nb::kw_only(),
        nb::arg("coll"), nb::arg("dtype"), nb::arg("redop"), nb::arg("root"),
        nb::arg("in_elems"), nb::arg("out_elems"), nb::arg("label"), nb::arg("spaces"),
        nb::arg("peers"), nb::arg("inputs"), nb::arg("input_ptr"), nb::arg("outputs"),
        nb::arg("output_ptr"), nb::arg("deps"), nb::arg("dep_ptr"), nb::arg("fragments"),
        nb::arg("lane_nbytes"), nb::arg("depth"), nb::arg("slot_reuse"), nb::arg("spins"), nb::arg("most_inline"), nb::arg("store"),
        nb::arg("adaptive"), nb::arg("factor"), nb::arg("integer_factor"), nb::arg("divisor"),
        nb::arg("alone"), nb::arg("returns_out"), nb::arg("itemsize"), nb::arg("user_function"),
        nb::arg("user_owner").none(), nb::arg("rounds_scaled"), nb::arg("shows_result"), nb::arg("exposable"),
        nb::arg("operand_exposable"), nb::arg("deliverable"), nb::arg("landings"),
        nb::arg("instr_fragments") = std::vector<int64_t>{},
        nb::arg("peer_fragments") = std::vector<std::pair<int64_t, int64_t>>{});
  nb::class_<GlooGroup>(m, "GlooGroup", "Keeps the collectives of a group of gloo in order.")
      .def(nb::init<>())
      .def_prop_ro("is_busy", &GlooGroup::is_busy,
                   "Whether an operation has not ended, as far as is known.");
  m.def("make_gloo_plan", &make_gloo_plan, nb::arg("group"), nb::kw_only(), nb::arg("coll"),
        nb::arg("dtype"), nb::arg("redop"), nb::arg("root"), nb::arg("in_elems"),
        nb::arg("out_elems"), nb::arg("label"), nb::arg("returns_out"), nb::arg("factor"),
        nb::arg("method"), nb::arg("arguments"), nb::arg("agreement").none(), nb::arg("digest"));
  m.def("make_native_plan", &make_native_plan, nb::kw_only(), nb::arg("coll"),
        nb::arg("dtype"), nb::arg("redop"), nb::arg("root"), nb::arg("in_elems"),
        nb::arg("out_elems"), nb::arg("label"), nb::arg("datatype"), nb::arg("op"),
        nb::arg("comm"), nb::arg("count"), nb::arg("returns_out"),
        nb::arg("send_counts") = std::vector<int>{}, nb::arg("send_at") = std::vector<int>{},
        nb::arg("recv_counts") = std::vector<int>{}, nb::arg("recv_at") = std::vector<int>{});
}

}  // namespace commrt
