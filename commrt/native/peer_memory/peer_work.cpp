// SPDX-License-Identifier: Apache-2.0
// Gives the device the commands of calls over memory of peers, and sees their ends
// (peer_work.hpp).
#include "peer_memory/peer_work.hpp"

#include "engine/comm.hpp"
#include "engine/engine.hpp"

namespace commrt {

using Bug = PlantedInExchange;

PeerWork::PeerWork(Comm& comm, Engine& engine, std::shared_ptr<PeerExchange> exchange,
                   std::uint32_t first_value)
    : WatchedWork(comm, engine, exchange->device, exchange, own_events_),
      exchange_(std::move(exchange)), own_events_(device_), lines_(device_, 3, first_value),
      issued_(first_value), scratch_(device_) {
  begun_ = lines_[0];
  ended_ = lines_[1];
  activity_ = lines_[2];
  call(&DeviceApi::event_create, &ready_);
}

void PeerWork::refuse_capture(Stream stream) const {
  refuse_capture_of(stream,
                    "an operation over memory of peers cannot be a part of a graph: its flags "
                    "count on from call to call, and a replay would wait for values that are past");
}

// --- the call ---

DeviceWork::CallPtr PeerWork::start(const std::shared_ptr<const PeerPlan>& plan,
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
  check_failed();
  const PeerPlan& plan = *made->plan;
  // First, as it may wait for all that the device was given.
  const bool copies = plan.overlaps(in, out) && !has(Bug::NoCopy);
  unsigned char* const memory =
      scratch_.of(in_lines(plan.scratch_nbytes) + (copies ? plan.in_nbytes : 0));
  made->end = events_.take();
  made->work = shared_from_this();
  made->value = ++issued_;
  count(*made, plan, stream, orders);
  try {
    give(*made, in, out, memory, copies, stream, orders);
  } catch (const DeviceFailure& failure) {
    // Peers wait for what does not come, and this rank's stream perhaps for them. The call has its
    // number already: without it peers would take it for one that was given.
    half_given_ = true;
    give_up_as(failure, made->seq);
    throw;
  }
  watch(made, keep);
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
    unsigned char* const copy = scratch + in_lines(plan.scratch_nbytes);
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

void PeerWork::wait_on(const CallPtr& made, Stream stream) {
  refuse_capture(stream);
  if (has(Bug::NoEndWait) || closed_ || made->failed()) return;
  call(&DeviceApi::stream_wait_event, stream, made->end);
}

// --- what the host sees ---

void PeerWork::see_end(const WatchedCall& made) {
  if (!failed_) {
    const GaveUp found = who_gave_up(made);
    if (found.is_any()) fail(found.kind(), found.why, false);
  }
  ended_seqs_.push_back(made.seq);
  if (ended_seqs_.size() > 2) ended_seqs_.pop_front();
}

GaveUp PeerWork::who_gave_up(const WatchedCall& made) {
  return has(Bug::Unasked) ? GaveUp() : WatchedWork::who_gave_up(made);
}

// --- failures ---

// A peer that was still at work may have written a flag after it was let go.
bool PeerWork::look_at_failed() {
  if (!has(Bug::KeptBehind)) let_streams_go();
  return false;
}

// A stream that is let go may write over a half of the exchange memory that peers have not read
// yet. That half holds the part before the last, and each call has at least one part. So it may
// belong to one of the last two calls that have ended here.
std::uint64_t PeerWork::first_lost(std::uint64_t next) const {
  const bool is_none = calls_.empty() && !half_given_;
  if (is_none || ended_seqs_.empty() || has(Bug::ToldLate)) {
    return WatchedWork::first_lost(next);
  }
  return ended_seqs_.front();
}

// If the release fails, the device is at fault, which calls report by themselves.
void PeerWork::let_streams_go() {
  if (device_gone_ || has(Bug::Kept)) return;
  const RelaxedCapture relaxed(device_);
  if (relaxed && exchange_->release() == DeviceStatus::Failed) device_gone_ = true;
}

// --- the end ---

void PeerWork::close() {
  abandon();
  HostLock own(device_, polling_);
  closed_ = true;
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
  own_events_.close();
  call(&DeviceApi::event_destroy, ready_);
  scratch_.free();
  lines_.free();
  // Drop the calls of a failed one: nobody else looks at them any more.
  HostLock looking(device_, polling_);
  for (const auto& one : calls_) engine_.discard_objects(one->keep);
  calls_.clear();
}

}  // namespace commrt
