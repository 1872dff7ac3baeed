// SPDX-License-Identifier: Apache-2.0
// A communicator's life, and its calls of one NCCL function each.
#include "nccl/nccl_comm.hpp"

#include "gil.hpp"

#include <Python.h>
#include <nanobind/nanobind.h>

#include <algorithm>
#include <condition_variable>
#include <thread>
#include <utility>

namespace nb = nanobind;

namespace commrt {

namespace {

constexpr auto kSignalPeriod = std::chrono::milliseconds(50);
constexpr double kAbortGrace_s = 1.0;
constexpr int kSpins = 200, kYields = 50;
constexpr std::chrono::microseconds kLongestSleep{500};

using Clock = NcclComm::Clock;

// Takes the GIL for a moment to let Ctrl-C through.
void check_signals() {
  TakenGil gil;
  if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

// Looks at signals every 50 ms; the first look is one period after it was made.
class SignalCheck {
 public:
  void operator()(Clock::time_point now) {
    if (now < next_) return;
    next_ = now + kSignalPeriod;
    check_signals();
  }

 private:
  Clock::time_point next_ = Clock::now() + kSignalPeriod;
};

// Between two looks: nothing, then the core for others, then longer and longer sleeps.
class Pause {
 public:
  void operator()() {
    if (++looks_ <= kSpins) return;
    if (looks_ <= kSpins + kYields) {
      std::this_thread::yield();
      return;
    }
    std::this_thread::sleep_for(sleep_);
    sleep_ = std::min(2 * sleep_, kLongestSleep);
  }
  void reset() { looks_ = 0; }

 private:
  int looks_ = 0;
  std::chrono::microseconds sleep_{5};
};

}  // namespace

NcclComm::~NcclComm() {
  const State now = state.load();
  if (!owned || now == State::Closed || now == State::Aborted) return;
  // NCCL may still write there.
  for (const auto& kept : {slot, child_}) new std::shared_ptr<Slot>(kept);
}

NcclComm::Deadline NcclComm::after(double timeout_s) {
  constexpr double kForever_s = 1e8;
  const double bounded = std::min(std::max(timeout_s, 0.0), kForever_s);
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(
                            std::chrono::duration<double>(bounded));
}

int NcclComm::fail(int code) {
  int none = kNcclSuccess;
  error.compare_exchange_strong(none, code);
  State live = State::Live;
  state.compare_exchange_strong(live, State::Failed);
  unsettled_ = false;
  return code;
}

void NcclComm::give_up() {
  State live = State::Live;
  state.compare_exchange_strong(live, State::Failed);
}

// Whether what was begun goes on, is done, or has failed.
int NcclComm::look(int* now_is) {
  if (job_ == nullptr) return api->comm_get_async_error(slot->comm, now_is);
  if (job_->state.load(std::memory_order_acquire) != Job::Done) {
    *now_is = kNcclInProgress;
    return kNcclSuccess;
  }
  const auto job = std::exchange(job_, nullptr);
  *now_is = kNcclSuccess;
  return job->code;
}

// The thread is left behind where NCCL never comes back.
int NcclComm::in_background(std::function<int()> function) {
  job_ = std::make_shared<Job>();
  unsettled_ = true;
  std::thread([job = job_, work = std::move(function), library = api, where = slot] {
    job->code = work();
    const int before = job->state.exchange(Job::Done, std::memory_order_acq_rel);
    // Given up while it joined: the handle was this thread's alone until now.
    if (before == Job::Abandoned && where->comm != nullptr) library->comm_abort(where->comm);
  }).detach();
  return kNcclInProgress;
}

bool NcclComm::is_stuck() const {
  const auto due = due_.load(std::memory_order_acquire);
  return due != 0 && Clock::now().time_since_epoch().count() > due;
}

int NcclComm::settle(Deadline deadline) {
  unsettled_ = true;
  SignalCheck signals;
  for (Pause pause;; (meanwhile && meanwhile()) ? pause.reset() : pause()) {
    int now_is = kNcclSuccess;
    const int code = look(&now_is);
    if (code != kNcclSuccess) return fail(code);
    if (now_is != kNcclInProgress) {
      unsettled_ = false;
      return now_is == kNcclSuccess ? now_is : fail(now_is);
    }
    // Acquire: whoever aborts has set it before it waits for the mutex held here.
    if (aborting_.load(std::memory_order_acquire)) return kNcclInterrupted;
    const auto now = Clock::now();
    if (now >= deadline) return kNcclTimedOut;
    signals(now);
  }
}

int NcclComm::take(int code, Deadline deadline) {
  if (code == kNcclSuccess) return code;
  if (code == kNcclInProgress) return settle(deadline);
  return fail(code);
}

// Runs `issue(deadline)` alone, and once what went before it is in the streams.
template <class Issue>
int NcclComm::run(double timeout_s, Issue&& issue) {
  const Deadline deadline = after(timeout_s);
  std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  SignalCheck signals;
  for (Pause pause; !lock.owns_lock(); pause(), (void)lock.try_lock()) {
    if (aborting_.load(std::memory_order_acquire)) return kNcclInterrupted;
    const auto now = Clock::now();
    if (now >= deadline) return kNcclBusy;
    signals(now);
  }
  if (state.load() != State::Live) return kNcclUnusable;
  if (aborting_.load(std::memory_order_acquire)) return kNcclInterrupted;
  // A call on a communicator in progress would fail, and would stay failed.
  if (unsettled_) {
    const int code = settle(deadline);
    if (code != kNcclSuccess) return code;
  }
  return issue(deadline);
}

// The same for work that goes into streams, in which NCCL may wait for peers.
template <class Issue>
int NcclComm::run_work(double timeout_s, Issue&& issue) {
  return run(timeout_s, [&](Deadline deadline) {
    if (!blocks()) return issue(deadline);
    due_.store(deadline.time_since_epoch().count(), std::memory_order_release);
    const int code = issue(deadline);
    due_.store(0, std::memory_order_release);
    // NCCL says something else of a call that an abort has ended.
    if (code == kNcclSuccess || !aborting_.load(std::memory_order_acquire)) return code;
    return static_cast<int>(Clock::now() >= deadline ? kNcclTimedOut : kNcclInterrupted);
  });
}

int NcclComm::init(int num_ranks, const NcclUniqueId& id, int own_rank,
                   const std::function<void(bool)>& enter) {
  std::lock_guard<std::mutex> lock(mutex_);
  size = num_ranks;
  rank = own_rank;
  if (blocks() && enter) {
    const int begun = in_background([=, library = api, where = slot] {
      enter(true);
      const int code =
          library->comm_init_rank_config(&where->comm, num_ranks, id, own_rank, &where->config);
      enter(false);
      return code;
    });
    joining_ = job_;
    return begun;
  }
  const int code =
      api->comm_init_rank_config(&slot->comm, num_ranks, id, own_rank, &slot->config);
  if (code == kNcclInProgress || code == kNcclSuccess) {
    unsettled_ = true;
    return kNcclInProgress;
  }
  return fail(code);
}

int NcclComm::adopt() {
  std::lock_guard<std::mutex> lock(mutex_);
  int code = api->comm_count(slot->comm, &size);
  if (code == kNcclSuccess) code = api->comm_user_rank(slot->comm, &rank);
  if (code == kNcclSuccess) code = api->comm_cu_device(slot->comm, &device);
  return code == kNcclSuccess ? code : fail(code);
}

int NcclComm::wait(double timeout_s) {
  return run(timeout_s, [&](Deadline deadline) {
    int code = settle(deadline);
    if (code == kNcclSuccess && device < 0) code = api->comm_cu_device(slot->comm, &device);
    return code;
  });
}

int NcclComm::poll() {
  const int code = run(0.0, [&](Deadline deadline) { return settle(deadline); });
  return code == kNcclTimedOut || code == kNcclBusy ? kNcclInProgress : code;
}

int NcclComm::split(int color, int key, const std::shared_ptr<Slot>& child, double timeout_s) {
  return run_work(timeout_s, [&](Deadline deadline) {
    // Until the parent is done, the child's handle is not there; polling it would be wrong.
    child_ = child;
    const int code =
        take(api->comm_split(slot->comm, color, key, &child->comm, &child->config), deadline);
    if (code == kNcclSuccess) {
      child_ = nullptr;
    } else if (code < 0) {
      give_up();
    }
    return code;
  });
}

int NcclComm::call(NcclColl coll, const void* x, void* out, size_t count, int dtype, int op,
                   int root, NcclStream stream) {
  NcclHandle comm = slot->comm;
  num_calls.fetch_add(1, std::memory_order_relaxed);
  switch (coll) {
    case NcclColl::Allreduce: return api->all_reduce(x, out, count, dtype, op, comm, stream);
    case NcclColl::Reduce: return api->reduce(x, out, count, dtype, op, root, comm, stream);
    case NcclColl::Bcast: return api->broadcast(x, out, count, dtype, root, comm, stream);
    case NcclColl::Allgather: return api->all_gather(x, out, count, dtype, comm, stream);
    case NcclColl::ReduceScatter:
      return api->reduce_scatter(x, out, count, dtype, op, comm, stream);
    case NcclColl::Alltoall:
      if (api->all_to_all == nullptr) return kNcclMissing;
      return api->all_to_all(x, out, count, dtype, comm, stream);
    case NcclColl::Gather:
      if (api->gather == nullptr) return kNcclMissing;
      return api->gather(x, out, count, dtype, root, comm, stream);
    case NcclColl::Scatter:
      if (api->scatter == nullptr) return kNcclMissing;
      return api->scatter(x, out, count, dtype, root, comm, stream);
    default: return kNcclMissing;
  }
}

int NcclComm::collective(NcclColl coll, const void* x, void* out, size_t count, int dtype, int op,
                         int root, NcclStream stream, double timeout_s) {
  return run_work(timeout_s, [&](Deadline deadline) {
    if (count == 0) return kNcclSuccess;  // on every rank: counts are equal
    const int code = call(coll, x, out, count, dtype, op, root, stream);
    return code == kNcclMissing ? code : take(code, deadline);
  });
}

// Runs `issue(op)` with a premul_sum made for it.
template <class Issue>
int NcclComm::with_factor(void* factor, int dtype, Issue&& issue) {
  int op = 0;
  int code = api->redop_create_premul_sum(&op, factor, dtype, kNcclHostImmediate, slot->comm);
  if (code != kNcclSuccess) return fail(code);
  code = issue(op);
  // It may go as soon as the call has returned; where that is not known yet, it stays.
  if (code == kNcclSuccess) {
    const int gone = api->redop_destroy(op, slot->comm);
    if (gone != kNcclSuccess) code = fail(gone);
  }
  return code;
}

int NcclComm::premul(NcclColl coll, const void* x, void* out, size_t count, int dtype,
                     void* factor, int root, NcclStream stream, double timeout_s) {
  return run_work(timeout_s, [&](Deadline deadline) {
    if (count == 0) return kNcclSuccess;
    return with_factor(factor, dtype, [&](int op) {
      return take(call(coll, x, out, count, dtype, op, root, stream), deadline);
    });
  });
}

int NcclComm::finalize(double timeout_s) {
  return run(timeout_s, [&](Deadline deadline) {
    if (finalizing_) return kNcclSuccess;  // earlier, until a deadline, and settled by now
    finalizing_ = true;
    if (!blocks()) return take(api->comm_finalize(slot->comm), deadline);
    in_background([library = api, where = slot] { return library->comm_finalize(where->comm); });
    return settle(deadline);
  });
}

// Runs a function that ends the communicator. It may stick in the driver for ever: then its thread
// is left behind with all that it needs.
int NcclComm::in_thread(int (*function)(NcclHandle), State then, double timeout_s) {
  struct Job {
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
    int code = kNcclSuccess;
  };
  auto job = std::make_shared<Job>();
  const Deadline deadline = after(timeout_s);
  state.store(then);
  std::thread([job, function, library = api, where = slot, child = child_] {
    const int code = function(where->comm);
    // A child that a split made half-way ends with its parent, and after it.
    if (child != nullptr && child->comm != nullptr) function(child->comm);
    std::lock_guard<std::mutex> lock(job->mutex);
    job->code = code;
    job->done = true;
    job->changed.notify_all();
  }).detach();
  std::unique_lock<std::mutex> lock(job->mutex);
  while (!job->done) {
    if (Clock::now() >= deadline) return kNcclInProgress;
    job->changed.wait_until(lock, std::min(deadline, Clock::now() + kSignalPeriod));
    if (!job->done) {
      lock.unlock();
      check_signals();
      lock.lock();
    }
  }
  // NCCL says that it goes on in the background: nothing may be asked of the handle any more.
  return job->code == kNcclInProgress ? kNcclSuccess : job->code;
}

int NcclComm::destroy(double timeout_s) {
  return run(timeout_s, [&](Deadline) {
    return in_thread(api->comm_destroy, State::Closed, timeout_s);
  });
}

int NcclComm::abort(double timeout_s) {
  State before = state.load();
  if (before == State::Closed || before == State::Aborted) return kNcclUnusable;
  aborting_.store(true, std::memory_order_release);
  // Threads that poll leave within a poll. One that sticks inside NCCL is freed by the abort alone.
  // NCCL promises that only for calls that do not block; it is what torch does for those that do.
  std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  const Deadline grace = after(std::min(timeout_s, kAbortGrace_s));
  for (Pause pause; !lock.owns_lock() && Clock::now() < grace; pause()) (void)lock.try_lock();
  int running = Job::Running;
  if (joining_ != nullptr &&
      joining_->state.compare_exchange_strong(running, Job::Abandoned, std::memory_order_acq_rel)) {
    state.store(State::Aborted);
    return kNcclInProgress;  // the thread that joins aborts it, if it ever comes back
  }
  if (slot->comm == nullptr) {  // it was never made
    state.store(State::Aborted);
    return kNcclSuccess;
  }
  return in_thread(api->comm_abort, State::Aborted, timeout_s);
}

// --- messages and blocks of different lengths ---

// Opens a group, issues into it until something fails, closes it in any case, and waits.
template <class Issue>
int NcclComm::in_group(Deadline deadline, Issue&& issue) {
  int code = api->group_start();
  if (code != kNcclSuccess) return fail(code);
  num_groups.fetch_add(1, std::memory_order_relaxed);
  const int inside = issue();
  code = api->group_end();
  // Within a group a call that is put off is no failure, whatever it is called.
  if (inside != kNcclSuccess && inside != kNcclInProgress) return fail(inside);
  return take(code, deadline);
}

int NcclComm::send_group(const NcclMessage* messages, size_t count, NcclStream stream,
                         Deadline deadline) {
  return in_group(deadline, [&] {
    for (size_t i = 0; i < count; ++i) {
      const NcclMessage& one = messages[i];
      num_calls.fetch_add(1, std::memory_order_relaxed);
      const int said = one.is_send ? api->send(one.at, one.nbytes, kNcclUint8, one.peer,
                                               slot->comm, stream)
                                   : api->recv(one.at, one.nbytes, kNcclUint8, one.peer,
                                               slot->comm, stream);
      if (said != kNcclSuccess && said != kNcclInProgress) return said;
    }
    return kNcclSuccess;
  });
}

int NcclComm::alone(double timeout_s, const Section& section) {
  return run_work(timeout_s, section);
}

int NcclComm::group(const std::vector<NcclMessage>& messages, NcclStream stream,
                    Deadline deadline) {
  return send_group(messages.data(), messages.size(), stream, deadline);
}

int NcclComm::run_messages(std::vector<NcclMessage>& messages, NcclStream stream,
                           Deadline deadline) {
  messages.erase(std::remove_if(messages.begin(), messages.end(),
                                [](const NcclMessage& one) { return one.nbytes == 0; }),
                 messages.end());
  // The k-th message of a pair goes into the round of (k, distance from sender to receiver), which
  // both ends know without talking, so a round has both ends of each of its messages. Rounds run in
  // one order on all ranks: nobody waits in one round for what another rank has put into a later one.
  std::vector<int> seen(2 * static_cast<size_t>(size), 0);
  const int distances = std::max(1, most_distances), per_pair = std::max(1, most_messages);
  const int64_t spans = (size + distances - 1) / distances;
  for (NcclMessage& one : messages) {
    const int k = seen[2 * static_cast<size_t>(one.peer) + (one.is_send ? 1 : 0)]++;
    const int ahead = one.is_send ? one.peer - rank : rank - one.peer;
    one.round = (k / per_pair) * spans + (ahead + size) % size / distances;
  }
  std::stable_sort(messages.begin(), messages.end(),
                   [](const NcclMessage& a, const NcclMessage& b) { return a.round < b.round; });
  for (size_t first = 0; first < messages.size();) {
    const int64_t round = messages[first].round;
    size_t last = first;
    while (last < messages.size() && messages[last].round == round) ++last;
    const int code = send_group(&messages[first], last - first, stream, deadline);
    const bool is_last = last == messages.size();
    if (code != kNcclSuccess) {
      // Peers wait for the rounds that will not come.
      if (code < 0 && !is_last) give_up();
      return code;
    }
    first = last;
  }
  return kNcclSuccess;
}

int NcclComm::exchange(std::vector<NcclMessage> messages, NcclStream stream, double timeout_s) {
  return run_work(timeout_s, [&](Deadline deadline) {
    return run_messages(messages, stream, deadline);
  });
}

int NcclComm::reduce_blocks(const char* x, char* out, const std::vector<int64_t>& counts,
                            size_t itemsize, int dtype, int op, NcclStream stream,
                            Deadline deadline) {
  int root = 0;
  const char* block = x;
  while (root < size) {
    bool is_empty = true;
    for (int i = root; i < size; ++i) is_empty = is_empty && counts[i] == 0;
    if (is_empty) break;
    const int code = in_group(deadline, [&] {
      for (int left = most_reductions; root < size && left > 0; ++root) {
        const auto count = static_cast<size_t>(counts[root]);
        if (count != 0) {
          const int said = call(NcclColl::Reduce, block, root == rank ? out : nullptr, count,
                                dtype, op, root, stream);
          if (said != kNcclSuccess && said != kNcclInProgress) return said;
          --left;
        }
        block += count * itemsize;
      }
      return kNcclSuccess;
    });
    if (code != kNcclSuccess) {
      if (code < 0 && root < size) give_up();
      return code;
    }
  }
  return kNcclSuccess;
}

int NcclComm::counted(NcclColl coll, const char* x, char* out,
                      const std::vector<int64_t>& send_counts,
                      const std::vector<int64_t>& recv_counts, size_t itemsize, int dtype, int op,
                      void* factor, int root, NcclStream stream, double timeout_s) {
  if (coll == NcclColl::ReduceScatterv) {
    return run_work(timeout_s, [&](Deadline deadline) {
      auto blocks = [&](int by) {
        return reduce_blocks(x, out, send_counts, itemsize, dtype, by, stream, deadline);
      };
      return factor == nullptr ? blocks(op) : with_factor(factor, dtype, blocks);
    });
  }
  std::vector<NcclMessage> messages;
  auto send = [&](int peer, const char* at, int64_t count) {
    messages.push_back({true, const_cast<char*>(at), static_cast<size_t>(count) * itemsize, peer});
  };
  auto recv = [&](int peer, char* at, int64_t count) {
    messages.push_back({false, at, static_cast<size_t>(count) * itemsize, peer});
  };
  // A block that is where it belongs goes nowhere.
  auto exchange_with = [&](int peer, const char* from, int64_t sent, char* to, int64_t received) {
    if (peer == rank && from == to) return;
    send(peer, from, sent);
    recv(peer, to, received);
  };
  const char* from = x;
  char* to = out;
  const int64_t own = send_counts[rank];
  for (int peer = 0; peer < size; ++peer) {
    const int64_t sent = send_counts[peer], received = recv_counts[peer];
    switch (coll) {
      case NcclColl::Alltoall:
      case NcclColl::Alltoallv: exchange_with(peer, from, sent, to, received); break;
      case NcclColl::Allgatherv: exchange_with(peer, x, own, to, received); break;
      case NcclColl::Gather:
      case NcclColl::Gatherv:
        if (peer == rank && rank == root) {
          exchange_with(peer, x, own, to, received);
        } else if (peer == root) {
          send(peer, x, own);
        } else if (rank == root) {
          recv(peer, to, received);
        }
        break;
      case NcclColl::Scatter:
      case NcclColl::Scatterv:
        if (peer == rank && rank == root) {
          exchange_with(peer, from, sent, out, own);
        } else if (peer == root) {
          recv(peer, out, own);
        } else if (rank == root) {
          send(peer, from, sent);
        }
        break;
      default: return kNcclMissing;
    }
    from += static_cast<size_t>(sent) * itemsize;
    to += static_cast<size_t>(received) * itemsize;
  }
  return exchange(std::move(messages), stream, timeout_s);
}

}  // namespace commrt
