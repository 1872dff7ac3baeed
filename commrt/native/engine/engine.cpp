// SPDX-License-Identifier: Apache-2.0
// Progress over all communicators, the parking thread, and how to wait politely.
#include "engine/engine.hpp"

#include "engine/device_work.hpp"
#include "engine/mpi_turn.hpp"
#include "engine/relay.hpp"

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
  static_cast<void>(watching_.release());
  for (std::thread* thread : {&thread_, &watch_}) {
    if (thread->joinable()) static_cast<void>(new std::thread(std::move(*thread)));
  }
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

bool Engine::has(const Comm* comm) {
  const std::lock_guard<std::mutex> own(mutex);
  return std::find(comms_.begin(), comms_.end(), comm) != comms_.end();
}

bool Engine::share_with_mpi(Device* device, std::shared_ptr<void> keeps) {
  const std::lock_guard<std::mutex> own(mutex);
  if (mpi_device_users_ != 0 && mpi_device_ != device) return false;
  mpi_device_ = device;
  mpi_device_keeps_ = std::move(keeps);
  ++mpi_device_users_;
  return true;
}

void Engine::leave_mpi() {
  const std::lock_guard<std::mutex> own(mutex);
  if (--mpi_device_users_ != 0) return;
  mpi_device_ = nullptr;
  mpi_device_keeps_ = nullptr;
}

bool Engine::step_locked(uint64_t limit) {
  const MpiTurn turn(mpi_device_);
  bool any = false;
  for (Comm* comm : comms_) any = comm->progress(limit) || any;
  return any;
}

bool Engine::step() {
  bool any = false;
  {
    std::lock_guard<std::mutex> lock(mutex);
    any = step_locked(kSliceBytes);
  }
  return has_device_work() ? step_device_work(any) : any;
}

void Engine::add_device_work(std::shared_ptr<DeviceWork> work) {
  const std::lock_guard<std::mutex> own(device_work_mutex_);
  device_work_.push_back(std::move(work));
  num_device_work_.fetch_add(1, std::memory_order_release);
}

void Engine::remove_device_work(const DeviceWork* work) {
  const std::lock_guard<std::mutex> own(device_work_mutex_);
  const auto found = std::find_if(device_work_.begin(), device_work_.end(),
                                  [&](const auto& one) { return one.get() == work; });
  if (found == device_work_.end()) return;
  device_work_.erase(found);
  num_device_work_.fetch_sub(1, std::memory_order_release);
}

// Called after a pass; true if that pass or this call advanced anything.
bool Engine::step_device_work(bool advanced) {
  thread_local std::vector<std::shared_ptr<DeviceWork>> all;
  {
    const std::lock_guard<std::mutex> own(device_work_mutex_);
    all = device_work_;
  }
  for (const auto& work : all) advanced = work->progress() || advanced;
  // If the host has a part in the work, somebody may pause until it has done that part.
  const auto staged = std::find_if(all.begin(), all.end(),
                                   [](const auto& work) { return work->holds_streams(); });
  if (advanced && staged != all.end()) (*staged)->announce();
  all.clear();
  return advanced;
}

bool Engine::is_device_busy() {
  if (!has_device_work()) return false;
  const std::lock_guard<std::mutex> own(device_work_mutex_);
  return std::any_of(device_work_.begin(), device_work_.end(),
                     [](const auto& one) { return one->outstanding() != 0; });
}

void Engine::release_streams(const std::string& why) {
  std::vector<std::shared_ptr<DeviceWork>> all;
  {
    const std::lock_guard<std::mutex> own(device_work_mutex_);
    all = device_work_;
  }
  for (const auto& work : all) {
    if (work->holds_streams() && work->outstanding() != 0) work->give_up("revoked", why);
  }
}

void Engine::discard_objects(void* (&objects)[2]) {
  const std::lock_guard<std::mutex> own(device_work_mutex_);
  for (void*& object : objects) {
    if (object != nullptr) objects_.push_back(object);
    object = nullptr;
  }
  if (!objects_.empty()) has_ended_.store(true, std::memory_order_relaxed);
}

std::vector<void*> Engine::take_objects() {
  const std::lock_guard<std::mutex> own(device_work_mutex_);
  return std::exchange(objects_, {});
}

bool Engine::busy_locked() const {
  return std::any_of(comms_.begin(), comms_.end(), [](const Comm* c) { return !c->idle(); });
}

bool Engine::idle() {
  if (is_device_busy()) return false;
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

namespace {

// Signals are for the threads of the program: Python's handlers run in its main thread, and
// what that one sleeps in is to be interrupted.
template <class F>
std::thread without_signals(F function) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    std::thread made(function);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return made;
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
}

}  // namespace

void Engine::start_thread() {
  if (thread_.joinable()) return;
  stopping_ = false;
  thread_ = without_signals([this] { thread_main(); });
}

void Engine::start_watch() {
  if (watch_.joinable()) return;
  watch_stopping_ = false;
  watch_ = without_signals([this] { watch_main(); });
}

void Engine::watch_main() {
  pthread_setname_np(pthread_self(), "commrt-watch");
  constexpr auto kBetween = std::chrono::milliseconds(100);
  for (;;) {
    {
      std::unique_lock<std::mutex> lock(watch_mutex_);
      if (watching_->wait_for(lock, kBetween, [this] { return watch_stopping_; })) return;
    }
    std::vector<std::shared_ptr<DeviceWork>> all;
    {
      const std::lock_guard<std::mutex> own(device_work_mutex_);
      all = device_work_;
    }
    for (const auto& work : all) {
      const bool may_hold = work->holds_streams() && !work->simulated();
      if (may_hold && work->outstanding() != 0) work->ask_for_oldest();
    }
  }
}

void Engine::stop_thread() {
  if (forked.load(std::memory_order_relaxed)) return;
  if (watch_.joinable()) {
    {
      const std::lock_guard<std::mutex> lock(watch_mutex_);
      watch_stopping_ = true;
    }
    watching_->notify_all();
    watch_.join();
  }
  if (!thread_.joinable()) return;
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

bool Engine::only_gloo_locked() const {
  if (thread_.joinable()) return true;
  return !has_device_work() &&
         std::all_of(comms_.begin(), comms_.end(), [](const Comm* comm) { return comm->only_gloo(); });
}

void Engine::thread_main() {
  pthread_setname_np(pthread_self(), "commrt-progress");
  Backoff backoff(0);
  constexpr int kSpins = 200;
  for (;;) {
    bool advanced = false;
    {
      std::unique_lock<std::mutex> lock(mutex);
      auto needed = [this] { return stopping_ || busy_locked() || is_device_busy(); };
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
      backoff.sleep_soon(std::any_of(comms_.begin(), comms_.end(),
                                     [](const Comm* comm) { return comm->off_node->is_relay; }));
      try {
        advanced = step_locked(kSliceBytes);
      } catch (const std::bad_alloc&) {
        // Waiting threads learn of it by themselves; here the next pass may have memory.
      }
    }
    // Between passes the lock is free, so that callers can submit and wait.
    if (has_device_work()) advanced = step_device_work(advanced);
    if (Relay::is_due()) Relay::order();  // this thread never takes the GIL
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
  constexpr int kYields = 20000, kYieldsForNeighbors = 20;
  int yields = kYields;
  // A yield may give away the core for a whole slice of somebody's; who sleeps is woken at once.
  if (sleeps_soon_) yields = Relay::expects_neighbors() ? kYieldsForNeighbors : 0;
  if (count_ <= spins_ + yields) {
    sched_yield();
    return;
  }
  if (sleeps_soon_) return Relay::wait_for_change(seen_);
  const timespec nap{0, 50000};
  nanosleep(&nap, nullptr);
}

}  // namespace commrt
