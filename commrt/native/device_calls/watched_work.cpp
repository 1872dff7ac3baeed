// SPDX-License-Identifier: Apache-2.0
// Lets the thread that makes progress see calls that the device ends (watched_work.hpp).
#include "device_calls/watched_work.hpp"

#include <chrono>
#include <thread>

#include "engine/chaos.hpp"
#include "engine/comm.hpp"
#include "engine/device_refusals.hpp"
#include "engine/engine.hpp"

namespace commrt {

WatchedCall::~WatchedCall() {
  if (work != nullptr && begun != 0) work->events().give(begun);
}

bool WatchedWork::may_have_to_wait() const {
  return comm_ != nullptr && comm_->refusals.have_been();
}

bool WatchedWork::may_start(double until_s, double deadline_s) {
  if (!may_have_to_wait()) return true;
  GaveUp found;
  const auto is_settled = [&] {
    const std::lock_guard<std::mutex> own(engine_.mutex);
    comm_->refusals.look_around();
    found = comm_->who_gave_up(comm_->next_seq);
    if (!found.is_any() && comm_->broken) found.why = comm_->failure;
    if (found.is_any() || !comm_->refusals.hold_back(comm_->next_seq)) return true;
    if (now_s() < deadline_s) return false;
    found.why = "other ranks have not looked at a call that this rank has refused";
    return true;
  };
  if (!progress_until(is_settled, until_s)) return false;
  if (!found.is_any()) return true;
  give_up(found.kind(), found.why);
  throw CallFailure(failure_kind_, failure_);
}

void WatchedWork::count(WatchedCall& made, const WatchedPlan& plan, Stream stream, bool orders) {
  Record record;
  record.count = plan.elements;
  record.coll = static_cast<int16_t>(plan.code);
  record.root = static_cast<int16_t>(plan.root);
  record.dtype = static_cast<uint8_t>(plan.element_type);
  record.redop = static_cast<uint8_t>(plan.reduction);
  record.blocking = orders;
  record.stream = stream;
  record.device = 0;
  std::shared_ptr<Fault> fault;
  std::string differs, refused;
  {
    const std::lock_guard<std::mutex> own(engine_.mutex);
    made.seq = comm_->count_elsewhere(record);
    // A graph runs as often as it is launched: no stand-in meets that.
    comm_->refusals.on_devices->note(made.seq, made.is_captured() ? nullptr : plan.words, orders);
    made.may_be_refused = !made.is_captured();
    refused = comm_->refusals.give_to_device(made.seq);
    if (refused.empty()) differs = left_trail(made, plan);
    if (refused.empty() && differs.empty()) {
      if (comm_->chaos == nullptr) return;
      fault = comm_->chaos->next(plan.code, title(called(plan.code), made));
      if (fault == nullptr || !comm_->chaos->strike_process(*fault)) return;
      const bool can = fault->kind == FaultKind::Fail || fault->kind == FaultKind::Delay;
      comm_->chaos->log(*fault, can ? "" : "not injected: a device runs this operation by itself");
      if (!can) return;
    }
  }
  if (!refused.empty()) {
    give_up("refused", refused, made.seq);
    throw CallFailure("refused", title(called(plan.code), made) + ", rank " +
                                     std::to_string(comm_->rank) + ": " + refused);
  }
  if (!differs.empty()) {
    give_up("calls", differs, made.seq);
    throw CallFailure(failure_kind_, failure_);
  }
  if (fault->kind == FaultKind::Delay) {  // before the device has it
    std::this_thread::sleep_for(std::chrono::duration<double>(fault->seconds));
    return;
  }
  const std::string why = Chaos::why(*fault);
  give_up("backend", why, made.seq);
  throw CallFailure("backend", fault->what + ", rank " + std::to_string(comm_->rank) + ": " + why);
}

std::string WatchedWork::title(const std::string& operation, const WatchedCall& made) const {
  return operation + " #" + std::to_string(made.seq) + " on " + comm_->name;
}

std::string WatchedWork::left_trail(const WatchedCall& made, const WatchedPlan& plan) {
  const uint64_t mark =
      mark_of_plan(plan.code, static_cast<DType>(plan.element_type),
                   static_cast<uint64_t>(plan.reduction),
                   call_has_root(plan.code) ? plan.root : plan.facts);
  if (std::string why = comm_->told_difference(made.seq); !why.empty()) return why;
  CallTrail& trail = comm_->trails.by_device;
  const bool is_known_equal = trail.add(made.seq, call_mark(mark, made.seq), plan.length,
                                        CallTrail::hash_of(mark, plan.length));
  if (is_known_equal) return {};
  return title(called(plan.code), made) + ", rank " + std::to_string(comm_->rank) + ": " +
         trail.why();
}

bool WatchedWork::look_for_difference() {
  std::string differs;
  {
    const std::lock_guard<std::mutex> own(engine_.mutex);
    const std::string why = comm_->trails.look_in_wait();
    if (why.empty()) return false;
    differs = title("operation", *calls_.front()) + ", rank " + std::to_string(comm_->rank) +
              ": " + why;
  }
  fail("calls", differs, false);
  return true;
}

void WatchedWork::watch(const WatchedPtr& made, void* const* keep) {
  HostLock own(device_, polling_);
  check(own.status());
  take_up(*made, keep);
  calls_.push_back(made);
  // It failed meanwhile; the streams are let go already.
  if (failed_) fail(failure_kind_, failure_, device_gone_);
}

bool WatchedWork::progress() {
  if (outstanding() == 0) return false;
  HostLock own(device_, polling_);
  // Once closed the flags may go, though somebody began to look before.
  if (own.status() != DeviceStatus::Ok || closed_ || calls_.empty()) return false;
  if (take_ended()) return true;
  if (calls_.empty() || (++idle_ % kIdleLooks != 0 && !simulated())) return false;
  return look_after();
}

bool WatchedWork::take_ended() {
  std::uint32_t begun = 0, ended = 0;
  // Another thread's capture must not end by questions about events.
  std::optional<RelaxedCapture> relaxed;
  if (begun_ == nullptr) {
    relaxed.emplace(device_);
  } else {
    const bool known = device_->api->flag_load(device_, begun_, &begun) == DeviceStatus::Ok &&
                       device_->api->flag_load(device_, ended_, &ended) == DeviceStatus::Ok;
    if (!known && !device_gone_) return false;
  }
  const auto has_come = [&](std::uint32_t flag, std::uint32_t value, Event event) {
    if (begun_ != nullptr) return flag_reached(flag, value);
    return device_->api->event_query(device_, event) == DeviceStatus::Ok;
  };
  for (; seen_begun_ < calls_.size(); ++seen_begun_) {
    WatchedCall& one = *calls_[seen_begun_];
    if (!has_come(begun, one.value, one.begun)) break;
    one.begun_s.store(now_s(), std::memory_order_release);
  }
  bool any = false;
  while (!calls_.empty()) {
    const WatchedPtr made = calls_.front();
    if (!device_gone_ && !has_come(ended, made->value, made->end)) break;
    see_end(*made);
    if (seen_begun_ > 0) --seen_begun_;
    calls_.pop_front();
    drop(*made);
    any = true;
  }
  return any;
}

// Called when nothing has changed for a while: the call may be too late, or a peer may have given
// up.
bool WatchedWork::look_after() {
  if (failed_) return look_at_failed();
  const WatchedCall& first = *calls_.front();
  const double begun_s = first.begun_s.load(std::memory_order_acquire);
  if (begun_s != 0 && now_s() > begun_s + first.timeout_s) {
    fail("timeout", "", false);
    return true;
  }
  if (comm_ != nullptr) {
    const std::lock_guard<std::mutex> own(engine_.mutex);
    comm_->refusals.look_around();  // else nobody looks where the host does nothing meanwhile
  }
  const GaveUp found = who_gave_up(first);
  if (!found.is_any()) return (comm_ != nullptr && look_for_difference()) || look_further();
  fail(found.kind(), found.why, false);
  return true;
}

GaveUp WatchedWork::who_gave_up(const WatchedCall& made) {
  if (comm_ == nullptr) return {};
  const std::lock_guard<std::mutex> own(engine_.mutex);
  Refusals& refusals = comm_->refusals;
  GaveUp found = comm_->who_gave_up(made.seq);
  if (!refusals.have_been()) return found;
  refusals.look();  // afterwards: who gave up may have done so by a refusal, which says more
  const std::string why = refusals.why_device_ends(made.seq);
  if (!why.empty()) {
    found = GaveUp{why};
    found.was_refused = true;
  }
  return found;
}

void WatchedWork::give_up_late(const CallPtr& call, double waited_s) {
  const auto& made = static_cast<const WatchedCall&>(*call);
  if (made.begun_s.load(std::memory_order_acquire) == 0 || waited_s < made.timeout_s) return;
  HostLock own(device_, polling_);
  check(own.status());
  if (!made.ended() && !failed_ && !closed_) fail("timeout", "", false);
}

DeviceWork::CallPtr WatchedWork::oldest() const {
  if (calls_.empty()) return nullptr;
  return calls_.front();
}

std::uint64_t WatchedWork::first_lost(std::uint64_t next) const {
  return calls_.empty() ? next : calls_.front()->seq;
}

void WatchedWork::let_all_go(const std::string& kind, const std::string& why) {
  for (const auto& one : calls_) one->fail(kind, why);
  let_streams_go();
}

}  // namespace commrt
