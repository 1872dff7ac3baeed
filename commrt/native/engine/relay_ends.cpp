// SPDX-License-Identifier: Apache-2.0
// How a relay's peers end: by their last frame, by a lost connection, or by the word of others.
#include <utility>

#include "engine/relay.hpp"

namespace commrt {

void Relay::watch(std::shared_ptr<Liveness> liveness, const std::vector<int>& away) {
  for (const int peer : away) peer_of(peer).is_away = true;
  told_.watch(liveness);
  liveness_ = std::move(liveness);
  liveness_->tell_by([this](int rank) { tell_gone(rank); });
}

// Of messages that are not here.
void Relay::end_receives(Peer& peer, int code) {
  for (auto& [tag, requests] : peer.posted) {
    for (Request* request : requests) request->end(code);
  }
  peer.posted.clear();
}

void Relay::lost(int number, const std::string& why, const std::string& error) {
  // First: whoever sees a request end asks it for the reason.
  if (liveness_ != nullptr) liveness_->note_cut(number, error.empty() ? why : error);
  if (has_sender_.load(std::memory_order_acquire)) sender_->drop(number);
  Peer& peer = peer_of(number);
  const int code = code_of(why);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (peer.failure != 0) return;
  peer.failure.store(code, std::memory_order_release);
  end_receives(peer, code);
  for (auto& [id, send] : peer.waiting) send.first->end(code);
  peer.waiting.clear();
  for (Outgoing& one : peer.queue) {
    const bool is_send = one.frame.kind == FrameKind::Message || one.frame.kind == FrameKind::Done;
    if (is_send) one.request->end(code);
  }
  peer.queue.clear();
  for (Outgoing& one : peer.payloads) {
    if (one.request != nullptr) one.request->end(code);
  }
  peer.payloads.clear();
  for (auto& queued : peer.num_queued) queued.store(0, std::memory_order_relaxed);
  if (peer.coming.request != nullptr) peer.coming.request->end(code);
  peer.coming = {};
  for (Request* request : peer.leaving) request->end(code);
  peer.leaving.clear();
  look(peer);
  for (auto& [where, landing] : peer.landing) {
    landing.request->end(code);
    static_cast<void>(landing.nowhere.release());  // what carries it may still write there
  }
  peer.landing.clear();
  peer.changed.notify_all();
  tell();
}

// A peer's last frame is here: messages that are not will never come.
void Relay::see_leave(int number) {
  if (liveness_ != nullptr) liveness_->note_left(number);
  Peer& peer = peer_of(number);
  const int code = code_of("rank " + std::to_string(number) + " of the job has left");
  end_receives(peer, code);
  for (auto& [id, send] : peer.waiting) send.first->end(code);
  peer.waiting.clear();
  tell();
}

void Relay::leave() {
  push_last();
  for (int peer = 0; peer < size(); ++peer) send(peer);
}

void Relay::push_last() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (size_t peer = 0; peer < peers_.size(); ++peer) {
    Peer& one = peers_[peer];
    if (static_cast<int>(peer) == rank_ || one.said_bye || one.failure != 0) continue;
    told_.each([&](int tag, const ToldAfar& told) {
      Outgoing last;
      last.frame = {FrameKind::Count, tag, told.started.load(), 0, 0};
      push(one, std::move(last));
    });
    one.said_bye = true;
    push(one, Outgoing{});
  }
}

bool Relay::did_its_part(int number, int tag, uint64_t seq) {
  Peer& peer = peer_of(number);
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto it = peer.counts.find(tag);
  return it == peer.counts.end() || it->second > seq;
}

// A process of this rank's node has ended. Other nodes may not see it: a process that it has
// forked keeps its connections open.
void Relay::tell_gone(int rank) {
  tell_others({FrameKind::Gone, 0, 0, static_cast<uint64_t>(rank), 0}, rank);
}

void Relay::ask_for_dumps() { tell_others({FrameKind::Dump, 0, 0, 0, 0}, rank_); }

// To all ranks of other nodes, but one.
void Relay::tell_others(const Frame& frame, int but) {
  for (int number = 0; number < size(); ++number) {
    Peer& one = peer_of(number);
    if (number == rank_ || number == but || !one.is_away) continue;
    const SendAtEnd sending(*this, number);
    const std::lock_guard<std::mutex> lock(mutex_);
    if (one.said_bye || one.failure != 0) continue;
    Outgoing out;
    out.frame = frame;
    push(one, std::move(out));
  }
}

void Relay::hear_of_gone(int number, uint64_t rank) {
  if (liveness_ == nullptr || rank >= peers_.size()) return;
  if (liveness_->note_told(static_cast<int>(rank), number)) tell();
}

}  // namespace commrt
