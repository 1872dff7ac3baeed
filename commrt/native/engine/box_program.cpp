// SPDX-License-Identifier: Apache-2.0
// Cuts boxes into messages, puts these in order, and makes a plan of them.
#include "engine/box_program.hpp"

#include <algorithm>
#include <stdexcept>
#include <tuple>

#include "engine/call_mark.hpp"
#include "engine/comm.hpp"
#include "engine/kept_list.hpp"

namespace commrt {

namespace {

constexpr int64_t kLineBytes = 64;

struct Bounds {
  int64_t low[kMostDims], high[kMostDims];

  Bounds() {}
};

// A part of a move.
struct Piece {
  const BoxMove* move;
  int64_t index = 0;  // among the move's
  int64_t touched_nbytes = 0;
  bool has_twin;  // another move has the same shape, in short rows
  Bounds bounds;

  Piece(const BoxMove* move, bool has_twin) : move(move), has_twin(has_twin) {}
};

// The boxes of one step.
struct Message {
  BoxStepKind kind;
  const BoxMove* first_move;
  int index;  // among those with the same peer in the same phase and direction
  size_t first, last;  // pieces
  int phase() const { return first_move->phase; }
  int peer() const { return first_move->peer; }
};

int64_t elements(const BoxEnd& end) {
  int64_t count = 1;
  for (int dim = 0; dim < end.ndim; ++dim) count *= end.stop[dim] - end.start[dim];
  return count;
}

bool same_shape(const BoxEnd& one, const BoxEnd& other) {
  if (one.ndim != other.ndim) return false;
  for (int dim = 0; dim < one.ndim; ++dim) {
    if (one.stop[dim] - one.start[dim] != other.stop[dim] - other.start[dim]) return false;
  }
  return true;
}

class Compiler {
 public:
  Compiler(const std::vector<DType>& types, const BoxCallKind& kind, int rank, int size,
           std::vector<Piece>& pieces, std::vector<Message>& messages)
      : types_(types), kind_(kind), rank_(rank), size_(size), pieces_(pieces),
        messages_(messages) {}

  BoxProgram compile(const std::vector<BoxMove>& moves, std::vector<const BoxMove*>& rest,
                     std::vector<const BoxMove*>& group, std::vector<Box> memory) {
    // Groups in the order of their first moves: of one phase, with one peer and direction.
    for (const BoxMove& move : moves) {
      if ((kind_.stated && move.peer >= 0) || elements(move.own()) > 0) rest.push_back(&move);
    }
    while (!rest.empty()) {
      const BoxMove& first = *rest[0];
      const auto is_other = [&](const BoxMove* move) {
        return move->phase != first.phase || move->peer != first.peer ||
               move->leaves != first.leaves;
      };
      group.clear();
      std::copy_if(rest.begin(), rest.end(), std::back_inserter(group),
                   [&](const BoxMove* move) { return !is_other(move); });
      rest.erase(std::stable_partition(rest.begin(), rest.end(), is_other), rest.end());
      if (kind_.stated && group[0]->peer >= 0) {
        add_stated(group);
      } else {
        add_messages(group);
      }
    }
    std::stable_sort(messages_.begin(), messages_.end(),
                     [this](const Message& one, const Message& other) {
                       return place(one) < place(other);
                     });
    return assemble(std::move(memory));
  }

 private:
  int64_t item(const BoxMove& move) const {
    return static_cast<int64_t>(item_size(types_[static_cast<size_t>(move.own().array)]));
  }

  static int64_t touched(const int64_t* shape, int ndim, int64_t itemsize) {
    if (ndim == 0) return itemsize;
    int64_t rows = 1;
    for (int dim = 0; dim < ndim - 1; ++dim) rows *= shape[dim];
    return rows * std::max(shape[ndim - 1] * itemsize, kLineBytes);
  }

  // Adds the parts, in order, of a move that touch about `limit` bytes at most. Its slowest
  // dimensions are cut first, evenly.
  void cut(Piece& piece, int64_t limit, int64_t itemsize, int from) {
    Bounds& bounds = piece.bounds;
    const int ndim = piece.move->own().ndim;
    int64_t shape[kMostDims];
    for (int dim = 0; dim < ndim; ++dim) shape[dim] = bounds.high[dim] - bounds.low[dim];
    piece.touched_nbytes = touched(shape, ndim, itemsize);
    if (from == ndim || piece.touched_nbytes <= limit) {
      pieces_.push_back(piece);
      ++piece.index;
      return;
    }
    const int64_t extent = shape[from], begin = bounds.low[from], end = bounds.high[from];
    shape[from] = 1;
    const int64_t slab = from == ndim - 1 ? itemsize : touched(shape, ndim, itemsize);
    const int64_t each = std::max<int64_t>(1, limit / slab);
    const int64_t parts = extent / each + (extent % each != 0);
    for (int64_t part = 0; part < parts; ++part) {
      bounds.low[from] = begin + extent * part / parts;
      bounds.high[from] = begin + extent * (part + 1) / parts;
      cut(piece, limit, itemsize, from + 1);
    }
    bounds.low[from] = begin;
    bounds.high[from] = end;
  }

  // Opposite faces of a block across its fastest dimension share cache lines: the engine moves
  // both in one pass (kernels/box_twins.cpp).
  void add_pieces(const std::vector<const BoxMove*>& group) {
    for (const BoxMove* move : group) {
      const BoxEnd& box = move->own();
      const int64_t itemsize = item(*move);
      const int64_t row = box.ndim == 0 ? 1 : box.stop[box.ndim - 1] - box.start[box.ndim - 1];
      const bool is_short = row * itemsize < kLineBytes;
      const bool has_twin =
          is_short && std::any_of(group.begin(), group.end(), [&](const BoxMove* other) {
            return other != move && other->own().array == box.array &&
                   same_shape(other->own(), box);
          });
      Piece piece(move, has_twin);
      for (int dim = 0; dim < box.ndim; ++dim) {
        piece.bounds.low[dim] = 0;
        piece.bounds.high[dim] = box.stop[dim] - box.start[dim];
      }
      cut(piece, has_twin ? kind_.limit_nbytes / 2 : kind_.limit_nbytes, itemsize, 0);
    }
  }

  static std::tuple<int64_t, int, int64_t> turn(const Piece& piece) {
    return {piece.index, piece.move->own().array, piece.move->number};
  }

  static bool are_twins(const Piece& one, const Piece& other) {
    return one.has_twin && one.index == other.index &&
           one.move->own().array == other.move->own().array &&
           same_shape(one.move->own(), other.move->own());
  }

  void add_messages(const std::vector<const BoxMove*>& group) {
    const BoxMove& first = *group[0];
    const BoxStepKind kind =
        first.leaves && first.arrives ? kind_.reduces ? BoxStepKind::Reduce : BoxStepKind::Copy
        : first.leaves                ? BoxStepKind::Send
        : kind_.reduces               ? BoxStepKind::ReceiveReduce
                                      : BoxStepKind::Receive;
    const size_t begin = pieces_.size();
    add_pieces(group);
    // Parts of all boxes take turns: lines that they share are still in the cache then.
    std::stable_sort(pieces_.begin() + static_cast<std::ptrdiff_t>(begin), pieces_.end(),
                     [](const Piece& one, const Piece& other) { return turn(one) < turn(other); });
    int64_t held = 0;
    int index = 0;
    for (size_t at = begin; at < pieces_.size();) {
      size_t end = at + 1;
      int64_t cost = pieces_[at].touched_nbytes;
      if (end < pieces_.size() && are_twins(pieces_[at], pieces_[end])) {
        cost += pieces_[end++].touched_nbytes;
      }
      if (index == 0 || held + cost > kind_.limit_nbytes) {
        messages_.push_back({kind, &first, index++, at, at});
        held = 0;
      }
      held += cost;
      messages_.back().last = at = end;
    }
  }

  void add_stated(std::vector<const BoxMove*>& group) {
    std::stable_sort(group.begin(), group.end(), [](const BoxMove* one, const BoxMove* other) {
      return one->number < other->number;
    });
    int index = 0;
    for (const BoxMove* move : group) {
      const int64_t count = elements(move->own()), most = kind_.limit_nbytes / item(*move);
      for (int64_t low = 0; low <= count; low += most) {
        const size_t at = pieces_.size();
        const int64_t high = std::min(low + most, count);
        if (high > low) {
          Piece piece(move, false);
          piece.bounds.low[0] = low;
          piece.bounds.high[0] = high;
          pieces_.push_back(piece);
        }
        const auto kind = move->leaves ? BoxStepKind::Send : BoxStepKind::Receive;
        messages_.push_back({kind, group[0], index++, at, pieces_.size()});
      }
    }
  }

  // Where a step stands: every rank begins with another peer.
  std::tuple<int, int, int, int> place(const Message& message) const {
    const bool sends = message.kind == BoxStepKind::Send, local = message.peer() < 0;
    const int way = sends ? 0 : local ? 1 : 2;
    const int away = local ? 0 : (message.peer() - rank_ + size_) % size_;
    return {message.phase(), message.index, way, sends ? away : -away};
  }

  void add_box(std::vector<Box>& boxes, const Piece& piece, bool of_target) const {
    const BoxEnd& end = of_target ? piece.move->target : piece.move->source;
    Box& box = boxes.emplace_back();
    box.array = end.array;
    const DType dtype = types_[static_cast<size_t>(end.array)];
    box.itemsize = item_size(dtype);
    box.combine = kind_.reduces ? combine_for(dtype, kind_.redop) : nullptr;
    box.ndim = end.ndim;
    box.offset = 0;
    for (int dim = 0; dim < end.ndim; ++dim) {
      box.shape[dim] = piece.bounds.high[dim] - piece.bounds.low[dim];
      box.strides[dim] = end.strides[dim];
      box.offset += (end.start[dim] + piece.bounds.low[dim]) * end.strides[dim];
    }
    box.settle();
  }

  BoxProgram assemble(std::vector<Box> memory) {
    BoxProgram made;
    std::vector<int> sent(static_cast<size_t>(size_)), received(static_cast<size_t>(size_));
    made.boxes = std::move(memory);
    made.boxes.clear();
    made.boxes.reserve(num_boxes());
    made.steps.reserve(messages_.size());
    int run = 0, run_sends = 0;
    for (size_t i = 0; i < messages_.size(); ++i) {
      const Message& message = messages_[i];
      BoxStep step{message.kind, static_cast<int>(made.boxes.size()), 0, -1, 0, -1};
      size_t nbytes = 0;
      for (size_t at = message.first; at < message.last; ++at) {
        add_box(made.boxes, pieces_[at], pieces_[at].move->arrives);
        nbytes += made.boxes.back().nbytes;
      }
      step.hi = static_cast<int>(made.boxes.size());
      const bool sends = message.kind == BoxStepKind::Send;
      if (message.peer() < 0) {
        step.source = step.hi;
        for (size_t at = message.first; at < message.last; ++at) {
          add_box(made.boxes, pieces_[at], false);
        }
      } else {
        step.peer = message.peer();
        step.k = (sends ? sent : received)[static_cast<size_t>(step.peer)]++;
      }
      made.steps.push_back(step);
      made.longest_nbytes = std::max(made.longest_nbytes, nbytes);
      const bool is_new = i == 0 || message.phase() != messages_[i - 1].phase() ||
                          message.index != messages_[i - 1].index;
      if (is_new) run = run_sends = 0;
      made.ahead = std::max(made.ahead, 2 * ++run);
      made.fewest_slots = std::max(made.fewest_slots, run_sends += sends);
    }
    for (int peer = 0; peer < size_; ++peer) {
      const auto at = static_cast<size_t>(peer);
      if (sent[at] + received[at] != 0) made.peers.push_back({peer, sent[at], received[at]});
    }
    add_dependencies(made);
    return made;
  }

  size_t num_boxes() const {
    size_t sum = pieces_.size();
    for (const Message& message : messages_) {
      if (message.peer() < 0) sum += message.last - message.first;
    }
    return sum;
  }

  static bool overlap(const Piece& one, const BoxEnd& end, const Piece& other,
                      const BoxEnd& written) {
    if (end.array != written.array) return false;
    for (int dim = 0; dim < end.ndim; ++dim) {
      const int64_t low = end.start[dim] + one.bounds.low[dim];
      const int64_t high = end.start[dim] + one.bounds.high[dim];
      if (written.start[dim] + other.bounds.low[dim] >= high ||
          written.start[dim] + other.bounds.high[dim] <= low) {
        return false;
      }
    }
    return true;
  }

  bool writes_what_is_used(const Message& before, const Message& message) const {
    for (size_t i = before.first; i < before.last; ++i) {
      const Piece& written = pieces_[i];
      if (!written.move->arrives) continue;
      for (size_t k = message.first; k < message.last; ++k) {
        const Piece& used = pieces_[k];
        const BoxMove& move = *used.move;
        if ((move.leaves && overlap(used, move.source, written, written.move->target)) ||
            (move.arrives && overlap(used, move.target, written, written.move->target))) {
          return true;
        }
      }
    }
    return false;
  }

  // Of each step the earlier ones that write what it reads or writes.
  void add_dependencies(BoxProgram& made) const {
    const bool matters =
        std::any_of(messages_.begin(), messages_.end(), [this](const Message& one) {
          return one.phase() != messages_[0].phase() || one.kind == BoxStepKind::Reduce ||
                 one.kind == BoxStepKind::ReceiveReduce;
        });
    if (!matters) return;
    made.deps.resize(messages_.size());
    for (size_t i = 0; i < messages_.size(); ++i) {
      for (size_t before = 0; before < i; ++before) {
        if (writes_what_is_used(messages_[before], messages_[i])) {
          made.deps[i].push_back(static_cast<int>(before));
        }
      }
    }
  }

  const std::vector<DType>& types_;
  const BoxCallKind& kind_;
  const int rank_, size_;
  std::vector<Piece>& pieces_;
  std::vector<Message>& messages_;
};

// An instruction without content, with the memory of another one's lists.
void empty(Instr& used) {
  Instr made;
  made.inputs = std::move(used.inputs);
  made.local_outs = std::move(used.local_outs);
  made.sends = std::move(used.sends);
  made.deps = std::move(used.deps);
  for (std::vector<Ref>* list : {&made.inputs, &made.local_outs, &made.sends}) list->clear();
  made.deps.clear();
  used = std::move(made);
}

// A plan without content, with the memory of another one's lists.
std::shared_ptr<Plan> empty(std::shared_ptr<Plan> used) {
  if (used == nullptr) return std::make_shared<Plan>();
  Plan made;
  made.spaces = std::move(used->spaces);
  made.instrs = std::move(used->instrs);
  made.peers = std::move(used->peers);
  made.publish_instr = std::move(used->publish_instr);
  made.peers.clear();
  *used = std::move(made);
  return used;
}

Ref boxes_from(int first, int count) {
  Ref ref{};
  ref.lo = first;
  ref.hi = first + count;
  return ref;
}

}  // namespace

BoxProgram compile_moves(const std::vector<BoxMove>& moves, const std::vector<DType>& types,
                         const BoxCallKind& kind, int rank, int size, std::vector<Box> memory) {
  thread_local std::vector<Piece> kept_pieces;
  thread_local std::vector<Message> kept_messages;
  thread_local std::vector<const BoxMove*> kept_rest, kept_group;
  KeptList pieces(kept_pieces);
  KeptList messages(kept_messages);
  KeptList rest(kept_rest), group(kept_group);
  return Compiler(types, kind, rank, size, *pieces, *messages)
      .compile(moves, *rest, *group, std::move(memory));
}

std::shared_ptr<Plan> plan_of_boxes(BoxProgram&& program, const BoxCallKind& kind, int most_slots,
                                    Store store, Store adaptive, Comm& comm,
                                    std::shared_ptr<Plan> used) {
  const std::shared_ptr<Plan> plan = empty(std::move(used));
  plan->coll = kind.coll;
  plan->dtype = DType::U8;
  plan->redop = kind.redop;
  plan->label = kind.label;
  plan->returns_out = true;
  plan->depth = 1;
  plan->spins = kind.spins;
  plan->inline_nbytes = std::clamp(kind.most_inline, kInlineBytes, kMostInlineBytes);
  plan->store = store;
  plan->adaptive = adaptive;
  plan->choice.start_with(store, adaptive);
  plan->most_slots = std::max(1, most_slots);
  plan->ahead = static_cast<uint64_t>(std::max(1, program.ahead));
  plan->spaces.resize(1);
  SpaceSpec& space = plan->spaces[0];
  space.kind = SpaceKind::In;
  space.offsets.clear();
  space.offsets.reserve(program.boxes.size() + 1);
  space.offsets.push_back(0);
  for (const Box& box : program.boxes) {
    space.offsets.push_back(space.offsets.back() + static_cast<int64_t>(box.nbytes));
  }
  space.boxes = std::move(program.boxes);
  const int num_boxes = static_cast<int>(space.boxes.size());
  std::vector<int> peer_index(static_cast<size_t>(comm.size), -1);
  for (const PeerUse& peer : program.peers) {
    if (peer.rank < 0 || peer.rank >= comm.size || peer.rank == comm.rank) {
      throw std::invalid_argument("peer " + std::to_string(peer.rank) + " is not another rank: "
                                  "expected 0 to " + std::to_string(comm.size - 1) + " without " +
                                  std::to_string(comm.rank) + ", which is this rank");
    }
    peer_index[static_cast<size_t>(peer.rank)] = static_cast<int>(plan->peers.size());
    plan->peers.push_back(peer);
  }
  plan->instrs.resize(program.steps.size());
  for (size_t i = 0; i < program.steps.size(); ++i) {
    const BoxStep& step = program.steps[i];
    const int count = step.hi - step.lo;
    const bool local = step.is_local();
    auto slice = [&](int first) {
      // A message without boxes is empty: it tells the other side that nothing comes.
      if (first < 0 || count < (local ? 1 : 0) || first + count > num_boxes) {
        throw std::invalid_argument("step " + std::to_string(i) + " asks for " +
                                    std::to_string(count) + " boxes from number " +
                                    std::to_string(first) + " on, but the table has " +
                                    std::to_string(num_boxes) + "; only a message may have none");
      }
      return boxes_from(first, count);
    };
    Instr& ins = plan->instrs[i];
    empty(ins);
    ins.boxed = true;
    Ref message{};
    if (!local) {
      if (step.peer < 0 || step.peer >= comm.size ||
          peer_index[static_cast<size_t>(step.peer)] < 0) {
        throw std::invalid_argument("step " + std::to_string(i) + " has a message with rank " +
                                    std::to_string(step.peer) + ", which is not among the plan's "
                                    "peers: add the rank to `peers`");
      }
      message.is_message = true;
      message.peer = peer_index[static_cast<size_t>(step.peer)];
      message.k = step.k;
      ins.has_mpi = comm.link(step.peer).kind == LinkKind::Mpi;
    }
    if (step.kind == BoxStepKind::Send) {
      ins.inputs.push_back(slice(step.lo));
      ins.sends.push_back(message);
    } else {
      ins.inputs.push_back(local ? slice(step.source) : message);
      if (step.kind == BoxStepKind::ReceiveReduce || step.kind == BoxStepKind::Reduce) {
        ins.inputs.push_back(slice(step.lo));
      }
      ins.local_outs.push_back(slice(step.lo));
    }
    if (!program.deps.empty()) ins.deps = std::move(program.deps[i]);
  }
  plan->in_elems = space.offsets.back();  // what is moved, for records and waits
  plan->finish(1, kind.lane_nbytes, 1, 0);
  plan->mark = mark_of_plan(kind.coll, kind.dtype, static_cast<uint64_t>(kind.redop), kind.facts);
  return plan;
}

}  // namespace commrt
