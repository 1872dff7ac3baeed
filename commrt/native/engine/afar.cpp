// SPDX-License-Identifier: Apache-2.0
// The order of messages between nodes, around calls that some rank has refused.
#include "engine/afar.hpp"

#include <algorithm>
#include <cstring>

#include "engine/comm.hpp"
#include "engine/engine.hpp"
#include "engine/p2p.hpp"

namespace commrt {

namespace {

constexpr int kTries = 1000;  // looks at a receive that was cancelled

template <class List, class Test>
void remove_where(List& list, Test test) {
  list.erase(std::remove_if(list.begin(), list.end(), test), list.end());
}

}  // namespace

// The carrier may still read and write what its requests are about.
Afar::~Afar() {
  for (Remains& one : remains_) {
    static_cast<void>(one.bytes.release());
    static_cast<void>(one.stamp.release());
    if (one.op != nullptr) static_cast<void>(new std::shared_ptr<Op>(std::move(one.op)));
  }
}

void Afar::note_first(int peer, uint64_t seq, uint64_t ids) {
  History& history = history_[static_cast<size_t>(peer)];
  if (history.firsts.empty()) history.firsts.resize(History::kMost);
  history.firsts[history.num++ % History::kMost] = {seq, ids, history.sent};
}

// Tells what an operation has sent to a peer, once it has no ids left to fill.
std::optional<Afar::Told> Afar::sent_of(int peer, uint64_t seq) const {
  const History& history = history_[static_cast<size_t>(peer)];
  uint64_t end = history.sent;
  for (uint64_t i = history.num; i > 0 && i + History::kMost > history.num; --i) {
    const First& first = history.firsts[(i - 1) % History::kMost];
    if (first.seq == seq) return Told{first.ids, end - first.sent_before, 0};
    if (first.seq < seq) return Told{};
    end = first.sent_before;
  }
  if (history.num <= History::kMost) return Told{};
  return std::nullopt;
}

bool Afar::hold_back(int peer, uint64_t seq) const {
  return std::any_of(unsettled_.begin(), unsettled_.end(), [=](const Unsettled& one) {
    return one.peer == peer && one.seq < seq;
  });
}

bool Afar::hold_back(uint64_t seq) const {
  return std::any_of(unsettled_.begin(), unsettled_.end(),
                     [=](const Unsettled& one) { return one.seq < seq; });
}

void Afar::refuse(uint64_t seq) {
  for (int peer = 0; peer < comm_.size; ++peer) {
    const Link& link = comm_.link(peer);
    if (link.kind == LinkKind::Mpi) unsettled_.push_back({peer, seq, link.next_in, link.next_out});
  }
}

void Afar::settle(int peer, uint64_t seq, const Told& told) {
  const auto found = std::find_if(unsettled_.begin(), unsettled_.end(), [=](const Unsettled& one) {
    return one.peer == peer && one.seq == seq;
  });
  if (found == unsettled_.end()) return;
  const Unsettled one = *found;
  unsettled_.erase(found);
  move(peer, seq, told.from_here, told.to_here);
  if (told.from_here != 0) {
    drains_.push_back({{peer, seq, one.in, one.in, one.in + told.from_here, {}}, told.sent});
  }
  if (told.to_here != 0) {
    fills_.push_back({{peer, seq, one.out, one.out, one.out + told.to_here, {}}, 0, true});
  }
  work();
}

// Moves the ids of all messages to and from a peer that belong to operations after `after`. None
// of them has been given to the carrier.
void Afar::move(int peer, uint64_t after, uint64_t in, uint64_t out) {
  comm_.link(peer).next_in += in;
  comm_.link(peer).next_out += out;
  for (const auto& op : comm_.active_) {
    if (op->seq <= after || op->finished()) continue;
    for (size_t i = 0; i < op->in_base_.size() && i < op->plan->peers.size(); ++i) {
      if (op->plan->peers[i].rank != peer) continue;
      op->in_base_[i] += in;
      op->out_base_[i] += out;
    }
  }
  const auto shift = [=](Ids& ids, uint64_t by) {
    if (ids.peer != peer || ids.seq <= after) return;
    ids.base += by;
    ids.at += by;
    ids.end += by;
  };
  for (Drain& one : drains_) shift(one, in);
  for (Fill& one : fills_) shift(one, out);
  for (Unsettled& one : unsettled_) {
    if (one.peer != peer || one.seq <= after) continue;
    one.in += in;
    one.out += out;
  }
}

// True: it will have no message. False: it has one, or its end is in `end`.
bool Afar::take_back(MpiRequest& request, MpiEnd& end) {
  if (end.known) return false;
  comm_.off_node->cancel(&request);
  end.may_be_cancelled = true;
  for (int tries = 0; tries < kTries; ++tries) {
    if (!has_ended(*comm_.off_node, request, end)) continue;
    if (!end.cancelled) return false;
    end = {};
    request = {};
    return true;
  }
  return false;
}

// Takes back what an operation receives from a peer and has no message yet, and what later ones
// do: from the last one on, since the carrier gives a message to the first one that is left.
void Afar::take_back(const Op& op, int peer) {
  struct Posted {
    uint64_t id;
    const Op* op;
    MpiInput* input;
  };
  std::vector<Posted> posted;
  for (const auto& each : comm_.active_) {
    Op& one = *each;
    if (one.seq < op.seq || one.is_over() || one.plan->instrs.empty()) continue;
    const uint64_t m = one.plan->instrs.size();
    for (auto& [position, step] : one.mpi_steps_) {
      const Instr& ins = one.plan->instrs[position % m];
      for (MpiInput& input : step.inputs) {
        const Ref& ref = ins.inputs[input.index];
        const bool waits = (input.posted && !input.done) || (input.stamp_posted && !input.stamp_done);
        if (!waits || one.rank_of(ref) != peer) continue;
        posted.push_back({one.in_id(ref, static_cast<int64_t>(position / m)), &one, &input});
      }
    }
  }
  const auto is_own = [&op](const Posted& one) { return one.op == &op; };
  if (std::none_of(posted.begin(), posted.end(), is_own)) return;
  std::sort(posted.begin(), posted.end(),
            [](const Posted& a, const Posted& b) { return a.id > b.id; });
  Link& link = comm_.link(peer);
  for (const Posted& one : posted) {
    MpiInput& input = *one.input;
    if (input.posted) {
      if (input.done || !take_back(input.request, input.end)) return;
      input.posted = false;
      link.mpi_in = one.id;
    }
    if (!input.stamp_posted || input.stamp_done) continue;
    if (!take_back(input.stamp_request, input.stamp_end)) return;
    input.stamp_posted = false;
  }
}

// Receives from a peer were taken back: what had been drained behind them comes again.
void Afar::drain_again(int peer) {
  const uint64_t next = comm_.link(peer).mpi_in;
  const auto follows = [=](const Drain& one) { return one.peer == peer && one.at >= next; };
  for (const Drain& one : drained_) {
    if (follows(one)) drains_.push_back(one);
  }
  remove_where(drained_, follows);
}

// The ids of an operation's messages with its i-th peer.
Afar::Ids Afar::ids_of(const Op& op, size_t i, bool incoming) const {
  const PeerUse& use = op.plan->peers[i];
  const uint64_t base = incoming ? op.in_base_[i] : op.out_base_[i];
  const uint64_t num = incoming ? use.num_recvs() : use.num_sends();
  Ids ids{use.rank, op.seq, base, base, base + num, {}};
  ids.twice.resize(static_cast<size_t>(incoming ? use.recvs_per_fragment : use.sends_per_fragment));
  for (const Instr& ins : op.plan->instrs) {
    for (const Ref& ref : incoming ? ins.inputs : ins.sends) {
      if (!ref.is_message || static_cast<size_t>(ref.peer) != i) continue;
      ids.twice[static_cast<size_t>(ref.k)] = follows_stamp(op.nbytes_of(ins, 0), 0);
    }
  }
  return ids;
}

uint64_t Afar::Ids::count(uint64_t from) const {
  uint64_t all = end - from;
  for (uint64_t id = from; id < end && id - base < twice.size(); ++id) {
    all += twice[static_cast<size_t>(id - base)];
  }
  return all;
}

void Afar::leave(Op& op) {
  const Plan& plan = *op.plan;
  for (size_t i = 0; i < plan.peers.size(); ++i) {
    const int peer = plan.peers[i].rank;
    Link& link = comm_.link(peer);
    if (link.kind != LinkKind::Mpi) continue;
    take_back(op, peer);
    drain_again(peer);
    Drain coming{ids_of(op, i, true), 0};
    coming.at = std::max(coming.base, link.mpi_in);
    if (coming.at < coming.end) {
      coming.left = coming.count(coming.at);
      drains_.push_back(std::move(coming));
    }
    Fill leaving{ids_of(op, i, false), op.mark(), false};
    leaving.at = std::max(leaving.base, link.mpi_out);
    if (leaving.at < leaving.end) fills_.push_back(std::move(leaving));
  }
  // Nobody waits for what is on its way to memory of the engine's own.
  const uint64_t m = plan.instrs.size();
  for (auto& [position, step] : op.mpi_steps_) {
    const Instr& ins = plan.instrs[position % m];
    for (MpiInput& input : step.inputs) {
      const Ref& ref = ins.inputs[input.index];
      if (input.stamp_posted && !input.posted) {  // the stamp is here, or coming; its value is not
        for (Drain& one : drains_) {
          const uint64_t id = op.in_id(ref, static_cast<int64_t>(position / m));
          if (one.peer == op.rank_of(ref) && one.seq == op.seq && one.at == id) --one.left;
        }
      }
      if (input.stamp_posted && !input.stamp_done && !input.stamp_end.known) {
        remains_.push_back({input.stamp_request, nullptr, std::move(input.stamp), nullptr});
      }
      input.stamp_done = true;
      if (!input.posted || input.done) continue;
      input.done = input.end.known || input.staging != nullptr;
      if (input.end.known || input.staging == nullptr) continue;
      remains_.push_back({input.request, std::move(input.staging), nullptr, nullptr});
    }
  }
  for (auto it = op.mpi_sends_.begin(); it != op.mpi_sends_.end();) {
    if (it->staging == nullptr) {
      ++it;
      continue;
    }
    remains_.push_back({it->request, std::move(it->staging), nullptr, nullptr});
    it = op.mpi_sends_.erase(it);
  }
  for (size_t i = 0; i < left_.size();) {
    if (left_[i].seq != op.seq) {
      ++i;
      continue;
    }
    let_go(op, left_[i].peer);
    left_.erase(left_.begin() + static_cast<std::ptrdiff_t>(i));
  }
}

// The array stays until the carrier has let go of it, too.
bool Afar::let_go(Op& op, int peer) {
  std::shared_ptr<Op> owner;
  for (const auto& each : comm_.active_) {
    if (each.get() == &op) owner = each;
  }
  if (owner == nullptr) return false;
  bool any = false;
  for (auto it = op.mpi_sends_.begin(); it != op.mpi_sends_.end();) {
    if (it->peer != peer) {
      ++it;
      continue;
    }
    remains_.push_back({it->request, nullptr, nullptr, owner});
    op.held = any = true;
    it = op.mpi_sends_.erase(it);
  }
  return any;
}

bool Afar::is_at_rest(Op& op) {
  if (!op.has_been_let_go()) return false;
  if (op.has_told) return op.mpi_sends_.empty() || op.all_sent();
  bool receives = false;
  for (auto& [position, step] : op.mpi_steps_) {
    for (MpiInput& input : step.inputs) {
      if (!input.posted || input.done) continue;
      input.done = has_ended(*comm_.off_node, input.request, input.end);
      if (input.done && input.end.code != 0 && !comm_.off_node->is_truncation(input.end.code)) {
        op.hold(input);
        fail("MPI_Test", input.end.code);
      } else if (input.done && input.end.cancelled) {
        comm_.break_down("a receive of a refused call was taken back too late");
        comm_.tell_failure(op.seq + 1);
      }
      receives = receives || !input.done;
    }
  }
  if (receives) return false;
  op.has_told = true;
  for (const PeerUse& use : op.plan->peers) {
    if (use.num_recvs() != 0) comm_.p2p->tell_left(use.rank, op.seq);
  }
  return op.mpi_sends_.empty() || op.all_sent();
}

void Afar::has_left(int peer, uint64_t seq) {
  for (const auto& op : comm_.active_) {
    if (op->seq != seq || op->finished() || op->is_agreement) continue;
    if (op->was_refused) {
      let_go(*op, peer);
    } else {
      left_.push_back({peer, seq});
    }
    return;
  }
}

std::optional<Afar::Told> Afar::pass_over(int peer, uint64_t seq) {
  auto told = sent_of(peer, seq);
  if (!told.has_value()) return told;
  for (Drain& one : drains_) {
    if (one.peer != peer || one.seq != seq) continue;
    told->to_here = one.end - one.base;
    one.left = 0;
  }
  for (Fill& one : fills_) {
    if (one.peer != peer || one.seq != seq) continue;
    told->from_here = one.end - one.base;
    one.is_silent = true;
  }
  for (const auto& op : comm_.active_) {
    if (op->seq == seq && op->was_refused && !op->finished()) let_go(*op, peer);
  }
  return told;
}

void Afar::forget(int peer, uint64_t seq) {
  const auto is_it = [=](const Ids& one) { return one.peer == peer && one.seq == seq; };
  remove_where(drains_, is_it);
  remove_where(fills_, is_it);
}

// True once there is nothing left of it.
bool Afar::fill(Fill& one) {
  Link& link = comm_.link(one.peer);
  if (link.mpi_out != one.at || hold_back(one.peer, one.seq)) return false;
  while (!one.is_silent && one.at < one.end) {
    if (one.at == one.base) note_first(one.peer, one.seq, one.end - one.base);
    const size_t place = static_cast<size_t>(one.at - one.base);
    const int times = place < one.twice.size() && one.twice[place] ? 2 : 1;
    for (int i = 0; i < times; ++i) {
      const Stamp stamp{one.at + one.mark, kNoMessage};
      Remains& sent = remains_.emplace_back();
      sent.bytes.reset(new unsigned char[sizeof stamp]);
      std::memcpy(sent.bytes.get(), &stamp, sizeof stamp);
      const int code = comm_.off_node->isend(sent.bytes.get(), static_cast<int>(sizeof stamp),
                                             comm_.off_node->byte_type, link.mpi_rank,
                                             comm_.mpi_tag, comm_.mpi_comm, &sent.request);
      if (code != 0) {
        static_cast<void>(sent.bytes.release());
        remains_.pop_back();
        fail("MPI_Isend", code);
        return true;
      }
      count_sent(one.peer);
    }
    link.mpi_out = ++one.at;
  }
  link.mpi_out = one.end;
  return true;
}

bool Afar::drain(Drain& one) {
  Link& link = comm_.link(one.peer);
  if (link.mpi_in != one.at || hold_back(one.peer, one.seq)) return false;
  const MpiApi& api = *comm_.off_node;
  while (one.left != 0) {
    MpiStatus status;
    int flag = 0, count = 0;
    int code = api.iprobe(link.mpi_rank, comm_.mpi_tag, comm_.mpi_comm, &flag, &status);
    const char* function = "MPI_Iprobe";
    if (code == 0 && !flag) return false;
    if (code == 0) {
      function = "MPI_Get_count";
      code = api.get_count(&status, api.byte_type, &count);
    }
    if (code == 0) {
      Remains& taken = remains_.emplace_back();
      taken.bytes.reset(new unsigned char[static_cast<size_t>(count) + 1]);
      function = "MPI_Irecv";
      code = api.irecv(taken.bytes.get(), count, api.byte_type, link.mpi_rank, comm_.mpi_tag,
                       comm_.mpi_comm, &taken.request);
      if (code != 0) {
        static_cast<void>(taken.bytes.release());
        remains_.pop_back();
      }
    }
    if (code != 0) {
      fail(function, code);
      return true;
    }
    --one.left;
  }
  link.mpi_in = one.end;
  drained_.push_back(one);
  return true;
}

bool Afar::has_remains(const Op& op) const {
  return std::any_of(remains_.begin(), remains_.end(),
                     [&op](const Remains& one) { return one.op.get() == &op; });
}

void Afar::finish_remains() {
  for (size_t i = 0; i < remains_.size();) {
    Remains& one = remains_[i];
    MpiStatus status;
    int flag = 0;
    const int code = comm_.off_node->test(&one.request, &flag, &status);
    const bool is_bad = code != 0 && !comm_.off_node->is_truncation(code);
    if (code == 0 && !flag) {
      ++i;
      continue;
    }
    if (is_bad) {
      static_cast<void>(one.bytes.release());
      static_cast<void>(one.stamp.release());
    }
    const std::shared_ptr<Op> op = std::move(one.op);
    remains_.erase(remains_.begin() + static_cast<std::ptrdiff_t>(i));
    if (op != nullptr && !is_bad && !has_remains(*op)) {
      op->held = false;
      if (op->finished() && op->has_keep()) comm_.engine.discard(std::shared_ptr<Op>(op));
    }
    if (is_bad) fail("MPI_Test", code);
  }
}

void Afar::work() {
  for (bool again = true; again;) {
    const size_t before = fills_.size() + drains_.size();
    remove_where(fills_, [this](Fill& one) { return fill(one); });
    remove_where(drains_, [this](Drain& one) { return drain(one); });
    again = fills_.size() + drains_.size() != before;
  }
  finish_remains();
  remove_where(drained_, [this](const Drain& one) {
    return std::none_of(comm_.active_.begin(), comm_.active_.end(), [&one](const auto& op) {
      return op->seq < one.seq && !op->is_over();
    });
  });
  remove_where(left_, [this](const Left& one) {
    return std::none_of(comm_.active_.begin(), comm_.active_.end(), [&one](const auto& op) {
      return op->seq == one.seq && !op->is_over();
    });
  });
}

// A relay takes or brings nothing any more once it has failed to, so no order is lost.
void Afar::fail(const char* function, int code) {
  if (comm_.off_node->is_relay) return;
  comm_.break_down("messages of a refused call: " + comm_.off_node->describe(function, code));
  comm_.tell_failure(comm_.next_seq);
}

}  // namespace commrt
