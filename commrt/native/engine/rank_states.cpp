// SPDX-License-Identifier: Apache-2.0
// Ranks say what they do, and the kernel speaks of those of this node.
#include "engine/rank_states.hpp"

#include <algorithm>
#include <cstring>
#include <iterator>

#include "engine/comm.hpp"
#include "engine/engine.hpp"
#include "engine/p2p.hpp"

namespace commrt {

namespace {

// A rank that waits says so ten times as often. Beside busy processes it may be late.
constexpr double kLately_s = 10 * kTellEvery_s;

uint64_t packed(int code, int peer) {
  return static_cast<uint64_t>(static_cast<uint32_t>(code)) << 32 | static_cast<uint32_t>(peer);
}

}  // namespace

const char* word_for(RankDoes does) {
  switch (does) {
    case RankDoes::Computes: return "computing";
    case RankDoes::Waits: return "waiting";
    case RankDoes::Stopped: return "stopped";
    case RankDoes::Ended: return "dead";
    case RankDoes::Left: return "left";
    case RankDoes::Unknown: break;
  }
  return "unknown";
}

const char* name_of_operation(int code) {
  if (code == kSendCode) return "send";
  if (code == kRecvCode) return "recv";
  const char* const name = name_of_call(code);
  return name != nullptr ? name : "an operation";
}

namespace {

void show(Waits& mine, const ToldWait* wait) {
  if (wait == nullptr) {
    mine.looked_ns.store(0, std::memory_order_release);
    return;
  }
  const uint64_t now = steady_ns();
  mine.since_ns.store(now - static_cast<uint64_t>(1e9 * wait->for_s), std::memory_order_relaxed);
  mine.what.store(packed(wait->code, wait->peer), std::memory_order_relaxed);
  mine.seq.store(wait->seq, std::memory_order_relaxed);
  for (size_t i = 0; i < std::size(mine.on); ++i) {
    uint64_t word;
    std::memcpy(&word, wait->on + i * sizeof word, sizeof word);
    mine.on[i].store(word, std::memory_order_relaxed);
  }
  mine.looked_ns.store(now, std::memory_order_release);
}

// Of a process that lives; `said_it_waits`: as far as it could say so.
void read(const Waits& its, RankState& found, bool& said_it_waits) {
  found.does = RankDoes::Computes;
  const uint64_t looked = its.looked_ns.load(std::memory_order_acquire);
  said_it_waits = looked != 0;
  if (!said_it_waits) return;
  const uint64_t what = its.what.load(std::memory_order_relaxed);
  found.wait.code = static_cast<int32_t>(what >> 32);
  found.wait.peer = static_cast<int32_t>(what);
  found.wait.seq = its.seq.load(std::memory_order_relaxed);
  const uint64_t since = its.since_ns.load(std::memory_order_relaxed);
  const uint64_t now = steady_ns();
  found.wait.for_s = now > since ? 1e-9 * static_cast<double>(now - since) : 0;
  for (size_t i = 0; i < std::size(its.on); ++i) {
    const uint64_t word = its.on[i].load(std::memory_order_relaxed);
    std::memcpy(found.wait.on + i * sizeof word, &word, sizeof word);
  }
  found.waits = 1e-9 * static_cast<double>(now - std::min(now, looked)) < kLately_s;
  if (found.waits) found.does = RankDoes::Waits;
}

// The latest collective, by what is told of it.
void read_latest(const std::atomic<uint64_t>& mark, const std::atomic<uint64_t>& ticks,
                 RankState& found) {
  if (found.started == 0) return;
  found.code = code_of(mark.load(std::memory_order_relaxed));
  found.age_s = Moment().seconds_since(ticks.load(std::memory_order_relaxed));
}

}  // namespace

void Comm::show_wait(const ToldWait* wait) {
  if (told_ != nullptr) show(told_->waits, wait);
  if (arena != nullptr) show(header(member_index_[rank])->waits, wait);
}

RankState state_from(const ToldAfar& told, int rank) {
  RankState found;
  found.rank = rank;
  found.started = told.started.load(std::memory_order_relaxed);
  read_latest(told.latest_mark, told.latest_ticks, found);
  bool said_it_waits;
  read(told.waits, found, said_it_waits);
  return found;
}

RankState Comm::state_of(int peer) const {
  RankState found;
  found.rank = peer;
  if (arena == nullptr && peer == rank) {  // alone on its node
    found.does = RankDoes::Computes;
    found.started = next_seq;
    if (next_seq == 0) return found;
    const Record& latest = records[(next_seq - 1) % kRecords];
    found.code = latest.coll;
    found.age_s = Moment().seconds_since(latest.start_ticks);
    return found;
  }
  if (arena == nullptr || member_of(peer) < 0) {
    // Of ranks of other nodes it is known at most that they are gone.
    if (links_[static_cast<size_t>(peer)].kind != LinkKind::Mpi) return found;
    if (has_left(peer)) found.does = RankDoes::Left;
    if (has_ended(peer)) found.does = RankDoes::Ended;
    return found;
  }
  const RankHeader& its = *header(member_of(peer));
  found.started = its.started.load(std::memory_order_acquire);
  read_latest(its.latest_mark, its.latest_ticks, found);
  bool said_it_waits;
  read(its.waits, found, said_it_waits);
  if (has_ended(peer)) {
    found.does = RankDoes::Ended;
    found.waits = false;
  } else if (has_left(peer)) {
    found.does = RankDoes::Left;
    found.waits = false;
  } else if (liveness_ != nullptr && life_of_[static_cast<size_t>(peer)] >= 0 &&
             liveness_->is_stopped(life_of_[static_cast<size_t>(peer)])) {
    found.does = RankDoes::Stopped;
    found.waits = said_it_waits;  // it could not say that it does not any more
  }
  return found;
}

void Engine::tell_wait_locked(const ToldWait* wait) {
  for (Comm* comm : comms_) comm->show_wait(wait);
}

bool WaitTeller::is_due(double now) {
  if (since_s_ == 0) {
    since_s_ = now;
    next_s_ = now + kTellEvery_s;
  }
  if (now < next_s_) return false;
  next_s_ = now + kTellEvery_s;
  told_ = true;
  return true;
}

void WaitTeller::tell(double now, const Comm& comm, const Op& op) {
  if (!is_due(now)) return;
  ToldWait wait;
  wait.seq = op.seq;
  wait.for_s = now - since_s_;
  if (op.p2p != nullptr) {
    wait.code = op.p2p->is_send ? kSendCode : kRecvCode;
    wait.peer = op.p2p->peer;
  } else {
    wait.code = op.plan->coll;
  }
  comm.name.copy(wait.on, ToldWait::kNameBytes);
  engine_->tell_wait_locked(&wait);
}

void WaitTeller::tell(double now) {
  if (engine_ == nullptr || !is_due(now)) return;
  ToldWait wait;
  wait.for_s = now - since_s_;
  const std::unique_lock<std::mutex> lock(engine_->mutex, std::try_to_lock);
  if (lock.owns_lock()) engine_->tell_wait_locked(&wait);
}

WaitTeller::~WaitTeller() {
  if (!told_ || Engine::forked.load(std::memory_order_relaxed)) return;
  const std::lock_guard<std::mutex> lock(engine_->mutex);
  engine_->tell_wait_locked(nullptr);
}

}  // namespace commrt
