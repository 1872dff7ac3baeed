// SPDX-License-Identifier: Apache-2.0
// The part that staged collectives and messages have in common (staged_work.hpp).
#include "device_calls/staged_work.hpp"

#include "engine/comm.hpp"

namespace commrt {

StagedWork::StagedWork(Comm& comm, Engine& engine, Device* device, std::shared_ptr<void> keeps,
                       const StagerOptions& options)
    : DeviceWork(comm, engine, device, std::move(keeps), own_events_), options_(options),
      flags_(device->memory_flags && options.flags), own_events_(device), lines_(device, 4, options.first_value),
      start_(lines_[0]), go_(lines_[1]), end_(lines_[2]), opened_(options.first_value) {
  using Api = DeviceApi;
  activity_ = lines_[3];
  // Non-blocking: work of the legacy stream must not wait for a stream that waits for a flag.
  call(&Api::stream_create, -1, false, &d2h_);
  call(&Api::stream_create, -1, false, &h2d_);
  call(&Api::event_create, &ready_);
}

void StagedWork::refuse_capture(Stream stream) const {
  refuse_capture_of(stream, why_no_graph());
}

const char* StagedWork::why_no_graph() const {
  return "an operation through host memory cannot be a part of a graph: the host works at each "
         "replay, and values of flags would come twice";
}

std::size_t StagedWork::pinned_nbytes() {
  HostLock own(device_, polling_);
  return memory_nbytes();
}

void StagedWork::wait_for_memory(Backoff& backoff, double deadline, double timeout_s) {
  if (now_s() > deadline) {
    throw DeviceFailure(DeviceStatus::OutOfMemory,
                        "no pinned memory came back within " + std::to_string(timeout_s) +
                            " s: " + std::to_string(outstanding()) +
                            " calls are under way and have all of the " +
                            std::to_string(options_.most_nbytes) +
                            " bytes that there may be; wait for some of them first");
  }
  if (engine_.step()) {
    backoff.reset();
  } else {
    pause(backoff, deadline);
  }
}

void StagedWork::wait_on(const CallPtr& made, Stream stream) {
  refuse_capture(stream);
  order_after(std::static_pointer_cast<StagedCall>(made), stream);
}

void StagedWork::order_after(const StagedPtr& made, Stream stream) {
  progress_until([&] { return made->end_issued.load(std::memory_order_acquire) || made->ended(); });
  if (closed_ || made->failed()) return;
  call(&DeviceApi::stream_wait_event, stream, made->end);
}

bool StagedWork::progress() {
  if (outstanding() == 0) return false;
  HostLock own(device_, polling_);
  if (own.status() != DeviceStatus::Ok || comm_ == nullptr || outstanding() == 0) return false;
  bool any = false;
  if (!failed_) any = open_gates();
  if (!failed_) any = let_go() || any;
  return take_ended() || any;
}

bool StagedWork::take_ended() {
  if (ending_.empty()) return false;
  std::uint32_t value = 0;
  if (flags_ && device_->api->flag_load(device_, end_, &value) != DeviceStatus::Ok) return false;
  bool any = false;
  while (!ending_.empty()) {
    const StagedPtr made = ending_.front();
    const bool ended =
        flags_ ? flag_reached(value, made->end_value)
               : query(made->end) != DeviceStatus::NotReady;
    if (!ended && !device_gone_) break;
    ending_.pop_front();
    finish(made);
    any = true;
  }
  return any;
}

void StagedWork::give_up_call(const StagedPtr& made, const DeviceFailure& failure) {
  {
    HostLock own(device_, polling_);
    made->fail(std::string("device:") + status_name(failure.status), failure.what());
  }
  give_up_as(failure);
}

DeviceStatus StagedWork::query(Event event) const {
  const RelaxedCapture relaxed(device_);
  return device_->api->event_query(device_, event);
}

void StagedWork::finish(const StagedPtr& made) {
  give_memory_back(*made);
  drop(*made);
}

void StagedWork::close() {
  // Nobody makes progress for it from here on, and streams would wait for ever.
  if (outstanding() != 0) give_up("revoked", "its communicator was freed");
  abandon();
  HostLock issue(device_, issue_);
  bool is_clean = false;
  {
    HostLock own(device_, polling_);
    if (closed_) return;
    closed_ = true;
    if (!failed_ && outstanding() != 0) return;
    is_clean = !failed_;
  }
  if (is_clean) {
    free_rest();
  } else {
    mark_ends();
  }
}

// Nobody gives the streams anything from here on. If a call fails here, the device is gone.
void StagedWork::mark_ends() {
  const RelaxedCapture relaxed(device_);
  const Stream streams[] = {d2h_, h2d_};
  for (std::size_t i = 0; i < 2; ++i) {
    Event made = 0;
    if (device_->api->event_create(device_, &made) != DeviceStatus::Ok) return;
    if (device_->api->event_record(device_, made, streams[i]) != DeviceStatus::Ok) return;
    last_[i] = made;
  }
}

// Three parties may still be at work: the device with what its streams hold, of which the events
// know; the host with operations, which have ended or belong to nobody; and MPI with their memory.
StagedWork::Rest StagedWork::release_rest() {
  HostLock issue(device_, issue_);
  if (is_released_) return Rest::Released;
  if (issue.status() != DeviceStatus::Ok || !closed_ || last_[1] == 0) return Rest::Never;
  {
    HostLock own(device_, polling_);
    if (own.status() != DeviceStatus::Ok) return Rest::Never;
    const Rest host = host_is_done();
    if (host != Rest::Released) return host;
  }
  const RelaxedCapture relaxed(device_);
  for (const Event event : last_) {
    const DeviceStatus status = device_->api->event_query(device_, event);
    if (status == DeviceStatus::NotReady && asks_device()) return Rest::Later;
    if (status != DeviceStatus::NotReady && status != DeviceStatus::Ok) return Rest::Never;
  }
  // Freeing waits for all that the device was given, and other calls may wait for this thread.
  if (engine_.is_device_busy()) return Rest::Later;
  {
    HostLock own(device_, polling_);
    for (const StagedPtr& made : ending_) finish(made);
    ending_.clear();
  }
  for (const Event event : last_) device_->api->event_destroy(device_, event);
  free_rest();
  is_released_ = true;
  return Rest::Released;
}

// Holds issue_.
void StagedWork::free_rest() {
  device_->api->stream_destroy(device_, d2h_);
  device_->api->stream_destroy(device_, h2d_);
  device_->api->event_destroy(device_, ready_);
  free_all();
  own_events_.close();
  lines_.free();
}

}  // namespace commrt
