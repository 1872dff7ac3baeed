// SPDX-License-Identifier: Apache-2.0
// What a call gives the device, and what whoever makes progress sees of it (peer_work.hpp).
#include "peer_work.hpp"

#include <algorithm>

#include "comm.hpp"
#include "device_error.hpp"
#include "engine.hpp"
#include "staging.hpp"

namespace commrt {

namespace {

using Bug = PlantedInExchange;
constexpr std::size_t kLine = 64;
// Looks without a change between two questions that take longer.
constexpr unsigned kIdleLooks = 256;

// Whether an input has to be put away first.
bool reads_what_it_writes(const PeerPlan& plan, const unsigned char* in,
                          const unsigned char* out) {
  if (plan.in_nbytes == 0 || (plan.in_place && in == out)) return false;
  return in < out + plan.out_nbytes && out < in + plan.in_nbytes;
}

std::size_t whole_lines(std::size_t nbytes) { return (nbytes + kLine - 1) / kLine * kLine; }

}  // namespace

PeerCall::~PeerCall() {
  if (work != nullptr && end != 0) work->give_event(end);
}

PeerWork::PeerWork(Comm& comm, Engine& engine, std::shared_ptr<PeerExchange> exchange,
                   std::uint32_t first_value)
    : comm_(&comm), engine_(engine), exchange_(std::move(exchange)), device_(exchange_->device),
      issued_(first_value) {
  using Api = DeviceApi;
  call(&Api::pinned_alloc, 3 * kLine, &flag_memory_);
  std::uint32_t** const all[] = {&begun_, &ended_, &activity_};
  for (std::size_t i = 0; i < 3; ++i) {
    *all[i] =
        reinterpret_cast<std::uint32_t*>(static_cast<unsigned char*>(flag_memory_) + i * kLine);
    call(&Api::flag_store, *all[i], first_value);
  }
  call(&Api::event_create, &ready_);
}

PeerWork::~PeerWork() = default;

void PeerWork::check(DeviceStatus status) const {
  if (status != DeviceStatus::Ok) throw DeviceFailure(status, device_error());
}

void PeerWork::refuse_capture(Stream stream) {
  CaptureState state = CaptureState::None;
  call(&DeviceApi::is_capturing, stream, &state);
  if (state == CaptureState::None) return;
  throw DeviceFailure(
      DeviceStatus::Capturing,
      "stream " + std::to_string(stream) +
          " is being captured, and an operation over memory of peers cannot be a part of a graph: "
          "its flags count on from call to call, and a replay would wait for values that are "
          "past. Call it outside of the capture; nothing was given to the device");
}

Event PeerWork::take_event() {
  {
    const std::lock_guard<std::mutex> own(events_mutex_);
    if (!events_.empty()) {
      const Event event = events_.back();
      events_.pop_back();
      return event;
    }
  }
  Event event = 0;
  call(&DeviceApi::event_create, &event);
  return event;
}

// Of a call that outlives the communicator's work: nobody will take it.
void PeerWork::give_event(Event event) {
  {
    const std::lock_guard<std::mutex> own(events_mutex_);
    if (!events_closed_) {
      events_.push_back(event);
      return;
    }
  }
  device_->api->event_destroy(device_, event);
}

// Programs run one behind the other, and share it.
unsigned char* PeerWork::scratch(std::size_t nbytes) {
  if (nbytes == 0) return nullptr;
  if (scratches_.empty() || scratches_.back().second < nbytes) {
    const std::size_t before = scratches_.empty() ? 256 : 2 * scratches_.back().second;
    const std::size_t wanted = std::max(nbytes, before);
    void* made = nullptr;
    call(&DeviceApi::alloc, wanted, &made);
    // The smaller ones stay: what was given to the device may use them.
    scratches_.emplace_back(made, wanted);
  }
  return static_cast<unsigned char*>(scratches_.back().first);
}

// --- the call ---

std::shared_ptr<PeerCall> PeerWork::start(const std::shared_ptr<const PeerPlan>& plan,
                                          unsigned char* in, unsigned char* out, Stream stream,
                                          bool orders, void* const* keep, double timeout_s) {
  auto made = std::make_shared<PeerCall>();
  made->plan = plan;
  made->timeout_s = timeout_s;
  {
    HostLock own(device_, issue_);
    check(own.status());
    issue(made, in, out, stream, orders, keep);
  }
  announce();
  engine_.wake();
  return made;
}

// Holds issue_.
void PeerWork::issue(const std::shared_ptr<PeerCall>& made, unsigned char* in, unsigned char* out,
                     Stream stream, bool orders, void* const* keep) {
  refuse_capture(stream);
  // Not the device's: the caller says what became of the communicator.
  if (failed_) {
    throw DeviceFailure(device_gone_ ? DeviceStatus::Failed : DeviceStatus::NotReady, failure_);
  }
  const PeerPlan& plan = *made->plan;
  // First, as it may wait for all that the device was given.
  const bool copies = reads_what_it_writes(plan, in, out) && !has(Bug::NoCopy);
  unsigned char* const memory =
      scratch(whole_lines(plan.scratch_nbytes) + (copies ? plan.in_nbytes : 0));
  made->end = take_event();
  made->work = shared_from_this();
  made->value = ++issued_;
  {
    const std::lock_guard<std::mutex> own(engine_.mutex);
    Record record;
    record.count = plan.elements;
    record.coll = static_cast<int16_t>(plan.code);
    record.root = static_cast<int16_t>(plan.root);
    record.dtype = static_cast<uint8_t>(plan.element_type);
    record.redop = static_cast<uint8_t>(plan.reduction);
    record.blocking = orders;
    record.stream = stream;
    record.device = 0;
    made->seq = comm_->count_elsewhere(record);
  }
  try {
    give(*made, in, out, memory, copies, stream, orders);
  } catch (const DeviceFailure& failure) {
    // Peers wait for what does not come, and this rank's stream perhaps for them.
    give_up(std::string("device:") + status_name(failure.status), failure.what());
    throw;
  }
  HostLock own(device_, looking_);
  check(own.status());
  made->keep[0] = keep[0];
  made->keep[1] = keep[1];
  calls_.push_back(made);
  outstanding_.fetch_add(1, std::memory_order_release);
  // It failed meanwhile; the streams are let go already.
  if (failed_) fail(failure_kind_, failure_, device_gone_);
}

// Holds issue_.
void PeerWork::give(PeerCall& made, unsigned char* in, unsigned char* out, unsigned char* scratch,
                    bool copies, Stream stream, bool orders) {
  using Api = DeviceApi;
  const PeerPlan& plan = *made.plan;
  const Stream own = exchange_->stream;
  const bool is_late = has(Bug::ReadyLate);
  call(&Api::event_record, ready_, stream);
  if (!has(Bug::NoReady) && !is_late) call(&Api::stream_wait_event, own, ready_);
  call(&Api::write_value32, own, begun_, made.value);
  if (has(Bug::EndFlagEarly)) call(&Api::write_value32, own, ended_, made.value);
  if (has(Bug::EndEarly)) call(&Api::event_record, made.end, own);
  if (copies) {
    unsigned char* const copy = scratch + whole_lines(plan.scratch_nbytes);
    call(&Api::memcpy_async, copy, in, plan.in_nbytes,
         has(Bug::CopyOtherStream) ? stream : own);
    in = copy;
  }
  Stream on = own;
  if (has(Bug::UserStream)) call(&Api::stream_create, 0, false, &on);
  check(exchange_->give(*plan.program, in, out, scratch, on));
  if (is_late) call(&Api::stream_wait_event, own, ready_);
  if (!has(Bug::EndFlagEarly)) call(&Api::write_value32, own, ended_, made.value);
  if (!has(Bug::EndEarly)) {
    call(&Api::event_record, made.end, has(Bug::EndOtherStream) ? stream : own);
  }
  if (orders && !has(Bug::NoEnd)) call(&Api::stream_wait_event, stream, made.end);
}

void PeerWork::wait_on(const PeerCall& made, Stream stream) {
  refuse_capture(stream);
  if (has(Bug::NoEndWait) || closed_ || made.failed()) return;
  call(&DeviceApi::stream_wait_event, stream, made.end);
}

void PeerWork::pause(Backoff& backoff) {
  if (simulated()) {
    check(device_->api->pause(device_));
  } else {
    backoff.pause();
  }
}

void PeerWork::see() {
  if (simulated()) HostLock own(device_, looking_);
}

void PeerWork::announce() {
  if (!simulated() || closed_) return;
  device_->api->flag_store(device_, activity_,
                           activities_.fetch_add(1, std::memory_order_relaxed) + 1);
}

// --- what the host sees ---

bool PeerWork::look() {
  if (outstanding() == 0) return false;
  HostLock own(device_, looking_);
  // Once closed the flags may go, though somebody began to look before.
  if (own.status() != DeviceStatus::Ok || closed_ || calls_.empty()) return false;
  if (take_ended()) return true;
  if (calls_.empty() || (++idle_ % kIdleLooks != 0 && !simulated())) return false;
  return look_after();
}

// Holds looking_.
bool PeerWork::take_ended() {
  std::uint32_t begun = 0, ended = 0;
  const bool known = device_->api->flag_load(device_, begun_, &begun) == DeviceStatus::Ok &&
                     device_->api->flag_load(device_, ended_, &ended) == DeviceStatus::Ok;
  if (!known && !device_gone_) return false;
  for (; seen_begun_ < calls_.size(); ++seen_begun_) {
    PeerCall& one = *calls_[seen_begun_];
    if (!flag_reached(begun, one.value)) break;
    one.begun_s.store(now_s(), std::memory_order_release);
  }
  bool any = false;
  while (!calls_.empty() && (device_gone_ || flag_reached(ended, calls_.front()->value))) {
    finish(calls_.front());
    any = true;
  }
  return any;
}

// The device has done all of it: references are free. Holds looking_.
void PeerWork::finish(const std::shared_ptr<PeerCall>& made) {
  const std::shared_ptr<PeerCall> held = made;
  if (!failed_) {
    const std::string who = who_gave_up(*held);
    if (!who.empty()) fail("revoked", who, false);
  }
  engine_.discard_objects(held->keep);
  int running = static_cast<int>(State::Running);
  held->state.compare_exchange_strong(running, static_cast<int>(State::Done),
                                      std::memory_order_acq_rel);
  ended_seqs_.push_back(held->seq);
  if (ended_seqs_.size() > 2) ended_seqs_.pop_front();
  if (seen_begun_ > 0) --seen_begun_;
  calls_.pop_front();
  outstanding_.fetch_sub(1, std::memory_order_release);
}

std::string PeerWork::who_gave_up(const PeerCall& made) {
  if (comm_ == nullptr || has(Bug::Unasked)) return {};
  const std::lock_guard<std::mutex> own(engine_.mutex);
  return comm_->who_gave_up(made.seq);
}

// Nothing has changed for a while: it may be too late, or a peer may have given up. Holds looking_.
bool PeerWork::look_after() {
  if (failed_) {
    // A peer that was still at work may have written a flag after it was let go.
    if (!has(Bug::KeptBehind)) let_go();
    return false;
  }
  const PeerCall& first = *calls_.front();
  const double begun_s = first.begun_s.load(std::memory_order_acquire);
  if (begun_s != 0 && now_s() > begun_s + first.timeout_s) {
    fail("timeout", "", false);
    return true;
  }
  const std::string who = who_gave_up(first);
  if (who.empty()) return false;
  fail("revoked", who, false);
  return true;
}

void PeerWork::give_up_late(const std::shared_ptr<PeerCall>& made, double waited_s) {
  if (made->begun_s.load(std::memory_order_acquire) == 0 || waited_s < made->timeout_s) return;
  HostLock own(device_, looking_);
  check(own.status());
  if (!made->ended() && !failed_ && !closed_) fail("timeout", "", false);
}

void PeerWork::ask_device(const std::shared_ptr<PeerCall>& made) {
  // Another thread's capture must not end by this question.
  CaptureMode mode = CaptureMode::Relaxed;
  if (device_->api->exchange_capture_mode(device_, &mode) != DeviceStatus::Ok) return;
  const DeviceStatus status = device_->api->event_query(device_, made->end);
  const std::string text = device_error();
  device_->api->exchange_capture_mode(device_, &mode);
  if (status == DeviceStatus::Ok || status == DeviceStatus::NotReady) return;
  give_up(std::string("device:") + status_name(status), text);
}

// --- failures ---

void PeerWork::give_up(const std::string& kind, const std::string& why) {
  {
    HostLock own(device_, looking_);
    if (closed_ || failed_) return;
    take_ended();  // what has ended is nothing to give up
    if (!failed_) fail(kind, why, kind == "device:failed");
  }
  announce();  // peers learn of it, too
}

// Holds looking_.
void PeerWork::fail(const std::string& kind, const std::string& why, bool device_is_gone) {
  failed_ = true;
  device_gone_ = device_gone_ || device_is_gone;
  failure_kind_ = kind;
  failure_ = why;
  // Before the streams go on: peers must not take what these publish for a result.
  if (comm_ != nullptr) {
    const std::string text =
        kind == "timeout" ? "an operation over memory of peers came too late" : why;
    const std::lock_guard<std::mutex> engine(engine_.mutex);
    comm_->break_down(text);
    comm_->tell_failure(first_lost());
  }
  for (const auto& one : calls_) {
    if (one->ended()) continue;
    one->kind = kind;
    one->error = why;
    one->state.store(static_cast<int>(State::Failed), std::memory_order_release);
  }
  let_go();
}

// The first call that peers must not take for good. What is let go may write over a half of the
// exchange memory that peers have not read yet: it holds the part before the last, and each call
// has one at least, so it may be one of the last two calls that have ended here. Holds looking_
// and the engine's lock.
std::uint64_t PeerWork::first_lost() const {
  if (calls_.empty()) return comm_->next_seq;
  if (ended_seqs_.empty() || has(Bug::ToldLate)) return calls_.front()->seq;
  return ended_seqs_.front();
}

// Holds looking_. Where it does not work the device is at fault, which calls say by themselves.
void PeerWork::let_go() {
  if (device_gone_ || has(Bug::Kept)) return;
  CaptureMode mode = CaptureMode::Relaxed;
  if (device_->api->exchange_capture_mode(device_, &mode) != DeviceStatus::Ok) return;
  const DeviceStatus status = exchange_->release();
  device_->api->exchange_capture_mode(device_, &mode);
  if (status == DeviceStatus::Failed) device_gone_ = true;
}

// --- the end ---

void PeerWork::close() {
  abandon();
  HostLock own(device_, looking_);
  closed_ = true;
}

void PeerWork::abandon() {
  engine_.unwatch(this);
  HostLock own(device_, looking_);
  comm_ = nullptr;
}

bool PeerWork::has_run() {
  HostLock own(device_, issue_);
  check(own.status());
  bool all = false;
  check(exchange_->has_run(&all));
  return all;
}

void PeerWork::end() {
  HostLock own(device_, issue_);
  check(own.status());
  check(exchange_->end());
  std::vector<Event> events;
  {
    const std::lock_guard<std::mutex> events_own(events_mutex_);
    events.swap(events_);
    events_closed_ = true;
  }
  for (const Event event : events) call(&DeviceApi::event_destroy, event);
  call(&DeviceApi::event_destroy, ready_);
  for (const auto& [memory, nbytes] : scratches_) call(&DeviceApi::free, memory);
  scratches_.clear();
  call(&DeviceApi::pinned_free, flag_memory_);
  // Of a failed one: nobody else looks at its calls any more.
  HostLock looking(device_, looking_);
  for (const auto& one : calls_) engine_.discard_objects(one->keep);
  calls_.clear();
}

}  // namespace commrt
