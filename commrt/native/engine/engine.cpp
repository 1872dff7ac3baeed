// SPDX-License-Identifier: Apache-2.0
// Progress over all communicators, the parking thread, and how to wait politely.
#include "engine/engine.hpp"

#include "engine/backoff.hpp"
#include "engine/device_work.hpp"
#include "engine/mpi_turn.hpp"
#include "engine/p2p.hpp"
#include "engine/relay.hpp"
#include "engine/tcp_poller.hpp"
#include "engine/stand_ins.hpp"

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

namespace {

// The engines of this process, for threads that know none of them. Never freed: threads may end
// late.
struct Engines {
  std::mutex mutex;
  std::vector<Engine*> all;
  std::atomic<int> num_sleepers{0};
  std::mutex going_on;  // the outer one; while it is held, no engine ends
};

Engines& engines() {
  static auto* const all = new Engines();
  return *all;
}

}  // namespace

Engine::Engine() {
  static std::atomic<uint64_t> number{0};
  const std::string name = "alone/" + std::to_string(number.fetch_add(1));
  kept_bells_.push_back(Bells::of_threads(name, 1, 0));
  ringing_.store(kept_bells_.back().get(), std::memory_order_release);
  const std::lock_guard<std::mutex> lock(engines().mutex);
  engines().all.push_back(this);
}

void Engine::ring_all() {
  if (engines().num_sleepers.load() == 0) return;
  const std::lock_guard<std::mutex> lock(engines().mutex);
  for (Engine* engine : engines().all) engine->ring();
}

void Engine::lie_down() { engines().num_sleepers.fetch_add(1); }
void Engine::rise() { engines().num_sleepers.fetch_sub(1); }

Engine* Engine::only_one() {
  const std::lock_guard<std::mutex> lock(engines().mutex);
  return engines().all.size() == 1 ? engines().all.front() : nullptr;
}

void Engine::add_bells(const std::shared_ptr<Bells>& bells) {
  const std::lock_guard<std::mutex> lock(bells_mutex_);
  if (kept_bells_.size() == 1) {
    kept_bells_.push_back(bells);
    ringing_.store(bells.get(), std::memory_order_release);
    return;
  }
  auto is_gone = [](const std::weak_ptr<Bells>& one) { return one.expired(); };
  other_bells_.erase(std::remove_if(other_bells_.begin(), other_bells_.end(), is_gone),
                     other_bells_.end());
  other_bells_.push_back(bells);
}

std::vector<std::shared_ptr<Bells>> Engine::all_bells() {
  const std::lock_guard<std::mutex> lock(bells_mutex_);
  std::vector<std::shared_ptr<Bells>> found(kept_bells_.begin() + 1, kept_bells_.end());
  for (const auto& one : other_bells_) {
    if (auto bells = one.lock()) found.push_back(std::move(bells));
  }
  return found;
}

std::shared_ptr<Bells> Engine::bell() {
  const std::lock_guard<std::mutex> lock(bells_mutex_);
  return kept_bells_.back();
}

double Engine::longest_sleep_s() {
  // A look costs some microseconds: below a hundredth of this.
  constexpr double kPoll_s = 2e-3;
  {
    const std::lock_guard<std::mutex> lock(bells_mutex_);
    for (const auto& one : other_bells_) {
      if (!one.expired()) return kPoll_s;
    }
  }
  if (is_device_busy()) return kPoll_s;
  const std::unique_lock<std::mutex> lock(mutex, std::try_to_lock);
  if (!lock.owns_lock()) return Bells::kNap_s;
  for (const Comm* comm : comms_) {
    if (comm->tells_nobody()) return kPoll_s;
  }
  return Bells::kLongest_s;
}

Engine::~Engine() {
  if (!forked.load(std::memory_order_relaxed)) {
    const std::lock_guard<std::mutex> outer(engines().going_on);
    const std::lock_guard<std::mutex> lock(engines().mutex);
    auto& all = engines().all;
    all.erase(std::find(all.begin(), all.end(), this));
  }
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

void Engine::leave() {
  const std::lock_guard<std::mutex> lock(mutex);
  for (Comm* comm : comms_) comm->leave(Farewell::Left);
}

void Engine::end_stand_ins() {
  const std::lock_guard<std::mutex> lock(mutex);
  for (Comm* comm : comms_) comm->refusals.stand_ins->end();
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
  if (TcpPoller::is_used() && Relay::is_awaited()) TcpPoller::instance().poll();
  if (closely_.load(std::memory_order_relaxed)) {
    closely_.store(false, std::memory_order_relaxed);
    for (Comm* comm : comms_) comm->look_closely();
  }
  bool any = false;
  for (Comm* comm : comms_) any = comm->progress(limit) || any;
  if (any) ring();
  has_advanced_ = any;
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
  if (advanced) ring();
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
  has_thread_.store(true, std::memory_order_release);
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
      if (work->may_stick()) work->free_who_sticks();
      const bool may_hold = work->holds_streams() && !work->simulated();
      if (may_hold && work->outstanding() != 0) work->ask_for_oldest();
    }
  }
}

void Engine::stop_thread() {
  if (forked.load(std::memory_order_relaxed)) return;
  {
    const std::lock_guard<std::mutex> outer(engines().going_on);  // the last pass has ended
    by_arrivals_.store(false, std::memory_order_release);
  }
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
  ring();
  thread_.join();
  has_thread_.store(false, std::memory_order_release);
}

bool Engine::goes_on_by_arrivals() const {
  return by_arrivals_.load(std::memory_order_acquire) && TcpPoller::is_used();
}

void Engine::wake(bool has_more) {
  if (has_thread()) {
    parked_->notify_one();
    ring();
  } else if (goes_on_by_arrivals()) {
    TcpPoller::instance().hand_over(has_more);
  }
}

bool Engine::may_have_more(const Op& op) {
  if (op.finished()) return false;
  if (op.p2p != nullptr) return op.p2p->nbytes > kSliceBytes;
  const int64_t elems = op.plan->in_elems + op.plan->out_elems;
  return static_cast<uint64_t>(elems) * op.plan->itemsize > kSliceBytes;
}

void Engine::hand_over_rest() {
  if (has_thread() || !goes_on_by_arrivals()) return;
  const std::unique_lock<std::mutex> lock(mutex, std::try_to_lock);
  if (!lock.owns_lock()) return wake(true);
  if (busy_locked()) wake(has_advanced_);
}

Engine::Pass Engine::go_on_everywhere() {
  const std::lock_guard<std::mutex> outer(engines().going_on);
  Pass made;
  try {
    std::vector<Engine*> mine;
    {
      const std::lock_guard<std::mutex> lock(engines().mutex);
      for (Engine* engine : engines().all) {
        if (!engine->has_thread() && engine->goes_on_by_arrivals()) mine.push_back(engine);
      }
    }
    for (Engine* engine : mine) {
      for (bool advanced = true; advanced;) {
        // Between passes the lock is free, so that callers can submit and wait.
        const std::lock_guard<std::mutex> lock(engine->mutex);
        advanced = engine->busy_locked() && engine->step_locked(kSliceBytes);
        made.has_advanced = made.has_advanced || advanced;
        if (!advanced) made.is_busy = made.is_busy || engine->busy_locked();
      }
    }
  } catch (const std::bad_alloc&) {
    made.is_busy = true;  // waiting threads learn of it; the next pass may have memory
  }
  return made;
}

int Engine::spins_locked(int own) const {
  for (const Comm* comm : comms_) own = comm->least_spins(own);
  return own;
}

bool Engine::only_gloo_locked() const {
  if (has_thread()) return true;
  return !has_device_work() &&
         std::all_of(comms_.begin(), comms_.end(), [](const Comm* comm) { return comm->only_gloo(); });
}

void Engine::thread_main() {
  pthread_setname_np(pthread_self(), "commrt-progress");
  Backoff backoff(*this, 0);
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

}  // namespace commrt
