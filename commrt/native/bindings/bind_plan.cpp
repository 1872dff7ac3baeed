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
#include <tuple>

#include "bindings/bindings.hpp"
#include "calls/group.hpp"
#include "engine/engine.hpp"
#include "engine/gloo_calls.hpp"
#include "engine/plan_template.hpp"
#include "engine/stand_ins.hpp"
#include "gil.hpp"

namespace commrt {

namespace {

using Table = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Pointers = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Bits = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using TemplatePtr = std::shared_ptr<PlanTemplate>;

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
                       bool scales) {
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
      const Ref ref = read_ref(plan, peer_index, rows(outputs, at));
      (ref.is_message ? ins.sends : ins.local_outs).push_back(ref);
    }
    for (int32_t at = dep_ptr.data()[i]; at < dep_ptr.data()[i + 1]; ++at) {
      ins.deps.push_back(deps.data()[at]);
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

// num, den, blocks: what each is of the full vector; which blocks are used; what each holds.
using Blocks = std::tuple<int64_t, int64_t, int, std::vector<uint8_t>, std::vector<int32_t>>;

BlockRule read_blocks(SpaceKind kind, const Blocks& blocks, int32_t holders) {
  const auto& [num, den, nblk, used, parts] = blocks;
  const auto all = static_cast<size_t>(std::max(nblk, 0));
  const bool fits = nblk >= 0 && num >= 0 && den >= 1 && (used.empty() || used.size() == all) &&
                    (parts.empty() ? holders == 0 || nblk == 0 : parts.size() == all) &&
                    std::all_of(parts.begin(), parts.end(),
                                [holders](int32_t part) { return part < holders; });
  if (!fits) {
    throw std::invalid_argument("the rule of a space does not fit: " + std::to_string(nblk) +
                                " blocks of " + std::to_string(num) + "/" + std::to_string(den) +
                                " of the vector, " + std::to_string(used.size()) + " marks and " +
                                std::to_string(parts.size()) + " parts; expected a mark and a part "
                                "for each block, and parts below " + std::to_string(holders));
  }
  return {kind, num, den, nblk, used, parts};
}

void read_peers(Plan& plan, const Group& group, std::vector<int>& peer_index,
                const std::vector<std::tuple<int, int, int>>& peers) {
  for (const auto& [rank, sends, recvs] : peers) {
    if (rank < 0 || rank >= group.comm->size || rank == group.comm->rank) {
      throw std::invalid_argument("peer " + std::to_string(rank) + " is not another rank: expected "
                                  "0 to " + std::to_string(group.comm->size - 1) + " without " +
                                  std::to_string(group.comm->rank) + ", which is this rank");
    }
    peer_index[rank] = static_cast<int>(plan.peers.size());
    plan.peers.push_back({rank, sends, recvs});
  }
}

// A call without its lengths, and how those of its arrays follow from them.
struct CallShape {
  int coll, dtype, redop, root;
  std::string label;
  bool returns_out;
  int counts;
  std::pair<int64_t, int64_t> x_part, out_part;
  bool x_is_own, out_is_own, has_in, has_out, divides;
  uint16_t facts;
};

TemplatePtr template_of(const Group& group, const CallShape& shape) {
  auto made = std::make_shared<PlanTemplate>();
  Plan& plan = made->prototype;
  plan.coll = shape.coll;
  plan.dtype = static_cast<DType>(shape.dtype);
  plan.redop = static_cast<RedOp>(shape.redop);
  plan.root = shape.root;
  plan.label = shape.label;
  plan.facts = shape.facts;
  plan.itemsize = item_size(plan.dtype);
  plan.returns_out = shape.returns_out;
  made->counts = static_cast<Counts>(shape.counts);
  made->rank = group.comm->rank;
  made->size = group.comm->size;
  std::tie(made->x_num, made->x_den) = shape.x_part;
  std::tie(made->out_num, made->out_den) = shape.out_part;
  made->x_is_own = shape.x_is_own;
  made->out_is_own = shape.out_is_own;
  made->has_in = shape.has_in;
  made->has_out = shape.has_out;
  made->divides = shape.divides;
  return made;
}

TemplatePtr make_schedule_template(
    const Group& group, const CallShape& shape, const std::vector<std::pair<int, Blocks>>& spaces,
    int share, const std::vector<std::tuple<int, int, int>>& peers, Table inputs,
    Pointers input_ptr, Table outputs, Pointers output_ptr, Pointers deps, Pointers dep_ptr,
    const std::vector<std::tuple<int64_t, int64_t, int64_t, int64_t>>& messages, int64_t publishes,
    int64_t chunk_nbytes, int64_t long_from_nbytes, int64_t long_chunk_nbytes, int64_t lane_nbytes,
    int depth, int slot_reuse, int spins, int64_t most_inline,
    std::tuple<uint64_t, uint64_t, std::vector<std::pair<int, int>>> stores, int64_t on_node,
    double factor, int64_t integer_factor, int64_t divisor, bool alone, int64_t itemsize,
    uint64_t user_function, nb::object user_owner, bool rounds_scaled, uint64_t shows_from_nbytes,
    bool wants_reach, const std::vector<int32_t>& instr_pairs) {
  const TemplatePtr owned = template_of(group, shape);
  PlanTemplate& made = *owned;
  Plan& plan = made.prototype;
  const int size = group.comm->size;
  plan.itemsize = static_cast<size_t>(itemsize);
  if (!user_owner.is_none()) {
    plan.user = {reinterpret_cast<UserFn>(user_function), user_function == 0,
                 own_object(user_owner.ptr())};
  }
  plan.depth = depth;
  plan.spins = spins;
  plan.inline_nbytes = std::clamp(static_cast<size_t>(most_inline), kInlineBytes, kMostInlineBytes);
  plan.factor = {factor, integer_factor};
  plan.rounds_scaled = rounds_scaled;
  plan.divide_out = divisor > 1;
  plan.divisor = divisor;
  if (share < 1) throw std::invalid_argument("share is " + std::to_string(share) +
                                             ": expected 1 block or more of each holder");
  made.share = share;
  const int32_t holders = made.counts == Counts::None    ? 0
                          : made.counts == Counts::Known ? size * share
                                                         : size * size * share;
  for (const auto& [kind, blocks] : spaces) {
    made.spaces.push_back(read_blocks(static_cast<SpaceKind>(kind), blocks, holders));
    const auto num_blocks = static_cast<size_t>(std::max(1, made.spaces.back().nblk));
    plan.spaces.push_back(
        {made.spaces.back().kind, std::vector<int64_t>(num_blocks + 1), 0});
  }
  std::vector<int> peer_index(static_cast<size_t>(size), -1);
  read_peers(plan, group, peer_index, peers);
  if (!plan.user) plan.combine = combine_for(plan.dtype, plan.redop);
  read_instructions(plan, *group.comm, inputs, input_ptr, outputs, output_ptr, deps, dep_ptr,
                    peer_index, factor != 1.0 || plan.redop == RedOp::PremulSum);
  if (made.counts == Counts::Pairs && instr_pairs.size() != plan.instrs.size()) {
    throw std::invalid_argument(std::to_string(instr_pairs.size()) + " pairs for " +
                                std::to_string(plan.instrs.size()) +
                                " instructions: expected one for each");
  }
  made.instr_pairs = instr_pairs;
  constexpr int kMostInputs = 64;  // as many as a word has bits (Plan::compute)
  plan.shows_raw = plan.redop == RedOp::Avg && size <= kMostInputs &&
                   std::none_of(plan.instrs.begin(), plan.instrs.end(), [](const Instr& ins) {
                     return ins.scaled() != nullptr && ins.inputs.size() == 1 &&
                            !ins.local_outs.empty();
                   });
  const bool logical = plan.redop >= RedOp::Land && plan.redop <= RedOp::Lxor;
  // An operand that meets no other is copied; "and" with itself gives its truth.
  if (alone && logical) plan.truth = combine_for(plan.dtype, RedOp::Land);
  plan.settle_program();
  for (const auto& [width, nblk, num, den] : messages) {
    made.messages.push_back({width, nblk, num, den});
  }
  made.publishes = publishes;
  made.chunk_nbytes = chunk_nbytes;
  made.long_from_nbytes = long_from_nbytes;
  made.long_chunk_nbytes = long_chunk_nbytes;
  made.lane_nbytes = static_cast<size_t>(lane_nbytes);
  made.slot_reuse = slot_reuse;
  const auto& [learns_from, beyond_cache, kinds] = stores;
  auto kinds_of = [&kinds = kinds](size_t i) {
    const auto& [first, adaptive] = kinds.at(i);
    return StoreRule::Kinds{static_cast<Store>(first), static_cast<Store>(adaptive)};
  };
  made.stores = {learns_from, beyond_cache, kinds_of(0), kinds_of(1), kinds_of(2)};
  made.on_node = on_node;
  made.shows_from_nbytes = shows_from_nbytes;
  made.wants_reach = wants_reach;
  return owned;
}

void set_reach(PlanTemplate& made, Bits exposable, Bits operand_exposable, Bits deliverable,
               const std::vector<Blocks>& spaces,
               const std::vector<std::tuple<uint32_t, uint32_t, int32_t>>& landings) {
  Plan& plan = made.prototype;
  std::vector<std::pair<uint32_t, uint32_t>> sends;
  for (uint32_t i = 0; i < plan.instrs.size(); ++i) {
    for (uint32_t k = 0; k < plan.instrs[i].sends.size(); ++k) sends.emplace_back(i, k);
  }
  if (exposable.shape(0) != plan.instrs.size() ||
      operand_exposable.shape(0) != plan.instrs.size() ||
      deliverable.shape(0) != sends.size()) {
    throw std::invalid_argument(
        "the tables of what peers may reach do not fit the program: expected exposable and "
        "operand_exposable for each of its " + std::to_string(plan.instrs.size()) +
        " instructions, deliverable for each of its " + std::to_string(sends.size()) +
        " messages");
  }
  const int32_t holders = made.counts == Counts::None ? 0 : made.size * made.share;
  std::vector<BlockRule> rules;
  for (const Blocks& blocks : spaces) {
    rules.push_back(read_blocks(SpaceKind::Out, blocks, holders));
  }
  std::vector<LandingRule> found;
  for (const auto& [message, space, block] : landings) {
    if (block < 0 || block > rules.at(space).nblk) {
      throw std::invalid_argument("a message lands at block " + std::to_string(block) +
                                  ": expected one of the space's " +
                                  std::to_string(rules.at(space).nblk));
    }
    found.push_back({sends.at(message).first, sends.at(message).second, space, block});
  }
  for (size_t i = 0; i < plan.instrs.size(); ++i) {
    plan.instrs[i].exposable = exposable.data()[i];
    plan.instrs[i].operand_exposable = operand_exposable.data()[i];
  }
  for (size_t i = 0; i < sends.size(); ++i) {
    plan.instrs[sends[i].first].sends[sends[i].second].deliverable = deliverable.data()[i];
  }
  made.landing_spaces = std::move(rules);
  made.landings = std::move(found);
  made.wants_reach = false;
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

TemplatePtr make_native_template(const Group& group, const CallShape& shape, uint64_t datatype,
                                 uint64_t op, uint64_t comm, int64_t unit, bool is_blocked) {
  TemplatePtr made = template_of(group, shape);
  made->prototype.native = true;
  made->prototype.settle_mark();
  made->prototype.call = {static_cast<Handle>(datatype), static_cast<Handle>(op),
                         static_cast<Handle>(comm), 0, 0, 0, {}, {}, {}, {}};
  made->unit = unit;
  made->is_blocked = is_blocked;
  return made;
}

void attach_library(const Group& group, uint64_t comm, uint64_t byte,
                    const std::vector<uint64_t>& types, const std::vector<uint64_t>& reductions) {
  const auto handles = [](const std::vector<uint64_t>& given) {
    return std::vector<Handle>(given.begin(), given.end());
  };
  const std::lock_guard<std::mutex> lock(group.engine->mutex);
  group.comm->refusals.stand_ins->attach({static_cast<Handle>(comm), static_cast<Handle>(byte),
                                          handles(types), handles(reductions)});
}

void end_stand_ins(const Group& group) {
  const ReleasedGil release;
  const std::lock_guard<std::mutex> lock(group.engine->mutex);
  group.comm->refusals.stand_ins->end();
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
  plan->settle_mark();
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
           nb::arg("integer_factor"), nb::call_guard<ReleasedGil>(),
           "This plan of a premul_sum with another factor; the same object if it is the same.")
      .def_prop_ro("nbytes", &Plan::nbytes, "Bytes of memory that it takes.")
      .def_prop_ro("bounds", [](const Plan& plan) {
        std::vector<std::vector<int64_t>> all;
        for (const SpaceSpec& space : plan.spaces) all.push_back(space.offsets);
        return all;
      }, "Boundaries of the blocks of each space, in elements.")
      .def_prop_ro("stores", [](const Plan& plan) {
        return std::make_pair(static_cast<int>(plan.store), static_cast<int>(plan.adaptive));
      }, "Codes of the stores that it begins with, and that it learns about.")
      .def_prop_ro("landings", [](const Plan& plan) {
        std::vector<int64_t> all;
        for (const Instr& ins : plan.instrs) {
          for (const Ref& ref : ins.sends) {
            all.push_back(ref.landing_nbytes / static_cast<int64_t>(plan.itemsize));
          }
        }
        return all;
      }, "Where each message may land in its peer's result, in elements.")
      .def_prop_ro("pair_fragments", [](const Plan& plan) {
        std::vector<std::tuple<int, int64_t, int64_t>> all;
        for (const PeerUse& peer : plan.peers) {
          all.emplace_back(peer.rank, peer.send_fragments, peer.recv_fragments);
        }
        return all;
      }, "Each peer, and the fragments that have messages to it and from it.")
      .def_prop_ro("instructions", [](const Plan& plan) { return plan.instrs.size(); });
  nb::class_<CallShape>(m, "CallShape",
                        "A call without its lengths, and how those of its arrays follow.")
      .def("__init__", [](CallShape* self, int coll, int dtype, int redop, int root,
                          const std::string& label, bool returns_out, int counts,
                          std::pair<int64_t, int64_t> x_part,
                          std::pair<int64_t, int64_t> out_part, bool x_is_own, bool out_is_own,
                          bool has_in, bool has_out, bool divides, uint16_t facts) {
             new (self) CallShape{coll, dtype, redop, root, label, returns_out, counts, x_part,
                                  out_part, x_is_own, out_is_own, has_in, has_out, divides, facts};
           },
           nb::kw_only(), nb::arg("coll"), nb::arg("dtype"), nb::arg("redop"), nb::arg("root"),
           nb::arg("label"), nb::arg("returns_out"), nb::arg("counts"), nb::arg("x_part"),
           nb::arg("out_part"), nb::arg("x_is_own"), nb::arg("out_is_own"), nb::arg("has_in"),
           nb::arg("has_out"), nb::arg("divides"), nb::arg("facts") = 0);
  nb::class_<PlanTemplate>(
      m, "PlanTemplate", "What calls have in common that differ in their lengths alone.")
      .def_prop_ro("label", [](const PlanTemplate& made) { return made.prototype.label; })
      .def_prop_ro("nbytes", &PlanTemplate::nbytes, "Bytes of memory that it takes.")
      .def("lacks_reach", &PlanTemplate::lacks_reach, nb::arg("num_elements"),
           "Return whether plans of this length need set_reach() first.")
      .def("set_reach", &set_reach, nb::kw_only(), nb::arg("exposable"),
           nb::arg("operand_exposable"), nb::arg("deliverable"), nb::arg("spaces"),
           nb::arg("landings"), "Say what peers may reach of buffers in the symmetric heap.")
      .def("plan", [](const PlanTemplate& made, Group& group, int64_t num_elements,
                      const std::vector<int64_t>& counts) {
        return made.make(num_elements, counts, *group.comm);
      }, nb::arg("group"), nb::arg("num_elements"), nb::arg("counts"),
         "The plan for so many elements; None if there can be none.");
  m.def("make_schedule_template", &make_schedule_template, nb::arg("group"), nb::arg("shape"),
        nb::kw_only(), nb::arg("spaces"), nb::arg("share"), nb::arg("peers"), nb::arg("inputs"),
        nb::arg("input_ptr"), nb::arg("outputs"), nb::arg("output_ptr"), nb::arg("deps"),
        nb::arg("dep_ptr"), nb::arg("messages"), nb::arg("publishes"), nb::arg("chunk_nbytes"),
        nb::arg("long_from_nbytes"), nb::arg("long_chunk_nbytes"), nb::arg("lane_nbytes"),
        nb::arg("depth"), nb::arg("slot_reuse"), nb::arg("spins"), nb::arg("most_inline"),
        nb::arg("stores"), nb::arg("on_node"), nb::arg("factor"), nb::arg("integer_factor"),
        nb::arg("divisor"), nb::arg("alone"), nb::arg("itemsize"), nb::arg("user_function"),
        nb::arg("user_owner").none(), nb::arg("rounds_scaled"), nb::arg("shows_from_nbytes"),
        nb::arg("wants_reach"), nb::arg("instr_pairs"),
        "Plans of one lowered schedule, and the rules of their lengths.");
  m.def("make_native_template", &make_native_template, nb::arg("group"), nb::arg("shape"),
        nb::kw_only(), nb::arg("datatype"), nb::arg("op"), nb::arg("comm"), nb::arg("unit"),
        nb::arg("is_blocked"), "Plans of one collective of the MPI library.");
  m.def("attach_library", &attach_library, nb::arg("group"), nb::kw_only(), nb::arg("comm"),
        nb::arg("byte"), nb::arg("types"), nb::arg("reductions"),
        "Name the MPI communicator of its ranks, and handles by the codes of types and reductions: "
        "where others have begun a call that was refused here, it is made in its place.");
  m.def("end_stand_ins", &end_stand_ins, nb::arg("group"),
        "Say that this rank makes no more calls in the place of those that it has refused.");
  nb::class_<GlooGroup>(m, "GlooGroup", "Keeps the collectives of a group of gloo in order.")
      .def(nb::new_([] { return std::make_shared<GlooGroup>(); }))
      .def_prop_ro("is_busy", &GlooGroup::is_busy,
                   "Whether an operation has not ended, as far as is known.");
  m.def("make_gloo_plan", &make_gloo_plan, nb::arg("group"), nb::kw_only(), nb::arg("coll"),
        nb::arg("dtype"), nb::arg("redop"), nb::arg("root"), nb::arg("in_elems"),
        nb::arg("out_elems"), nb::arg("label"), nb::arg("returns_out"), nb::arg("factor"),
        nb::arg("method"), nb::arg("arguments"), nb::arg("agreement").none(), nb::arg("digest"));
}

}  // namespace commrt
