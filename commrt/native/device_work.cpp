// SPDX-License-Identifier: Apache-2.0
// Flags, events and failures of a communicator's work on a device.
#include "device_work.hpp"

#include "comm.hpp"
#include "device_error.hpp"
#include "engine.hpp"

namespace commrt {

namespace {
constexpr std::size_t kLine = 64;
}

StagedCall::~StagedCall() {
  if (work == nullptr) return;
  for (const Event event : {end, copied}) {
    if (event != 0) work->give_event(event);
  }
}

void StagedCall::fail(const std::string& kind_, const std::string& why) {
  if (ended()) return;
  kind = kind_;
  error = why;
  state.store(static_cast<int>(State::Failed), std::memory_order_release);
}

void StagedCall::succeed() {
  int running = static_cast<int>(State::Running);
  state.compare_exchange_strong(running, static_cast<int>(State::Done),
                                std::memory_order_acq_rel);
}

const char* failure_kind(const Op& op) {
  return op.by_user            ? "reduction"
         : op.by_mpi           ? "backend"
         : op.given_up         ? "revoked"
         : op.p2p != nullptr   ? "truncation"
                               : "mismatch";
}

DeviceWork::DeviceWork(Comm& comm, Engine& engine, Device* device, std::shared_ptr<void> keeps)
    : comm_(&comm), engine_(engine), device_(device), keeps_(std::move(keeps)),
      flags_(device->memory_flags) {}

// What close() did not give back is left alone: the device may still use it.
DeviceWork::~DeviceWork() = default;

void DeviceWork::check(DeviceStatus status) const {
  if (status != DeviceStatus::Ok) throw DeviceFailure(status, commrt::device_error());
}

void DeviceWork::refuse_capture(Stream stream) {
  CaptureState state = CaptureState::None;
  call(&DeviceApi::is_capturing, stream, &state);
  if (state == CaptureState::None) return;
  throw DeviceFailure(
      DeviceStatus::Capturing,
      "stream " + std::to_string(stream) +
          " is being captured, and an operation through host memory cannot be a part of a graph: "
          "the host works at each replay, and values of flags would come twice. Call it outside "
          "of the capture; nothing was given to the device");
}

// --- what is used again ---

void DeviceWork::make_flags(std::size_t count, std::uint32_t value,
                            std::uint32_t** const* flags) {
  using Api = DeviceApi;
  call(&Api::pinned_alloc, (count + 1) * kLine, &flag_memory_);
  for (std::size_t i = 0; i <= count; ++i) {
    auto* const flag =
        reinterpret_cast<std::uint32_t*>(static_cast<unsigned char*>(flag_memory_) + i * kLine);
    call(&Api::flag_store, flag, value);
    (i < count ? *flags[i] : activity_) = flag;
  }
}

void DeviceWork::free_flags() { device_->api->pinned_free(device_, flag_memory_); }

Event DeviceWork::take_event() {
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
void DeviceWork::give_event(Event event) {
  {
    const std::lock_guard<std::mutex> own(events_mutex_);
    if (!events_closed_) {
      events_.push_back(event);
      return;
    }
  }
  device_->api->event_destroy(device_, event);
}

std::size_t DeviceWork::num_events() {
  const std::lock_guard<std::mutex> own(events_mutex_);
  return events_.size();
}

void DeviceWork::destroy_events() {
  std::vector<Event> all;
  {
    const std::lock_guard<std::mutex> own(events_mutex_);
    all.swap(events_);
    events_closed_ = true;
  }
  for (const Event event : all) device_->api->event_destroy(device_, event);
}

void DeviceWork::check_failed() const {
  // Not the device's: the caller says what became of the communicator.
  if (!failed_) return;
  throw DeviceFailure(device_gone_ ? DeviceStatus::Failed : DeviceStatus::NotReady, failure_);
}

void DeviceWork::wait_for_memory(Backoff& backoff, double deadline, double timeout_s,
                                 std::size_t most) {
  if (now_s() > deadline) {
    throw DeviceFailure(DeviceStatus::OutOfMemory,
                        "no pinned memory came back within " + std::to_string(timeout_s) +
                            " s: " + std::to_string(outstanding()) +
                            " calls are under way and have all of the " + std::to_string(most) +
                            " bytes that there may be; wait for some of them first");
  }
  if (engine_.step()) {
    backoff.reset();
  } else {
    pause(backoff);
  }
}

void DeviceWork::drop(StagedCall& made) {
  engine_.discard_objects(made.keep);
  made.succeed();
  outstanding_.fetch_sub(1, std::memory_order_release);
}

// --- waiting ---

void DeviceWork::pause(Backoff& backoff) {
  if (simulated()) {
    check(device_->api->pause(device_));
  } else {
    backoff.pause();
  }
}

void DeviceWork::announce() {
  if (!simulated() || closed_) return;
  device_->api->flag_store(device_, activity_,
                           activities_.fetch_add(1, std::memory_order_relaxed) + 1);
}

void DeviceWork::ask_device(const std::shared_ptr<StagedCall>& made) {
  // Where the end is not given yet, what was copied to the host tells as much.
  const Event asked =
      made->end_given.load(std::memory_order_acquire) ? made->end : made->copied;
  if (asked == 0) return;
  // Another thread's capture must not end by this question.
  CaptureMode mode = CaptureMode::Relaxed;
  if (device_->api->exchange_capture_mode(device_, &mode) != DeviceStatus::Ok) return;
  const DeviceStatus status = device_->api->event_query(device_, asked);
  const std::string text = commrt::device_error();
  device_->api->exchange_capture_mode(device_, &mode);
  if (status == DeviceStatus::Ok || status == DeviceStatus::NotReady) return;
  give_up(std::string("device:") + status_name(status), text);
}

bool DeviceWork::has_ended(const StagedCall& made) {
  if (!made.ended()) return false;
  // What a state tells through memory, a simulated device learns from the lock.
  if (simulated() && !closed_) HostLock own(device_, polling_);
  return true;
}

void DeviceWork::ask_for_oldest() {
  std::shared_ptr<StagedCall> made;
  {
    const std::lock_guard<std::mutex> own(polling_);
    if (!closed_ && !failed_) made = oldest();
  }
  if (made != nullptr) ask_device(made);
}

// --- failures ---

void DeviceWork::give_up(const std::string& kind, const std::string& why) {
  {
    HostLock own(device_, polling_);
    if (closed_ || failed_) return;
    fail(kind, why, kind == "device:failed");
  }
  announce();  // peers learn of it, too
}

void DeviceWork::fail_as(const DeviceFailure& failure) {
  fail(std::string("device:") + status_name(failure.status), failure.what(),
       failure.status == DeviceStatus::Failed);
}

// Holds polling_.
void DeviceWork::fail(const std::string& kind, const std::string& why, bool device_is_gone) {
  failed_ = true;
  device_gone_ = device_gone_ || device_is_gone;
  failure_kind_ = kind;
  failure_ = why;
  const std::string text = kind == "timeout" ? "an operation on device memory came too late" : why;
  if (comm_ != nullptr) {
    const std::lock_guard<std::mutex> engine(engine_.mutex);
    comm_->break_down(text);
    comm_->tell_failure(comm_->next_seq);
  }
  let_all_go(kind, text);
}

void DeviceWork::abandon() {
  engine_.remove_device_work(this);
  HostLock own(device_, polling_);
  comm_ = nullptr;
}

}  // namespace commrt
