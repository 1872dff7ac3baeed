// SPDX-License-Identifier: Apache-2.0
// The state that NCCL's work on a device shares, and the end of communicators.
#include "library_calls/nccl_order.hpp"

#include <algorithm>

#include "device_calls/staged_work.hpp"
#include "library_calls/nccl_work.hpp"

namespace commrt {

namespace {
// A finalised communicator is destroyed at once; where that sticks, its thread is left behind.
constexpr double kDestroy_s = 1;
// The number of captures whose latest operation is remembered. So many captures would have to go
// on at once for one to be forgotten before its end.
constexpr std::size_t kMostCaptures = 1024;
}

NcclOrder::NcclOrder(Device* on, std::shared_ptr<void> keeps, std::uint32_t first_value)
    : DeviceUser(on), events(on), flags(on->memory_flags), issued(first_value), scratch(on),
      lines(on, 3, first_value), keeps_(std::move(keeps)) {
  using Api = DeviceApi;
  // Non-blocking: it must not take turns with the legacy stream.
  call(&Api::stream_create, -1, false, &stream);
  call(&Api::event_create, &ready);
  call(&Api::event_create, &serial);
  forks_.push_back(0);  // so that a capture need not make one
  call(&Api::stream_create, -1, false, &forks_.back());
}

std::shared_ptr<StagedCall> NcclOrder::unended() const {
  for (const auto& [work, one] : beside) {
    if (!one->end_issued.load(std::memory_order_acquire) && !one->ended()) return one;
  }
  return nullptr;
}

void NcclOrder::wait_for_last(Stream on) {
  if (last != nullptr) call(&DeviceApi::stream_wait_event, on, last->end);
}

void NcclOrder::wait_for_beside(Stream on) {
  for (const auto& [work, one] : beside) call(&DeviceApi::stream_wait_event, on, one->end);
}

Event* NcclOrder::tip(std::uint64_t capture) {
  if (capture <= forgotten_) {
    throw DeviceFailure(DeviceStatus::Capturing,
                        "capture " + std::to_string(capture) + " began more than " +
                            std::to_string(kMostCaptures) +
                            " captures ago: end captures before you begin that many others");
  }
  const auto found = tips_.find(capture);
  return found == tips_.end() ? nullptr : &found->second;
}

void NcclOrder::set_tip(std::uint64_t capture, Event event) {
  Event& kept = tips_[capture];
  if (kept != 0) events.give(kept);
  kept = event;
  if (tips_.size() <= kMostCaptures) return;
  forgotten_ = tips_.begin()->first;
  events.give(tips_.begin()->second);
  tips_.erase(tips_.begin());
}

Stream NcclOrder::fork(std::uint64_t capture) {
  Stream idle = 0;
  for (const Stream each : forks_) {
    std::uint64_t in = 0;
    call(&DeviceApi::capture_id, each, &in);
    if (in == capture) return each;
    if (in == 0) idle = each;
  }
  if (idle != 0) return idle;
  call(&DeviceApi::stream_create, -1, false, &idle);
  forks_.push_back(idle);
  return idle;
}

void NcclOrder::retire(std::shared_ptr<NcclComm> comm) {
  HostLock own(device_, issue);
  retired_.push_back(std::move(comm));
}

std::size_t NcclOrder::sweep() {
  HostLock own(device_, issue);
  sweep_locked();
  return retired_.size();
}

void NcclOrder::sweep_locked() {
  for (auto& comm : retired_) {
    const int code = comm->finalize(0.0);
    if (code == kNcclTimedOut || code == kNcclBusy) continue;  // the other ranks are not there yet
    // A communicator that failed is aborted: its peers may never come.
    if (code == kNcclSuccess) {
      comm->destroy(kDestroy_s);
    } else {
      comm->abort(kDestroy_s);
    }
    comm = nullptr;
  }
  retired_.erase(std::remove(retired_.begin(), retired_.end(), nullptr), retired_.end());
}

void NcclOrder::close(double abort_timeout_s) {
  HostLock own(device_, issue);
  if (closed_) return;
  closed_ = true;
  for (auto& comm : retired_) comm->abort(abort_timeout_s);
  retired_.clear();
  last = nullptr;
  beside.clear();
  // A device that is gone has taken all of it along, so nobody looks at what it says.
  const auto give = [this](auto entry, auto what) { (device_->api->*entry)(device_, what); };
  give(&DeviceApi::stream_destroy, stream);
  for (const Stream each : forks_) give(&DeviceApi::stream_destroy, each);
  for (const Event each : {ready, serial}) give(&DeviceApi::event_destroy, each);
  for (const auto& [capture, event] : tips_) give(&DeviceApi::event_destroy, event);
  events.close();
  scratch.free();
  // Whoever makes progress may still look at the flags of a call, as the process ends.
  if (under_way.load(std::memory_order_acquire) == 0) lines.free();
}

}  // namespace commrt
