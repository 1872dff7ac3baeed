// SPDX-License-Identifier: Apache-2.0
// Point-to-point messages as operations: how they start and end, and what they say.
#include <algorithm>

#include "engine/engine.hpp"
#include "engine/in_flight.hpp"
#include "engine/p2p.hpp"

namespace commrt {

// The record of the next message to start.
Record& P2P::note(bool is_send, int peer, int tag, uint64_t nbytes) {
  const uint64_t seq = next_seq();
  Record& record = comm_.message_records[seq % Comm::kRecords];
  record = Record{};
  record.seq = seq;
  record.count = static_cast<int64_t>(nbytes);
  record.start_ticks = ticks();
  record.coll = is_send ? kSendCode : kRecvCode;
  record.dtype = static_cast<uint8_t>(DType::U8);
  record.peer = peer;
  record.tag = tag;
  return record;
}

std::shared_ptr<Op> P2P::make(bool is_send, const Message& message) {
  if (!attached_) attach();
  auto op = std::make_shared<Op>();
  op->comm = &comm_;
  op->p2p = std::make_unique<P2PTask>();
  P2PTask& task = *op->p2p;
  task.is_send = is_send;
  task.peer = message.peer;
  task.tag = message.tag;
  task.type = message.type;
  task.nbytes = message.nbytes;
  auto* const data = static_cast<unsigned char*>(message.data);
  if (is_send) {
    task.send_buffer = data;
  } else {
    task.recv_buffer = data;
  }
  return op;
}

// Gives a message its number and its record: from here on it is in flight.
void P2P::number(Op& op) {
  P2PTask& task = *op.p2p;
  op.seq = next_seq();
  note(task.is_send, task.peer, task.tag, task.nbytes);
  task.id = next_id_++;
  ++comm_.messages_in_flight;
}

std::shared_ptr<Op> P2P::begin(bool is_send, const Message& message) {
  auto op = make(is_send, message);
  number(*op);
  return op;
}

std::shared_ptr<Op> P2P::send(const Message& message) {
  auto op = begin(true, message);
  launch(op);
  return op;
}

std::shared_ptr<Op> P2P::recv(const Message& message) {
  auto op = begin(false, message);
  post(op);
  return op;
}

std::shared_ptr<Op> P2P::sendrecv(const Message& leaving, const Message& coming, bool sent) {
  auto whole = std::make_shared<Op>();
  auto receiving = begin(false, coming);
  auto sending = begin(true, leaving);
  whole->comm = &comm_;
  whole->seq = receiving->seq;
  whole->p2p = std::make_unique<P2PTask>();
  whole->p2p->nbytes = std::max(leaving.nbytes, coming.nbytes);
  whole->p2p->peer = coming.peer;
  whole->p2p->tag = coming.tag;
  whole->p2p->parts = std::make_unique<Parts>();
  Parts& parts = *whole->p2p->parts;
  parts.dest = leaving.peer;
  parts.sendtag = leaving.tag;
  parts.ops = {receiving, sending};
  parts.left = 2;
  receiving->p2p->whole = sending->p2p->whole = whole;
  post(receiving);
  if (sent) {
    complete(sending);
  } else {
    launch(sending);
  }
  return whole;
}

void P2P::launch(const std::shared_ptr<Op>& op) {
  queue_send(op);
  serve(op->p2p->peer);
}

void P2P::post(const std::shared_ptr<Op>& op) {
  queue_recv(op);
  serve(op->p2p->peer);
}

void P2P::queue_send(const std::shared_ptr<Op>& op) {
  if (comm_.chaos == nullptr || !strike(op)) queue(op);
}

void P2P::queue(const std::shared_ptr<Op>& op) {
  P2PTask& task = *op->p2p;
  if (task.peer == comm_.rank) {
    channels_[task.peer].unannounced.push_back(op);
    flush_self();
    return;
  }
  if (refused(op, task.peer)) return;
  channels_[task.peer].unannounced.push_back(op);
}

void P2P::queue_recv(const std::shared_ptr<Op>& op) {
  if (comm_.chaos != nullptr && strike(op)) return;
  if (!refused(op, op->p2p->peer)) meet(op);
}

void P2P::meet(const std::shared_ptr<Op>& op) {
  P2PTask& task = *op->p2p;
  const auto it = unexpected_.find(key(task.peer, task.tag));
  if (it == unexpected_.end()) {
    task.stage = Stage::Posted;
    posted_[key(task.peer, task.tag)].push_back(op);
  } else {
    Incoming message = std::move(it->second.front());
    it->second.pop_front();
    if (it->second.empty()) unexpected_.erase(it);
    deliver(op, task.peer, message.header, message.payload.data());
  }
}

bool P2P::refused(const std::shared_ptr<Op>& op, int peer) {
  if (channels_[peer].failure.empty()) return false;
  if (comm_.is_gone(peer) || !comm_.who_died().empty()) {
    op->given_up = op->by_death = true;
    complete(op, channels_[peer].failure);
    return true;
  }
  op->by_mpi = true;
  complete(op, channels_[peer].failure + "; " + kAfterMpiFailure);
  return true;
}

void P2P::complete(const std::shared_ptr<Op>& op, std::string error) {
  if (op->p2p->refusal != nullptr) return;  // it was never in flight
  --comm_.messages_in_flight;
  Record& record = comm_.message_records[op->seq % Comm::kRecords];
  if (record.seq == op->seq) {
    record.end_ticks = ticks();
    record.state = static_cast<uint8_t>(error.empty() ? OpState::Done : OpState::Failed);
  }
  end(op, std::move(error));
  if (const auto whole = std::move(op->p2p->whole)) part_ended(whole);
}

void P2P::end(const std::shared_ptr<Op>& op, std::string error) {
  op->error = std::move(error);
  if (op->in_flight != nullptr) op->was_changed = op->in_flight->has_changed();
  const OpState state = op->error.empty() ? OpState::Done : OpState::Failed;
  op->state.store(static_cast<int>(state), std::memory_order_release);
  comm_.engine.ring();
  // Python objects are dropped later, by someone who holds the GIL.
  if (op->has_keep()) comm_.engine.discard(std::shared_ptr<Op>(op));
}

// The whole ends with the last of its parts.
void P2P::part_ended(const std::shared_ptr<Op>& whole) {
  P2PTask& task = *whole->p2p;
  Parts& parts = *task.parts;
  if (--parts.left != 0) return;
  constexpr int kMost = 4;  // errors that are told
  std::string error;
  int failed = 0;
  size_t receive = parts.first_recv;
  for (const auto& part : parts.ops) {
    const P2PTask& one = *part->p2p;
    if (!one.is_send) {
      task.moved += one.moved;
      task.source = parts.is_list ? -1 : one.source;
      if (parts.is_list) parts.received[receive++] = one.moved;
    }
    if (part->error.empty()) continue;
    task.mistyped = task.mistyped || one.mistyped;
    whole->was_refused = whole->was_refused || part->was_refused;
    whole->by_mpi = whole->by_mpi || part->by_mpi;
    whole->given_up = whole->given_up || part->given_up;
    whole->by_death = whole->by_death || part->by_death;
    whole->by_damage = whole->by_damage || part->by_damage;
    if (++failed > kMost) continue;
    if (!error.empty()) error += "; and ";
    error += (one.is_send ? "send " : "recv ") + whom(*part) + ": " + part->error;
  }
  if (failed > kMost) error += "; and " + std::to_string(failed - kMost) + " more";
  parts.ops.clear();
  end(whole, std::move(error));
}

// Takes an operation that is not matched out of all lists.
void P2P::forget(const std::shared_ptr<Op>& op) {
  const P2PTask& task = *op->p2p;
  auto& queue = channels_[task.peer].unannounced;
  switch (task.stage) {
    case Stage::Queued: queue.erase(std::find(queue.begin(), queue.end(), op)); break;
    case Stage::Announced: announced_.erase(task.id); break;
    case Stage::Posted: {
      const auto it = posted_.find(key(task.peer, task.tag));
      it->second.remove(op);
      if (it->second.empty()) posted_.erase(it);
      break;
    }
    case Stage::Matched: break;
  }
}

void P2P::give_up(const std::shared_ptr<Op>& op, const std::string& why, bool by_death) {
  op->given_up = true;
  op->by_death = by_death;
  op->by_calls = comm_.calls_differ;
  op->by_damage = comm_.is_damaged;
  complete(op, comm_.calls_differ ? comm_.failure : why);
  comm_.break_down(why, by_death);
  comm_.tell_failure(comm_.next_seq);
}

bool P2P::fail_after_peer(const std::shared_ptr<Op>& op) {
  if (op->p2p->parts == nullptr) return fail_one(op);
  const auto parts = op->p2p->parts->ops;  // the last one that ends empties it
  for (const auto& part : parts) {
    if (!part->finished()) fail_one(part);
  }
  return op->finished();
}

void P2P::take_back(const std::shared_ptr<Op>& op, const std::string& why) {
  const P2PTask& task = *op->p2p;
  if (task.parts != nullptr || task.stage == Stage::Matched) return;
  forget(op);
  op->given_up = true;
  op->by_calls = comm_.calls_differ;
  op->by_damage = comm_.is_damaged;
  complete(op, comm_.calls_differ ? comm_.failure : why);
}

// A matched message is left alone, as it may still end: the rank that gives up makes progress
// until the message is gone.
bool P2P::fail_one(const std::shared_ptr<Op>& op) {
  P2PTask& task = *op->p2p;
  const int peer = task.peer;
  if (task.stage == Stage::Matched) return fail_after_death(op);
  if (peer == comm_.rank && comm_.broken.load(std::memory_order_relaxed)) {
    forget(op);
    give_up(op, "this rank gave up: " + comm_.failure, comm_.failed_by_death);
    return true;
  }
  if (peer != comm_.rank && fail_after_death(op)) return true;
  if (comm_.link(peer).kind == LinkKind::Mpi && comm_.failed_by_death) {
    drain(peer);
    if (op->finished()) return true;
    if (task.stage == Stage::Matched) return false;
    forget(op);
    give_up(op, "this rank gave up: " + comm_.failure, true);
    return true;
  }
  if (comm_.link(peer).kind != LinkKind::Shared) return fail_after_revoke(op);
  const RankHeader& its = *comm_.header(comm_.member_of(peer));
  const auto& failed = its.failed;
  const uint64_t at = failed.load(std::memory_order_acquire);
  if (at == 0) return fail_after_revoke(op);
  // Acquired: what the peer has sent until then is in its packets, and taken here first.
  drain(peer);
  if (op->finished()) return true;
  if (task.stage == Stage::Matched) return false;
  forget(op);
  if (its.cause.load(std::memory_order_relaxed) == FailureCause::Difference) {
    comm_.break_down(comm_.words_of_difference(comm_.why_of(comm_.member_of(peer))));
  }
  const uint32_t dead = its.failed_by_death.load(std::memory_order_relaxed);
  if (dead != 0) comm_.said_dead_ = dead;  // others hear it from here
  give_up(op, "rank " + std::to_string(peer) + " gave up at operation #" +
                  std::to_string(Failure::seq_of(at)) +
                  " and makes no matching call any more: " + comm_.why_of(comm_.member_of(peer)),
          dead != 0);
  return true;
}

// Of any rank, which then ends messages between others, too.
bool P2P::fail_after_revoke(const std::shared_ptr<Op>& op) {
  const P2PTask& task = *op->p2p;
  const int who = comm_.who_revoked();
  if (who < 0) return false;
  if (task.peer != comm_.rank) drain(task.peer);
  if (op->finished() || task.stage == Stage::Matched) return op->finished();
  // Whoever revokes it may do so since a rank has died. Then this rank says so, too.
  const GaveUp found = comm_.who_gave_up(comm_.next_seq, false, false);
  forget(op);
  give_up(op, found.has_died ? found.why
                             : "rank " + std::to_string(who) + " has ended it for all ranks: " +
                                   comm_.why_of(comm_.member_of(who)),
          found.has_died);
  return true;
}

// Of a peer that reads and writes nothing any more.
void P2P::forget_matched(const std::shared_ptr<Op>& op) {
  const P2PTask& task = *op->p2p;
  channels_[task.peer].direct.remove_if([&op](const Direct& one) { return one.op == op; });
  if (!task.is_send) {
    receiving_.erase(task.id);
    return;
  }
  auto& streaming = channels_[task.peer].streaming;
  streaming.erase(std::remove(streaming.begin(), streaming.end(), op), streaming.end());
}

// A matched message ends with its peer only.
bool P2P::fail_after_death(const std::shared_ptr<Op>& op) {
  const P2PTask& task = *op->p2p;
  const std::string why = comm_.who_died(task.peer);
  const bool is_of_peer = comm_.is_gone(task.peer);
  if (why.empty() || (task.stage == Stage::Matched && !is_of_peer)) return false;
  if (is_of_peer) {
    // All that it wrote before its end is there by now, and counts.
    drain(task.peer);
    if (op->finished()) return true;
  }
  forget(op);
  if (task.stage == Stage::Matched) forget_matched(op);
  if (comm_.who_died().empty()) {  // it has left: messages of others go on
    op->given_up = op->by_death = true;
    complete(op, why);
  } else {
    give_up(op, why, true);
  }
  return true;
}

std::string P2P::whom(const Op& op) {
  const P2PTask& task = *op.p2p;
  auto at = [](const char* towards, int rank, int tag) {
    return towards + std::to_string(rank) + ", tag " + std::to_string(tag);
  };
  auto number = [](size_t count, const char* one) {
    return std::to_string(count) + one + (count == 1 ? "" : "s");
  };
  if (task.is_send) return at("to rank ", task.peer, task.tag);
  if (task.parts != nullptr && task.parts->is_list) {
    return "of " + number(task.parts->num_sends, " send") + " and " +
           number(task.parts->num_recvs, " receive");
  }
  const std::string from = at("from rank ", task.peer, task.tag);
  if (task.parts == nullptr) return from;
  return at("to rank ", task.parts->dest, task.parts->sendtag) + ", " + from;
}

// Lists the tags of the peer's messages that no receive has asked for.
std::string P2P::others_waiting(const P2PTask& task) const {
  constexpr size_t kMost = 8;
  std::vector<int> tags;
  for (const auto& [which, queue] : unexpected_) {
    if (static_cast<int>(which >> 32) == task.peer) tags.push_back(queue.front().header.tag);
  }
  if (tags.empty()) return "";
  std::sort(tags.begin(), tags.end());
  std::string text = "; messages of it wait for their receives, tag ";
  for (size_t i = 0; i < std::min(kMost, tags.size()); ++i) {
    text += (i != 0 ? ", " : "") + std::to_string(tags[i]);
  }
  return text + (tags.size() > kMost ? ", ..." : "");
}

std::string P2P::waits_for(const Op& op) const {
  const P2PTask& task = *op.p2p;
  if (task.parts != nullptr) {
    constexpr int kMost = 4;
    std::string text;
    int waiting = 0;
    for (const auto& part : task.parts->ops) {
      if ((part->finished() && part->error.empty()) || ++waiting > kMost) continue;
      if (!text.empty()) text += "; ";
      text += (part->p2p->is_send ? "send " : "recv ") + whom(*part) + ": ";
      text += part->finished() ? "failed: " + part->error : waits_for(*part);
    }
    if (waiting > kMost) text += "; and " + std::to_string(waiting - kMost) + " more";
    return text;
  }
  const std::string peer = "rank " + std::to_string(task.peer);
  const std::string tag = "tag " + std::to_string(task.tag);
  const std::string so_far =
      std::to_string(task.moved) + " of " +
      std::to_string(task.is_send ? task.nbytes : task.expected) + " bytes ";
  switch (task.stage) {
    case Stage::Queued:
      return "no matching call: " + peer + " takes nothing from this rank at the moment";
    case Stage::Announced:
      return "no matching call: " + peer + " has called no recv from rank " +
             std::to_string(comm_.rank) + " with " + tag + " for it";
    case Stage::Posted:
      return "no matching call: " + peer + " has sent no message with " + tag + " for it" +
             others_waiting(task);
    case Stage::Matched: break;
  }
  return so_far + (task.is_send ? "are on their way to " : "have come from ") + peer;
}

}  // namespace commrt
