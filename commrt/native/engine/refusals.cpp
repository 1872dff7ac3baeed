// SPDX-License-Identifier: Apache-2.0
// Records of refused calls, and how the ids of messages come to agree again.
#include "engine/refusals.hpp"

#include <algorithm>
#include <cstring>

#include "engine/comm.hpp"
#include "engine/device_refusals.hpp"
#include "engine/engine.hpp"
#include "engine/p2p.hpp"
#include "engine/stand_ins.hpp"

namespace commrt {

const std::atomic<uint64_t> Refusals::kNone{0};

namespace {

constexpr const char* kCannotBeTakenBack =
    "; it cannot be taken back here, so the communicator ends";

template <class List, class Test>
void remove_where(List& list, Test test) {
  list.erase(std::remove_if(list.begin(), list.end(), test), list.end());
}

}  // namespace

std::string said_refused(int rank, const std::string& reason) {
  return "rank " + std::to_string(rank) + " has refused its call, and nothing was delivered: " + reason;
}

std::string shortened(const std::string& text, size_t most) {
  if (text.size() <= most) return text;
  size_t end = most - 3;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) --end;
  return text.substr(0, end) + "...";
}

Refusals::Refusals(Comm& comm) : comm_(comm), stand_ins(std::make_unique<StandIns>(comm)),
      on_devices(std::make_unique<DeviceRefusals>(comm)) {}

Refusals::~Refusals() = default;

void Refusals::attach() {
  told_ = &header(0).num_refused_here;
  seen_ = 0;  // and not what it says: a peer that was faster may have refused a call already
  seen_afar_.assign(comm_.members.size(), 0);
}

void Refusals::detach() {
  told_ = &kNone;
  seen_ = 0;
}

unsigned char* Refusals::region(int member) const {
  return comm_.arena + static_cast<size_t>(member) * comm_.region_nbytes;
}

RankHeader& Refusals::header(int member) const {
  return *reinterpret_cast<RankHeader*>(region(member));
}

Refusal& Refusals::record(int member, uint64_t index) const {
  return reinterpret_cast<Refusal*>(region(member) + comm_.layout.refusals)[index % kRefusals];
}

// Returns the record of a refusal of another rank that the member has heard of.
Refusal& Refusals::record_afar(int member, uint64_t index) const {
  return reinterpret_cast<Refusal*>(region(member) + comm_.layout.heard_afar)[index % kRefusals];
}

// What member `of` answers to member `to`.
Answer& Refusals::answer(int of, int to, uint64_t index) const {
  Answer* const all = reinterpret_cast<Answer*>(region(of) + comm_.layout.answers);
  return all[static_cast<uint64_t>(to) * kRefusals + index % kRefusals];
}

// The number of refusals of member `from` that member `of` has answered.
std::atomic<uint64_t>& Refusals::heard(int of, int from) const {
  return reinterpret_cast<Ack*>(region(of) + comm_.layout.heard)[from].consumed;
}

bool Refusals::refuse(const std::string& reason) {
  look();
  const uint64_t seq = comm_.next_seq;
  if (comm_.arena != nullptr) {
    const int me = comm_.member_of(comm_.rank);
    const int members = static_cast<int>(comm_.members.size());
    for (int m = 0; m < members; ++m) {
      const uint64_t seen = m == me ? num_own_ : heard(m, me).load(std::memory_order_acquire);
      if (num_own_ - seen >= kRefusals) return false;
    }
    Refusal& one = record(me, num_own_);
    const std::string text = shortened(reason, Refusal::kMostBytes);
    one.seq = seq;
    one.nbytes = text.size();
    one.rank = comm_.rank;
    std::memcpy(one.reason, text.data(), text.size());
    for (int peer : comm_.members) {
      if (peer != comm_.rank) unsettled_.push_back({peer, seq, num_own_, comm_.link(peer).next_in});
    }
    header(me).num_refused.store(++num_own_, std::memory_order_release);
    header(0).num_refused_here.fetch_add(1);
    ++seen_;  // as far as it is the own one; those of others make it differ still
    header(me).started.store(seq + 1, std::memory_order_release);
    for (int peer : comm_.members) comm_.ring(peer);
  }
  have_been_.store(true, std::memory_order_release);
  afar.refuse(seq);
  stand_ins->refuse(seq);
  comm_.p2p->tell_refused(seq, shortened(reason, Refusal::kMostBytes));
  answer_all(seq);
  remove_where(coming_, [seq](const Coming& one) { return one.seq == seq; });
  comm_.take_number();
  see();
  return true;
}

void Refusals::look() {
  while (is_due()) {
    seen_ = told_->load(std::memory_order_acquire);
    const int me = comm_.member_of(comm_.rank);
    for (int m = 0; m < static_cast<int>(comm_.members.size()); ++m) {
      if (m == me) continue;
      hear(m);
      hear_of_afar(m);
    }
  }
  if (!disturb_) return;
  settle();
  skip();
  prune();
  afar.work();
  stand_ins->work();
  context_ends.look();
  on_devices->look();
  // Peers are to answer, or may ask.
  if (afar.is_busy() || stand_ins->is_busy() || !ended_.empty()) comm_.p2p->look_closely();
  see();
}

// Those that have refused operation `seq` learn what became of it here.
void Refusals::answer_all(uint64_t seq) {
  for (const Coming& one : coming_) {
    if (one.seq == seq) stand_ins->hear_refused(one.rank, seq);
  }
}

void Refusals::see() {
  disturb_ = !coming_.empty() || !unsettled_.empty() || !skips_.empty() || !ended_.empty() ||
             afar.is_busy() || stand_ins->is_busy() || context_ends.is_asked() || on_devices->is_busy();
}

// Answers all that a member has refused meanwhile.
void Refusals::hear(int member) {
  const int me = comm_.member_of(comm_.rank), rank = comm_.members[static_cast<size_t>(member)];
  std::atomic<uint64_t>& count = heard(me, member);
  const uint64_t end = header(member).num_refused.load(std::memory_order_acquire);
  for (uint64_t i = count.load(std::memory_order_relaxed); i < end; ++i) {
    const Refusal& one = record(member, i);
    const Range ids = hear(rank, one.seq, said_refused(rank, std::string(one.reason, one.nbytes)));
    if (one.seq < comm_.next_seq) stand_ins->hear_refused(rank, one.seq);
    answer(me, member, i) = {ids.begin, ids.end};
    count.store(i + 1, std::memory_order_release);
  }
  comm_.ring(rank);
  see();
}

// A refusal of another rank; returns what that rank is to skip.
Refusals::Range Refusals::hear(int rank, uint64_t seq, const std::string& why) {
  if (seq >= comm_.next_seq) {
    coming_.push_back({seq, rank, why});
    return {};
  }
  for (Ended& one : ended_) {
    if (one.seq == seq) return leave(one, rank);
  }
  if (Op* const op = find(seq)) {
    if (comm_.can_take_back(*op)) return leave(end(*op, why), rank);
    end_all(*op, rank, why);
    return {};
  }
  if (on_device_.has(seq)) end_on_device(seq, why);  // before it is answered
  return {Answer::kByMarks, Answer::kByMarks};
}

Op* Refusals::find(uint64_t seq) const {
  for (const auto& op : comm_.active_) {
    if (op->seq == seq && !op->is_agreement && !op->is_over()) return op.get();
  }
  return nullptr;
}

// The messages of a collective of gloo's are those by which the ranks compare it before.
Op& Refusals::with_messages(Op& op) { return op.agreement != nullptr ? *op.agreement : op; }

// Fails an operation, and notes which messages it would have exchanged.
Refusals::Ended& Refusals::end(Op& op, const std::string& why) {
  Ended ended{op.seq, {}};
  Op& messages = with_messages(op);
  for (size_t i = 0; i < messages.plan->peers.size(); ++i) {  // a vendor collective has none
    const PeerUse& use = messages.plan->peers[i];
    if (comm_.link(use.rank).kind != LinkKind::Shared) continue;
    const Range out{messages.out_base_[i], messages.out_base_[i] + use.num_sends()};
    const Range in{messages.in_base_[i], messages.in_base_[i] + use.num_recvs()};
    ended.uses.push_back({use.rank, out, in});
    if (in.length() != 0) skips_.push_back({use.rank, op.seq, in});
  }
  afar.leave(messages);
  messages.refuse(why);
  if (&messages != &op) op.refuse(why);
  stand_ins->leave(op);
  ended_.push_back(std::move(ended));
  return ended_.back();
}

// A rank has refused an operation that has failed here: nothing comes from there. Returns the ids
// of what that rank would have received.
Refusals::Range Refusals::leave(Ended& ended, int rank) {
  const uint64_t seq = ended.seq;
  Range out;
  for (Use& use : ended.uses) {
    if (use.rank != rank) continue;
    remove_where(skips_, [&](const Skip& one) { return one.peer == rank && one.seq == seq; });
    move(rank, seq, -use.in.length());
    use.in.end = use.in.begin;
    out = use.out;
  }
  return out;
}

// Moves the ids of all messages from a peer that belong to operations after `after`. Modulo 2^64.
void Refusals::move(int peer, uint64_t after, uint64_t by) {
  if (by == 0) return;
  comm_.link(peer).next_in += by;
  for (const auto& op : comm_.active_) {
    if (op->seq <= after || op->finished()) continue;
    for (size_t i = 0; i < op->in_base_.size() && i < op->plan->peers.size(); ++i) {
      if (op->plan->peers[i].rank == peer) op->in_base_[i] += by;
    }
  }
  const auto shift = [by](Range& ids) {
    ids.begin += by;
    ids.end += by;
  };
  for (Ended& ended : ended_) {
    for (Use& use : ended.uses) {
      if (ended.seq > after && use.rank == peer) shift(use.in);
    }
  }
  for (Skip& one : skips_) {
    if (one.seq > after && one.peer == peer) shift(one.ids);
  }
  for (Unsettled& one : unsettled_) {
    if (one.seq > after && one.peer == peer) one.at += by;
  }
}

bool Refusals::hold_back(int peer, uint64_t seq) const {
  return std::any_of(unsettled_.begin(), unsettled_.end(), [=](const Unsettled& one) {
    return one.peer == peer && one.seq < seq;
  });
}

bool Refusals::hold_back(uint64_t seq) const {
  return afar.hold_back(seq) || stand_ins->hold_back(seq) ||
         std::any_of(unsettled_.begin(), unsettled_.end(),
                     [seq](const Unsettled& one) { return one.seq < seq; });
}

void Refusals::settle_afar(int rank, uint64_t seq, const Afar::Told& told) {
  afar.settle(rank, seq, told);
  see();
}

void Refusals::has_left_afar(int rank, uint64_t seq) {
  afar.has_left(rank, seq);
  see();
}

// Takes the answers of peers to what this rank has refused.
void Refusals::settle() {
  if (comm_.arena == nullptr) return;
  const int me = comm_.member_of(comm_.rank);
  for (size_t i = 0; i < unsettled_.size();) {
    const Unsettled one = unsettled_[i];
    const int member = comm_.member_of(one.peer);
    const bool answered = heard(member, me).load(std::memory_order_acquire) > one.index;
    bool is_all = false;
    uint64_t number = count_by_marks(one, is_all);
    if (hold_back(one.peer, one.seq) || (!answered && !is_all)) {
      ++i;
      continue;
    }
    unsettled_.erase(unsettled_.begin() + static_cast<std::ptrdiff_t>(i));
    if (answered) {  // before that the peer may be writing it
      const Answer said = answer(member, me, one.index);
      if (said.begin != Answer::kByMarks) number = said.end - said.begin;
    }
    move(one.peer, one.seq, number);
    if (number != 0) skips_.push_back({one.peer, one.seq, {one.at, one.at + number}});
  }
}

// The number of messages that are here and say that they belong to the refused operation. `is_all`
// is set if the next one is here, too, and belongs to another: a peer that has done its part, and
// does something else for long, need not answer.
uint64_t Refusals::count_by_marks(const Unsettled& one, bool& is_all) const {
  const Link& link = comm_.link(one.peer);
  for (uint64_t id = one.at;; ++id) {
    const uint64_t word = link.in_lines[id & (kLines - 1)].seq.load(std::memory_order_acquire);
    const bool is_here = has_id(word, id);
    if (is_here && order_of(word - id) == low_bits(one.seq, 16)) continue;
    is_all = is_here;
    return id - one.at;
  }
}

// Gives lines back of messages that nobody reads, behind those that somebody does.
void Refusals::skip() {
  remove_where(skips_, [this](const Skip& one) {
    const uint64_t begun =
        header(comm_.member_of(one.peer)).started.load(std::memory_order_acquire);
    Link& link = comm_.link(one.peer);
    if (begun <= one.seq || is_due() || hold_back(one.peer, one.seq)) return false;
    if (link.consumed < one.ids.begin) return false;
    while (link.consumed < one.ids.end) link.consume(link.consumed);
    return true;
  });
}

// Forgets operations that nobody can refuse any more.
void Refusals::prune() {
  uint64_t begun = comm_.next_seq;
  for (int m = 0; comm_.arena != nullptr && m < static_cast<int>(comm_.members.size()); ++m) {
    begun = std::min(begun, header(m).started.load(std::memory_order_acquire));
  }
  if (is_due()) return;
  remove_where(ended_, [begun](const Ended& one) { return one.seq < begun; });
}

bool Refusals::are_for(const Op& op) const {
  return std::any_of(coming_.begin(), coming_.end(),
                     [&op](const Coming& one) { return one.seq == op.seq; }) ||
         !stand_ins->why_left(op).empty();
}

void Refusals::look_around() {
  comm_.p2p->look_closely();
  comm_.p2p->progress();
  look();
}

std::string Refusals::why_next() {
  look_around();
  on_devices->wait_elsewhere();
  for (const Coming& one : coming_) {
    if (one.seq == comm_.next_seq) return one.why;
  }
  return {};
}

void Refusals::pass_over() {
  const uint64_t seq = comm_.take_number();
  answer_all(seq);
  remove_where(coming_, [seq](const Coming& one) { return one.seq == seq; });
  see();
}

void Refusals::end_after(uint64_t seq, const std::string& why) {
  Op* const op = find(seq);
  if (op != nullptr && stand_ins->take(*op)) end(*op, why);
  see();
}

// All who have refused it are left, since none of them will answer.
void Refusals::end_new(Op& op) {
  std::vector<Coming> all;
  for (const Coming& one : coming_) {
    if (one.seq == op.seq) all.push_back(one);
  }
  const std::string why = all.empty() ? stand_ins->why_left(op) : all.front().why;
  remove_where(coming_, [&op](const Coming& one) { return one.seq == op.seq; });
  if (!comm_.can_take_back(op)) {
    for (const Coming& one : all) end_all(op, one.rank, one.why);
    return see();
  }
  // Those of other nodes were told that nothing goes there, and nothing comes from there.
  for (const Coming& one : all) {
    Link& link = comm_.link(one.rank);
    const std::vector<PeerUse>& peers = with_messages(op).plan->peers;
    for (size_t i = 0; link.kind == LinkKind::Mpi && i < peers.size(); ++i) {
      const PeerUse& use = peers[i];
      if (use.rank != one.rank) continue;
      link.next_out -= use.num_sends();
      link.next_in -= use.num_recvs();
    }
  }
  Ended& ended = end(op, why);
  for (const Coming& one : all) {
    stand_ins->hear_refused(one.rank, op.seq);
    if (comm_.link(one.rank).kind == LinkKind::Mpi) {
      afar.forget(one.rank, op.seq);
      continue;
    }
    // They were told that nothing comes from here.
    const Range out = leave(ended, one.rank);
    comm_.link(one.rank).next_out -= out.length();
    for (Use& use : ended.uses) {
      if (use.rank == one.rank) use.out.end = use.out.begin;
    }
  }
  afar.work();
  see();
}

// A rank of another node has refused an operation.
void Refusals::end_by(int rank, uint64_t seq, const std::string& why) {
  if (seq >= comm_.next_seq) {
    const bool is_known = std::any_of(coming_.begin(), coming_.end(), [=](const Coming& one) {
      return one.seq == seq && one.rank == rank;
    });
    if (!is_known) coming_.push_back({seq, rank, why});
  } else if (Op* const op = find(seq)) {
    if (comm_.can_take_back(*op)) {
      end(*op, why);
    } else {
      end_all(*op, rank, why);
    }
  } else if (on_device_.has(seq)) {
    end_on_device(seq, why);
  }
}

void Refusals::hear_from_afar(int rank, uint64_t seq, const std::string& reason) {
  have_been_.store(true, std::memory_order_release);
  const bool is_new = seq >= comm_.next_seq;
  if (find(seq) != nullptr) tell_node(rank, seq, reason);
  end_by(rank, seq, said_refused(rank, reason));
  if (!is_new) stand_ins->hear_refused(rank, seq);
  const auto told = is_new ? Afar::Told{} : afar.pass_over(rank, seq);
  if (!told.has_value()) end_communicator(seq + 1);
  comm_.p2p->tell_heard(rank, seq, told.value_or(Afar::Told{}));  // behind what says that it has ended
  see();
}

// This rank is about to leave an operation. Ranks of its node look whether that is so before they
// take what they have read from here, or write here.
void Refusals::tell_node(int rank, uint64_t seq, const std::string& reason) {
  if (comm_.arena == nullptr) return;
  const int me = comm_.member_of(comm_.rank);
  const uint64_t index = header(me).num_heard_afar.load(std::memory_order_relaxed);
  Refusal& one = record_afar(me, index);
  const std::string text = shortened(reason, Refusal::kMostBytes);
  one.seq = seq;
  one.nbytes = text.size();
  one.rank = rank;
  std::memcpy(one.reason, text.data(), text.size());
  header(me).num_heard_afar.store(index + 1, std::memory_order_release);
  header(0).num_refused_here.fetch_add(1);
  ++seen_;
  for (int peer : comm_.members) comm_.ring(peer);
}

// Takes from a member of this node what it has heard from other nodes.
void Refusals::hear_of_afar(int member) {
  uint64_t& seen = seen_afar_[static_cast<size_t>(member)];
  const std::atomic<uint64_t>& count = header(member).num_heard_afar;
  for (; seen < count.load(std::memory_order_acquire); ++seen) {
    const Refusal one = record_afar(member, seen);
    std::atomic_thread_fence(std::memory_order_acquire);
    if (count.load(std::memory_order_acquire) - seen >= kRefusals) {
      seen = count.load(std::memory_order_acquire);
      uint64_t from = comm_.next_seq;
      for (const auto& op : comm_.active_) from = std::min(from, op->seq);
      return end_communicator(from);
    }
    const int rank = static_cast<int>(one.rank);
    end_by(rank, one.seq, said_refused(rank, std::string(one.reason, one.nbytes)));
  }
  see();
}

// Operations from `seq` on cannot come into step again.
void Refusals::end_communicator(uint64_t seq) {
  comm_.end_everywhere(
      seq, "a rank has refused a call so many calls ago that the ranks cannot take it back");
}

// An operation that cannot be taken back: the communicator ends with it, on all ranks.
void Refusals::end_all(Op& op, int rank, const std::string& why) {
  op.given_up = true;
  comm_.fail_op(op, why + kCannotBeTakenBack);
  comm_.p2p->tell_ended(rank, op.seq + 1);
}

// A device's operation: the communicator ends with it, on all ranks. Whoever watches the device lets
// its streams go.
void Refusals::end_on_device(uint64_t seq, const std::string& why) {
  if (seq >= device_ends_from_) return;
  device_ends_from_ = seq;
  why_device_ends_ = why + kCannotBeTakenBack;
  comm_.end_everywhere(seq, why_device_ends_);
}

std::string Refusals::give_to_device(uint64_t seq) {
  on_device_.add(seq);
  if (!have_been()) return {};
  look();
  std::string why;
  for (const Coming& one : coming_) {
    if (one.seq == seq && why.empty()) why = one.why;
  }
  if (why.empty()) return {};
  remove_where(coming_, [seq](const Coming& one) { return one.seq == seq; });
  end_on_device(seq, why);
  see();
  return why_device_ends_;
}

std::string Refusals::why_device_ends(uint64_t seq) const {
  return seq < device_ends_from_ ? std::string() : why_device_ends_;
}

std::string Refusals::reason_of(int member, uint64_t seq) const {
  const uint64_t end = header(member).num_refused.load(std::memory_order_acquire);
  for (uint64_t i = end > kRefusals ? end - kRefusals : 0; i < end; ++i) {
    const Refusal& one = record(member, i);
    if (one.seq == seq) return std::string(one.reason, one.nbytes);
  }
  return {};
}

int Refusals::num_members() const {
  return comm_.arena == nullptr ? 0 : static_cast<int>(comm_.members.size());
}

std::vector<uint64_t> Refusals::all_of(int member) const {
  std::vector<uint64_t> found;
  const auto take = [&](uint64_t end, const auto& one_at) {
    for (uint64_t i = end > kRefusals ? end - kRefusals : 0; i < end; ++i) {
      found.push_back(one_at(i).seq);
    }
  };
  const RankHeader& its = header(member);
  take(its.num_refused.load(std::memory_order_acquire),
       [&](uint64_t i) -> const Refusal& { return record(member, i); });
  take(its.num_heard_afar.load(std::memory_order_acquire),
       [&](uint64_t i) -> const Refusal& { return record_afar(member, i); });
  return found;
}

}  // namespace commrt
