// SPDX-License-Identifier: Apache-2.0
// A communicator's links, lanes and operations in flight.
#include "engine/comm.hpp"

#include <algorithm>
#include <stdexcept>

#include "engine/chaos.hpp"
#include "engine/engine.hpp"
#include "engine/in_flight.hpp"
#include "engine/kin.hpp"
#include "engine/mpi_turn.hpp"
#include "engine/p2p.hpp"
#include "engine/relay.hpp"
#include "engine/stand_ins.hpp"

namespace commrt {

const char* Op::failure_kind() const {
  return by_user    ? "reduction"
         : by_damage ? "integrity"
         : by_calls ? "calls"
         : by_death ? "peer"
         : by_mpi   ? "backend"
         : given_up ? "revoked"
         : was_refused ? "refused"
         : p2p != nullptr && !p2p->mistyped ? "truncation"
                                            : "mismatch";
}

Comm::Comm(Engine& engine_, int rank_, int size_, std::string name_)
    : engine(engine_), rank(rank_), size(size_), name(std::move(name_)), records(kRecords), message_records(kRecords),
      kin_(std::make_shared<Kin>(Kin{this, nullptr})), links_(static_cast<size_t>(size_)), member_index_(static_cast<size_t>(size_), -1) {
  for (auto& lane : lanes_) lane.last.assign(static_cast<size_t>(size), 0);
  p2p = std::make_unique<P2P>(*this);
  engine.add(this);  // last: from now on a progress thread may look at it
}

Comm::~Comm() {
  kin_->comm = nullptr;
  engine.remove(this);
  if (p2p->idle() && active_.empty()) return;
  // Dropped with operations in flight: MPI may still read and write what belongs to them.
  static_cast<void>(new std::vector<std::shared_ptr<Op>>(std::move(active_)));
  static_cast<void>(p2p.release());
}

unsigned char* Comm::lane_base(int lane) const {
  return arena + static_cast<size_t>(member_index_[rank]) * region_nbytes + layout.lanes +
         static_cast<size_t>(lane) * layout.lane_nbytes + lanes_[lane].at;
}

void Comm::attach_arena(void* base, size_t region, size_t lane_nbytes,
                        const std::vector<int>& ranks) {
  arena = static_cast<unsigned char*>(base);
  region_nbytes = region;
  members = ranks;
  layout = RegionLayout(static_cast<int>(ranks.size()), lane_nbytes);
  if (layout.nbytes > region) {
    throw std::invalid_argument("the shared memory of a rank has " + std::to_string(region) +
                                " bytes, expected at least " + std::to_string(layout.nbytes) +
                                " for " + std::to_string(ranks.size()) + " ranks");
  }
  if (region * ranks.size() > kSlotMask) {
    throw std::invalid_argument("the shared memory of " + std::to_string(ranks.size()) +
                                " ranks has " + std::to_string(region) +
                                " bytes for each, expected at most " + std::to_string(kSlotMask) +
                                " in all");
  }
  for (size_t i = 0; i < ranks.size(); ++i) member_index_[ranks[i]] = static_cast<int>(i);
  const size_t me = static_cast<size_t>(member_index_[rank]);
  unsigned char* mine = arena + me * region;
  for (int peer : ranks) {
    if (peer == rank) continue;
    const size_t other = static_cast<size_t>(member_index_[peer]);
    unsigned char* theirs = arena + other * region;
    Link& link = links_[peer];
    link.kind = LinkKind::Shared;
    link.out_lines = reinterpret_cast<Line*>(mine + layout.lines) + other * kLines;
    link.in_lines = reinterpret_cast<const Line*>(theirs + layout.lines) + me * kLines;
    link.out_more = reinterpret_cast<More*>(mine + layout.more) + other * kLines;
    link.in_more = reinterpret_cast<const More*>(theirs + layout.more) + me * kLines;
    link.ack = reinterpret_cast<Ack*>(mine + layout.acks) + other;
    link.acked = reinterpret_cast<const Ack*>(theirs + layout.acks) + me;
  }
  refusals.attach();
}

const std::atomic<uint32_t> Comm::kNobodySleeps{0};

void Comm::attach_bells(std::shared_ptr<Bells> bells, std::vector<int> of) {
  bells_ = std::move(bells);
  bell_of_ = std::move(of);
  asleep_ = &bells_->asleep();
}

void Comm::leave(Farewell how) {
  if (arena == nullptr) return;
  header(member_index_[rank])->farewell.store(how, std::memory_order_release);
}

void Comm::wake_peer(int peer) {
  const int member = bell_of_[static_cast<size_t>(peer)];
  if (member >= 0 && peer != rank) bells_->ring(member);
}

void Comm::wake_peers(const Plan& plan) {
  for (const PeerUse& use : plan.peers) wake_peer(use.rank);
}

bool Comm::tells_nobody() const {
  if (chaos != nullptr) return true;  // an operation may wait for its time
  const bool by_mpi = mpi_comm != 0 && !off_node->is_relay;
  if (by_mpi && (!p2p->idle() || refusals.stand_ins->has_open())) return true;
  return std::any_of(active_.begin(), active_.end(), [by_mpi](const auto& op) {
    const Plan& plan = *op->plan;
    return plan.native || plan.gloo != nullptr || op->gate.opened != nullptr ||
           (by_mpi && std::any_of(plan.instrs.begin(), plan.instrs.end(),
                                  [](const Instr& ins) { return ins.has_mpi; }));
  });
}

void Comm::look_closely() { p2p->look_closely(); }

void Comm::detach() {
  refusals.stand_ins->end();
  flight.close();
  if (idle()) leave(Farewell::Freed);
  refusals.detach();
  trails.set_every(0);
  for (auto& link : links_) link = Link{};
  p2p = std::make_unique<P2P>(*this);
  arena = nullptr;
  heap_.clear();
  mirrors_.clear();
}

void Comm::attach_mpi(Handle comm_handle, int tag, const std::vector<int>& mpi_ranks) {
  mpi_comm = comm_handle;
  mpi_tag = tag;
  for (int peer = 0; peer < size; ++peer) {
    Link& link = links_[peer];
    link.mpi_rank = mpi_ranks[peer];
    if (peer != rank && link.kind == LinkKind::Self) link.kind = LinkKind::Mpi;
  }
  refusals.afar.attach(static_cast<size_t>(size));
}

void Comm::attach_relay(std::shared_ptr<Relay> relay, int tag, const std::vector<int>& ranks) {
  off_node = &relay_api();
  attach_mpi(reinterpret_cast<Handle>(relay.get()), tag, ranks);
  tell_afar(relay->told_of(tag));
  relay_ = std::move(relay);
  auto is_shared = [](const Link& link) { return link.kind == LinkKind::Shared; };
  if (std::any_of(links_.begin(), links_.end(), is_shared)) Relay::expect_neighbors();
}

std::shared_ptr<Op> Comm::fresh_op() {
  // The last operation's object is used again once nobody else holds it: its vectors then
  // need no allocation.
  std::shared_ptr<Op> op;
  if (spare_ && spare_.use_count() == 1) {
    op = std::move(spare_);
    op->state.store(static_cast<int>(OpState::Running), std::memory_order_relaxed);
  } else {
    op = std::make_shared<Op>();
  }
  op->comm = this;
  op->parts.reset();
  op->bucket_facts = 0;
  op->moved_s = 0;
  op->agreement.reset();
  op->gate = {};
  op->fault.reset();
  op->in_flight.reset();
  op->was_changed = false;
  op->stream = 0;
  op->was_refused = op->by_death = op->has_told = op->by_damage = op->by_calls = false;
  return op;
}

uint64_t Comm::take_number() {
  const uint64_t seq = next_seq++;
  tell_count();
  return seq;
}

std::shared_ptr<Op> Comm::start(const std::shared_ptr<const Plan>& plan, const void* in,
                                void* out, void* const* keep, bool timed, uint64_t limit) {
  if (refusals.is_due() || refusals.disturb()) refusals.look();
  std::shared_ptr<Op> op = fresh_op();
  op->bind(plan, in, out);  // first: without memory for scratch, nothing has happened
  op->seq = next_seq++;
  if (guards && keep != nullptr && keep[0] != nullptr) guard(*op);
  if (plan->shows_result && has_heap() && !checksums) op->find_in_heap();
  op->store = store_for_run(*plan, timed, op->uses_heap());
  op->timed_from = timed && plan->learns() ? ticks() : 0;
  op->keep[0] = keep != nullptr ? keep[0] : nullptr;
  op->keep[1] = keep != nullptr ? keep[1] : nullptr;
  return begin(std::move(op), limit);
}

std::shared_ptr<Op> Comm::start_gated(const std::shared_ptr<const Plan>& plan, const void* in,
                                      void* out, const Gate& gate, uint64_t stream) {
  if (refusals.is_due() || refusals.disturb()) refusals.look();
  std::shared_ptr<Op> op = fresh_op();
  op->bind(plan, in, out);
  op->seq = next_seq++;
  op->gate = gate;
  op->stream = stream;
  if (plan->shows_result && has_heap() && !checksums) op->find_in_heap();
  op->store = store_for_run(*plan, false, op->uses_heap());
  op->timed_from = 0;
  op->keep[0] = op->keep[1] = nullptr;
  return begin(std::move(op), kSliceBytes);
}

std::shared_ptr<Op> Comm::start_bucket(const std::shared_ptr<const Plan>& plan,
                                       std::unique_ptr<BucketParts> parts, void* keep,
                                       uint64_t limit, uint16_t facts) {
  const bool in_pieces = !plan->native && std::none_of(
      plan->instrs.begin(), plan->instrs.end(), [](const Instr& ins) { return ins.has_mpi; });
  if (refusals.is_due() || refusals.disturb()) refusals.look();
  std::shared_ptr<Op> op = fresh_op();
  // First, as in start(): without memory nothing has happened.
  unsigned char* const packed = in_pieces ? nullptr : parts->pack(plan->itemsize);
  op->bind(plan, packed, packed);
  op->parts = std::move(parts);
  op->bucket_facts = facts;
  op->seq = next_seq++;
  op->store = store_for_run(*plan, false);
  op->timed_from = 0;
  op->keep[0] = keep;
  op->keep[1] = nullptr;
  return begin(std::move(op), limit);
}

// Keeps the books, and does the first of the work.
std::shared_ptr<Op> Comm::begin(std::shared_ptr<Op> op, uint64_t limit) {
  note(op->seq, *op->plan, op->stream);
  if (chaos != nullptr) inject(*op);

  // Issue order decides: an operation may not overtake an older one that waits for a lane. While
  // others are in flight, the refusals of the last pass still hold.
  if (active_.empty()) lane_refused_ = native_refused_ = false;
  const MpiTurn turn(engine.mpi_device());
  if (advance_first(op, limit) && op->has_keep()) engine.discard(std::shared_ptr<Op>(op));
  if (p2p->is_urgent()) p2p->progress();
  return op;
}

// The first pass of an operation; true if it has ended. It is in flight meanwhile, so that a refusal
// of it that comes now finds it.
bool Comm::advance_first(const std::shared_ptr<Op>& op, uint64_t limit) {
  if (op->plan->gloo != nullptr && !op->finished()) make_agreement(*op);
  if (refusals.disturb() && refusals.are_for(*op)) {
    refusals.end_new(*op);
    return true;
  }
  if (op->finished()) return true;
  if (op->agreement != nullptr) active_.push_back(op->agreement);
  active_.push_back(op);
  try {
    if (op->agreement != nullptr) begin_agreement(op->agreement);
    if (!op->is_over() && !fail_after_own(*op)) op->advance(limit);
  } catch (...) {
    active_.pop_back();
    throw;
  }
  ring(*op->plan);
  if (op->finished()) active_.pop_back();
  return op->finished();
}

Store Comm::store_for_run(const Plan& plan, bool timed, bool in_heap) {
  if (in_heap && plan.adaptive != Store::Plain) {
    StoreChoice& choice = plan.heap_choice;
    const Store kind = plan.learns() && timed ? choice.next() : choice.current();
    return streams_second(kind) ? Store::StreamBoth : Store::Plain;
  }
  if (plan.learns()) {
    if (learned_ >= 0) plan.choice.hear(learned_ == 1);
    return timed ? plan.choice.next() : plan.choice.current();
  }
  if (!streams_second(plan.adaptive) || learned_ < 0) return plan.store;
  return store_of(streams_first(plan.store), learned_ == 1);
}

void Comm::report_run(const Plan& plan, uint64_t took_ticks, bool in_heap) {
  if (in_heap) {
    plan.heap_choice.report(took_ticks);
    return;
  }
  plan.choice.report(took_ticks, !plan.answered);
  // Judge by the latest run, not by the latest change: a plan that changed in another state of the
  // machine, and has not run since, may never change back.
  if (streams_second(plan.adaptive) && plan.choice.has_tried()) {
    learned_ = streams_second(plan.choice.current()) ? 1 : 0;
  }
}

void Comm::recycle(std::shared_ptr<Op> op) {
  if (op->p2p == nullptr && !op->was_refused) spare_ = std::move(op);
}

int Comm::least_spins(int otherwise) const {
  for (const auto& op : active_) otherwise = std::min(otherwise, spins_of(op->plan.get()));
  return otherwise;
}

bool Comm::only_gloo() const {
  return p2p->idle() &&
         std::all_of(active_.begin(), active_.end(), [](const auto& op) { return op->gloo != nullptr; });
}

bool Comm::idle() const {
  return active_.empty() && p2p->idle() && !refusals.stand_ins->has_open();
}

bool Comm::can_take_back(const Op& op) const {
  if (op.plan->gloo != nullptr) {
    return op.agreement != nullptr && op.gloo == nullptr && !op.agreement->is_over();
  }
  if (refusals.stand_ins->take(op)) return true;
  if (op.native_started_) return false;
  if (!op.plan->native && op.gate.opened == nullptr) return true;
  return std::none_of(links_.begin(), links_.end(),
                      [](const Link& link) { return link.kind == LinkKind::Mpi; });
}

bool Comm::progress(uint64_t limit) {
  bool any = p2p->progress();
  if (refusals.is_due() || refusals.disturb()) refusals.look();
  lane_refused_ = native_refused_ = false;
  bool ended = false;
  try {
    for (size_t i = 0; i < active_.size(); ++i) {
      Op& op = *active_[i];
      if (!op.finished() && (fail_after_own(op) || op.advance(limit))) {
        any = true;
        ring(*op.plan);
      }
      ended = ended || op.finished();
    }
  } catch (...) {
    // Operations that this pass did not reach may wait for a lane, so nothing starts before them.
    lane_refused_ = native_refused_ = true;
    throw;
  }
  if (p2p->is_urgent()) p2p->progress();
  if (ended) {
    for (auto& op : active_) {
      if (!op->finished()) continue;
      // Python objects are dropped later, by someone who holds the GIL; those that are still being
      // sent to ranks of other nodes, once that is over (afar.hpp).
      const bool leaves = op->was_refused && op->held;
      if (op->has_keep() && !leaves) {
        engine.discard(std::move(op));
      } else {
        op.reset();
      }
    }
    active_.erase(std::remove(active_.begin(), active_.end(), nullptr), active_.end());
  }
  return any;
}

int Comm::acquire_lane(const Plan& plan) {
  if (lane_refused_) return -1;
  for (int i = 0; i < kLanes; ++i) {
    Lane& lane = lanes_[i];
    if (lane.busy) continue;
    bool clear = true;
    for (int peer = 0; peer < size && clear; ++peer) {
      if (lane.last[peer] != 0) clear = links_[peer].is_acked(lane.last[peer] - 1);
    }
    if (!clear) continue;
    lane.busy = true;
    const size_t nbytes = static_cast<size_t>(plan.slots) * plan.slot_nbytes;
    // The whole lane is free then, so an operation may begin anywhere.
    lane.at = plan.moves_on && lane.next + nbytes <= slot_window ? lane.next : 0;
    lane.next = lane.at + (plan.moves_on ? nbytes : 0);
    return i;
  }
  lane_refused_ = true;
  return -1;
}

void Comm::release_lane(Op& op) {
  if (op.lane_ < 0) return;
  lanes_[op.lane_].busy = false;
  op.lane_ = -1;
}

std::shared_ptr<Op> Comm::take_wanted() {
  for (const auto& op : active_) {
    if (op->is_over() || !op->user_value) continue;
    if (op->user_value->state != UserValue::State::Wanted) continue;
    op->user_value->state = UserValue::State::Running;
    return op;
  }
  return nullptr;
}

bool Comm::gave_up(int peer, uint64_t seq) const {
  std::atomic_thread_fence(std::memory_order_acquire);
  const uint64_t failed = header(member_of(peer))->failed.load(std::memory_order_acquire);
  return Failure::ends(failed, seq, false);
}

// MPI would hand it the messages of the one that failed, and the other ranks end it too.
bool Comm::fail_after_own(Op& op) {
  if (op.seq < failed_from) return false;
  if (const Op* const first = op.agreement.get(); first != nullptr && first->has_failed()) {
    op.given_up = first->given_up;
    op.by_death = first->by_death;
    op.by_damage = first->by_damage;
    op.by_calls = first->by_calls;
    op.by_mpi = first->by_mpi;
    op.fail(first->error);
    return true;
  }
  op.given_up = true;
  op.by_death = failed_by_death;
  op.by_damage = is_damaged;
  op.by_calls = calls_differ;
  op.fail(calls_differ ? failure
                       : "this rank gave up at operation #" + std::to_string(failed_from) + ": " + failure);
  return true;
}

void Comm::fail_op(Op& op, const std::string& why) { op.fail(why); }

std::vector<int> Comm::not_started(uint64_t seq) const {
  std::vector<int> missing;
  for (size_t i = 0; i < members.size(); ++i) {
    if (header(static_cast<int>(i))->started.load(std::memory_order_acquire) <= seq) {
      missing.push_back(members[i]);
    }
  }
  return missing;
}

}  // namespace commrt
