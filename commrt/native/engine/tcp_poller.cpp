// SPDX-License-Identifier: Apache-2.0
// Waiting for connections by epoll.
#include "engine/tcp_poller.hpp"

#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <thread>

#include "engine/engine.hpp"
#include "engine/relay.hpp"

namespace commrt {

namespace {

constexpr int kMostEvents = 64;

int checked(int result, const char* what) {
  if (result < 0) throw std::system_error(errno, std::generic_category(), what);
  return result;
}

void erase(std::vector<int>& from, int one) {
  from.erase(std::remove(from.begin(), from.end(), one), from.end());
}

// A thread with short slices is let in at once as it wakes, beside one that computes: Linux 6.12
// lets the other one finish its slice otherwise, some milliseconds. Older ones take no notice.
void ask_for_short_slices() {
#ifdef SYS_sched_setattr
  struct {
    uint32_t size, policy;
    uint64_t flags;
    int32_t nice;
    uint32_t priority;
    uint64_t runtime_ns, deadline_ns, period_ns;
  } attributes{};
  constexpr uint64_t kShortest_ns = 100'000;
  if (sched_getscheduler(0) != SCHED_OTHER) return;
  attributes.size = sizeof attributes;
  attributes.nice = getpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)));
  attributes.runtime_ns = kShortest_ns;
  syscall(SYS_sched_setattr, 0, &attributes, 0);
#endif
}

epoll_event event_of(uint32_t events, void* who) {
  epoll_event event{};
  event.events = events;
  event.data.ptr = who;
  return event;
}

}  // namespace

std::atomic<bool> TcpPoller::used_{false}, TcpPoller::in_child_{false};

TcpPoller& TcpPoller::instance() {
  static TcpPoller* const one = new TcpPoller;  // threads may wait until the process has ended
  return *one;
}

TcpPoller::Run::Run()
    : all(checked(epoll_create1(EPOLL_CLOEXEC), "epoll_create1")),
      quiet(checked(epoll_create1(EPOLL_CLOEXEC), "epoll_create1")),
      interrupts(checked(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), "eventfd")) {
  epoll_event event = event_of(EPOLLIN, nullptr);
  checked(epoll_ctl(all, EPOLL_CTL_ADD, interrupts, &event), "epoll_ctl");
  event = event_of(0, nullptr);
  checked(epoll_ctl(quiet, EPOLL_CTL_ADD, all, &event), "epoll_ctl");
}

TcpPoller::Run::~Run() {
  for (const int descriptor : {all, quiet, interrupts}) close(descriptor);
}

TcpPoller::TcpPoller() {
  pthread_atfork([] { instance().descriptors_mutex_.lock(); },
                 [] { instance().descriptors_mutex_.unlock(); }, forget_in_child);
}

// The caller has the lock, as in `end`.
void TcpPoller::begin() {
  auto made = std::make_shared<Run>();
  {
    const std::lock_guard<std::mutex> lock(descriptors_mutex_);
    descriptors_.insert(descriptors_.end(), {made->all, made->quiet, made->interrupts});
  }
  {
    const std::lock_guard<std::mutex> lock(interrupting_);
    run_ = made;
  }
  // Signals are for the threads of the program.
  sigset_t every, before;
  sigfillset(&every);
  pthread_sigmask(SIG_SETMASK, &every, &before);
  std::thread([this, made] { run(made); }).detach();
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  used_.store(true, std::memory_order_release);
}

void TcpPoller::end() {
  used_.store(false, std::memory_order_release);
  run_->is_over.store(true);
  {
    const std::lock_guard<std::mutex> lock(descriptors_mutex_);
    for (const int one : {run_->all, run_->quiet, run_->interrupts}) erase(descriptors_, one);
  }
  const std::lock_guard<std::mutex> lock(interrupting_);
  run_ = nullptr;
}

// A peer sees that this process has ended only once no child keeps its connections.
void TcpPoller::forget_in_child() {
  TcpPoller& one = instance();
  used_.store(false);
  in_child_.store(true);
  for (const int descriptor : one.descriptors_) close(descriptor);
  one.descriptors_.clear();
  one.descriptors_mutex_.unlock();
}

TcpPoller::Held TcpPoller::hold() {
  num_holding_.fetch_add(1);
  interrupt();
  Held held(mutex_);
  num_holding_.fetch_sub(1);
  return held;
}

void TcpPoller::add(int descriptor, Link* link) {
  if (num_links_ == 0) begin();
  {
    const std::lock_guard<std::mutex> lock(descriptors_mutex_);
    descriptors_.push_back(descriptor);
  }
  epoll_event event = event_of(EPOLLIN, link);
  checked(epoll_ctl(run_->all, EPOLL_CTL_ADD, descriptor, &event), "epoll_ctl");
  ++num_links_;
}

void TcpPoller::watch(int descriptor, Link* link, bool reads, bool writes) {
  epoll_event event = event_of((reads ? EPOLLIN : 0u) | (writes ? EPOLLOUT : 0u), link);
  epoll_ctl(run_->all, EPOLL_CTL_MOD, descriptor, &event);
}

void TcpPoller::remove(int descriptor) {
  epoll_ctl(run_->all, EPOLL_CTL_DEL, descriptor, nullptr);
  {
    const std::lock_guard<std::mutex> lock(descriptors_mutex_);
    erase(descriptors_, descriptor);
    close(descriptor);
  }
  if (--num_links_ == 0) end();
}

void TcpPoller::interrupt() {
  if (!is_sleeping_.load(std::memory_order_seq_cst)) return;
  const std::lock_guard<std::mutex> lock(interrupting_);
  if (run_ == nullptr) return;
  const uint64_t one = 1;
  static_cast<void>(!write(run_->interrupts, &one, sizeof one));
}

// The caller has the lock.
bool TcpPoller::look() {
  if (run_ == nullptr) return false;
  epoll_event events[kMostEvents];
  const int found = epoll_wait(run_->all, events, kMostEvents, 0);
  for (int i = 0; i < found && run_ != nullptr; ++i) {
    const auto& event = events[i];
    if (event.data.ptr == nullptr) {
      uint64_t told = 0;
      static_cast<void>(!read(run_->interrupts, &told, sizeof told));
    } else {
      const auto is = [&event](uint32_t which) { return (event.events & which) != 0; };
      static_cast<Link*>(event.data.ptr)->see(is(EPOLLIN), is(EPOLLOUT), is(EPOLLHUP | EPOLLERR));
    }
  }
  return found > 0;
}

// From the poller's own thread, which is not to be woken.
void TcpPoller::take_over() {
  num_looks_.fetch_add(1, std::memory_order_relaxed);
  if (is_handed_over_.load(std::memory_order_relaxed)) is_handed_over_.store(false);
  if (run_ == nullptr || !run_->is_armed.load(std::memory_order_relaxed)) return;
  const std::lock_guard<std::mutex> lock(interrupting_);
  arm(*run_, false);
}

// Once, until something comes. The caller has `interrupting_`.
void TcpPoller::arm(Run& run, bool is_armed) {
  epoll_event event = event_of(is_armed ? EPOLLIN | EPOLLONESHOT : 0u, nullptr);
  epoll_ctl(run.quiet, EPOLL_CTL_MOD, run.all, &event);
  run.is_armed.store(is_armed);
}

void TcpPoller::hand_over(bool has_more) {
  is_handed_over_.store(true);
  const std::lock_guard<std::mutex> lock(interrupting_);
  if (run_ == nullptr) return;
  const uint64_t one = 1;
  if (has_more) static_cast<void>(!write(run_->interrupts, &one, sizeof one));
  if (!run_->is_armed.load()) arm(*run_, true);
}

TcpPoller::Held TcpPoller::try_hold() {
  if (num_holding_.load(std::memory_order_relaxed) != 0) return Held();
  Held held(mutex_, std::try_to_lock);
  if (held.owns_lock()) {
    take_over();
  } else {
    is_wanted_.store(true, std::memory_order_relaxed);
  }
  return held;
}

bool TcpPoller::poll() {
  const Held held = try_hold();
  return held.owns_lock() && look();
}

bool TcpPoller::wait(std::chrono::microseconds most, const std::atomic<uint64_t>& count,
                     uint64_t seen) {
  const Held held = try_hold();
  if (!held.owns_lock() || run_ == nullptr) return false;
  is_sleeping_.store(true, std::memory_order_seq_cst);
  if (count.load(std::memory_order_seq_cst) == seen && num_holding_.load() == 0) {
    pollfd one{run_->all, POLLIN, 0};
    const timespec limit{most.count() / 1'000'000, most.count() % 1'000'000 * 1000};
    ppoll(&one, 1, &limit, nullptr);
  }
  is_sleeping_.store(false, std::memory_order_seq_cst);
  look();
  return true;
}

// Receives what comes while nobody else looks. Who looks disarms this, and others arm it.
void TcpPoller::run(const std::shared_ptr<Run>& mine) {
  pthread_setname_np(pthread_self(), "commrt-tcp");
  ask_for_short_slices();
  // Ranks of the node tell this thread nothing.
  constexpr int kBetweenLooks_ms = 10, kBetweenLooksAtNeighbors_ms = 1;
  uint64_t before = 0;
  bool goes_on = false;  // with operations
  while (!mine->is_over.load()) {
    const bool is_eager = goes_on && Relay::expects_neighbors();
    epoll_event event;
    const int most_ms = is_eager ? kBetweenLooksAtNeighbors_ms : kBetweenLooks_ms;
    const bool comes = epoll_wait(mine->quiet, &event, 1, most_ms) > 0;
    if (comes) {
      const std::lock_guard<std::mutex> lock(interrupting_);
      mine->is_armed.store(false);
    }
    const uint64_t looks = num_looks_.load(std::memory_order_relaxed);
    if (looks != before && !is_handed_over_.exchange(false)) {  // others look
      before = looks;
      goes_on = false;
      continue;
    }
    bool has_found = false;
    if (num_holding_.load() == 0) {
      if (const Held held(mutex_, std::try_to_lock); held.owns_lock() && run_ == mine) {
        while (look()) {
          has_found = true;
          if (is_wanted_.exchange(false)) break;
        }
      }
    }
    if (mine->is_over.load()) return;
    const Engine::Pass pass = Engine::go_on_everywhere();
    goes_on = pass.is_busy;
    const bool is_late = !comes && (has_found || pass.has_advanced);
    if (is_late) num_late_.fetch_add(1, std::memory_order_relaxed);
    before = num_looks_.load(std::memory_order_relaxed);
    const std::lock_guard<std::mutex> lock(interrupting_);
    arm(*mine, true);
  }
}

}  // namespace commrt
