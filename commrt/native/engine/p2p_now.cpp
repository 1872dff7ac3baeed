// SPDX-License-Identifier: Apache-2.0
// Messages that are over at once, without an operation: nothing is allocated for them.
//
// A short message takes about as long as one cache line takes to cross between cores. So a
// blocking send whose message fits into the peer's packets, and a blocking receive whose
// message is here or comes within a short spin, run straight from the caller's stack.
// Everything else returns to the caller as if nothing had been, and becomes an operation.
#include <cstring>

#include "engine/engine.hpp"
#include "engine/p2p.hpp"

namespace commrt {

bool P2P::calm(const Message& message) const {
  const Channel& c = channels_[message.peer];
  switch (comm_.link(message.peer).kind) {
    case LinkKind::Self: return message.nbytes <= kPacketBytes && c.unannounced.empty();
    case LinkKind::Shared: return c.unannounced.empty() && c.streaming.empty();
    case LinkKind::Mpi: break;
  }
  return false;
}

// Closes the books of a message that took the next number.
void P2P::close(Record& record) {
  record.end_ticks = ticks();
  record.state = static_cast<uint8_t>(OpState::Done);
  ++next_id_;
}

bool P2P::push_now(const Message& message) {
  if (comm_.is_watched) return false;
  if (!attached_) attach();
  const uint64_t nbytes = message.nbytes;
  const int dest = message.peer;
  if (nbytes > kPacketBytes || comm_.link(dest).kind != LinkKind::Shared) return false;
  Channel& c = channels_[dest];
  const uint64_t held = nbytes + kEagerOverhead;
  if (!c.unannounced.empty() || c.eager_out + held > kEagerBytes) return false;
  const PacketHeader header{PacketKind::Eager, message.type, message.tag, nbytes, 0, 0, 0};
  if (!push(dest, header, static_cast<const unsigned char*>(message.data), nbytes)) return false;
  c.eager_out += held;
  return true;
}

bool P2P::send_now(const Message& message) {
  if (!push_now(message)) return false;
  const int dest = message.peer;
  close(note(true, dest, message.tag, message.nbytes));
  // Sends take in what the peer sends, before it runs out of room. Not each packet as it
  // comes: the receive that is likely to follow finds it cheaper where it is.
  Channel& c = channels_[dest];
  const uint64_t enough = comm_.messages_in_flight == 0 ? kPacketLines / 2 : 1;
  if (c.waiting(enough) || c.has_answers()) serve(dest);
  return true;
}

bool P2P::take_arrived(const Message& message, uint64_t which) {
  const auto it = unexpected_.find(which);
  const PacketHeader& header = it->second.front().header;
  const bool fits = header.nbytes <= message.nbytes && header.nbytes <= kPacketBytes &&
                    types_meet(header.type, message.type);
  if (header.kind != PacketKind::Eager || !fits) return false;
  if (header.nbytes != 0) {
    std::memcpy(message.data, it->second.front().payload.data(), header.nbytes);
  }
  count_received(message.peer, header.nbytes);
  took_ = header.nbytes;
  it->second.pop_front();
  if (it->second.empty()) unexpected_.erase(it);
  return true;
}

// The record that is returned is of the next number; null: there was no message.
Record* P2P::take_now(const Message& message, int& spins) {
  if (comm_.is_watched) return nullptr;
  if (!attached_) attach();
  const uint64_t capacity = message.nbytes;
  const int source = message.peer, tag = message.tag;
  const LinkKind kind = comm_.link(source).kind;
  if (kind == LinkKind::Mpi) return nullptr;
  const uint64_t which = key(source, tag);
  // An older receive of the same messages comes first.
  if (!posted_.empty() && posted_.count(which) != 0) return nullptr;
  if (!unexpected_.empty() && unexpected_.count(which) != 0) {
    if (!take_arrived(message, which)) return nullptr;
    return &note(false, source, tag, capacity);
  }
  if (kind == LinkKind::Self) return nullptr;
  Channel& c = channels_[source];
  Record* record = nullptr;
  for (int others = 0; others < kPacketLines;) {
    PacketHeader header;
    const unsigned char* payload = read(c, header);
    if (payload == nullptr) {
      // The books are kept while the message is on its way: that costs nothing.
      if (record == nullptr) record = &note(false, source, tag, capacity);
      if (--spins < 0) return nullptr;
      relax();
      continue;
    }
    const bool eager = header.kind == PacketKind::Eager;
    if ((!eager && header.kind != PacketKind::Rts) || header.tag != tag) {
      arrived(source, header, payload);
      c.took_packet();
      comm_.ring(source);
      ++others;
      continue;
    }
    if (!eager || header.nbytes > capacity || !types_meet(header.type, message.type)) {
      return nullptr;  // it stays where it is
    }
    if (header.nbytes != 0) std::memcpy(message.data, payload, header.nbytes);
    took_ = header.nbytes;
    c.took_packet();
    comm_.ring(source);
    count_received(source, header.nbytes);
    return record != nullptr ? record : &note(false, source, tag, capacity);
  }
  return nullptr;
}

bool P2P::recv_now(const Message& message, int spins) {
  Record* const record = take_now(message, spins);
  if (record == nullptr) return false;
  close(*record);
  if (channels_[message.peer].has_answers()) serve(message.peer);
  return true;
}

P2P::Now P2P::sendrecv_now(const Message& leaving, const Message& coming, int spins) {
  if (!push_now(leaving)) return Now::Nothing;
  Record* const record = take_now(coming, spins);
  if (record == nullptr) return Now::Sent;
  close(*record);
  close(note(true, leaving.peer, leaving.tag, leaving.nbytes));
  if (channels_[coming.peer].has_answers()) serve(coming.peer);
  return Now::Both;
}

// The books are kept message by message. If a send does not fit or a message does not come, the
// rest is left to an operation, and nothing is undone.
bool P2P::multi_now(const MessageLists& lists, int spins, Begun& begun) {
  begun.seq = next_seq();
  for (const Message& one : lists.sends) {
    if (one.peer == comm_.rank) {
      if (!channels_[one.peer].unannounced.empty() || comm_.is_watched) return false;
      const PacketHeader header{PacketKind::Eager, one.type, one.tag, one.nbytes, 0, 0, 0};
      arrived(one.peer, header, static_cast<const unsigned char*>(one.data));
    } else if (!push_now(one)) {
      return false;
    }
    close(note(true, one.peer, one.tag, one.nbytes));
    ++begun.sent;
  }
  for (const Message& one : lists.recvs) {
    Record* const record = take_now(one, spins);
    if (record == nullptr) return false;
    close(*record);
    begun.lengths[begun.received++] = took_;
    if (channels_[one.peer].has_answers()) serve(one.peer);
  }
  // Sends alone never look at what comes, so do it here, as send_now() does.
  for (const Message& one : lists.sends) {
    if (one.peer == comm_.rank) continue;
    Channel& c = channels_[one.peer];
    if (c.waiting(kPacketLines / 2) || c.has_answers()) serve(one.peer);
  }
  return true;
}

}  // namespace commrt
