// SPDX-License-Identifier: Apache-2.0
// Binds schedules: recording and lowering their steps, and proving them right.
#include <nanobind/ndarray.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <memory>

#include "bindings/bindings.hpp"
#include "schedules/engine_run.hpp"
#include "schedules/lowering.hpp"
#include "schedules/proof.hpp"
#include "schedules/rounds.hpp"

namespace commrt {

namespace {

using Table = nb::ndarray<nb::numpy, std::int32_t>;
using Places = nb::ndarray<nb::numpy, std::int64_t>;
using TableIn = nb::ndarray<const std::int32_t, nb::c_contig, nb::device::cpu>;

template <class T, class Array>
Array to_numpy(std::vector<T> values, std::size_t columns) {
  using Item = typename Array::Scalar;
  auto* kept = new std::vector<T>(std::move(values));
  nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  const std::size_t items = kept->size() * sizeof(T) / sizeof(Item);
  void* data = kept->data();
  if (columns == 0) return Array(data, {items}, owner);
  return Array(data, {items / columns, columns}, owner);
}

std::int32_t integer(PyObject* value) {
  const long found = PyLong_AsLong(value);
  if (found == -1 && PyErr_Occurred() != nullptr) throw nb::python_error();
  if (found != static_cast<std::int32_t>(found))
    throw nb::value_error(("a step has the number " + std::to_string(found) +
                           "; expected one of 32 bits")
                              .c_str());
  return static_cast<std::int32_t>(found);
}

BlockSlice slice_of(nb::handle given) {
  if (given.is_none()) return {};
  if (!PyTuple_Check(given.ptr()) || PyTuple_GET_SIZE(given.ptr()) != 3)
    throw nb::type_error("an end of a step must be a Slice (space, lo, hi) or None");
  return {integer(PyTuple_GET_ITEM(given.ptr(), 0)), integer(PyTuple_GET_ITEM(given.ptr(), 1)),
          integer(PyTuple_GET_ITEM(given.ptr(), 2))};
}

std::vector<std::int32_t> numbers_of(nb::handle given) {
  if (!PyTuple_Check(given.ptr()))
    throw nb::type_error("the numbers of steps must be in a tuple");
  std::vector<std::int32_t> found;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(given.ptr()); ++i)
    found.push_back(integer(PyTuple_GET_ITEM(given.ptr(), i)));
  return found;
}

ScheduleStep step_of(nb::handle op, nb::handle src, nb::handle dst, nb::handle peer) {
  return {integer(op.ptr()), integer(peer.ptr()), slice_of(src), slice_of(dst)};
}

nb::object to_tuple(const BlockSlice& where) {
  if (!where.given()) return nb::none();
  return nb::make_tuple(where.space, where.lo, where.hi);
}

nb::tuple to_tuple(const std::int32_t* begin, const std::int32_t* end) {
  nb::object made = nb::steal(PyTuple_New(end - begin));
  for (const auto* one = begin; one != end; ++one)
    PyTuple_SET_ITEM(made.ptr(), one - begin, PyLong_FromLong(*one));
  return nb::borrow<nb::tuple>(made);
}

nb::tuple step_row(const StepColumns& columns, std::int32_t index) {
  if (index < 0 || index >= columns.size())
    throw nb::index_error(("step " + std::to_string(index) + " of " +
                           std::to_string(columns.size()))
                              .c_str());
  const ScheduleStep& step = columns.row(index);
  const std::vector<std::int32_t> none;
  const std::vector<std::int32_t>* asked = columns.after(index);
  const std::vector<std::int32_t>& after = asked == nullptr ? none : *asked;
  return nb::make_tuple(step.op, to_tuple(step.src), to_tuple(step.dst), step.peer,
                        to_tuple(columns.deps().begin(index), columns.deps().end(index)),
                        to_tuple(after.data(), after.data() + after.size()));
}

// kind, blocks, first block, whether it may be the input's memory, width of a block (numerator,
// denominator), split, and lengths of its blocks.
using SpaceRow = std::tuple<int, std::int32_t, std::int32_t, bool, std::int64_t, std::int64_t,
                            std::int32_t, std::vector<std::int64_t>>;

struct SpaceTable {
  BlockSpaces spaces;

  explicit SpaceTable(const std::vector<SpaceRow>& rows) {
    for (const auto& [kind, nblk, first, may_be_input, num, den, split, lengths] : rows) {
      const bool right = kind >= 0 && kind <= static_cast<int>(BlockSpaceKind::kTmp) && nblk >= 0 &&
                         first >= 0 && den >= 0 &&
                         (lengths.empty() || lengths.size() == static_cast<std::size_t>(nblk));
      if (!right) throw nb::value_error("a space has a kind, blocks and lengths that there are");
      spaces.push_back({static_cast<BlockSpaceKind>(kind), nblk, first, may_be_input, num, den,
                        split, lengths});
    }
  }
};

OperationGoal make_goal(std::int32_t size, int shape, bool per_rank_input, bool idempotent,
                        std::vector<std::pair<std::int32_t, std::int32_t>> holders) {
  if (size < 1 || shape < 0 || shape > static_cast<int>(OperationGoal::Shape::kBlockPerPair) ||
      holders.size() != static_cast<std::size_t>(size))
    throw nb::value_error("a goal has a size, a shape from 0 to 3, and holders for each rank");
  return {size, static_cast<OperationGoal::Shape>(shape), per_rank_input, idempotent,
          std::move(holders)};
}

// The programs of all ranks.
class StepPrograms {
 public:
  explicit StepPrograms(nb::list programs) : kept_(programs) {
    std::int64_t base = 0;
    for (nb::handle one : programs) {
      const auto& steps = nb::cast<const StepColumns&>(one[0]);
      views_.push_back({&steps, &nb::cast<const SpaceTable&>(one[1]).spaces});
      all_.push_back({&steps, base});
      base += steps.size();
    }
  }

  const std::vector<RankProgramView>& views() const { return views_; }
  const AllSteps& all() const { return all_; }
  std::int64_t num_steps() const { return commrt::num_steps(all_); }

  void check_input_lasts() const {
    for (std::size_t rank = 0; rank < views_.size(); ++rank)
      commrt::check_input_lasts(static_cast<std::int32_t>(rank), views_[rank]);
  }
  void check_races() const {
    for (std::size_t rank = 0; rank < views_.size(); ++rank)
      check_step_races(static_cast<std::int32_t>(rank), views_[rank]);
  }

  const std::vector<std::int64_t>& partners() {
    if (!matched_) partners_ = match_messages(all_);
    matched_ = true;
    return partners_;
  }
  const Events& events() {
    if (!ran_) events_ = run_steps(all_, partners());
    ran_ = true;
    return events_;
  }

  // Blocks that a rank sends of each of its spaces, and its most messages to one rank.
  std::pair<std::vector<std::int64_t>, std::int32_t> sent(std::int32_t rank) const {
    std::vector<std::int64_t> blocks(views_.at(rank).spaces->size(), 0);
    std::vector<std::int32_t> messages(views_.size(), 0);
    std::int32_t most = 0;
    for (const ScheduleStep& step : views_[rank].steps->rows()) {
      if (step.op != kSendStep || !step.src.given()) continue;
      blocks.at(step.src.space) += step.src.count();
      most = std::max(most, ++messages.at(step.peer));
    }
    return {blocks, most};
  }

 private:
  nb::list kept_;
  std::vector<RankProgramView> views_;
  AllSteps all_;
  bool matched_ = false, ran_ = false;
  std::vector<std::int64_t> partners_;
  Events events_;
};

using CountsIn = nb::typed<nb::dict, int, int>;

PeerCounts counts_of(const CountsIn& counts) {
  PeerCounts found;
  for (auto [peer, count] : counts)
    found.push_back({nb::cast<std::int32_t>(peer), nb::cast<std::int32_t>(count)});
  return found;
}

void fill(IndexRows& rows, const TableIn& values, const TableIn& starts) {
  rows.values.assign(values.data(), values.data() + values.size());
  rows.starts.assign(starts.data(), starts.data() + starts.size());
}

bool rises(const std::vector<std::int32_t>& starts, std::size_t last) {
  return !starts.empty() && starts.front() == 0 && std::is_sorted(starts.begin(), starts.end()) &&
         static_cast<std::size_t>(starts.back()) <= last;
}

// The lowered programs of all ranks, from the tables of commrt/schedule/lower.py.
class LoweredPrograms {
 public:
  void add(std::int32_t rank, const SpaceTable& spaces, TableIn inputs, TableIn input_ptr,
           TableIn outputs, TableIn output_ptr, TableIn deps, TableIn dep_ptr,
           CountsIn messages_in, CountsIn messages_out) {
    LoweredProgram one;
    one.rank = rank;
    one.spaces = spaces.spaces;
    fill_entries(one.inputs, inputs, input_ptr);
    fill_entries(one.outputs, outputs, output_ptr);
    fill(one.deps, deps, dep_ptr);
    one.messages_in = counts_of(messages_in);
    one.messages_out = counts_of(messages_out);
    check(one);
    programs.push_back(std::move(one));
  }

  std::vector<LoweredProgram> programs;

 private:
  static void fill_entries(EntryRows& rows, const TableIn& entries, const TableIn& starts) {
    rows.entries.resize(entries.size() / 4);
    std::memcpy(rows.entries.data(), entries.data(), rows.entries.size() * sizeof(InstructionEntry));
    rows.starts.assign(starts.data(), starts.data() + starts.size());
  }

  void check(const LoweredProgram& one) const {
    const auto size = static_cast<std::size_t>(one.size());
    bool right = one.rank == static_cast<std::int32_t>(programs.size()) &&
                 rises(one.deps.starts, one.deps.values.size()) &&
                 rises(one.inputs.starts, one.inputs.entries.size()) &&
                 rises(one.outputs.starts, one.outputs.entries.size()) &&
                 one.inputs.starts.size() == size + 1 && one.outputs.starts.size() == size + 1;
    for (std::int32_t dep : one.deps.values) right = right && dep >= 0 && dep < one.size();
    for (const EntryRows* rows : {&one.inputs, &one.outputs}) {
      for (const InstructionEntry& e : rows->entries) {
        if (!e.local()) {
          right = right && e.a >= 0 && e.b >= 0;
          continue;
        }
        right = right && e.a >= 0 && e.a < static_cast<std::int32_t>(one.spaces.size()) &&
                e.b >= 0 && e.b < e.c && e.c <= one.spaces[e.a].nblk;
      }
    }
    if (!right)
      throw nb::value_error(("the lowered program of rank " + std::to_string(one.rank) +
                             " is malformed: programs come in rank order, with blocks and "
                             "dependencies that there are")
                                .c_str());
  }
};

// The order in which all ranks run: rank, fragment and instruction, row by row.
struct EngineOrder {
  std::vector<EnginePlace> places;
};

struct AllRounds {
  std::vector<RankRounds> ranks;
};

const RankRounds& rounds_of_rank(const AllRounds& rounds, std::int32_t rank) {
  return rounds.ranks.at(static_cast<std::size_t>(rank));
}

StreamRows sequenced(const RankRounds& own, std::int32_t size, std::int32_t fragments,
                     std::int32_t lag, std::int32_t distances, std::int32_t messages) {
  if (size < 1 || fragments < 1 || lag < 1 || distances < 1 || messages < 1)
    throw nb::value_error("sequence: size, fragments, lag, distances and messages are at least 1");
  return sequence_rounds(own, size, fragments, lag, {distances, messages});
}

std::vector<RowsView> views_of(const std::vector<TableIn>& rows) {
  std::vector<RowsView> views;
  for (const TableIn& own : rows)
    views.push_back({reinterpret_cast<const StreamRow*>(own.data()),
                     static_cast<std::int64_t>(own.size() / kStreamRowColumns)});
  return views;
}

std::int32_t check_rounds(const AllRounds& rounds, const std::vector<TableIn>& rows,
                          std::int32_t distances, std::int32_t messages, const OperationGoal& goal,
                          int rule, const std::vector<TableIn>& once) {
  if (rows.size() != rounds.ranks.size() || (!once.empty() && once.size() != rows.size()))
    throw nb::value_error("check_rounds: expected rows for each rank");
  return check_stream_rows(rounds.ranks, views_of(rows), {distances, messages}, goal,
                           static_cast<CombineRule>(rule), views_of(once));
}

// A round's messages and work, in rows like those of a sequence.
Table rows_of_rounds(const AllRounds& rounds, std::int32_t rank) {
  const RankRounds& own = rounds_of_rank(rounds, rank);
  StreamRows rows;
  const auto number_of = [&own](const OneRound& each) {
    const auto at = static_cast<std::int32_t>(&each - own.rounds.data());
    return at == own.num_rounds() ? -1 : at;
  };
  for (const OneRound& each : own.rounds) {
    const std::int32_t number = number_of(each);
    for (const RoundMessage& one : each.sends)
      rows.push_back({StreamRowKind::kSend, number, one.peer, one.k, one.place, {}});
    for (const RoundMessage& one : each.recvs)
      rows.push_back({StreamRowKind::kRecv, number, one.peer, one.k, one.place, {}});
    for (const RoundWork& one : each.work)
      rows.push_back({one.reduces ? StreamRowKind::kReduce : StreamRowKind::kCopy, number, -1, 0,
                      one.dst, one.src});
  }
  return to_numpy<StreamRow, Table>(std::move(rows), kStreamRowColumns);
}

PyObject* fault_type = nullptr;

void translate(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const ScheduleFault& fault) {
    nb::list contents;
    for (const ScheduleFault::Held& one : fault.contents)
      contents.append(nb::make_tuple(one.part, one.ranks));
    const nb::tuple args = nb::make_tuple(fault.what(), fault.numbers, contents);
    PyErr_SetObject(fault_type, args.ptr());
  }
}

void bind_steps(nb::module_& m) {
  nb::class_<StepColumns>(m, "StepColumns", "The steps of one rank, in columns.")
      .def(nb::init<>())
      .def("__len__", &StepColumns::size)
      .def("append",
           [](StepColumns& self, nb::handle op, nb::handle src, nb::handle dst, nb::handle peer,
              nb::handle deps, nb::handle after) {
             return self.append(step_of(op, src, dst, peer), numbers_of(deps), numbers_of(after));
           },
           nb::arg("op"), nb::arg("src").none(), nb::arg("dst").none(), nb::arg("peer"),
           nb::arg("deps"), nb::arg("after"),
           nb::sig("def append(self, op: int, src: tuple[int, int, int] | None, dst: tuple[int, "
                   "int, int] | None, peer: int, deps: tuple[int, ...], after: tuple[int, ...]) "
                   "-> int"),
           "Add a step as it is; return its index.")
      .def("record",
           [](StepColumns& self, nb::handle op, nb::handle src, nb::handle dst, nb::handle peer) {
             return self.record(step_of(op, src, dst, peer));
           },
           nb::arg("op"), nb::arg("src").none(), nb::arg("dst").none(), nb::arg("peer"),
           nb::sig("def record(self, op: int, src: tuple[int, int, int] | None, dst: tuple[int, "
                   "int, int] | None, peer: int) -> int"),
           "Add a step that waits for what its data demands; return its index.")
      .def("next_waits_for", &StepColumns::next_waits_for, nb::arg("steps"),
           "Make the next step that is recorded wait for these, too.")
      .def("place", &StepColumns::place, nb::arg("first"),
           "Say where the blocks of each space are numbered from.")
      .def("place_next", &StepColumns::place_next, nb::arg("first"),
           "Say it of one more space.")
      .def("peers", &StepColumns::peers, "Return the ranks that messages go to or come from.")
      .def("row", &step_row, nb::arg("index"),
           nb::sig("def row(self, index: int) -> tuple[int, tuple[int, int, int] | None, "
                   "tuple[int, int, int] | None, int, tuple[int, ...], tuple[int, ...]]"),
           "Return op, src, dst, peer, deps and after of a step.");
  nb::class_<SpaceTable>(m, "SpaceTable", "The spaces of one rank.")
      .def(nb::init<const std::vector<SpaceRow>&>(), nb::arg("rows"));
  m.def("lower_steps",
        [](const StepColumns& steps, const SpaceTable& spaces, std::int32_t rank,
           nb::bytes fuses) {
          const auto* flags = reinterpret_cast<const std::uint8_t*>(fuses.c_str());
          LoweredProgram made = lower_steps(steps, spaces.spaces, rank,
                                            std::vector<std::uint8_t>(flags, flags + fuses.size()));
          return std::make_tuple(
              to_numpy<InstructionEntry, Table>(std::move(made.inputs.entries), 4),
              to_numpy<std::int32_t, Table>(std::move(made.inputs.starts), 0),
              to_numpy<InstructionEntry, Table>(std::move(made.outputs.entries), 4),
              to_numpy<std::int32_t, Table>(std::move(made.outputs.starts), 0),
              to_numpy<std::int32_t, Table>(std::move(made.deps.values), 0),
              to_numpy<std::int32_t, Table>(std::move(made.deps.starts), 0),
              std::move(made.messages_in), std::move(made.messages_out),
              std::vector<int>(made.used_spaces.begin(), made.used_spaces.end()),
              made.num_publishes);
        },
        nb::arg("steps"), nb::arg("spaces"), nb::arg("rank"), nb::arg("fuses"),
        "Return the tables of a rank's lowered program.");
}

void bind_proofs(nb::module_& m) {
  nb::class_<OperationGoal>(m, "OperationGoal", "What an operation starts from and must reach.")
      .def("__init__",
           [](OperationGoal* self, std::int32_t size, int shape, bool per_rank_input,
              bool idempotent, std::vector<std::pair<std::int32_t, std::int32_t>> holders) {
             new (self) OperationGoal(
                 make_goal(size, shape, per_rank_input, idempotent, std::move(holders)));
           },
           nb::kw_only(), nb::arg("size"), nb::arg("shape"), nb::arg("per_rank_input"),
           nb::arg("idempotent"), nb::arg("holders"));
  nb::class_<StepPrograms>(m, "StepPrograms", "The steps of all ranks.")
      .def(nb::init<nb::list>(), nb::arg("programs"))
      .def_prop_ro("num_steps", &StepPrograms::num_steps)
      .def("check_well_formed", [](const StepPrograms& self) { check_well_formed(self.views()); })
      .def("check_input_lasts", &StepPrograms::check_input_lasts)
      .def("check_races", &StepPrograms::check_races)
      .def("check_lengths",
           [](StepPrograms& self) { check_lengths(self.views(), self.all(), self.partners()); })
      .def("partners",
           [](StepPrograms& self) {
             return to_numpy<std::int64_t, Places>(self.partners(), 0);
           },
           "Return for each step of all ranks the other end of its message, or -1.")
      .def("events",
           [](StepPrograms& self) {
             const Events& events = self.events();
             return std::make_tuple(to_numpy<std::int64_t, Places>(events.done, 0),
                                    to_numpy<std::int64_t, Places>(events.sent_by, 0),
                                    events.longest);
           },
           "Return what runs, step by step, who sent it, and the longest chain of messages.")
      .def("longest_chain", [](StepPrograms& self) { return self.events().longest; })
      .def("sent", &StepPrograms::sent, nb::arg("rank"),
           "Return the blocks that a rank sends, by space, and its most messages to one rank.")
      .def("check_meaning",
           [](StepPrograms& self, const OperationGoal& goal, int rule) {
             check_meaning(self.views(), self.all(), self.events(), goal,
                           static_cast<CombineRule>(rule));
           },
           nb::arg("goal"), nb::arg("rule"));
  nb::class_<EngineOrder>(m, "EngineOrder", "An order in which all ranks run.")
      .def("__len__", [](const EngineOrder& self) { return self.places.size(); })
      .def("rows",
           [](const EngineOrder& self) {
             return to_numpy<EnginePlace, Table>(self.places, 3);
           },
           "Return rank, fragment and instruction of each place.");
  nb::class_<LoweredPrograms>(m, "LoweredPrograms", "The lowered programs of all ranks.")
      .def(nb::init<>())
      .def("add", &LoweredPrograms::add, nb::arg("rank"), nb::arg("spaces"), nb::arg("inputs"),
           nb::arg("input_ptr"), nb::arg("outputs"), nb::arg("output_ptr"), nb::arg("deps"),
           nb::arg("dep_ptr"), nb::arg("messages_in"), nb::arg("messages_out"))
      .def("check", [](const LoweredPrograms& self) { check_lowered(self.programs); })
      .def("run",
           [](const LoweredPrograms& self, std::int32_t fragments, std::int32_t lines,
              std::function<bool(std::int32_t, std::int32_t)> has_lines) {
             return EngineOrder{run_engine(self.programs, fragments, lines, has_lines)};
           },
           nb::arg("fragments"), nb::arg("lines"), nb::arg("has_lines").none(),
           "Return an order in which all of it runs.")
      .def("check_meaning",
           [](const LoweredPrograms& self, const EngineOrder& order, const OperationGoal& goal,
              int rule) {
             check_lowered_meaning(self.programs, order.places, goal,
                                   static_cast<CombineRule>(rule));
           },
           nb::arg("order"), nb::arg("goal"), nb::arg("rule"))
      .def("rounds", [](const LoweredPrograms& self) { return AllRounds{rounds_of(self.programs)}; });
}

void bind_rounds(nb::module_& m) {
  nb::class_<AllRounds>(m, "AllRounds", "The rounds of all ranks.")
      .def("num_rounds",
           [](const AllRounds& self, std::int32_t rank) {
             return rounds_of_rank(self, rank).num_rounds();
           },
           nb::arg("rank"))
      .def("num_slots",
           [](const AllRounds& self, std::int32_t rank) {
             return rounds_of_rank(self, rank).num_slots;
           },
           nb::arg("rank"))
      .def("rows", &rows_of_rounds, nb::arg("rank"), "Return a rank's messages and work.")
      .def("sequence",
           [](const AllRounds& self, std::int32_t rank, std::int32_t size, std::int32_t fragments,
              std::int32_t lag, std::int32_t distances, std::int32_t messages) {
             return to_numpy<StreamRow, Table>(
                 sequenced(rounds_of_rank(self, rank), size, fragments, lag, distances, messages),
                 kStreamRowColumns);
           },
           nb::arg("rank"), nb::kw_only(), nb::arg("size"), nb::arg("fragments"), nb::arg("lag"),
           nb::arg("distances"), nb::arg("messages"), "Return what a rank's stream runs.")
      .def("check", &check_rounds, nb::arg("rows"), nb::kw_only(), nb::arg("distances"),
           nb::arg("messages"), nb::arg("goal"), nb::arg("rule"), nb::arg("once"),
           "Check what all ranks run; return the calls of the largest group.");
}

}  // namespace

void bind_schedules(nb::module_& m) {
  fault_type = PyErr_NewExceptionWithDoc("commrt._native.ScheduleFaultError",
                                         "What is wrong with a schedule: kind, numbers, contents.",
                                         PyExc_Exception, nullptr);
  if (fault_type == nullptr) throw nb::python_error();
  m.attr("ScheduleFaultError") = nb::borrow(fault_type);
  nb::register_exception_translator(translate);
  bind_steps(m);
  bind_proofs(m);
  bind_rounds(m);
}

}  // namespace commrt
