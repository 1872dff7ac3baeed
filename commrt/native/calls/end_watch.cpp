// SPDX-License-Identifier: Apache-2.0
// A wait for the first of many ends.
#include "calls/end_watch.hpp"

#include <algorithm>
#include <mutex>
#include <utility>

#include "engine/gloo_calls.hpp"
#include "engine/relay.hpp"

namespace commrt {

EndWatch::EndWatch(std::shared_ptr<Engine> engine, bool has_core)
    : engine_(std::move(engine)), has_core_(has_core) {}

void EndWatch::wake() {
  is_woken_.store(true, std::memory_order_release);
  engine_->ring();
}

std::vector<size_t> EndWatch::ended(const std::vector<Watched>& watched) const {
  std::vector<size_t> found;
  for (size_t i = 0; i < watched.size(); ++i) {
    if (watched[i].op->finished()) found.push_back(i);
  }
  return found;
}

void EndWatch::fail_after_peers(const std::vector<Watched>& watched) {
  const std::lock_guard<std::mutex> lock(engine_->mutex);
  for (const auto& [op, comm] : watched) {
    if (!op->finished()) comm->fail_after_peer(op);
  }
}

bool EndWatch::wants_python() const {
  // Where connections of commrt's own carry the messages, no other thread has the GIL for calls of gloo.
  return engine_->wants_python() || engine_->is_timed_due() || Relay::has_calls();
}

Backoff& EndWatch::backoff(const std::vector<Watched>& watched) {
  constexpr double kPatience_s = 1e-3;
  if (backoff_ == nullptr) {
    backoff_ = std::make_unique<Backoff>(*engine_, 0);
    if (!has_core_) backoff_->be_patient_for(kPatience_s);
  }
  backoff_->sleep_soon(std::any_of(watched.begin(), watched.end(), [](const Watched& one) {
    return one.comm->off_node->is_relay;
  }));
  return *backoff_;
}

std::vector<size_t> EndWatch::wait(const std::vector<Watched>& watched, bool is_curious,
                                   double limit_s) {
  const Engine::HandsOver hands_over(*engine_);
  constexpr double kLongestNap_s = 5e-4;
  // A process that ends rings nobody.
  constexpr double kBetweenLooks_s = 0.1;
  const double deadline = now_s() + limit_s;
  double next_look = now_s() + kBetweenLooks_s;
  double nap_s = Bells::kNap_s;
  for (;;) {
    if (is_woken_.exchange(false, std::memory_order_acquire)) break;
    bool advanced = false, looked = false;
    if (const std::unique_lock<std::mutex> lock(engine_->mutex, std::try_to_lock);
        lock.owns_lock()) {
      looked = true;
      advanced = engine_->step_locked(kSliceBytes);
    }
    if (engine_->has_device_work()) advanced = engine_->step_device_work(advanced);
    if (Relay::is_due()) Relay::order();
    if (auto found = ended(watched); !found.empty()) {
      if (backoff_ != nullptr) backoff_->reset();  // the next wait is as patient
      backoff_.reset();
      return found;
    }
    if (wants_python() || (is_curious && advanced)) break;
    Backoff& pausing = backoff(watched);
    if (advanced) {
      pausing.reset();
      nap_s = Bells::kNap_s;
      continue;
    }
    // Gloo's operations end in calls that need the GIL.
    const bool in_gloo = GlooGroup::is_running();
    const bool has_rested =
        pausing.pause(std::min({deadline, next_look, engine_->timed_due_s.load()}), looked);
    if (now_s() >= next_look) {
      fail_after_peers(watched);
      next_look = now_s() + kBetweenLooks_s;
    }
    if (pausing.take_ring()) {
      // For nothing that came: a peer may have given up.
      fail_after_peers(watched);
      // Each ring that wakes this thread takes some microseconds of the one that rings. Where
      // another thread makes all the progress, it naps for longer and longer before it sleeps.
      if (!has_core_ && nap_s > Bells::kNap_s) nap(std::min(nap_s, std::max(0.0, deadline - now_s())));
      nap_s = std::min(2 * nap_s, kLongestNap_s);
    }
    // Another thread's progress may have ended its operation: the caller is to look before
    // this thread sleeps, and after it has. The next wait goes on where this one was.
    if ((is_curious || in_gloo) && has_rested) return {};
    if (now_s() >= deadline) break;
  }
  backoff_.reset();
  return {};
}

}  // namespace commrt
