// SPDX-License-Identifier: Apache-2.0
// The plan cache, waiting and requests.
#include "calls/group.hpp"

#include <algorithm>
#include <new>

#include "calls/fusion.hpp"
#include "calls/group_methods.hpp"
#include "calls/device_call_cache.hpp"
#include "engine/backoff.hpp"
#include "engine/device_work.hpp"
#include "engine/gloo_calls.hpp"
#include "engine/p2p.hpp"
#include "engine/rank_states.hpp"
#include "engine/relay.hpp"
#include "engine/relay_carrier.hpp"
#include "engine/starvation.hpp"
#include "gil.hpp"
#include "python_callbacks.hpp"
#include "recording/record_ring.hpp"

namespace commrt {

namespace {

constexpr int64_t kLongBytes = 32768;

bool is_long(const Plan& plan) {
  return (plan.in_elems + plan.out_elems) * static_cast<int64_t>(plan.itemsize) > kLongBytes;
}

bool is_long(const Op& op) {
  return op.p2p != nullptr ? op.p2p->nbytes > kLongBytes : is_long(*op.plan);
}

}  // namespace

Group::Group(std::shared_ptr<Engine> engine_, int rank, int size, const std::string& name)
    : engine(std::move(engine_)), comm(std::make_unique<Comm>(*engine, rank, size, name)),
      device_call_cache(std::make_unique<DeviceCallCache>()) {}

Group::~Group() {
  if (!device_work.empty() && !Engine::forked.load(std::memory_order_relaxed)) {
    ReleasedGil release;
    for (const auto& work : device_work) work->abandon();
  }
  // The next call would drop what ended calls have kept, but there may be none.
  if (engine->has_ended() && !Engine::forked.load(std::memory_order_relaxed)) drop_ended(*engine);
  forget_timed(*this);
}

void keep_alive(Op& op, PyObject* first, PyObject* second) {
  Py_XINCREF(first);
  Py_XINCREF(second);
  op.keep[0] = first;
  op.keep[1] = second;
}

thread_local bool leaves_arrays = false;

void drop_ended(Engine& engine) {
  const auto ended = engine.take_ended();
  std::vector<void*> objects;
  if (leaves_arrays) {
    void* none[2] = {nullptr, nullptr};
    engine.discard_objects(none);  // somebody else is to look
  } else {
    objects = engine.take_objects();
  }
  // This is in any call of any communicator, and the device may wait for just that call.
  const LeavingArrays leaving;
  for (void* object : objects) Py_DECREF(static_cast<PyObject*>(object));
  for (const auto& op : ended) {
    for (void*& kept : op->keep) {
      if (!op->held) Py_XDECREF(static_cast<PyObject*>(kept));
      kept = nullptr;
    }
  }
}

namespace {

constexpr double kTimedPeriod_s = 1e-3;

// For an operation that gloo runs: waits in gloo for at most `seconds`, if there is nothing else
// to do here. Returns false if gloo has not been asked yet.
bool ask_gloo(Group& group, const Op& op, double seconds) {
  Engine& engine = *group.engine;
  if (Relay::is_due()) RelayCarrier::give_everything();
  std::shared_ptr<GlooCall> call;
  bool nothing_else = false;
  {
    const std::lock_guard<std::mutex> lock(engine.mutex);
    call = op.gloo;
    nothing_else = engine.only_gloo_locked();
  }
  if (call == nullptr) return false;
  if (nothing_else) {
    GlooGroup::wait(call, seconds);
  } else {
    GlooGroup::look_everything();
  }
  if (call->now() < GlooCall::State::Done) return true;
  // The end is some stores: no reason to let go of the GIL.
  const std::unique_lock<std::mutex> lock(engine.mutex, std::try_to_lock);
  if (lock.owns_lock()) group.comm->progress(kSliceBytes);
  return true;
}

}  // namespace

WaitResult wait_for(Group& group, const std::shared_ptr<Op>& op, double timeout_s, bool spun) {
  const GiveAtEnd give;
  const Engine::HandsOver hands_over(*group.engine);
  constexpr int kPassesWithGil = 24;  // about 2 us
  // Ranks that share cores go straight to the loop below, which yields.
  const int spins = group.comm->spins_of(op->plan.get());
  const bool crowded = spins < kPassesWithGil;
  const int passes = spun || crowded ? 0 : kPassesWithGil;
  constexpr double kSignalPeriod_s = 0.05;
  Engine& engine = *group.engine;
  for (int i = 0; i < passes && !is_long(*op); ++i) {
    if (op->finished()) return WaitResult::Done;
    if (wants_gil(engine)) break;
    // Use a lock object: a pass that runs out of memory must leave the lock free.
    const std::unique_lock<std::mutex> lock(engine.mutex, std::try_to_lock);
    if (lock.owns_lock()) engine.step_locked(kSliceBytes);
  }
  const double start = now_s();
  double deadline = start + timeout_s;
  LookWatch looks(start);
  WaitTeller teller(&engine);
  double next_signal_check = start + kSignalPeriod_s;
  uint64_t steps_seen = kNoLimit;  // none yet
  Backoff backoff(engine, spins);
  backoff.sleep_soon(group.comm->off_node->is_relay);
  constexpr int kPassesBetweenQuestions = 4;
  const bool by_gloo = op->plan != nullptr && op->plan->gloo != nullptr;
  for (;;) {
    bool finished = false, in_gloo = false;
    if (by_gloo) {
      const double left = std::min(GlooGroup::kSlice_s, deadline - now_s());
      in_gloo = ask_gloo(group, *op, engine.timed_due_s == kNever ? left : std::min(left, kTimedPeriod_s));
      if (op->finished()) return WaitResult::Done;
    }
    {
      ReleasedGil release;
      for (int i = 0;; ++i) {
        if (op->finished()) {
          finished = true;
          break;
        }
        if (wants_gil(engine)) break;
        bool advanced = false, looked = false, looks_at_clock = (i & 63) == 63;
        if (const std::unique_lock<std::mutex> lock(engine.mutex, std::try_to_lock);
            lock.owns_lock()) {
          looked = true;
          advanced = engine.step_locked(kNoLimit);
          // It serves all that is in flight, and waits like the most impatient of these.
          if (i == 0) backoff.spin_at_most(engine.spins_locked(spins));
        }
        if (engine.has_device_work()) advanced = engine.step_device_work(advanced);
        if (in_gloo && !advanced && i >= kPassesBetweenQuestions) break;
        if (advanced) {
          backoff.reset();
        } else {
          if (backoff.take_ring()) break;  // for nothing that came: a peer may have given up
          const double end = std::min({deadline, next_signal_check, engine.timed_due_s.load()});
          looks_at_clock = backoff.pause(end, looked) || looks_at_clock;
        }
        if (looks_at_clock) {
          if (engine.is_timed_due() || backoff.take_interrupt()) break;
          const double now = now_s();
          if (now >= deadline || now >= next_signal_check) break;
        }
      }
    }
    if (finished || op->finished()) return WaitResult::Done;
    const double looked = now_s();
    if (looks.is_late(looked)) {
      deadline = std::max(deadline, looked + std::min(timeout_s, LookWatch::kSecondLook_s));
    }
    if (wants_gil(engine)) {
      if (!run_wanted(engine)) return WaitResult::Interrupted;
      backoff.reset();
      looks.leave_out(now_s());
    }
    if (engine.is_timed_due() && !look_at_timed(engine)) return WaitResult::Interrupted;
    {
      std::lock_guard<std::mutex> lock(engine.mutex);
      if (!op->finished() && group.comm->fail_after_peer(op)) return WaitResult::Done;
      if (steps_seen != kNoLimit && op->steps_done() != steps_seen) op->moved_s = now_s();
      steps_seen = op->steps_done();
      op->starved = looks.found;
      teller.tell(looked, *group.comm, *op);
    }
    if (PyErr_CheckSignals() != 0) return WaitResult::Interrupted;
    const double now = now_s();
    if (now >= deadline) return WaitResult::TimedOut;
    next_signal_check = now + kSignalPeriod_s;
  }
}

Request::~Request() {
  if (observed_ || Engine::forked.load(std::memory_order_relaxed)) return;
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  try {
    if (PyErr_ResourceWarning(nullptr, 1, "%U was dropped without wait(): its buffers stay alive "
                              "until it ends, and its errors are lost", what().ptr()) != 0) {
      PyErr_WriteUnraisable(operation_.ptr());
    }
  } catch (nb::python_error& e) {
    e.discard_as_unraisable(operation_);
  }
  PyErr_Restore(type, value, traceback);
}

nb::object Request::outcome() {
  observed_ = true;
  if (!Engine::forked.load(std::memory_order_relaxed)) {
    drop_ended(*nb::cast<Group&>(group_).engine);
  }
  if (is_failed()) {
    if (!error_.is_valid()) {
      error_ = group_.attr(group_methods::kOperationError)(what(), op_->error,
                                                           op_->failure_kind());
      if (op_->by_user) {
        nb::handle reduction(op_->plan->user.owner.get());
        error_.attr("__cause__") = nb::getattr(reduction, "error", nb::none());
      }
    }
    if (ring_ != nullptr) ring_->fail(first_record_, num_records_, error_);
    ring_.reset();
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error_.ptr())), error_.ptr());
    throw nb::python_error();
  }
  if (ring_ != nullptr) {
    ring_->end(first_record_, num_records_);
    ring_.reset();
  }
  if (op_->was_changed) {
    if (!error_.is_valid()) error_ = group_.attr(group_methods::kChangedInFlight)(what(), site_);
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error_.ptr())), error_.ptr());
    throw nb::python_error();
  }
  return result_;
}

void Request::note_site() {
  site_ = callback(Callback::CallSite)();
}

namespace {

// Says so of an operation that was late but under way when time was up; empty: it was not.
std::string says_it_moves(const Op& op) {
  constexpr double kRecent_s = 0.5;
  if (op.steps_in_all() == 0 || op.moved_s == 0 || now_s() - op.moved_s > kRecent_s) return {};
  return "it is under way, with " + std::to_string(op.steps_done()) + " of " +
         std::to_string(op.steps_in_all()) +
         " steps done on this rank; give it more time, or longer pieces";
}

}  // namespace

nb::object Request::outcome_after(WaitResult ended, double seconds) {
  observed_ = true;
  if (ended == WaitResult::TimedOut) {
    std::string waits_for;
    if (op_->p2p != nullptr) {
      const Group& group = nb::cast<Group&>(group_);
      std::lock_guard<std::mutex> lock(group.engine->mutex);
      if (!op_->finished()) waits_for = group.comm->p2p->waits_for(*op_);
    } else {
      const Group& group = nb::cast<Group&>(group_);
      std::lock_guard<std::mutex> lock(group.engine->mutex);
      const bool all_here = group.comm->arena == nullptr || group.comm->not_started(op_->seq).empty();
      if (!op_->finished() && all_here) waits_for = says_it_moves(*op_);
    }
    try {
      group_.attr(group_methods::kTimedOut)(what(), op_->seq, seconds, waits_for, nb::find(*this),
                                            op_->starved.longest_s, op_->starved.process_ran);
    } catch (nb::python_error& error) {  // it stays in flight
      if (ring_ != nullptr) RecordRing::tell(error.value());
      throw;
    }
  }
  return outcome();
}

nb::object Request::wait(nb::object stream, nb::object timeout) {
  if (!stream.is_none()) group_.attr(group_methods::kStreamOnHost)(what());
  double seconds = timeout_s_;
  if (!timeout.is_none()) {
    seconds = nb::cast<double>(group_.attr(group_methods::kCheckTimeout)(what(), timeout));
  }
  if (!op_->finished()) {
    if (Engine::forked.load(std::memory_order_relaxed)) group_.attr(group_methods::kCheckUsable)();
    Group& group = nb::cast<Group&>(group_);
    switch (wait_for(group, op_, seconds)) {
      case WaitResult::Done: break;
      case WaitResult::Interrupted: throw nb::python_error();
      case WaitResult::TimedOut: return outcome_after(WaitResult::TimedOut, seconds);
    }
  }
  return outcome();
}

bool Request::test() {
  if (!op_->finished()) {
    if (Engine::forked.load(std::memory_order_relaxed)) group_.attr(group_methods::kCheckUsable)();
    Engine& engine = *nb::cast<Group&>(group_).engine;
    const GiveAtEnd give;
    const Engine::HandsOver hands_over(engine);
    // A thread that looks at devices waits for locks whose holder may wait for the GIL.
    auto step = [&] {
      if (is_long(*op_) || engine.has_device_work()) {
        ReleasedGil release;
        engine.step();
      } else {
        engine.step();
      }
    };
    step();
    if (wants_gil(engine) || GlooGroup::is_running()) {
      if (!run_wanted(engine)) throw nb::python_error();
      GlooGroup::look_everything();
      step();
    }
    if (engine.is_timed_due() && !look_at_timed(engine)) throw nb::python_error();
  }
  if (!op_->finished() && !peers_gave_up()) return false;
  outcome();
  return true;
}

// True if the operation has ended, or ends now because a peer gave up, as wait() would notice.
bool Request::peers_gave_up() {
  Group& group = nb::cast<Group&>(group_);
  std::lock_guard<std::mutex> lock(group.engine->mutex);
  return op_->finished() || group.comm->fail_after_peer(op_);
}

void Request::take_back(const std::string& why) {
  Group& group = nb::cast<Group&>(group_);
  const std::lock_guard<std::mutex> lock(group.engine->mutex);
  if (op_->p2p != nullptr && !op_->finished()) group.comm->p2p->take_back(op_, why);
}

int64_t Request::received_nbytes() const {
  if (op_->p2p == nullptr || op_->p2p->is_send) return -1;
  if (op_->finished()) return static_cast<int64_t>(op_->p2p->moved);
  const Group& group = nb::cast<Group&>(group_);
  if (Engine::forked.load(std::memory_order_relaxed)) return 0;
  std::lock_guard<std::mutex> lock(group.engine->mutex);
  return static_cast<int64_t>(op_->p2p->moved);
}

nb::list Request::each_received_nbytes() const {
  nb::list found;
  const P2PTask* task = op_->p2p.get();
  if (task == nullptr || task->parts == nullptr || !task->parts->is_list) {
    if (const int64_t nbytes = received_nbytes(); nbytes >= 0) found.append(nbytes);
    return found;
  }
  std::vector<uint64_t> lengths(task->parts->num_recvs);
  if (op_->finished()) {
    lengths = task->parts->received;
  } else if (!Engine::forked.load(std::memory_order_relaxed)) {
    std::lock_guard<std::mutex> lock(nb::cast<const Group&>(group_).engine->mutex);
    lengths = task->parts->received;
  }
  for (const uint64_t nbytes : lengths) found.append(nbytes);
  return found;
}

int Request::source() const {
  // Written before the end, by the thread that has the lock.
  return op_->p2p != nullptr && op_->finished() ? op_->p2p->source : -1;
}

nb::object Request::device() const {
  const int device = op_->plan ? op_->plan->device : kHost;
  return device == kHost ? nb::none() : nb::object(nb::int_(device));
}

nb::object Request::stream() const {
  return device().is_none() ? nb::none() : nb::object(nb::int_(op_->stream));
}

nb::str Request::what() const {
  const Group& group = nb::cast<Group&>(group_);
  if (op_->p2p == nullptr) {
    return nb::str("{} #{} on {}").format(operation_, op_->seq, group.comm->name);
  }
  return nb::str("{} #{} {}, on {}")
      .format(operation_, op_->seq, P2P::whom(*op_), group.comm->name);
}

nb::str Request::repr() const {
  const char* state = is_failed() ? "failed" : done() ? "done" : "pending";
  return nb::str("<commrt.Request {}: {}>").format(what(), state);
}

namespace {

// There was no memory for what a call needs, and nothing has started: its peers must not wait.
void refuse_for_memory(nb::handle group_object) {
  try {
    const nb::object why = nb::steal(PyObject_CallFunction(
        PyExc_MemoryError, "s", "there is no memory for what the call needs"));
    if (!why.is_valid()) throw nb::python_error();
    group_object.attr(group_methods::kRefuse)(why);
  } catch (nb::python_error& another) {
    another.discard_as_unraisable("refuse");
  }
}

}  // namespace

nb::object run_plan(nb::handle group_object, const PlanPtr& plan, const void* in, void* out,
                    nb::handle keep_x, nb::handle keep_out, nb::handle result,
                    nb::handle operation, bool nonblocking, double timeout_s) {
  Group& group = *nb::inst_ptr<Group>(group_object);
  // Every rank makes this call after the same ones.
  if (group.fusion != nullptr) {
    if (!group.fusion->make_way(group_object)) throw nb::python_error();
    if (group.comm->broken.load(std::memory_order_relaxed)) {
      group_object.attr(group_methods::kCheckUsable)();
    }
  }
  Engine& engine = *group.engine;
  // Long copies happen outside the GIL; short operations are over sooner than it is released.
  const bool outside = is_long(*plan);
  std::shared_ptr<Op> op;
  std::unique_lock<std::mutex> lock(engine.mutex, std::defer_lock);
  if (!nonblocking && plan->run_short && lock.try_lock()) {
    if (group.comm->quiet()) {
      op = group.comm->run_short(plan, in, out, group.comm->spins_with_gil(plan.get()));
      lock.unlock();
      if (op == nullptr) return nb::borrow(result);
      return finish_call(group_object, std::move(op), keep_x, keep_out, result, operation,
                         false, timeout_s);
    }
    lock.unlock();
  }
  void* kept[2] = {nonblocking ? keep_x.ptr() : nullptr,
                   nonblocking ? keep_out.ptr() : nullptr};
  for (void* object : kept) Py_XINCREF(static_cast<PyObject*>(object));
  const uint64_t limit = nonblocking ? kSliceBytes : kNoLimit;
  bool has_number = true;  // of its own; another thread's call may take one meanwhile
  const auto start = [&] {
    const uint64_t number = group.comm->next_seq;
    try {
      op = group.comm->start(plan, in, out, kept, !nonblocking, limit);
    } catch (const std::bad_alloc&) {
      has_number = group.comm->next_seq != number;
      throw;
    }
  };
  try {
    if (!outside && lock.try_lock()) {
      start();
      lock.unlock();
    } else {
      ReleasedGil release;
      const std::lock_guard<std::mutex> own(engine.mutex);
      start();
    }
  } catch (const std::bad_alloc&) {
    if (lock.owns_lock()) lock.unlock();
    for (void* object : kept) Py_XDECREF(static_cast<PyObject*>(object));
    if (!has_number) refuse_for_memory(group_object);
    throw;
  } catch (...) {  // nothing has started
    if (lock.owns_lock()) lock.unlock();
    for (void* object : kept) Py_XDECREF(static_cast<PyObject*>(object));
    throw;
  }
  return finish_call(group_object, std::move(op), keep_x, keep_out, result, operation,
                     nonblocking, timeout_s);
}

// Makes the request in the memory of the Python object: one allocation less than nb::cast of a new
// one.
nb::object make_request(nb::handle group, std::shared_ptr<Op> op, nb::handle result,
                        nb::handle operation, double timeout_s) {
  nb::object request = nb::inst_alloc(nb::type<Request>());
  make_request_in(request, group, std::move(op), result, operation, timeout_s);
  return request;
}

void make_request_in(nb::handle memory, nb::handle group, std::shared_ptr<Op> op,
                     nb::handle result, nb::handle operation, double timeout_s) {
  new (nb::inst_ptr<Request>(memory)) Request(nb::borrow(group), std::move(op),
                                              nb::borrow(result), nb::borrow(operation),
                                              timeout_s);
  nb::inst_mark_ready(memory);
}

nb::object finish_call(nb::handle group_object, std::shared_ptr<Op> op, nb::handle keep_x,
                       nb::handle keep_out, nb::handle result, nb::handle operation,
                       bool nonblocking, double timeout_s, bool spun) {
  Group& group = *nb::inst_ptr<Group>(group_object);
  Engine& engine = *group.engine;
  if (engine.has_ended()) drop_ended(engine);
  if (Relay::is_due()) RelayCarrier::give_everything();
  if (nonblocking) {
    if (wants_gil(engine) && !run_wanted(engine)) throw nb::python_error();
    if (engine.has_thread() || !op->finished()) engine.wake(Engine::may_have_more(*op));
    const bool guarded = op->in_flight != nullptr;
    nb::object made = make_request(group_object, std::move(op), result, operation, timeout_s);
    if (guarded) nb::inst_ptr<Request>(made)->note_site();
    return made;
  }
  // The engine may touch the buffers until the operation ends, which may be never.
  auto keep_while_needed = [&] {
    std::lock_guard<std::mutex> lock(engine.mutex);
    const bool needed = !op->finished() || op->held;
    if (needed && !op->has_keep()) keep_alive(*op, keep_x.ptr(), keep_out.ptr());
  };
  WaitResult ended = WaitResult::Done;
  try {
    if (!op->finished()) ended = wait_for(group, op, timeout_s, spun);
  } catch (const std::bad_alloc&) {  // of a pass; the operation is in flight
    keep_while_needed();
    throw;
  }
  if (ended == WaitResult::Done &&
      op->state.load(std::memory_order_acquire) == static_cast<int>(OpState::Done)) {
    // A receive reports how much came through its request; nothing else looks at the op.
    nb::object value = nb::borrow(result);
    if (op->p2p != nullptr && engine.goes_on_alone()) {
      std::unique_lock<std::mutex> lock(engine.mutex);
      const bool rest = !group.comm->p2p->idle();
      lock.unlock();
      if (rest) engine.wake();  // answers, packets on their way
    }
    if (op->p2p == nullptr && engine.mutex.try_lock()) {
      group.comm->recycle(std::move(op));
      engine.mutex.unlock();
    }
    return value;
  }
  if (!op->finished() || op->held) keep_while_needed();
  if (engine.goes_on_alone()) engine.wake();  // nobody waits for it any more
  if (ended == WaitResult::Interrupted) throw nb::python_error();
  nb::object request = make_request(group_object, op, result, operation, timeout_s);
  return nb::cast<Request&>(request).outcome_after(ended, timeout_s);
}

}  // namespace commrt
