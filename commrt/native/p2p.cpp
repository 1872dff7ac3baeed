// SPDX-License-Identifier: Apache-2.0
// The packet protocol of point-to-point messages.
#include "p2p.hpp"

#include <algorithm>
#include <cstring>

#include "engine.hpp"

namespace commrt {

static_assert(sizeof(PacketHeader) <= kInlineBytes);

namespace {
constexpr size_t kMpiPacketBytes = 1 << 20;
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

std::shared_ptr<Op> P2P::begin(int peer, int tag, uint64_t nbytes) {
  if (!attached_) attach();
  auto op = std::make_shared<Op>();
  op->comm = &comm_;
  op->p2p = std::make_unique<P2PTask>();
  op->p2p->peer = peer;
  op->p2p->tag = tag;
  op->p2p->nbytes = nbytes;
  op->p2p->id = next_id_++;
  ++comm_.messages_in_flight;
  return op;
}

std::shared_ptr<Op> P2P::send(const void* buffer, uint64_t nbytes, int dest, int tag) {
  auto op = begin(dest, tag, nbytes);
  P2PTask& task = *op->p2p;
  task.is_send = true;
  task.send_buffer = static_cast<const unsigned char*>(buffer);
  if (dest == comm_.rank) {
    PacketHeader header{PacketKind::Eager, tag, nbytes, task.id, 0, 0};
    arrived(dest, header, task.send_buffer);
    complete(op);
    return op;
  }
  if (refused(op, dest)) return op;
  channels_[dest].unannounced.push_back(op);
  progress();
  return op;
}

std::shared_ptr<Op> P2P::recv(void* buffer, uint64_t capacity, int source, int tag) {
  auto op = begin(source, tag, capacity);
  P2PTask& task = *op->p2p;
  task.recv_buffer = static_cast<unsigned char*>(buffer);
  if (refused(op, source)) return op;
  for (auto it = unexpected_.begin(); it != unexpected_.end(); ++it) {
    if (!matches(task, it->source, it->header.tag)) continue;
    Incoming message = std::move(*it);
    unexpected_.erase(it);
    deliver(op, message.source, message.header, message.payload.data());
    progress();
    return op;
  }
  posted_.push_back(op);
  progress();
  return op;
}

bool P2P::refused(const std::shared_ptr<Op>& op, int peer) {
  if (peer == kAnySource || channels_[peer].failure.empty()) return false;
  op->by_mpi = true;
  complete(op, channels_[peer].failure + "; " + kAfterMpiFailure);
  return true;
}

bool P2P::matches(const P2PTask& task, int source, int tag) {
  return (task.peer == kAnySource || task.peer == source) &&
         (task.tag == kAnyTag || task.tag == tag);
}

void P2P::complete(const std::shared_ptr<Op>& op, std::string error) {
  --comm_.messages_in_flight;
  op->error = std::move(error);
  const OpState state = op->error.empty() ? OpState::Done : OpState::Failed;
  op->state.store(static_cast<int>(state), std::memory_order_release);
  // Python objects are dropped later, by someone who holds the GIL.
  if (op->has_keep()) comm_.engine.discard(std::shared_ptr<Op>(op));
}

bool P2P::idle() const { return comm_.messages_in_flight == 0 && !lingering_; }

// A message has met its receive.
void P2P::deliver(const std::shared_ptr<Op>& op, int source, const PacketHeader& header,
                  const unsigned char* payload) {
  P2PTask& task = *op->p2p;
  Channel& c = channels_[source];
  task.source = source;
  task.expected = header.nbytes;
  const bool too_long = header.nbytes > task.nbytes;
  if (header.kind == PacketKind::Rts) {
    c.control.push_back({PacketKind::Cts, header.tag, header.nbytes, header.send_id,
                         too_long ? kDiscard : task.id, 0});
    lingering_ = true;
  } else {
    if (!too_long) {
      if (header.nbytes != 0) std::memcpy(task.recv_buffer, payload, header.nbytes);
      task.moved = header.nbytes;
    }
    c.eager_in += source == comm_.rank ? 0 : header.nbytes + kEagerOverhead;
    if (c.eager_in >= kEagerBytes / 4) {
      c.control.push_back({PacketKind::Credit, 0, c.eager_in, 0, 0, 0});
      c.eager_in = 0;
      lingering_ = true;
    }
  }
  if (too_long) {
    complete(op, "message of " + std::to_string(header.nbytes) + " bytes from rank " +
                      std::to_string(source) + " (tag " + std::to_string(header.tag) +
                      ") is longer than the receive buffer of " + std::to_string(task.nbytes) +
                      " bytes");
  } else if (header.kind == PacketKind::Eager) {
    complete(op);
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
    if (it == announced_.end()) return;
    auto op = std::move(it->second);
    announced_.erase(it);
    if (header.recv_id == kDiscard) {
      complete(op);
    } else {
      op->p2p->peer_id = header.recv_id;
      channels_[source].streaming.push_back(std::move(op));
    }
    return;
  }
  if (header.kind == PacketKind::Data) {
    const auto it = receiving_.find(header.recv_id);
    if (it == receiving_.end()) return;
    P2PTask& task = *it->second->p2p;
    if (header.nbytes != 0) {
      std::memcpy(task.recv_buffer + header.offset, payload, header.nbytes);
    }
    task.moved += header.nbytes;
    if (task.moved == task.expected) {
      complete(it->second);
      receiving_.erase(it);
    }
    return;
  }
  for (auto it = posted_.begin(); it != posted_.end(); ++it) {
    if (!matches(*(*it)->p2p, source, header.tag)) continue;
    const auto op = *it;
    posted_.erase(it);
    deliver(op, source, header, payload);
    return;
  }
  Incoming message{source, header, {}};
  if (header.kind == PacketKind::Eager && header.nbytes != 0) {
    message.payload.assign(payload, payload + header.nbytes);
  }
  unexpected_.push_back(std::move(message));
}

// MPI has failed for this peer: what needs it ends with an error. True, as this is progress.
bool P2P::lose(int peer, const char* function, int code) {
  Channel& c = channels_[peer];
  c.failure = "no messages to and from rank " + std::to_string(peer) + ": " +
              mpi().describe(function, code);
  comm_.break_down(c.failure);
  comm_.tell_failure(comm_.next_seq);
  std::vector<std::shared_ptr<Op>> ended(c.unannounced.begin(), c.unannounced.end());
  ended.insert(ended.end(), c.streaming.begin(), c.streaming.end());
  for (const auto& op : posted_) if (op->p2p->peer == peer) ended.push_back(op);
  for (const auto& [id, op] : announced_) if (op->p2p->peer == peer) ended.push_back(op);
  for (const auto& [id, op] : receiving_) if (op->p2p->source == peer) ended.push_back(op);
  for (const auto& op : ended) {
    posted_.remove(op);
    announced_.erase(op->p2p->id);
    receiving_.erase(op->p2p->id);
    refused(op, peer);
  }
  c.unannounced.clear();
  c.streaming.clear();
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
    if (nbytes != 0) std::memcpy(c.out_packets + i * kPacketBytes, payload, nbytes);
    std::memcpy(c.out_lines[i].payload, &header, sizeof header);
    c.out_lines[i].seq.store(++c.out, std::memory_order_release);
    return true;
  }
  constexpr size_t kMaxSending = 8;
  if (c.mpi_sending.size() >= kMaxSending) return false;
  MpiPacket& packet = c.mpi_sending.emplace_back();
  packet.nbytes = sizeof header + nbytes;
  packet.bytes.reset(new unsigned char[packet.nbytes]);
  std::memcpy(packet.bytes.get(), &header, sizeof header);
  if (nbytes != 0) std::memcpy(packet.bytes.get() + sizeof header, payload, nbytes);
  const int rc =
      mpi().isend(packet.bytes.get(), static_cast<int>(packet.nbytes), mpi().byte_type,
                  link.mpi_rank, comm_.mpi_tag + 1, comm_.mpi_comm, &packet.request);
  return rc == 0 || !lose(peer, "MPI_Isend", rc);
}

bool P2P::pull(int peer) {
  Channel& c = channels_[peer];
  bool any = false;
  for (;;) {
    const uint64_t i = c.in % kPacketLines;
    const Line& line = c.in_lines[i];
    if (line.seq.load(std::memory_order_acquire) != c.in + 1) return any;
    PacketHeader header;
    std::memcpy(&header, line.payload, sizeof header);
    arrived(peer, header, c.in_packets + i * kPacketBytes);
    c.ack->consumed.store(++c.in, std::memory_order_release);
    any = true;
  }
}

// Large packets need the sender's help to arrive, so their receives are polled, never waited
// for; they are taken in order.
bool P2P::pull_mpi(int peer) {
  Channel& c = channels_[peer];
  const Link& link = comm_.link(peer);
  const int tag = comm_.mpi_tag + 1;
  bool any = false;
  for (;;) {
    MpiStatus status;
    int flag = 0, count = 0;
    int rc = mpi().iprobe(link.mpi_rank, tag, comm_.mpi_comm, &flag, &status);
    if (rc != 0) return lose(peer, "MPI_Iprobe", rc);
    if (!flag) break;
    rc = mpi().get_count(&status, mpi().byte_type, &count);
    if (rc != 0) return lose(peer, "MPI_Get_count", rc);
    MpiPacket& packet = c.mpi_arriving.emplace_back();
    packet.nbytes = static_cast<size_t>(count);
    packet.bytes.reset(new unsigned char[packet.nbytes]);
    rc = mpi().irecv(packet.bytes.get(), count, mpi().byte_type, link.mpi_rank, tag,
                     comm_.mpi_comm, &packet.request);
    if (rc != 0) return lose(peer, "MPI_Irecv", rc);
    any = true;
  }
  while (!c.mpi_arriving.empty()) {
    MpiPacket& packet = c.mpi_arriving.front();
    MpiStatus status;
    int flag = 0;
    const int rc = mpi().test(&packet.request, &flag, &status);
    if (rc != 0) return lose(peer, "MPI_Test", rc);
    if (!flag) break;
    PacketHeader header;
    std::memcpy(&header, packet.bytes.get(), sizeof header);
    arrived(peer, header, packet.bytes.get() + sizeof header);
    c.mpi_arriving.pop_front();
    any = true;
  }
  return any;
}

// Forgets packets that MPI has sent.
bool P2P::reap(int peer) {
  Channel& c = channels_[peer];
  bool any = false;
  for (auto it = c.mpi_sending.begin(); it != c.mpi_sending.end();) {
    MpiStatus status;
    int flag = 0;
    const int rc = mpi().test(&it->request, &flag, &status);
    if (rc != 0) return lose(peer, "MPI_Test", rc);
    it = flag ? c.mpi_sending.erase(it) : std::next(it);
    any = any || flag;
  }
  return any;
}

// Sends what waits for this peer: answers first, then announcements in order, then data.
bool P2P::flush(int peer) {
  Channel& c = channels_[peer];
  bool any = reap(peer);
  while (!c.control.empty() && push(peer, c.control.front(), nullptr, 0)) {
    c.control.pop_front();
    any = true;
  }
  while (!c.unannounced.empty()) {
    auto op = c.unannounced.front();
    P2PTask& task = *op->p2p;
    const uint64_t held = task.nbytes + kEagerOverhead;  // there, until it is received
    const bool eager = task.nbytes <= kPacketBytes && c.eager_out + held <= kEagerBytes;
    PacketHeader header{eager ? PacketKind::Eager : PacketKind::Rts, task.tag, task.nbytes,
                        task.id, 0, 0};
    if (!push(peer, header, task.send_buffer, eager ? task.nbytes : 0)) break;
    c.unannounced.pop_front();
    any = true;
    if (eager) {
      c.eager_out += held;
      complete(op);
    } else {
      announced_.emplace(task.id, std::move(op));
    }
  }
  const size_t packet =
      comm_.link(peer).kind == LinkKind::Shared ? kPacketBytes : kMpiPacketBytes;
  while (!c.streaming.empty()) {
    auto op = c.streaming.front();
    P2PTask& task = *op->p2p;
    const uint64_t nbytes = std::min<uint64_t>(packet, task.nbytes - task.moved);
    PacketHeader header{PacketKind::Data, task.tag, nbytes, task.id, task.peer_id, task.moved};
    if (!push(peer, header, task.send_buffer + task.moved, nbytes)) break;
    task.moved += nbytes;
    any = true;
    if (task.moved == task.nbytes) {
      complete(op);
      c.streaming.pop_front();
    }
  }
  return any;
}

bool P2P::on_the_way() const {
  return std::any_of(channels_.begin(), channels_.end(), [](const Channel& c) {
    return !c.control.empty() || !c.mpi_sending.empty() || !c.mpi_arriving.empty();
  });
}

bool P2P::progress() {
  if (idle()) {
    // A peer's messages are taken in even by a rank that waits for something else: sends do
    // not wait for receives until memory ends. Rarely, as a look costs a cache line per peer.
    constexpr unsigned kLookEvery = 64;
    if (++idle_passes_ % kLookEvery != 0) return false;
    if (comm_.arena == nullptr && comm_.mpi_comm == 0) return false;
    if (!attached_) attach();
  }
  bool any = false;
  for (int peer = 0; peer < comm_.size; ++peer) {
    const LinkKind kind = comm_.link(peer).kind;
    if (kind == LinkKind::Self || !channels_[peer].failure.empty()) continue;
    if (kind == LinkKind::Shared ? pull(peer) : pull_mpi(peer)) any = true;
    if (channels_[peer].failure.empty() && flush(peer)) any = true;
  }
  lingering_ = on_the_way();
  return any;
}

}  // namespace commrt
