// SPDX-License-Identifier: Apache-2.0
// multi_sendrecv: lists of sends and receives as one operation.
//
// Receives are posted before anything is sent, so that no message has to be kept. In place it
// is the other way round: what leaves is copied where it cannot leave at once, and only then
// may a receive write there. Neither waits for a peer, so no order of the lists can deadlock.
#include <algorithm>
#include <cstring>

#include "engine/engine.hpp"
#include "engine/p2p.hpp"

namespace commrt {

uint64_t MessageLists::nbytes() const {
  uint64_t sum = 0;
  for (const Message& one : sends) sum += one.nbytes;
  for (const Message& one : recvs) sum += one.nbytes;
  return sum;
}

bool MessageLists::settle_overlaps(bool may_replace) {
  auto begin = [](const Message& one) { return static_cast<const unsigned char*>(one.data); };
  auto end = [&](const Message& one) { return begin(one) + one.nbytes; };
  std::vector<const Message*> written;
  written.reserve(recvs.size());
  for (const Message& one : recvs) {
    if (one.nbytes != 0) written.push_back(&one);
  }
  std::sort(written.begin(), written.end(),
            [&](const Message* a, const Message* b) { return begin(*a) < begin(*b); });
  for (size_t i = 1; i < written.size(); ++i) {
    if (begin(*written[i]) < end(*written[i - 1])) return false;
  }
  for (Message& one : sends) {
    const auto at = std::partition_point(written.begin(), written.end(), [&](const Message* w) {
      return end(*w) <= begin(one);
    });
    if (at == written.end() || begin(**at) >= end(one) || one.nbytes == 0) continue;
    const bool same = (*at)->data == one.data && (*at)->nbytes == one.nbytes;
    if (!may_replace || !same) return false;
    one.replaced = in_place = true;
  }
  return true;
}

bool P2P::calm(const MessageLists& lists) const {
  auto all_calm = [&](const std::vector<Message>& list) {
    return std::all_of(list.begin(), list.end(),
                       [&](const Message& one) { return calm(one); });
  };
  return all_calm(lists.sends) && all_calm(lists.recvs);
}

std::shared_ptr<Op> P2P::multi(const MessageLists& lists, const Begun& begun,
                               const Gate& gate) {
  // Memory first: where there is none, nothing has started.
  auto whole = std::make_shared<Op>();
  whole->comm = &comm_;
  whole->seq = begun.sent + begun.received != 0 ? begun.seq : next_seq();
  whole->p2p = std::make_unique<P2PTask>();
  whole->p2p->nbytes = lists.nbytes();
  whole->p2p->parts = std::make_unique<Parts>();
  Parts& parts = *whole->p2p->parts;
  parts.is_list = true;
  parts.num_sends = lists.sends.size();
  parts.num_recvs = lists.recvs.size();
  parts.first_recv = begun.received;
  parts.received.assign(begun.lengths, begun.lengths + begun.received);
  parts.received.resize(parts.num_recvs);
  for (const uint64_t length : parts.received) whole->p2p->moved += length;

  std::vector<std::shared_ptr<Op>> sends, recvs;
  sends.reserve(parts.num_sends - begun.sent);
  recvs.reserve(parts.num_recvs - begun.received);
  for (size_t i = begun.sent; i < parts.num_sends; ++i) {
    const Message& one = lists.sends[i];
    sends.push_back(make(true, one));
    if (one.replaced) sends.back()->p2p->copy.reset(new unsigned char[one.nbytes]);
  }
  for (size_t i = begun.received; i < parts.num_recvs; ++i) {
    recvs.push_back(make(false, lists.recvs[i]));
  }
  parts.ops = sends;
  parts.ops.insert(parts.ops.end(), recvs.begin(), recvs.end());
  parts.left = parts.ops.size() + 1;  // one until all have been started
  for (const auto& part : parts.ops) {
    part->p2p->whole = whole;
    part->p2p->gate = gate;
    number(*part);
  }

  // Messages to one peer mostly follow each other: it is served once for them.
  auto serve_all = [this](const std::vector<std::shared_ptr<Op>>& list) {
    for (size_t i = 0; i < list.size(); ++i) {
      const int peer = list[i]->p2p->peer;
      if (i + 1 == list.size() || list[i + 1]->p2p->peer != peer) serve(peer);
    }
  };
  if (!lists.in_place) {
    for (const auto& part : recvs) queue_recv(part);
  }
  for (const auto& part : sends) queue_send(part);
  serve_all(sends);
  if (lists.in_place) {
    for (const auto& part : sends) {
      P2PTask& task = *part->p2p;
      if (task.copy == nullptr || part->finished()) continue;
      std::memcpy(task.copy.get(), task.send_buffer, task.nbytes);
      task.send_buffer = task.copy.get();
    }
    for (const auto& part : recvs) queue_recv(part);
  }
  serve_all(recvs);
  part_ended(whole);
  return whole;
}

}  // namespace commrt
