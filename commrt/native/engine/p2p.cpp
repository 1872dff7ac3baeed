// SPDX-License-Identifier: Apache-2.0
// The packet protocol of point-to-point messages.
#include "engine/p2p.hpp"

#include <algorithm>
#include <cstring>

#include "engine/engine.hpp"
#include "engine/far_packets.hpp"
#include "engine/stand_ins.hpp"

namespace commrt {

static_assert(sizeof(PacketHeader) <= kInlineBytes);

namespace {
constexpr size_t kMpiPacketBytes = 1 << 20;
// A relay carries so much whole; to announce it would cost two more of its messages.
constexpr size_t kRelayEagerBytes = 256 << 10;
constexpr int kMaxSending = 8;  // packets that one peer is sent at once over MPI
}

P2P::P2P(Comm& comm) : comm_(comm), channels_(static_cast<size_t>(comm.size)) {}

void P2P::attach() {
  attached_ = true;
  if (comm_.arena == nullptr) return;
  const RegionLayout& layout = comm_.layout;
  const size_t me = static_cast<size_t>(comm_.member_of(comm_.rank));
  unsigned char* mine = comm_.arena + me * comm_.region_nbytes;
  for (int peer : comm_.members) {
    if (peer == comm_.rank) continue;
    const size_t other = static_cast<size_t>(comm_.member_of(peer));
    unsigned char* theirs = comm_.arena + other * comm_.region_nbytes;
    Channel& c = channels_[peer];
    c.out_lines = reinterpret_cast<Line*>(mine + layout.packet_lines) + other * kPacketLines;
    c.in_lines =
        reinterpret_cast<const Line*>(theirs + layout.packet_lines) + me * kPacketLines;
    c.out_packets = mine + layout.packets + other * kPacketLines * kPacketBytes;
    c.in_packets = theirs + layout.packets + me * kPacketLines * kPacketBytes;
    c.ack = reinterpret_cast<Ack*>(mine + layout.packet_acks) + other;
    c.acked = reinterpret_cast<const Ack*>(theirs + layout.packet_acks) + me;
  }
}

bool P2P::idle() const { return comm_.messages_in_flight == 0 && !lingering_; }

void P2P::answer(int peer, const PacketHeader& header) {
  if (!attached_) attach();
  channels_[peer].control.push_back(header);
  lingering_ = true;
}

// An EAGER message is the receiver's no more.
void P2P::count_received(int source, uint64_t nbytes) {
  if (source == comm_.rank) return;
  uint64_t& received = channels_[source].eager_in;
  received += nbytes + kEagerOverhead;
  if (received < kEagerBytes / 4) return;
  answer(source, {PacketKind::Credit, kAnyType, 0, received, 0, 0, 0});
  received = 0;
}

// A message has met its receive.
void P2P::deliver(const std::shared_ptr<Op>& op, int source, const PacketHeader& header,
                  const unsigned char* payload) {
  P2PTask& task = *op->p2p;
  if (task.refusal != nullptr) return drop(task, source, header);
  task.source = source;
  task.stage = Stage::Matched;
  task.expected = header.nbytes;
  task.sum = header.offset;
  if (!task.gate.is_open()) {
    task.early = std::make_unique<Incoming>(Incoming{header, {}});
    if (header.kind == PacketKind::Eager) {
      task.early->payload.assign(payload, payload + header.nbytes);
    }
    early_.push_back(op);
    return;
  }
  if (header.type == kRefusedType) {
    count_received(source, header.nbytes);
    return fail_refused(op, source, "send", payload, header.nbytes);
  }
  const bool too_long = header.nbytes > task.nbytes;
  task.mistyped = !types_meet(header.type, task.type);
  const bool refuses = too_long || task.mistyped;
  if (header.kind == PacketKind::Rts) {
    const uint64_t where = refuses ? 0 : expect_direct(op, source, header.nbytes);
    answer(source, {PacketKind::Cts, kAnyType, header.tag, header.nbytes, header.send_id,
                    refuses ? kDiscard : task.id, where});
  } else {
    if (!refuses) {
      if (header.nbytes != 0) std::memcpy(task.recv_buffer, payload, header.nbytes);
      task.moved = header.nbytes;
    }
    count_received(source, header.nbytes);
  }
  if (task.mistyped) {
    complete(op, "the message from rank " + std::to_string(source) + " (tag " +
                      std::to_string(header.tag) + ") has " +
                      name_of_type(static_cast<DType>(header.type)) +
                      " elements, and the receive buffer has " +
                      name_of_type(static_cast<DType>(task.type)) +
                      ": send and receive arrays of one type");
  } else if (too_long) {
    complete(op, "message of " + std::to_string(header.nbytes) + " bytes from rank " +
                      std::to_string(source) + " (tag " + std::to_string(header.tag) +
                      ") is longer than the receive buffer of " + std::to_string(task.nbytes) +
                      " bytes: receive into an array of that length, or send fewer bytes");
  } else if (header.kind == PacketKind::Eager) {
    complete_received(op);
  } else {
    receiving_.emplace(task.id, op);
  }
}

void P2P::arrived(int source, const PacketHeader& header, const unsigned char* payload) {
  if (header.kind == PacketKind::Credit) {
    channels_[source].eager_out -= header.nbytes;
    return;
  }
  if (header.kind == PacketKind::Cts) {
    const auto it = announced_.find(header.send_id);
    if (it == announced_.end()) {
      if (header.recv_id == kDiscard) return;
      answer(source, {PacketKind::Gone, kAnyType, header.tag, 0, header.send_id, header.recv_id, 0});
      return;
    }
    auto op = std::move(it->second);
    announced_.erase(it);
    op->p2p->stage = Stage::Matched;
    if (header.recv_id == kDiscard) {
      complete(op);
    } else {
      op->p2p->peer_id = header.recv_id;
      if (header.offset == 0 || !send_direct(op, header.offset)) {
        channels_[source].streaming.push_back(std::move(op));
      }
    }
    return;
  }
  if (header.kind == PacketKind::Dropped) return hear_of_drop(source, header, payload);
  if (header.kind == PacketKind::Refused) {
    const std::string reason(reinterpret_cast<const char*>(payload), header.nbytes);
    comm_.refusals.hear_from_afar(source, header.send_id, reason);
    return;
  }
  if (header.kind == PacketKind::Heard) {
    comm_.refusals.settle_afar(source, header.send_id, {header.recv_id, header.offset, header.nbytes});
    return;
  }
  if (header.kind == PacketKind::Left) return comm_.refusals.has_left_afar(source, header.send_id);
  if (header.kind == PacketKind::Ended) return hear_of_end(source, header, payload);
  if (header.kind == PacketKind::Called) {
    const CallTrail::Entry told{header.send_id, header.recv_id, header.offset, header.nbytes};
    comm_.trails.of(header.tag).hear(source, told);
    return;
  }
  if (header.kind == PacketKind::Part) {
    return comm_.refusals.stand_ins->hear(source, header.send_id, payload, header.nbytes);
  }
  if (header.kind == PacketKind::Waits) return comm_.far_waits.hear(source, header.send_id, header.recv_id);
  if (header.kind == PacketKind::ContextEnd) return hear_of_context_end(source, header);
  if (header.kind == PacketKind::AskDevice || header.kind == PacketKind::OnDevice) {
    return hear_of_device(source, header, payload);
  }
  if (header.kind == PacketKind::Data) {
    const auto it = receiving_.find(header.recv_id);
    if (it == receiving_.end()) return;
    P2PTask& task = *it->second->p2p;
    if (header.nbytes != 0) std::memcpy(task.recv_buffer + header.offset, payload, header.nbytes);
    task.moved += header.nbytes;
    if (task.moved == task.expected) {
      const auto op = std::move(it->second);
      receiving_.erase(it);
      complete_received(op);
    }
    return;
  }
  if (header.kind == PacketKind::Gone) {
    const auto it = receiving_.find(header.recv_id);
    if (it == receiving_.end()) return;
    const auto op = std::move(it->second);
    receiving_.erase(it);
    channels_[source].direct.remove_if([&op](const Direct& one) { return one.op == op; });
    const bool is_near = comm_.link(source).kind == LinkKind::Shared;
    give_up(op, "rank " + std::to_string(source) + " gave the message up before it was here: " +
                    (is_near ? comm_.why_of(comm_.member_of(source)) : "look for its error"));
    return;
  }
  if (const auto it = posted_.find(key(source, header.tag)); it != posted_.end()) {
    const auto op = std::move(it->second.front());
    it->second.pop_front();
    if (it->second.empty()) posted_.erase(it);
    deliver(op, source, header, payload);
    return;
  }
  Incoming message{header, {}};
  if (header.kind == PacketKind::Eager && header.nbytes != 0) {
    message.payload.assign(payload, payload + header.nbytes);
  }
  unexpected_[key(source, header.tag)].push_back(std::move(message));
}

// MPI has failed for this peer: what needs it ends with an error. True, as this is progress.
bool P2P::lose(int peer, const char* function, int code) {
  Channel& c = channels_[peer];
  const bool by_death = MpiFailures::is_failure(code);
  const std::string died = comm_.who_died(peer, by_death);
  c.failure = "no messages to and from rank " + std::to_string(peer) + ": " +
              (died.empty() ? comm_.off_node->describe(function, code) : died);
  if (!comm_.has_left(peer)) {  // else messages of others go on
    comm_.break_down(c.failure, by_death || !died.empty());
    comm_.tell_failure(comm_.next_seq);
  }
  std::vector<std::shared_ptr<Op>> ended(c.unannounced.begin(), c.unannounced.end());
  ended.insert(ended.end(), c.streaming.begin(), c.streaming.end());
  for (const Direct& one : c.direct) if (one.op->p2p->is_send) ended.push_back(one.op);
  for (const MpiPacket& one : c.mpi_sending) {
    const bool is_known = one.op == nullptr || one.op->finished() ||
                          std::find(ended.begin(), ended.end(), one.op) != ended.end();
    if (!is_known) ended.push_back(one.op);
  }
  for (auto it = posted_.begin(); it != posted_.end();) {
    const bool lost = static_cast<int>(it->first >> 32) == peer;
    if (lost) ended.insert(ended.end(), it->second.begin(), it->second.end());
    it = lost ? posted_.erase(it) : std::next(it);
  }
  for (const auto& [id, op] : announced_) if (op->p2p->peer == peer) ended.push_back(op);
  for (const auto& [id, op] : receiving_) if (op->p2p->source == peer) ended.push_back(op);
  for (const auto& op : ended) {
    announced_.erase(op->p2p->id);
    receiving_.erase(op->p2p->id);
    refused(op, peer);
  }
  c.unannounced.clear();
  c.streaming.clear();
  c.direct.clear();
  c.control.clear();
  // MPI may still read and write what its requests are about.
  for (auto* packets : {&c.mpi_sending, &c.mpi_arriving}) {
    for (MpiPacket& packet : *packets) static_cast<void>(packet.bytes.release());
    packets->clear();
  }
  return true;
}

bool P2P::push(int peer, const PacketHeader& header, const unsigned char* payload,
               size_t nbytes) {
  Channel& c = channels_[peer];
  Link& link = comm_.link(peer);
  if (link.kind == LinkKind::Shared) {
    if (c.out >= kPacketLines && c.out - kPacketLines >= c.acked_seen) {
      c.acked_seen = c.acked->consumed.load(std::memory_order_acquire);
      if (c.out - kPacketLines >= c.acked_seen) return false;
    }
    const uint64_t i = c.out % kPacketLines;
    Line& line = c.out_lines[i];
    unsigned char* to = c.out_packets + i * kPacketBytes;
    if (is_in_line(header)) {
      std::memcpy(line.payload, &header, kEagerHeaderBytes);
      to = line.payload + kEagerHeaderBytes;
    } else {
      std::memcpy(line.payload, &header, sizeof header);
    }
    if (nbytes != 0) std::memcpy(to, payload, nbytes);
    line.seq.store(++c.out, std::memory_order_release);
    comm_.ring(peer);
    return true;
  }
  if (c.mpi_sending.size() >= kMaxSending) return false;
  MpiPacket& packet = c.mpi_sending.emplace_back();
  packet.nbytes = sizeof header + nbytes;
  packet.bytes.reset(new unsigned char[packet.nbytes]);
  std::memcpy(packet.bytes.get(), &header, sizeof header);
  if (nbytes != 0) std::memcpy(packet.bytes.get() + sizeof header, payload, nbytes);
  const int rc =
      comm_.off_node->isend(packet.bytes.get(), static_cast<int>(packet.nbytes), comm_.off_node->byte_type,
                  link.mpi_rank, comm_.mpi_tag + 1, comm_.mpi_comm, &packet.request);
  if (rc == 0 && !comm_.off_node->is_relay) FarPackets::of_process().count_sent(link.mpi_rank);
  return rc == 0 || !lose(peer, "MPI_Isend", rc);
}

const unsigned char* P2P::read(const Channel& c, PacketHeader& header) const {
  if (!c.waiting(1)) return nullptr;
  const Line& line = c.in_line(c.in);
  std::memcpy(&header, line.payload, sizeof header);
  return is_in_line(header) ? line.payload + kEagerHeaderBytes
                               : c.in_packets + c.in % kPacketLines * kPacketBytes;
}

bool P2P::pull(int peer) {
  Channel& c = channels_[peer];
  int taken = 0;
  for (; taken < kPacketLines; ++taken) {
    PacketHeader header;
    const unsigned char* payload = read(c, header);
    if (payload == nullptr) break;
    arrived(peer, header, payload);
    c.took_packet();
  }
  if (taken != 0) comm_.ring(peer);
  return taken != 0;
}

// Large packets need the sender's help to arrive, so their receives are polled, never waited
// for; they are taken in order.
bool P2P::pull_mpi(int peer) {
  Channel& c = channels_[peer];
  const Link& link = comm_.link(peer);
  const int tag = comm_.mpi_tag + 1;
  bool any = false;
  for (int found = 0; found < kMaxSending; ++found) {
    MpiStatus status;
    int flag = 0, count = 0;
    int rc = comm_.off_node->iprobe(link.mpi_rank, tag, comm_.mpi_comm, &flag, &status);
    if (rc != 0) return lose(peer, "MPI_Iprobe", rc);
    if (!flag) break;
    rc = comm_.off_node->get_count(&status, comm_.off_node->byte_type, &count);
    if (rc != 0) return lose(peer, "MPI_Get_count", rc);
    MpiPacket& packet = c.mpi_arriving.emplace_back();
    packet.nbytes = static_cast<size_t>(count);
    packet.bytes.reset(new unsigned char[packet.nbytes]);
    rc = comm_.off_node->irecv(packet.bytes.get(), count, comm_.off_node->byte_type, link.mpi_rank, tag,
                     comm_.mpi_comm, &packet.request);
    if (rc != 0) return lose(peer, "MPI_Irecv", rc);
    if (!comm_.off_node->is_relay) FarPackets::of_process().count_taken();
    any = true;
  }
  for (size_t copied = 0; copied < kMpiPacketBytes && !c.mpi_arriving.empty();) {
    MpiPacket& packet = c.mpi_arriving.front();
    MpiStatus status;
    int flag = 0;
    const int rc = comm_.off_node->test(&packet.request, &flag, &status);
    if (rc != 0) return lose(peer, "MPI_Test", rc);
    if (!flag) break;
    PacketHeader header;
    std::memcpy(&header, packet.bytes.get(), sizeof header);
    arrived(peer, header, packet.bytes.get() + sizeof header);
    copied += packet.nbytes;
    c.mpi_arriving.pop_front();
    any = true;
  }
  return any;
}

namespace {

// A message whose gate is closed lets others pass, but none of its own tag.
bool waits_for_gate(const P2PTask& task, std::vector<int>& held_back) {
  if (!task.gate.is_open()) {
    held_back.push_back(task.tag);
    return true;
  }
  return std::find(held_back.begin(), held_back.end(), task.tag) != held_back.end();
}

}  // namespace

// Delivers the messages that this rank sends to itself.
bool P2P::flush_self() {
  auto& queue = channels_[static_cast<size_t>(comm_.rank)].unannounced;
  std::vector<int> held_back;
  bool any = false;
  for (auto next = queue.begin(); next != queue.end();) {
    const auto op = *next;
    const P2PTask& task = *op->p2p;
    if (waits_for_gate(task, held_back)) {
      ++next;
      continue;
    }
    next = queue.erase(next);
    arrived(task.peer, announcement(PacketKind::Eager, task), task.send_buffer);
    complete(op);
    any = true;
  }
  return any;
}

// Messages that met their receives before these might be written to.
bool P2P::deliver_early() {
  bool any = false;
  for (auto next = early_.begin(); next != early_.end();) {
    const auto op = *next;
    if (!op->finished() && !op->p2p->gate.is_open()) {
      ++next;
      continue;
    }
    next = early_.erase(next);
    if (op->finished()) continue;
    const auto message = std::move(op->p2p->early);
    if (message->header.kind == PacketKind::Rts && refused(op, op->p2p->peer)) continue;
    deliver(op, op->p2p->peer, message->header, message->payload.data());
    any = true;
  }
  return any;
}

// Sends what waits for this peer: answers first, then announcements in order, then data.
bool P2P::flush(int peer) {
  Channel& c = channels_[peer];
  bool any = reap(peer);
  // A pass sends at most what a peer's lines hold, or one packet of MPI's. So it ends, however
  // fast the peer takes the packets.
  const size_t packet =
      comm_.link(peer).kind == LinkKind::Shared ? kPacketBytes : kMpiPacketBytes;
  const size_t most = std::max(kMpiPacketBytes / 4, packet);
  const bool relayed = comm_.link(peer).kind == LinkKind::Mpi && comm_.off_node->is_relay;
  const bool needs_help = comm_.link(peer).kind == LinkKind::Mpi && !relayed;
  const size_t most_eager = relayed ? kRelayEagerBytes : kPacketBytes;
  size_t pushed = 0;
  while (!c.notices.empty()) {
    const auto& [header, reason] = c.notices.front();
    if (!push(peer, header, reinterpret_cast<const unsigned char*>(reason.data()), reason.size())) {
      break;
    }
    c.notices.pop_front();
    any = true;
  }
  while (!c.control.empty() && push(peer, c.control.front(), nullptr, 0)) {
    c.control.pop_front();
    any = true;
  }
  std::vector<int> held_back;
  for (auto next = c.unannounced.begin(); next != c.unannounced.end() && pushed < most;) {
    auto op = *next;
    P2PTask& task = *op->p2p;
    if (waits_for_gate(task, held_back)) {
      ++next;
      continue;
    }
    const uint64_t held = task.nbytes + kEagerOverhead;  // there, until it is received
    const bool has_room = c.eager_out + held <= kEagerBytes || task.type == kRefusedType;
    const bool eager = task.nbytes <= most_eager && has_room;
    const PacketHeader header = announcement(eager ? PacketKind::Eager : PacketKind::Rts, task);
    if (!push(peer, header, task.send_buffer, eager ? task.nbytes : 0)) break;
    next = c.unannounced.erase(next);
    any = true;
    pushed += kEagerOverhead + (eager ? task.nbytes : 0);
    if (eager) {
      c.eager_out += held;
      complete(op);
    } else {
      task.stage = Stage::Announced;
      announced_.emplace(task.id, std::move(op));
    }
  }
  while (!c.streaming.empty() && pushed < most) {
    auto op = c.streaming.front();
    P2PTask& task = *op->p2p;
    const uint64_t nbytes = std::min<uint64_t>(packet, task.nbytes - task.moved);
    PacketHeader header{PacketKind::Data, kAnyType, task.tag, nbytes, task.id, task.peer_id, task.moved};
    if (!push(peer, header, task.send_buffer + task.moved, nbytes)) break;
    task.moved += nbytes;
    pushed += nbytes;
    any = true;
    if (needs_help) {
      c.mpi_sending.back().op = op;
      ++task.leaving;
    }
    if (task.moved != task.nbytes) continue;
    c.streaming.pop_front();
    if (task.leaving == 0) complete(op);
  }
  return any;
}

bool P2P::on_the_way() const {
  return std::any_of(channels_.begin(), channels_.end(), [](const Channel& c) {
    return c.on_the_way();
  });
}

// Makes progress on all messages with one peer.
bool P2P::serve(int peer) {
  const LinkKind kind = comm_.link(peer).kind;
  if (kind == LinkKind::Self) return flush_self();
  if (!channels_[peer].failure.empty()) return false;
  bool any = kind == LinkKind::Shared ? pull(peer) : pull_mpi(peer);
  const Channel& c = channels_[peer];
  if (c.failure.empty() && !c.direct.empty() && settle_direct(peer)) any = true;
  if (c.failure.empty() && flush(peer)) any = true;
  lingering_ = lingering_ || c.on_the_way();
  return any;
}

// Takes all that has come from a peer so far.
bool P2P::drain(int peer) {
  bool any = false;
  if (comm_.link(peer).kind == LinkKind::Shared) {
    while (pull(peer)) any = true;
    return any;
  }
  const Channel& c = channels_[peer];
  while (c.failure.empty() && (pull_mpi(peer) || (c.failure.empty() && settle_direct(peer)))) any = true;
  return any;
}

Waiting P2P::waiting(int tag, int first, int num, bool takes_refused) {
  if (!attached_) attach();
  for (int i = 0; i < num; ++i) {
    const int peer = (first + i) % comm_.size;
    serve(peer);
    const auto found = unexpected_.find(key(peer, tag));
    if (found == unexpected_.end()) continue;
    const Incoming& message = found->second.front();
    Waiting one{peer, message.header.nbytes, message.header.type, {}};
    if (takes_refused && one.type == kRefusedType) {
      one.refusal.emplace(message.payload.begin(), message.payload.end());
      count_received(peer, one.nbytes);
      found->second.pop_front();
      if (found->second.empty()) unexpected_.erase(found);
    }
    return one;
  }
  return {};
}

bool P2P::progress() {
  if (idle()) {
    // A peer's messages are taken in even by a rank that waits for something else: sends do
    // not wait for receives until memory ends. Rarely, as a look costs a cache line per peer.
    if (++idle_passes_ % kLookEvery != 0) return false;
    if (comm_.arena == nullptr && comm_.mpi_comm == 0) return false;
    if (!attached_) attach();
  }
  urgent_ = false;
  bool any = !early_.empty() && deliver_early();
  for (int peer = 0; peer < comm_.size; ++peer) {
    any = serve(peer) || any;
  }
  lingering_ = on_the_way();
  return any;
}

}  // namespace commrt
