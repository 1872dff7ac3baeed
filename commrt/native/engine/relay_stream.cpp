// SPDX-License-Identifier: Apache-2.0
// Frames of a relay in a stream of bytes, each with its payload behind it.
#include <cstring>
#include <string>
#include <utility>

#include "engine/relay.hpp"

namespace commrt {

void Relay::be_sent_by(std::shared_ptr<Sender> sender) {
  const std::lock_guard<std::mutex> lock(mutex_);
  sender_ = std::move(sender);
  has_sender_.store(true, std::memory_order_release);
}

void Relay::push_to_stream(Peer& peer, Outgoing&& what) {
  const bool is_payload = what.frame.kind == FrameKind::Done;
  if (what.frame.kind == FrameKind::Bye) {  // each stream's last one
    peer.payloads.push_back(what);
    peer.num_queued[1].fetch_add(1, std::memory_order_relaxed);
  }
  (is_payload ? peer.payloads : peer.queue).push_back(std::move(what));
  peer.num_queued[is_payload].fetch_add(1, std::memory_order_relaxed);
}

void Relay::send(int number) {
  if (!has_sender_.load(std::memory_order_acquire)) return;
  const Peer& peer = peer_of(number);
  for (const Lane lane : {Lane::Frames, Lane::Payloads}) {
    const auto& queued = peer.num_queued[static_cast<size_t>(lane)];
    if (queued.load(std::memory_order_relaxed) != 0) sender_->send(number, lane);
  }
}

bool Relay::take_parts(int number, Lane lane, Parts& parts, bool first) {
  Peer& peer = peer_of(number);
  const std::lock_guard<std::mutex> lock(mutex_);
  const bool is_frame = lane == Lane::Frames;
  auto& queue = is_frame ? peer.queue : peer.payloads;
  bool& is_taken = is_frame ? peer.is_taken : peer.sends_payload;
  if (first && is_taken) return false;
  is_taken = !queue.empty() && peer.failure == 0;
  if (!is_taken) return false;
  Outgoing one = std::move(queue.front());
  queue.pop_front();
  peer.num_queued[static_cast<size_t>(lane)].fetch_sub(1, std::memory_order_relaxed);
  std::memcpy(parts.head, &one.frame, sizeof one.frame);
  parts.is_payload = one.frame.kind == FrameKind::Done;
  parts.ends = one.frame.kind == FrameKind::Bye;
  parts.has_next = !queue.empty();
  const bool is_answer = one.frame.kind == FrameKind::Answer;
  const bool is_message = one.frame.kind == FrameKind::Message;
  parts.nbytes = parts.is_payload || is_answer || is_message ? one.frame.nbytes : 0;
  parts.body = is_answer ? one.state.get() : one.payload;
  parts.state = std::move(one.state);
  parts.request = is_message ? one.request : nullptr;
  if (parts.is_payload) peer.leaving.push_back(one.request);
  return true;
}

Relay::Body Relay::head_arrived(int number, Lane lane, const unsigned char* head) {
  Frame frame;
  std::memcpy(&frame, head, sizeof frame);
  Body body;
  Peer& peer = peer_of(number);
  const auto refuse = [&](const std::string& what) {
    lost(number, "a frame " + what + " is no frame of commrt's");
    body.ends = true;
    return body;
  };
  const bool has_body = frame.nbytes != 0 && (frame.kind == FrameKind::Message ||
                                              frame.kind == FrameKind::Answer ||
                                              frame.kind == FrameKind::Done);
  if (frame.kind > FrameKind::Dump || frame.kind == FrameKind::Expect) {
    return refuse("of kind " + std::to_string(static_cast<uint32_t>(frame.kind)));
  }
  if (frame.kind == FrameKind::Bye) {
    // The rank may still have something in the other stream, which comes first.
    body.ends = true;
    if (++peer.num_ended == kLanes) arrived(number, head, sizeof frame);
    return body;
  }
  if ((frame.kind == FrameKind::Done) != (lane == Lane::Payloads)) {
    return refuse("of another connection");
  }
  if (!has_body) {
    const Then then = arrived(number, head, sizeof frame);
    if (then > kNext) landed(number, static_cast<uint64_t>(then));
    return body;
  }
  if (frame.kind != FrameKind::Done && frame.nbytes > kEagerNbytes) {
    return refuse("of " + std::to_string(frame.nbytes) + " bytes");
  }
  std::unique_lock<std::mutex> lock(mutex_);
  body.nbytes = frame.nbytes;
  if (frame.kind == FrameKind::Done) {
    const auto it = peer.landing.find(frame.where);
    const bool is_known = it != peer.landing.end() && it->second.request->nbytes == frame.nbytes;
    if (!is_known) {
      lock.unlock();
      return refuse("whose payload nobody expects");
    }
    Landing& landing = it->second;
    peer.landing_now = frame.where;
    body.to = landing.nowhere == nullptr ? landing.request->data : landing.nowhere.get();
    return body;
  }
  Coming& coming = peer.coming;
  coming = {frame, nullptr, nullptr};
  if (frame.kind == FrameKind::Answer) {
    coming.bytes.reset(new unsigned char[sizeof frame + frame.nbytes]);
    std::memcpy(coming.bytes.get(), head, sizeof frame);
    body.to = coming.bytes.get() + sizeof frame;
    return body;
  }
  const auto it = peer.posted.find(frame.tag);
  if (it != peer.posted.end() && it->second.front()->nbytes >= frame.nbytes) {
    coming.request = it->second.front();
    it->second.pop_front();
    if (it->second.empty()) peer.posted.erase(it);
    body.to = coming.request->data;
  } else {
    coming.bytes.reset(new unsigned char[frame.nbytes]);
    body.to = coming.bytes.get();
  }
  return body;
}

void Relay::body_arrived(int number, Lane lane) {
  Peer& peer = peer_of(number);
  if (lane == Lane::Payloads) return landed(number, peer.landing_now);
  const SendAtEnd sending(*this, number);
  Coming coming;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    coming = std::exchange(peer.coming, {});
    if (coming.frame.kind == FrameKind::Message) {
      if (coming.request != nullptr) {
        coming.request->nbytes = coming.frame.nbytes;
        count_received(peer, coming.frame.nbytes);
        coming.request->end();
      } else if (coming.bytes != nullptr) {
        Incoming message;
        message.bytes = std::move(coming.bytes);
        message.nbytes = coming.frame.nbytes;
        take_message(peer, coming.frame.tag, std::move(message));
      }
      return;
    }
  }
  if (coming.bytes != nullptr) {
    arrived(number, coming.bytes.get(), sizeof coming.frame + coming.frame.nbytes);
  }
}

}  // namespace commrt
