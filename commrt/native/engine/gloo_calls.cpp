// SPDX-License-Identifier: Apache-2.0
// Starts collectives in gloo and learns of their end, with the GIL.
#include "engine/gloo_calls.hpp"

#include <nanobind/nanobind.h>

#include <algorithm>

#include "engine/collective_codes.hpp"
#include "engine/engine.hpp"
#include "engine/plan.hpp"
#include "engine/relay.hpp"
#include "engine/user_reduction.hpp"

namespace nb = nanobind;

namespace commrt {

namespace {

struct Groups {
  std::mutex mutex;
  std::vector<GlooGroup*> all;
  std::atomic<int> num_running{0};  // operations
};

Groups& groups() {
  static Groups* const kept = new Groups;  // plans may outlive static objects
  return *kept;
}

bool has_completed(const GlooCall& call) {
  return nb::cast<bool>(nb::handle(call.work.get()).attr("is_completed")());
}

// torch counts in milliseconds, and takes 0 of them for no limit at all.
nb::object timedelta(double seconds) {
  constexpr double kLeast_s = 2e-3;
  seconds = std::max(seconds, kLeast_s);
  // Kept for ever: the last one would be dropped after the interpreter.
  static PyObject* const type =
      nb::object(nb::module_::import_("datetime").attr("timedelta")).release().ptr();
  static PyObject* const slice = nb::handle(type)(0, GlooGroup::kSlice_s).release().ptr();
  return seconds == GlooGroup::kSlice_s ? nb::borrow(slice) : nb::handle(type)(0, seconds);
}

// The first line of what an exception says, without where it came from.
std::string said_by(const nb::python_error& error) {
  const auto text = nb::cast<std::string>(nb::str(error.value()));
  return text.substr(0, text.find('\n'));
}

}  // namespace

GlooGroup::GlooGroup() {
  const std::lock_guard<std::mutex> lock(groups().mutex);
  groups().all.push_back(this);
}

GlooGroup::~GlooGroup() {
  {
    const std::lock_guard<std::mutex> lock(groups().mutex);
    auto& all = groups().all;
    all.erase(std::find(all.begin(), all.end(), this));
  }
  groups().num_running -= static_cast<int>(running_.size());
  Relay::add_due(-static_cast<int>(asked_.size()));
}

bool GlooGroup::is_running() { return groups().num_running.load(std::memory_order_relaxed) > 0; }

bool GlooGroup::is_busy() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return !asked_.empty() || !running_.empty();
}

void GlooGroup::ask(std::shared_ptr<GlooCall> call) {
  const std::lock_guard<std::mutex> lock(mutex_);
  asked_.push_back(std::move(call));
  Relay::add_due(1);
}

void GlooGroup::end(GlooCall& call, GlooCall::State state, const std::string& error) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = std::find_if(running_.begin(), running_.end(),
                                    [&](const auto& one) { return one.get() == &call; });
    if (found != running_.end()) {
      running_.erase(found);
      --groups().num_running;
    }
    if (call.now() != GlooCall::State::Running && call.now() != GlooCall::State::Asked) return;
    call.error = error;
    call.failed_s = now_s();
    call.state.store(state, std::memory_order_release);
  }
  Relay::tell();
}

void GlooGroup::start(const std::shared_ptr<GlooCall>& call) {
  const GlooPlan& how = *call->plan->gloo;
  if (how.last == nullptr || how.last_in != call->in || how.last_out != call->out) {
    const auto made = nb::handle(how.arguments.get())(reinterpret_cast<uintptr_t>(call->in),
                                                      reinterpret_cast<uintptr_t>(call->out));
    how.last = own_object(made.ptr());
    how.last_in = call->in;
    how.last_out = call->out;
  }
  call->arguments = how.last;
  // No line of Python runs in here, at whose end a signal's handler could raise.
  const nb::object work = nb::steal(PyObject_CallObject(how.method.get(), call->arguments.get()));
  if (!work.is_valid()) throw nb::python_error();
  call->work = own_object(work.ptr());
  const std::lock_guard<std::mutex> lock(mutex_);
  running_.push_back(call);
  ++groups().num_running;
  call->state.store(GlooCall::State::Running, std::memory_order_release);
}

void GlooGroup::start_asked() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (is_starting_ || asked_.empty()) return;
    is_starting_ = true;
  }
  for (;;) {
    std::shared_ptr<GlooCall> call;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (asked_.empty()) {
        is_starting_ = false;
        return;
      }
      call = std::move(asked_.front());
      asked_.pop_front();
      Relay::add_due(-1);
    }
    try {
      start(call);
    } catch (nb::python_error& error) {
      if (error.matches(PyExc_Exception)) {
        end(*call, GlooCall::State::Failed, said_by(error));
        continue;
      }
      // Ctrl-C, before gloo knew of it: to be raised where somebody can take it.
      const std::lock_guard<std::mutex> lock(mutex_);
      asked_.push_front(std::move(call));
      Relay::add_due(1);
      is_starting_ = false;
      PyErr_SetInterrupt();
      return;
    }
  }
}

void GlooGroup::start_everything() {
  std::vector<GlooGroup*> all;
  {
    const std::lock_guard<std::mutex> lock(groups().mutex);
    all = groups().all;
  }
  // The GIL is let go of meanwhile, so one of them may end: its last operation keeps it.
  for (GlooGroup* one : all) {
    std::shared_ptr<GlooGroup> kept;
    {
      const std::lock_guard<std::mutex> lock(groups().mutex);
      const auto& now = groups().all;
      if (std::find(now.begin(), now.end(), one) == now.end()) continue;
      const std::lock_guard<std::mutex> own(one->mutex_);
      if (one->asked_.empty()) continue;
      kept = one->asked_.front()->plan->gloo->group;
    }
    kept->start_asked();
  }
}

void GlooGroup::look() {
  std::vector<std::shared_ptr<GlooCall>> asked;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    asked = running_;
  }
  for (const auto& call : asked) {
    // torch's work of a reduce_scatter never says that it has ended: it ends in a wait.
    if (call->plan->coll == kReduceScatter) {
      wait(call, 0);
    } else if (has_completed(*call)) {
      wait(call, 1);
    }
  }
}

void GlooGroup::look_everything() {
  if (!is_running()) return;
  std::vector<std::shared_ptr<GlooGroup>> all;
  {
    const std::lock_guard<std::mutex> lock(groups().mutex);
    for (GlooGroup* one : groups().all) {
      const std::lock_guard<std::mutex> own(one->mutex_);
      if (!one->running_.empty()) all.push_back(one->running_.front()->plan->gloo->group);
    }
  }
  for (const auto& one : all) one->look();
}

void GlooGroup::wait(const std::shared_ptr<GlooCall>& call, double seconds) {
  if (call->now() != GlooCall::State::Running) return;
  GlooGroup& group = *call->plan->gloo->group;
  const std::shared_ptr<_object> work = call->work;
  const auto asked = [&] {
    nb::handle(work.get()).attr("wait")(timedelta(seconds));
    group.end(*call, GlooCall::State::Done, "");
  };
  try {
    asked();
    return;
  } catch (nb::python_error&) {
    if (!has_completed(*call)) return;  // time was up
  }
  // It has failed, or ended just as time was up: now that it is over, it says which.
  try {
    asked();
  } catch (nb::python_error& error) {
    group.end(*call, GlooCall::State::Failed, said_by(error));
  }
}

}  // namespace commrt
