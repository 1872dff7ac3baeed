// SPDX-License-Identifier: Apache-2.0
// Progress over all communicators, the parking thread, and how to wait politely.
#include "engine.hpp"

#include "staging.hpp"
#include "watched.hpp"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <new>
#include <utility>

namespace commrt {

std::atomic<bool> Engine::forked{false};

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

Engine::~Engine() {
  if (!forked.load(std::memory_order_relaxed)) {
    stop_thread();
    return;
  }
  // Another process's thread can neither be joined nor be waited for.
  static_cast<void>(parked_.release());
  if (thread_.joinable()) static_cast<void>(new std::thread(std::move(thread_)));
}

void Engine::add(Comm* comm) {
  std::lock_guard<std::mutex> lock(mutex);
  comms_.push_back(comm);
}

void Engine::remove(Comm* comm) {
  // The lock may have been held, in the parent, by a thread that this process lacks.
  if (forked.load(std::memory_order_relaxed)) return;
  std::lock_guard<std::mutex> lock(mutex);
  comms_.erase(std::remove(comms_.begin(), comms_.end(), comm), comms_.end());
}

bool Engine::step_locked(uint64_t limit) {
  bool any = false;
  for (Comm* comm : comms_) any = comm->progress(limit) || any;
  return any;
}

bool Engine::step() {
  bool any = look_at_watched();
  {
    std::lock_guard<std::mutex> lock(mutex);
    any = step_locked(kSliceBytes) || any;
  }
  return has_stagers() ? step_stagers(any) : any;
}

void Engine::add_stager(std::shared_ptr<Stager> stager) {
  const std::lock_guard<std::mutex> own(stagers_mutex_);
  stagers_.push_back(std::move(stager));
  num_stagers_.fetch_add(1, std::memory_order_release);
}

void Engine::remove_stager(const Stager* stager) {
  const std::lock_guard<std::mutex> own(stagers_mutex_);
  const auto found = std::find_if(stagers_.begin(), stagers_.end(),
                                  [&](const auto& one) { return one.get() == stager; });
  if (found == stagers_.end()) return;
  stagers_.erase(found);
  num_stagers_.fetch_sub(1, std::memory_order_release);
}

// After a pass; true if that or this advanced anything.
bool Engine::step_stagers(bool advanced) {
  thread_local std::vector<std::shared_ptr<Stager>> all;
  {
    const std::lock_guard<std::mutex> own(stagers_mutex_);
    all = stagers_;
  }
  for (const auto& stager : all) advanced = stager->progress() || advanced;
  if (advanced && !all.empty()) all.front()->announce();
  all.clear();
  return advanced;
}

void Engine::watch(std::shared_ptr<Watched> work) {
  const std::lock_guard<std::mutex> own(watched_mutex_);
  watched_.push_back(std::move(work));
  num_watched_.fetch_add(1, std::memory_order_release);
}

void Engine::unwatch(const Watched* work) {
  const std::lock_guard<std::mutex> own(watched_mutex_);
  const auto found = std::find_if(watched_.begin(), watched_.end(),
                                  [&](const auto& one) { return one.get() == work; });
  if (found == watched_.end()) return;
  watched_.erase(found);
  num_watched_.fetch_sub(1, std::memory_order_release);
}

bool Engine::look_at_watched() {
  if (num_watched_.load(std::memory_order_acquire) == 0) return false;
  thread_local std::vector<std::shared_ptr<Watched>> all;
  {
    const std::lock_guard<std::mutex> own(watched_mutex_);
    all = watched_;
  }
  bool any = false;
  for (const auto& work : all) any = work->look() || any;
  all.clear();
  return any;
}

bool Engine::is_watching() {
  if (num_watched_.load(std::memory_order_acquire) == 0) return false;
  const std::lock_guard<std::mutex> own(watched_mutex_);
  return std::any_of(watched_.begin(), watched_.end(),
                     [](const auto& one) { return one->outstanding() != 0; });
}

bool Engine::is_staging() {
  if (!has_stagers()) return false;
  const std::lock_guard<std::mutex> own(stagers_mutex_);
  return std::any_of(stagers_.begin(), stagers_.end(),
                     [](const auto& one) { return one->outstanding() != 0; });
}

void Engine::release_streams(const std::string& why) {
  std::vector<std::shared_ptr<Stager>> all;
  {
    const std::lock_guard<std::mutex> own(stagers_mutex_);
    all = stagers_;
  }
  for (const auto& stager : all) {
    if (stager->outstanding() != 0) stager->give_up("revoked", why);
  }
}

void Engine::discard_objects(void* (&objects)[2]) {
  const std::lock_guard<std::mutex> own(stagers_mutex_);
  for (void*& object : objects) {
    if (object != nullptr) objects_.push_back(object);
    object = nullptr;
  }
  if (!objects_.empty()) has_ended_.store(true, std::memory_order_relaxed);
}

std::vector<void*> Engine::take_objects() {
  const std::lock_guard<std::mutex> own(stagers_mutex_);
  return std::exchange(objects_, {});
}

bool Engine::busy_locked() const {
  return std::any_of(comms_.begin(), comms_.end(), [](const Comm* c) { return !c->idle(); });
}

bool Engine::idle() {
  if (is_staging() || is_watching()) return false;
  std::lock_guard<std::mutex> lock(mutex);
  return !busy_locked();
}

std::vector<std::shared_ptr<Op>> Engine::take_ended() {
  std::lock_guard<std::mutex> lock(mutex);
  has_ended_.store(false, std::memory_order_relaxed);
  return std::exchange(ended_, {});
}

std::shared_ptr<Op> Engine::take_wanted_locked() {
  for (Comm* comm : comms_) {
    if (std::shared_ptr<Op> op = comm->take_wanted()) return op;
  }
  wants_python_.store(false, std::memory_order_release);
  return nullptr;
}

void Engine::start_thread() {
  if (thread_.joinable()) return;
  stopping_ = false;
  // Signals are for the threads of the program: Python's handlers run in its main thread,
  // and what that one sleeps in is to be interrupted.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    thread_ = std::thread([this] { thread_main(); });
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void Engine::stop_thread() {
  if (!thread_.joinable() || forked.load(std::memory_order_relaxed)) return;
  {
    std::lock_guard<std::mutex> lock(mutex);
    stopping_ = true;
  }
  parked_->notify_all();
  thread_.join();
}

void Engine::wake() {
  if (thread_.joinable()) parked_->notify_one();
}

int Engine::spins_locked(int own) const {
  for (const Comm* comm : comms_) own = comm->least_spins(own);
  return own;
}

void Engine::thread_main() {
  pthread_setname_np(pthread_self(), "commrt-progress");
  Backoff backoff(0);
  constexpr int kSpins = 200;
  for (;;) {
    bool advanced = false;
    {
      std::unique_lock<std::mutex> lock(mutex);
      auto needed = [this] { return stopping_ || busy_locked() || is_staging() || is_watching(); };
      if (!needed()) {
        is_parked_.store(true, std::memory_order_release);
        parked_->wait(lock, needed);
        is_parked_.store(false, std::memory_order_release);
        backoff.reset();
      }
      if (stopping_) return;
      int spins = kSpins;  // where ranks outnumber cores, hardly any
      for (const Comm* comm : comms_) spins = std::min(spins, comm->spin_before_yield);
      backoff.spin_at_most(spins_locked(spins));
      try {
        advanced = step_locked(kSliceBytes);
      } catch (const std::bad_alloc&) {
        // Those who wait learn of it by themselves; here the next pass may have memory.
      }
    }
    // Between passes the lock is free, so that callers can submit and wait.
    advanced = look_at_watched() || advanced;
    if (has_stagers()) advanced = step_stagers(advanced);
    if (advanced) backoff.reset();
    backoff.pause();
  }
}

void Backoff::pause() {
  ++count_;
  if (count_ <= spins_) {
    relax();
    return;
  }
  constexpr int kYields = 20000;
  if (count_ <= spins_ + kYields) {
    sched_yield();
    return;
  }
  const timespec nap{0, 50000};
  nanosleep(&nap, nullptr);
}

}  // namespace commrt
