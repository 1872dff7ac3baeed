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

std::shared_ptr<Op> P2P::send(const void* buffer, uint64_t nbytes, int dest, int tag) {
  if (!attached_) attach();
  auto op = std::make_shared<Op>();
  op->comm = &comm_;
  op->p2p = std::make_unique<P2PTask>();
  P2PTask& task = *op->p2p;
  task.is_send = true;
  task.peer = dest;
  task.tag = tag;
  task.send_buffer = static_cast<const unsigned char*>(buffer);
  task.nbytes = nbytes;
  task.id = next_id_++;
  ++live_;
  if (dest == comm_.rank) {
    PacketHeader header{PacketKind::Eager, tag, nbytes, task.id, 0, 0};
    arrived(dest, header, task.send_buffer);
    complete(*op);
    return op;
  }
  channels_[dest].unannounced.push_back(op);
  progress();
  return op;
}

std::shared_ptr<Op> P2P::recv(void* buffer, uint64_t capacity, int source, int tag) {
  if (!attached_) attach();
  auto op = std::make_shared<Op>();
  op->comm = &comm_;
  op->p2p = std::make_unique<P2PTask>();
  P2PTask& task = *op->p2p;
  task.peer = source;
  task.tag = tag;
  task.recv_buffer = static_cast<unsigned char*>(buffer);
  task.nbytes = capacity;
  task.id = next_id_++;
  ++live_;
  for (auto it = unexpected_.begin(); it != unexpected_.end(); ++it) {
    if (!matches(task, it->source, it->header.tag)) continue;
    Incoming message = std::move(*it);
    unexpected_.erase(it);
    if (message.header.kind == PacketKind::Rts) receiving_.push_back(op);
    deliver(*op, message.source, message.header, message.payload.data());
    if (op->finished()) receiving_.remove(op);
    progress();
    return op;
  }
  posted_.push_back(op);
  progress();
  return op;
}

bool P2P::matches(const P2PTask& task, int source, int tag) {
  return (task.peer == kAnySource || task.peer == source) &&
         (task.tag == kAnyTag || task.tag == tag);
}

void P2P::complete(Op& op, std::string error) {
  --live_;
  op.error = std::move(error);
  const OpState state = op.error.empty() ? OpState::Done : OpState::Failed;
  op.state.store(static_cast<int>(state), std::memory_order_release);
}

// A message has met its receive.
void P2P::deliver(Op& op, int source, const PacketHeader& header,
                  const unsigned char* payload) {
  P2PTask& task = *op.p2p;
  task.source = source;
  task.expected = header.nbytes;
  const bool too_long = header.nbytes > task.nbytes;
  if (header.kind == PacketKind::Rts) {
    PacketHeader answer{PacketKind::Cts, header.tag, header.nbytes, header.send_id,
                        too_long ? kDiscard : task.id, 0};
    channels_[source].control.push_back(answer);
    lingering_ = true;
  } else if (!too_long) {
    if (header.nbytes != 0) std::memcpy(task.recv_buffer, payload, header.nbytes);
    task.moved = header.nbytes;
  }
  if (too_long) {
    complete(op, "message of " + std::to_string(header.nbytes) + " bytes from rank " +
                     std::to_string(source) + " (tag " + std::to_string(header.tag) +
                     ") is longer than the receive buffer of " + std::to_string(task.nbytes) +
                     " bytes");
  } else if (header.kind == PacketKind::Eager) {
    complete(op);
  } else {
    task.streaming = true;
  }
}

void P2P::arrived(int source, const PacketHeader& header, const unsigned char* payload) {
  if (header.kind == PacketKind::Cts) {
    for (auto it = announced_.begin(); it != announced_.end(); ++it) {
      if ((*it)->p2p->id != header.send_id) continue;
      auto op = *it;
      announced_.erase(it);
      if (header.recv_id == kDiscard) {
        complete(*op);
      } else {
        op->p2p->peer_id = header.recv_id;
        channels_[source].streaming.push_back(std::move(op));
      }
      return;
    }
    return;
  }
  if (header.kind == PacketKind::Data) {
    for (auto it = receiving_.begin(); it != receiving_.end(); ++it) {
      P2PTask& task = *(*it)->p2p;
      if (task.id != header.recv_id) continue;
      std::memcpy(task.recv_buffer + header.offset, payload, header.nbytes);
      task.moved += header.nbytes;
      if (task.moved == task.expected) {
        complete(**it);
        receiving_.erase(it);
      }
      return;
    }
    return;
  }
  for (auto it = posted_.begin(); it != posted_.end(); ++it) {
    if (!matches(*(*it)->p2p, source, header.tag)) continue;
    auto op = *it;
    posted_.erase(it);
    deliver(*op, source, header, payload);
    if (!op->finished()) receiving_.push_back(std::move(op));
    return;
  }
  Incoming message{source, header, {}};
  if (header.kind == PacketKind::Eager && header.nbytes != 0) {
    message.payload.assign(payload, payload + header.nbytes);
  }
  unexpected_.push_back(std::move(message));
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
  packet.bytes.resize(sizeof header + nbytes);
  std::memcpy(packet.bytes.data(), &header, sizeof header);
  if (nbytes != 0) std::memcpy(packet.bytes.data() + sizeof header, payload, nbytes);
  mpi().isend(packet.bytes.data(), static_cast<int>(packet.bytes.size()), mpi().byte_type,
              link.mpi_rank, comm_.mpi_tag + 1, comm_.mpi_comm, &packet.request);
  return true;
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
  bool any = false;
  for (;;) {
    MpiStatus status;
    int flag = 0, count = 0;
    mpi().iprobe(link.mpi_rank, comm_.mpi_tag + 1, comm_.mpi_comm, &flag, &status);
    if (!flag) break;
    mpi().get_count(&status, mpi().byte_type, &count);
    MpiPacket& packet = c.mpi_arriving.emplace_back();
    packet.bytes.resize(static_cast<size_t>(count));
    mpi().irecv(packet.bytes.data(), count, mpi().byte_type, link.mpi_rank, comm_.mpi_tag + 1,
                comm_.mpi_comm, &packet.request);
    any = true;
  }
  while (!c.mpi_arriving.empty()) {
    MpiPacket& packet = c.mpi_arriving.front();
    MpiStatus status;
    int flag = 0;
    mpi().test(&packet.request, &flag, &status);
    if (!flag) break;
    PacketHeader header;
    std::memcpy(&header, packet.bytes.data(), sizeof header);
    arrived(peer, header, packet.bytes.data() + sizeof header);
    c.mpi_arriving.pop_front();
    any = true;
  }
  return any;
}

// Sends what waits for this peer: answers first, then announcements in order, then data.
bool P2P::flush(int peer) {
  Channel& c = channels_[peer];
  bool any = false;
  for (auto it = c.mpi_sending.begin(); it != c.mpi_sending.end();) {
    MpiStatus status;
    int flag = 0;
    mpi().test(&it->request, &flag, &status);
    it = flag ? c.mpi_sending.erase(it) : std::next(it);
  }
  while (!c.control.empty() && push(peer, c.control.front(), nullptr, 0)) {
    c.control.pop_front();
    any = true;
  }
  while (!c.unannounced.empty()) {
    auto op = c.unannounced.front();
    P2PTask& task = *op->p2p;
    const bool eager = task.nbytes <= kPacketBytes;
    PacketHeader header{eager ? PacketKind::Eager : PacketKind::Rts, task.tag, task.nbytes,
                        task.id, 0, 0};
    if (!push(peer, header, task.send_buffer, eager ? task.nbytes : 0)) break;
    c.unannounced.pop_front();
    any = true;
    if (eager) {
      complete(*op);
    } else {
      announced_.push_back(std::move(op));
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
      complete(*op);
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
  if (live_ == 0 && !lingering_) {
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
    if (kind == LinkKind::Self) continue;
    if (kind == LinkKind::Shared ? pull(peer) : pull_mpi(peer)) any = true;
    if (flush(peer)) any = true;
  }
  lingering_ = on_the_way();
  return any;
}

}  // namespace commrt
