// SPDX-License-Identifier: Apache-2.0
// Messages that a rank has refused for their arguments, and what ranks tell others of refusals.
//
// A refused message takes its place among those of its pair of ranks and its tag. So the next
// message meets the next receive, and no array gets what was meant for another.
#include <algorithm>
#include <cstring>

#include "engine/device_refusals.hpp"
#include "engine/engine.hpp"
#include "engine/p2p.hpp"

namespace commrt {

namespace {

// A packet between ranks of one node has room for that.
std::string shortened_for_packet(const std::string& reason) {
  constexpr size_t kMost = 1024;
  static_assert(kMost <= kPacketBytes);
  return shortened(reason, kMost);
}

constexpr size_t kMostWords = kPacketBytes;

}  // namespace

// Where the peer takes no packets at the moment, it waits among the sends, but nobody for it.
void P2P::refuse_send(int peer, int tag, const std::string& reason) {
  if (!channels_[peer].failure.empty()) return;  // nothing goes there
  auto text = std::make_unique<std::string>(shortened_for_packet(reason));
  auto op = make(true, {text->data(), text->size(), peer, tag, kRefusedType, false});
  op->p2p->refusal = std::move(text);
  queue(op);
  serve(peer);
}

void P2P::refuse_recv(int peer, int tag, const std::string& reason) {
  if (!channels_[peer].failure.empty()) return;  // nothing comes from there
  auto op = make(false, {nullptr, 0, peer, tag, kAnyType, false});
  op->p2p->refusal = std::make_unique<std::string>(shortened_for_packet(reason));
  meet(op);
  serve(peer);
}

// A message has met a receive that was refused.
void P2P::drop(const P2PTask& task, int source, const PacketHeader& header) {
  if (header.kind == PacketKind::Eager) return count_received(source, header.nbytes);
  const std::string& reason = *task.refusal;
  const PacketHeader answer{PacketKind::Dropped, kAnyType, header.tag, reason.size(),
                            header.send_id, 0, 0};
  channels_[source].notices.emplace_back(answer, reason);
  lingering_ = true;
}

// The message that this rank has announced was dropped.
void P2P::hear_of_drop(int source, const PacketHeader& header, const unsigned char* payload) {
  const auto it = announced_.find(header.send_id);
  if (it == announced_.end()) return;  // it was given up meanwhile
  const auto op = std::move(it->second);
  announced_.erase(it);
  op->p2p->stage = Stage::Matched;
  fail_refused(op, source, "recv", payload, header.nbytes);
}

// As `said_refused` in commrt/group/group.py says it of collectives.
void P2P::fail_refused(const std::shared_ptr<Op>& op, int rank, const char* call,
                       const void* reason, size_t nbytes) {
  op->was_refused = true;
  complete(op, "rank " + std::to_string(rank) + " has refused its " + call + " (tag " +
                   std::to_string(op->p2p->tag) + "), and nothing was delivered: " +
                   std::string(static_cast<const char*>(reason), nbytes));
}

void P2P::tell_refused(uint64_t seq, const std::string& reason) {
  if (!attached_) attach();
  for (int peer = 0; peer < comm_.size; ++peer) {
    if (comm_.link(peer).kind != LinkKind::Mpi) continue;
    const PacketHeader header{PacketKind::Refused, kAnyType, 0, reason.size(), seq, 0, 0};
    channels_[peer].notices.emplace_back(header, reason);
    serve(peer);
  }
}

void P2P::tell_part(int rank, uint64_t seq, const void* head, size_t nbytes,
                    const std::string& rest) {
  if (!attached_) attach();
  const std::string said = std::string(static_cast<const char*>(head), nbytes) + rest;
  const PacketHeader header{PacketKind::Part, kAnyType, 0, said.size(), seq, 0, 0};
  channels_[static_cast<size_t>(rank)].notices.emplace_back(header, said);
  lingering_ = urgent_ = true;
}

void P2P::ask_of_device(int rank, uint64_t seq, const std::string& reason) {
  if (!attached_) attach();
  const PacketHeader header{PacketKind::AskDevice, kAnyType, 0, reason.size(), seq, 0, 0};
  channels_[static_cast<size_t>(rank)].notices.emplace_back(header, reason);
  lingering_ = urgent_ = true;
}

void P2P::tell_of_device(int rank, uint64_t seq, DeviceRefusals::Part part,
                         const std::string& words) {
  if (!attached_) attach();
  const std::string said = words.size() <= kMostWords ? words : std::string();
  const PacketHeader header{PacketKind::OnDevice, kAnyType, static_cast<int32_t>(part), said.size(),
                            seq, 0, 0};
  channels_[static_cast<size_t>(rank)].notices.emplace_back(header, said);
  lingering_ = urgent_ = true;
}

void P2P::hear_of_device(int source, const PacketHeader& header, const unsigned char* payload) {
  std::string words(reinterpret_cast<const char*>(payload), header.nbytes);
  DeviceRefusals& refusals = *comm_.refusals.on_devices;
  if (header.kind == PacketKind::AskDevice) {
    return refusals.hear_question(source, header.send_id, words);
  }
  const auto part = static_cast<DeviceRefusals::Part>(header.tag);
  refusals.hear_answer(source, header.send_id, part, std::move(words));
}

void P2P::tell_heard(int rank, uint64_t seq, const Afar::Told& told) {
  answer(rank, {PacketKind::Heard, kAnyType, 0, told.to_here, seq, told.from_here, told.sent});
}

void P2P::tell_left(int rank, uint64_t seq) {
  if (comm_.link(rank).kind != LinkKind::Mpi) return;
  answer(rank, {PacketKind::Left, kAnyType, 0, 0, seq, 0, 0});
  urgent_ = true;
}

}  // namespace commrt
