// SPDX-License-Identifier: Apache-2.0
// Matching, requests and frames of messages that Python carries to other nodes.
#include "engine/relay.hpp"

#include "engine/engine.hpp"
#include "engine/flight_files.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>

namespace commrt {

namespace {

constexpr int kFirstText = 16;

// The texts of error codes. All relays share them, because the functions of MPI's table that ask
// for a text do not know the relay.
struct Texts {
  std::mutex mutex;
  std::vector<std::string> said;

  int add(const std::string& text) {
    const std::lock_guard<std::mutex> lock(mutex);
    said.push_back(text);
    return kFirstText + static_cast<int>(said.size()) - 1;
  }
  std::string get(int code) {
    const std::lock_guard<std::mutex> lock(mutex);
    const size_t at = static_cast<size_t>(code - kFirstText);
    if (code >= kFirstText && at < said.size()) return said[at];
    return code == Relay::kTruncated
               ? "a message was longer than its receive: the ranks called with different arguments"
               : "";
  }
};

Texts& texts() {
  static Texts* const all = new Texts;  // threads may wait until the process has ended
  return *all;
}

}  // namespace

void Relay::Request::end(int with) {
  code = with;
  if (!done.exchange(true, std::memory_order_release)) num_open.fetch_sub(1);
  tell();
}

namespace {

// All relays of this process, for threads with and without the GIL.
struct Relays {
  std::mutex mutex;
  std::vector<Relay*> all;
  std::atomic<int> num_due{0};  // peers, and collectives for gloo
  std::atomic<int> num_due_calls{0};  // the latter
  std::atomic<bool> neighbors{false};
};

Relays& relays() {
  static Relays* const all = new Relays;  // threads may wait until the process has ended
  return *all;
}

}  // namespace

Relay::Relay(int rank, int size)
    : rank_(rank), told_(rank, size), peers_(static_cast<size_t>(size)) {
  const std::lock_guard<std::mutex> lock(relays().mutex);
  relays().all.push_back(this);
}

Relay::~Relay() {
  if (sender_ != nullptr) sender_->stop();  // before what it uses is gone
  if (liveness_ != nullptr) liveness_->tell_by(nullptr);
  const std::lock_guard<std::mutex> lock(relays().mutex);
  auto& all = relays().all;
  all.erase(std::find(all.begin(), all.end(), this));
  for (const Peer& peer : peers_) relays().num_due -= peer.is_due;
}

bool Relay::is_due() { return relays().num_due.load(std::memory_order_relaxed) > 0; }
void Relay::add_due(int more) {
  relays().num_due_calls.fetch_add(more, std::memory_order_relaxed);
  relays().num_due.fetch_add(more, std::memory_order_relaxed);
}
bool Relay::has_calls() { return relays().num_due_calls.load(std::memory_order_relaxed) > 0; }
void Relay::expect_neighbors() { relays().neighbors.store(true, std::memory_order_relaxed); }
bool Relay::expects_neighbors() { return relays().neighbors.load(std::memory_order_relaxed); }

void Relay::order() {
  const std::lock_guard<std::mutex> lock(relays().mutex);
  bool has_calls = Relay::has_calls();
  for (Relay* relay : relays().all) {
    for (size_t peer = 0; peer < relay->peers_.size(); ++peer) {
      const std::lock_guard<std::mutex> own(relay->mutex_);
      Peer& one = relay->peers_[peer];
      if (!(one.is_due || (has_calls && one.is_attended)) || one.is_called) continue;
      has_calls = false;  // one thread is enough for these
      one.is_called = true;
      one.changed.notify_all();
    }
  }
}

// Updates whether frames for this peer wait for a thread. Called after each change.
void Relay::look(Peer& peer) {
  const bool due = most_leaving_ != 0 && !peer.is_taken && !peer.queue.empty() &&
                   peer.num_leaving < most_leaving_ && peer.failure == 0;
  relays().num_due.fetch_add(static_cast<int>(due) - static_cast<int>(peer.is_due));
  if (due && !peer.is_due) Engine::ring_all();
  peer.is_due = due;
}

void Relay::push(Peer& peer, Outgoing&& what) {
  if (has_sender_.load(std::memory_order_relaxed)) return push_to_stream(peer, std::move(what));
  peer.queue.push_back(std::move(what));
  if (most_leaving_ == 0) {
    peer.changed.notify_one();
  } else {
    look(peer);
  }
}

void Relay::be_carried(int most) {
  const std::lock_guard<std::mutex> lock(mutex_);
  most_leaving_ = most;
}

bool Relay::begin_to_take(int number) {
  Peer& peer = peer_of(number);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!peer.is_due) return false;
  peer.is_taken = true;
  look(peer);
  return true;
}

bool Relay::take(int number, unsigned char* frame, Todo& todo) {
  Peer& peer = peer_of(number);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (peer.queue.empty() || peer.num_leaving >= most_leaving_ || peer.failure != 0) {
    peer.is_taken = false;
    look(peer);
    return false;
  }
  todo = write_frame(peer, frame);
  ++peer.num_leaving;
  return true;
}

void Relay::frame_left(int number) {
  Peer& peer = peer_of(number);
  const std::lock_guard<std::mutex> lock(mutex_);
  --peer.num_leaving;
  look(peer);
}

void Relay::call(int number) {
  Peer& peer = peer_of(number);
  const std::lock_guard<std::mutex> lock(mutex_);
  peer.is_called = true;
  peer.changed.notify_all();
}

bool Relay::attend(int number) {
  Peer& peer = peer_of(number);
  std::unique_lock<std::mutex> lock(mutex_);
  peer.is_attended = true;
  peer.changed.wait(lock, [&peer] { return peer.is_called || peer.failure != 0; });
  peer.is_called = false;
  return peer.failure == 0;
}

Relay::Todo Relay::next(int number, unsigned char* frame) {
  Peer& peer = peer_of(number);
  std::unique_lock<std::mutex> lock(mutex_);
  peer.changed.wait(lock, [&peer] { return !peer.queue.empty() || peer.failure != 0; });
  if (peer.queue.empty() || peer.failure != 0) {
    Todo todo;
    todo.ends = true;
    return todo;
  }
  return write_frame(peer, frame);
}

// The oldest frame.
Relay::Todo Relay::write_frame(Peer& peer, unsigned char* frame) {
  const Outgoing one = peer.queue.front();
  peer.queue.pop_front();
  Todo todo;
  std::memcpy(frame, &one.frame, sizeof one.frame);
  todo.frame_nbytes = sizeof one.frame;
  todo.ends = one.frame.kind == FrameKind::Bye;
  todo.where = one.frame.where;
  switch (one.frame.kind) {
    case FrameKind::Message:
      todo.frame_nbytes += one.frame.nbytes;
      if (one.frame.nbytes != 0) {
        std::memcpy(frame + sizeof one.frame, one.payload, one.frame.nbytes);
      }
      one.request->end();
      break;
    case FrameKind::Answer:
      todo.frame_nbytes += one.frame.nbytes;
      if (one.state != nullptr) {
        std::memcpy(frame + sizeof one.frame, one.state.get(), one.frame.nbytes);
      }
      break;
    case FrameKind::Expect:
      todo.frame_nbytes = 0;
      [[fallthrough]];
    case FrameKind::Clear:
      todo.landing = one.landing;
      todo.landing_nbytes = one.frame.nbytes;
      break;
    case FrameKind::Done:
      todo.payload = one.payload;
      todo.payload_nbytes = one.frame.nbytes;
      peer.leaving.push_back(one.request);
      break;
    default:
      break;
  }
  return todo;
}

void Relay::sent(int number) {
  Peer& peer = peer_of(number);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (peer.leaving.empty()) return;
  peer.leaving.front()->end();
  peer.leaving.pop_front();
}

// A whole message is this rank's memory no more.
void Relay::count_received(Peer& peer, uint64_t nbytes) {
  peer.eager_in += nbytes;
  if (peer.eager_in < kWindowNbytes / 4) return;
  Outgoing credit;
  credit.frame = {FrameKind::Credit, 0, peer.eager_in, 0, 0};
  peer.eager_in = 0;
  push(peer, std::move(credit));
}

// A message has met its receive.
void Relay::match(Peer& peer, Request* request, Incoming&& message) {
  const bool fits = message.nbytes <= request->nbytes;
  request->nbytes = message.nbytes;
  const unsigned char* const bytes =
      message.in_frame != nullptr ? message.in_frame : message.bytes.get();
  if (bytes != nullptr || message.nbytes == 0) {
    if (fits && message.nbytes != 0) std::memcpy(request->data, bytes, message.nbytes);
    count_received(peer, message.nbytes);
    request->end(fits ? 0 : Relay::kTruncated);
    return;
  }
  std::unique_ptr<unsigned char[]> nowhere;
  if (!fits) nowhere.reset(new unsigned char[message.nbytes]);
  const uint64_t where = next_where(peer);
  Outgoing clear;
  clear.frame = {FrameKind::Clear, request->tag, message.nbytes, message.id, where};
  clear.landing = fits ? request->data : nowhere.get();
  peer.landing.emplace(where, Landing{request, std::move(nowhere)});
  push(peer, std::move(clear));
}

void Relay::take_message(Peer& peer, int tag, Incoming&& message) {
  const auto it = peer.posted.find(tag);
  if (it == peer.posted.end()) {
    if (message.in_frame != nullptr) {
      message.bytes.reset(new unsigned char[message.nbytes]);
      std::memcpy(message.bytes.get(), message.in_frame, message.nbytes);
      message.in_frame = nullptr;
    }
    peer.unexpected[tag].push_back(std::move(message));
    peer.num_unexpected.fetch_add(1, std::memory_order_release);
    tell();
    return;
  }
  Request* request = it->second.front();
  it->second.pop_front();
  if (it->second.empty()) peer.posted.erase(it);
  match(peer, request, std::move(message));
}

// The receiver is ready for it.
void Relay::send_payload(Peer& peer, const Frame& clear) {
  const auto it = peer.waiting.find(clear.id);
  if (it == peer.waiting.end()) return;
  const auto [request, data] = it->second;
  peer.waiting.erase(it);
  Outgoing done;
  done.frame = {FrameKind::Done, request->tag, request->nbytes, clear.id, clear.where};
  done.payload = data;
  done.request = request;
  push(peer, std::move(done));
}

Relay::Then Relay::arrived(int number, const unsigned char* bytes, uint64_t nbytes) {
  Frame frame;
  if (nbytes < sizeof frame) {
    lost(number, "a frame of " + std::to_string(nbytes) + " bytes is no frame of commrt's");
    return kEnd;
  }
  std::memcpy(&frame, bytes, sizeof frame);
  Incoming message;
  message.nbytes = frame.nbytes;
  message.id = frame.id;
  if (frame.kind == FrameKind::Message && frame.nbytes != 0) {
    message.in_frame = bytes + sizeof frame;
  }
  Peer& peer = peer_of(number);
  const SendAtEnd sending(*this, number);
  const std::lock_guard<std::mutex> lock(mutex_);
  switch (frame.kind) {
    case FrameKind::Message:
    case FrameKind::Ready:
      take_message(peer, frame.tag, std::move(message));
      return kNext;
    case FrameKind::Credit:
      peer.eager_out -= std::min(frame.nbytes, peer.eager_out);
      return kNext;
    case FrameKind::Clear:
      send_payload(peer, frame);
      return kNext;
    case FrameKind::Done:
      return static_cast<Then>(frame.where);
    case FrameKind::Ask:
      answer_ask(peer, frame);
      return kNext;
    case FrameKind::Answer: {
      Answer& said = answers_[frame.id];
      // The buffer may be longer than the frame in it.
      said.is_known = frame.nbytes == sizeof said.state && nbytes >= sizeof frame + frame.nbytes;
      if (said.is_known) std::memcpy(&said.state, bytes + sizeof frame, sizeof said.state);
      return kNext;
    }
    case FrameKind::Count:
      peer.counts[frame.tag] = frame.nbytes;
      return kNext;
    case FrameKind::Dump:
      flight::ask_here(static_cast<uint32_t>(number));
      return kNext;
    case FrameKind::Gone:
      hear_of_gone(number, frame.id);
      return kNext;
    case FrameKind::Bye:
    case FrameKind::Expect:
      break;
  }
  // The peer waits for this rank's last frame, too: then nobody reads from a closed connection.
  if (!peer.said_bye) {
    peer.said_bye = true;
    push(peer, Outgoing{});
    see_leave(number);
  }
  return kEnd;
}

void Relay::landed(int number, uint64_t where) {
  Peer& peer = peer_of(number);
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto it = peer.landing.find(where);
  if (it == peer.landing.end()) return;
  const Landing landing = std::move(it->second);
  peer.landing.erase(it);
  landing.request->end(landing.nowhere == nullptr ? 0 : Relay::kTruncated);
}

std::shared_ptr<ToldAfar> Relay::told_of(int tag) { return told_.of(tag); }

void Relay::answer_ask(Peer& peer, const Frame& ask) {
  Outgoing answer;
  answer.frame = {FrameKind::Answer, ask.tag, 0, ask.id, 0};
  if (const auto state = told_.answer(ask.tag, static_cast<int>(ask.where))) {
    answer.frame.nbytes = sizeof *state;
    answer.state = std::make_shared<RankState>(*state);
  }
  push(peer, std::move(answer));
}

uint64_t Relay::ask(int number, int tag, int about) {
  Peer& peer = peer_of(number);
  const SendAtEnd sending(*this, number);
  const std::lock_guard<std::mutex> lock(mutex_);
  const uint64_t question = ++questions_;
  if (peer.failure != 0 || peer.said_bye) {
    answers_[question] = {};
    return question;
  }
  Outgoing ask;
  ask.frame = {FrameKind::Ask, tag, 0, question, static_cast<uint64_t>(about)};
  push(peer, std::move(ask));
  return question;
}

bool Relay::answer(uint64_t question, Answer& said) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto it = answers_.find(question);
  if (it == answers_.end()) return false;
  said = it->second;
  answers_.erase(it);
  return true;
}

int Relay::code_of(const std::string& text) { return texts().add(text); }
std::string Relay::text_of(int code) { return texts().get(code); }

std::string Relay::failure_of(int number) const {
  const int code = peers_[static_cast<size_t>(number)].failure;
  return code == 0 ? "" : texts().get(code);
}

std::unique_ptr<Relay::Request> Relay::make_request(int peer, int tag, uint64_t nbytes) {
  auto made = std::make_unique<Request>();
  Request::num_open.fetch_add(1);
  made->owner = this;
  made->peer = peer;
  made->tag = tag;
  made->nbytes = nbytes;
  return made;
}

// An error's code, or 0.
int Relay::why_no_send(const Peer& peer, int number) const {
  if (peer.failure != 0) return peer.failure;
  if (!peer.said_bye) return 0;
  return texts().add("rank " + std::to_string(number) +
                     " of the job takes no more messages: it, or this rank, has ended");
}

int Relay::isend(const void* data, int nbytes, int number, int tag, Request** request,
                 bool leaves) {
  Peer& peer = peer_of(number);
  const SendAtEnd sending(*this, number, leaves);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (const int code = why_no_send(peer, number); code != 0) return code;
  *request = make_request(number, tag, static_cast<uint64_t>(nbytes)).release();
  Outgoing one;
  one.request = *request;
  const uint64_t length = static_cast<uint64_t>(nbytes);
  if (length <= kEagerNbytes && peer.eager_out + length <= kWindowNbytes) {
    peer.eager_out += length;
    one.frame = {FrameKind::Message, tag, (*request)->nbytes, 0, 0};
    one.payload = data;
  } else {
    const uint64_t id = peer.next_id++;
    peer.waiting.emplace(id, std::pair<Request*, const void*>(*request, data));
    one.frame = {FrameKind::Ready, tag, (*request)->nbytes, id, 0};
  }
  push(peer, std::move(one));
  return 0;
}

int Relay::irecv(void* data, int nbytes, int number, int tag, Request** request) {
  Peer& peer = peer_of(number);
  const SendAtEnd sending(*this, number);
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto it = peer.unexpected.find(tag);
  if (it == peer.unexpected.end() && peer.failure != 0) return peer.failure;
  auto made = make_request(number, tag, static_cast<uint64_t>(nbytes));
  made->data = static_cast<unsigned char*>(data);
  *request = made.release();
  if (it == peer.unexpected.end()) {
    peer.posted[tag].push_back(*request);
    return 0;
  }
  Incoming message = std::move(it->second.front());
  it->second.pop_front();
  if (it->second.empty()) peer.unexpected.erase(it);
  peer.num_unexpected.fetch_sub(1, std::memory_order_release);
  const bool is_here = message.bytes != nullptr || message.nbytes == 0;
  if (!is_here && peer.failure != 0) {
    (*request)->end(peer.failure);
  } else {
    match(peer, *request, std::move(message));
  }
  return 0;
}

int Relay::iprobe(int number, int tag, int* flag, int* count) {
  Peer& peer = peer_of(number);
  *flag = 0;
  if (peer.num_unexpected.load(std::memory_order_acquire) != 0) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto it = peer.unexpected.find(tag);
    if (it != peer.unexpected.end()) {
      *flag = 1;
      *count = static_cast<int>(it->second.front().nbytes);
      return 0;
    }
  }
  return peer.failure.load(std::memory_order_acquire);
}

// No two of the numbers in flight are the same. They are gloo's tags, of which 0 has another use.
uint64_t Relay::next_where(Peer& peer) {
  constexpr uint64_t kTags = 1 << 30;
  return peer.next_where++ % kTags + 1;
}

int Relay::expect(void* data, uint64_t nbytes, int number, uint64_t* where, Request** request) {
  Peer& peer = peer_of(number);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (peer.failure != 0) return peer.failure;
  *where = next_where(peer);
  *request = make_request(number, 0, nbytes).release();
  (*request)->data = static_cast<unsigned char*>(data);
  peer.landing.emplace(*where, Landing{*request, nullptr});
  if (has_sender_.load(std::memory_order_relaxed)) return 0;  // a stream needs no word of it
  Outgoing one;
  one.frame = {FrameKind::Expect, 0, nbytes, 0, *where};
  one.landing = data;
  push(peer, std::move(one));
  return 0;
}

int Relay::deliver(const void* data, uint64_t nbytes, int number, uint64_t where,
                   Request** request) {
  Peer& peer = peer_of(number);
  const SendAtEnd sending(*this, number);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (const int code = why_no_send(peer, number); code != 0) return code;
  *request = make_request(number, 0, nbytes).release();
  Outgoing one;
  one.frame = {FrameKind::Done, 0, nbytes, 0, where};
  one.payload = data;
  one.request = *request;
  push(peer, std::move(one));
  return 0;
}

// A receive that has met its message goes on.
void Relay::cancel(Request* request) {
  Peer& peer = peer_of(request->peer);
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto it = peer.posted.find(request->tag);
  if (it == peer.posted.end()) return;
  auto& queue = it->second;
  const auto at = std::find(queue.begin(), queue.end(), request);
  if (at == queue.end()) return;
  queue.erase(at);
  if (queue.empty()) peer.posted.erase(it);
  request->cancelled = true;
  request->end();
}

}  // namespace commrt
