// SPDX-License-Identifier: Apache-2.0
// Calls under way on a device, and their failures.
#include "engine/device_work.hpp"

#include "engine/backoff.hpp"
#include "engine/comm.hpp"
#include "engine/device_refusals.hpp"
#include "engine/engine.hpp"

namespace commrt {

DeviceCall::~DeviceCall() {
  if (work != nullptr && end != 0) work->events().give(end);
}

void DeviceCall::fail(const std::string& kind_, const std::string& why) {
  if (ended()) return;
  kind = kind_;
  error = why;
  state.store(static_cast<int>(State::Failed), std::memory_order_release);
}

void DeviceCall::succeed() {
  int running = static_cast<int>(State::Running);
  state.compare_exchange_strong(running, static_cast<int>(State::Done),
                                std::memory_order_acq_rel);
}

DeviceWork::DeviceWork(Comm& comm, Engine& engine, Device* device, std::shared_ptr<void> keeps,
                       EventPool& events)
    : DeviceUser(device), comm_(&comm), engine_(engine), keeps_(std::move(keeps)),
      events_(events) {}

// Resources that close() did not give back are left alone: the device may still use them.
DeviceWork::~DeviceWork() = default;

void DeviceWork::check_failed() const {
  // The failure is not the device's: the caller says what became of the communicator.
  if (!failed_) return;
  throw DeviceFailure(device_gone_ ? DeviceStatus::Failed : DeviceStatus::NotReady, failure_);
}

void DeviceWork::refuse_capture_of(Stream stream, const char* why) const {
  CaptureState state = CaptureState::None;
  call(&DeviceApi::is_capturing, stream, &state);
  if (state == CaptureState::None) return;
  throw DeviceFailure(DeviceStatus::Capturing,
                      "stream " + std::to_string(stream) + " is being captured, and " + why +
                          ". Call it outside of the capture; nothing was given to the device");
}

void DeviceWork::take_up(DeviceCall& made, void* const* keep) {
  made.keep[0] = keep[0];
  made.keep[1] = keep[1];
  outstanding_.fetch_add(1, std::memory_order_release);
}

void DeviceWork::drop(DeviceCall& made) {
  engine_.discard_objects(made.keep);
  fail_if_refused(made);
  made.succeed();
  outstanding_.fetch_sub(1, std::memory_order_release);
}

void DeviceWork::fail_if_refused(DeviceCall& made) {
  if (!made.may_be_refused || comm_ == nullptr || made.ended()) return;
  DeviceRefusals& refusals = *comm_->refusals.on_devices;
  const std::string why = refusals.take_refused(made.seq);
  if (why.empty()) return;
  made.fail("refused", why);
  // Who asks for the end sees one of the two.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (made.is_waited.load()) refusals.leave_untold(made.seq, why);
}

// --- waiting ---

bool DeviceWork::pause(Backoff& backoff, double until_s) {
  if (!simulated()) return backoff.pause(until_s);
  check(device_->api->pause(device_));
  return false;
}

bool DeviceWork::progress_until(const std::function<bool()>& is_so, double until_s) {
  const bool is_limited = until_s != std::numeric_limits<double>::infinity();
  Backoff backoff(engine_, 0);
  while (!is_so()) {
    if (engine_.step()) {
      backoff.reset();
    } else {
      pause(backoff, until_s);
    }
    if (is_limited && (backoff.take_interrupt() || now_s() >= until_s)) return is_so();
  }
  return true;
}

void DeviceWork::announce() {
  if (!simulated() || closed_) return;
  device_->api->flag_store(device_, activity_,
                           activities_.fetch_add(1, std::memory_order_relaxed) + 1);
}

void DeviceWork::ask_device(const CallPtr& made) {
  const Event asked = made->asked();
  if (asked == 0) return;
  DeviceStatus status = DeviceStatus::Ok;
  std::string text;
  {
    // Another thread's capture must not end by this question.
    const RelaxedCapture relaxed(device_);
    if (!relaxed) return;
    status = device_->api->event_query(device_, asked);
    if (status == DeviceStatus::Ok || status == DeviceStatus::NotReady) return;
    text = commrt::device_error();
  }
  give_up(std::string("device:") + status_name(status), text);
}

bool DeviceWork::has_ended(const DeviceCall& made) {
  if (!made.ended()) return false;
  // A simulated device learns from the lock what a state tells through memory.
  if (simulated() && !closed_) HostLock own(device_, polling_);
  return true;
}

void DeviceWork::ask_for_oldest() {
  CallPtr made;
  {
    const std::lock_guard<std::mutex> own(polling_);
    if (!closed_ && !failed_) made = oldest();
  }
  if (made != nullptr) ask_device(made);
}

// --- failures ---

void DeviceWork::give_up(const std::string& kind, const std::string& why,
                         std::optional<std::uint64_t> seq) {
  {
    HostLock own(device_, polling_);
    if (closed_ || failed_) return;
    const bool is_gone = kind == "device:failed";
    if (!is_gone) see_ended();
    if (!failed_) fail(kind, why, is_gone, seq);
  }
  announce();  // peers learn of it, too
}

void DeviceWork::give_up_as(const DeviceFailure& failure, std::optional<std::uint64_t> seq) {
  give_up(std::string("device:") + status_name(failure.status), failure.what(), seq);
}

void DeviceWork::fail_as(const DeviceFailure& failure) {
  fail(std::string("device:") + status_name(failure.status), failure.what(),
       failure.status == DeviceStatus::Failed);
}

void DeviceWork::fail(const std::string& kind, const std::string& why, bool device_is_gone,
                      std::optional<std::uint64_t> seq) {
  device_gone_ = device_gone_ || device_is_gone;
  failure_kind_ = kind;
  std::string text = kind == "timeout" ? too_late() : why;
  // Before the streams go on: peers must not take what these give them for a result.
  if (comm_ != nullptr) {
    const std::lock_guard<std::mutex> engine(engine_.mutex);
    const bool differ = kind == "calls" || kind == "mismatch";
    const std::string common = differ ? comm_->words_of_difference(text) : text;
    if (kind == "calls") text = common;  // the same on all ranks
    comm_->break_down(common);
    comm_->tell_failure(first_lost(seq.value_or(comm_->next_seq)));
  }
  failure_ = kind == "timeout" ? why : text;
  failed_ = true;
  let_all_go(kind, text);
}

void DeviceWork::abandon() {
  engine_.remove_device_work(this);
  HostLock own(device_, polling_);
  comm_ = nullptr;
}

}  // namespace commrt
