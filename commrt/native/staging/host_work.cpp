// SPDX-License-Identifier: Apache-2.0
// Gives the device the commands of calls whose work is the host's, and makes their progress
// (host_work.hpp).
#include "staging/host_work.hpp"

#include <algorithm>

#include "devices/device_error.hpp"
#include "engine/backoff.hpp"
#include "engine/comm.hpp"
#include "engine/engine.hpp"

namespace commrt {

COMMRT_NAMES_OF_BUGS(
    PlantedHostWork,
    "ungated", "no_ready", "start_early", "values_again", "no_go", "go_early", "go_ahead",
    "end_early", "end_of_copies", "no_end_wait", "end_flag_early", "early_recycling",
    "read_recycling", "late_copy", "not_copied", "flags_kept", "block_lost", "references_kept")

HostCall::~HostCall() {
  if (work != nullptr && copied != 0) work->events().give(copied);
}

// Before the end is given, the copy to the host tells as much.
Event HostCall::asked() const {
  return end_issued.load(std::memory_order_acquire) ? end : copied;
}

HostWork::HostWork(Comm& comm, Engine& engine, Device* device, std::shared_ptr<void> keeps,
                       const StagerOptions& options)
    : StagedWork(comm, engine, device, std::move(keeps), options), starts_(options.first_value),
      ends_(options.first_value), gos_(options.first_value) {
  void* first = nullptr;
  call(&DeviceApi::pinned_alloc, options_.first_nbytes, &first);
  pool_.add_first(first, options_.first_nbytes);
}

PinnedPool::Block HostWork::take_block(std::size_t nbytes, double timeout_s) {
  const int size_class = PinnedPool::class_for(nbytes);
  const std::size_t rounded = PinnedPool::nbytes_of(size_class);
  PinnedPool::Block block;
  const auto take = [&](std::size_t* grow) {
    if (pool_.take(size_class, &block)) return true;
    const std::size_t most = options_.most_nbytes;
    // With nothing under way, no memory comes back, and waiting for it would be in vain.
    if (rounded > most || outstanding() == 0 || pool_.total() + rounded <= most) *grow = rounded;
    return false;
  };
  take_memory(take, [&](void* more, std::size_t) { pool_.add(more, size_class); }, timeout_s);
  return block;
}

// --- the call ---

DeviceWork::CallPtr HostWork::start(std::vector<HostArray> arrays, Stream stream,
                                      bool asked_for, void* const* keep, double timeout_s) {
  auto made = std::make_shared<HostCall>();
  made->timeout_s = timeout_s;
  made->asked_for = asked_for;
  {
    HostLock own(device_, issue_);
    check(own.status());
    refuse_capture(stream);
    std::size_t nbytes = 0;
    for (HostArray& one : arrays) {
      one.pinned = nbytes;
      nbytes += in_lines(one.nbytes);
      made->writes = made->writes || one.writes;
    }
    made->arrays = std::move(arrays);
    made->block = take_block(std::max(nbytes, kLine), timeout_s);
    made->end = events_.take();
    made->copied = events_.take();
    made->work = shared_from_this();
    made->seq = number_++;
    made->start_value = starts_ + (has(PlantedHostWork::ValuesAgain) && starts_ != 0 ? 0 : 1);
    made->is_gated = flags_ && made->writes && !has(PlantedHostWork::LateCopy);
    give_or_fail(
        [&] {
          copy_to_host(*made, stream);
          if (made->is_gated) owed_.push_back(made);
        },
        "no host memory is left to start a call that the host makes: free memory first");
    starts_ = made->start_value;
    if (made->is_gated) {
      made->go_value = gos_.fetch_add(1, std::memory_order_acq_rel) + 1;
      made->end_value = ++ends_;
    }
    HostLock polling(device_, polling_);
    check(polling.status());
    take_up(*made, keep);
    if (has(PlantedHostWork::ReferencesKept)) made->keep[0] = made->keep[1] = nullptr;
    calls_.push_back(made);
    if (failed_) fail(failure_kind_, failure_, device_gone_);
  }
  announce();
  engine_.wake();
  return made;
}

void HostWork::copy_to_host(HostCall& made, Stream stream) {
  using Api = DeviceApi;
  call(&Api::event_record, ready_, stream);
  if (!has(PlantedHostWork::NoReady)) call(&Api::stream_wait_event, d2h_, ready_);
  const bool early = has(PlantedHostWork::StartEarly);
  if (flags_ && early) call(&Api::write_value32, d2h_, start_, made.start_value);
  for (const HostArray& one : made.arrays) {
    if (!one.reads || one.nbytes == 0) continue;
    call(&Api::memcpy_async, static_cast<void*>(made.block.at + one.pinned),
         static_cast<const void*>(one.at), one.nbytes, d2h_);
  }
  call(&Api::event_record, made.copied, d2h_);
  if (flags_ && !early) call(&Api::write_value32, d2h_, start_, made.start_value);
  if (made.writes) return;
  // If nothing is written back, the copy is the end: the arrays are the caller's again.
  call(&Api::event_record, made.end, d2h_);
  made.end_issued.store(true, std::memory_order_release);
}

// Gives those of earlier calls of other threads, too: calls end in the order of their starts.
void HostWork::give_back(const CallPtr& call) {
  const HostCallPtr last = as_host_call(call);
  HostLock own(device_, issue_);
  check(own.status());
  while (!owed_.empty() && !last->end_issued.load(std::memory_order_acquire)) {
    const HostCallPtr made = owed_.front();
    owed_.pop_front();
    give_copies(made);
  }
}

// A call that has failed is given them, too: nothing holds them any more, and its end comes.
void HostWork::give_copies(const HostCallPtr& made) {
  using Api = DeviceApi;
  if (closed_) return;
  try {
    if (!has(PlantedHostWork::NotCopied)) call(&Api::stream_wait_event, h2d_, made->copied);
    if (!has(PlantedHostWork::NoGo)) call(&Api::wait_value32_geq, h2d_, go_, made->go_value);
    copy_back(*made);
  } catch (const DeviceFailure& failure) {
    give_up_call(made, failure);
    throw;
  }
  made->end_issued.store(true, std::memory_order_release);
}

void HostWork::copy_back(HostCall& made) {
  using Api = DeviceApi;
  const bool event_early = has(PlantedHostWork::EndEarly);
  const bool flag_early = has(PlantedHostWork::EndFlagEarly);
  if (event_early) call(&Api::event_record, made.end, h2d_);
  if (has(PlantedHostWork::EndOfCopies)) call(&Api::event_record, made.end, d2h_);
  if (flags_ && flag_early) call(&Api::write_value32, h2d_, end_, made.end_value);
  for (const HostArray& one : made.arrays) {
    if (!one.writes || one.nbytes == 0) continue;
    call(&Api::memcpy_async, static_cast<void*>(one.at),
         static_cast<const void*>(made.block.at + one.pinned), one.nbytes, h2d_);
  }
  if (!event_early && !has(PlantedHostWork::EndOfCopies)) {
    call(&Api::event_record, made.end, h2d_);
  }
  if (flags_ && !flag_early) call(&Api::write_value32, h2d_, end_, made.end_value);
}

void HostWork::order_after(const StagedPtr& made, Stream stream) {
  if (has(PlantedHostWork::NoEndWait)) return;
  if (has(PlantedHostWork::LateCopy)) {
    call(&DeviceApi::wait_value32_geq, stream, end_, as_host_call(made)->start_value);
    return;
  }
  StagedWork::order_after(made, stream);
}

std::vector<std::uint64_t> HostWork::places(const CallPtr& call) const {
  const HostCallPtr made = as_host_call(call);
  std::vector<std::uint64_t> found;
  for (const HostArray& one : made->arrays) {
    found.push_back(reinterpret_cast<std::uint64_t>(made->block.at + one.pinned));
  }
  return found;
}

// --- the host's part ---

// Tells a simulated device what the host does in pinned memory. The thread that does it calls
// this.
void HostWork::touch(const HostCall& made, bool reads, bool writes) {
  if (!simulated()) return;
  for (const HostArray& one : made.arrays) {
    if (one.nbytes == 0) continue;
    unsigned char* const at = made.block.at + one.pinned;
    if (reads && one.reads) device_->api->host_access(device_, at, one.nbytes, false);
    if (writes && one.writes) device_->api->host_access(device_, at, one.nbytes, true);
  }
}

bool HostWork::has_come(const CallPtr& call) {
  const HostCallPtr made = as_host_call(call);
  if (made->failed()) return true;
  HostLock own(device_, polling_);
  check(own.status());
  if (made->failed()) return true;
  if (!made->come && !has(PlantedHostWork::Ungated)) return false;
  made->at_work = true;
  touch(*made, true, false);
  return true;
}

bool HostWork::wait_until_come(const CallPtr& call, double limit_s) {
  Backoff backoff(engine_, 0);
  const double deadline = now_s() + limit_s;
  for (unsigned look = 1; !has_come(call); ++look) {
    bool looks_at_clock = look % 16 == 0;
    if (engine_.step()) {
      backoff.reset();
    } else {
      looks_at_clock = pause(backoff, deadline) || looks_at_clock;
    }
    if (looks_at_clock && now_s() > deadline) return false;
  }
  return true;
}

void HostWork::done(const CallPtr& call) {
  const HostCallPtr made = as_host_call(call);
  {
    HostLock own(device_, polling_);
    check(own.status());
    if (!made->failed()) touch(*made, true, true);
    made->host_done = true;
  }
  progress();
  announce();
  engine_.wake();
}

// Nobody asks for the end of a call that blocked nobody, so later calls report its failure.
void HostWork::fail_call(const CallPtr& call, const std::string& kind,
                           const std::string& why) {
  const HostCallPtr made = as_host_call(call);
  {
    HostLock own(device_, polling_);
    check(own.status());
    made->host_done = true;
    if (!failed_ && kind == "timeout") {
      fail(kind, why, false);
    } else if (!made->ended()) {
      made->fail(kind, why);
      if (!made->asked_for && comm_ != nullptr) {
        const std::lock_guard<std::mutex> engine(engine_.mutex);
        comm_->break_down(why);
      }
    }
  }
  progress();
  announce();
  engine_.wake();
}

// --- progress ---

// Lets the host begin with calls whose copies to the host are there.
bool HostWork::open_gates() {
  if (come_ == calls_.size()) return false;
  std::uint32_t started = 0;
  if (flags_ && device_->api->flag_load(device_, start_, &started) != DeviceStatus::Ok) {
    return false;
  }
  bool any = false;
  for (; come_ < calls_.size(); ++come_) {
    HostCall& made = *calls_[come_];
    if (flags_) {
      if (!flag_reached(started, made.start_value) && !has(PlantedHostWork::Ungated)) break;
    } else {
      const DeviceStatus status = query(made.copied);
      if (status == DeviceStatus::NotReady) break;
      if (status != DeviceStatus::Ok) {
        fail(std::string("device:") + status_name(status), device_error(),
             status == DeviceStatus::Failed);
        return true;
      }
    }
    made.come = true;
    if (has(PlantedHostWork::ReadRecycling) && !made.writes) pool_.give_back(made.block);
    any = true;
  }
  return any;
}

// Sends back what the host is done with. A call that failed before its copies came stays until
// they come: they are on their way to memory that others would use.
bool HostWork::let_go() {
  bool any = false;
  while (come_ > 0) {
    const HostCallPtr made = calls_.front();
    if (!made->host_done && !(has(PlantedHostWork::GoEarly) && made->at_work)) break;
    if (!made->writes || (!flags_ && made->failed())) {
      finish(made);
    } else if (!flags_ || has(PlantedHostWork::LateCopy)) {
      if (!give_finished(made)) return true;
    } else {
      const std::uint32_t ahead = has(PlantedHostWork::GoAhead) ? 1 : 0;
      device_->api->flag_store(device_, go_, made->go_value + ahead);
      if (has(PlantedHostWork::EarlyRecycling)) pool_.give_back(made->block);
      ending_.push_back(made);
    }
    calls_.pop_front();
    --come_;
    any = true;
  }
  return any;
}

// Without flags, sends back what is done. The caller holds polling_. The end is then counted only
// here.
bool HostWork::give_finished(const HostCallPtr& made) {
  try {
    call(&DeviceApi::stream_wait_event, h2d_, made->copied);
    made->end_value = ++ends_;
    copy_back(*made);
    made->end_issued.store(true, std::memory_order_release);
    ending_.push_back(made);
    return true;
  } catch (const DeviceFailure& failure) {
    fail_as(failure);
    return false;
  }
}

void HostWork::give_memory_back(StagedCall& ended) {
  auto& made = static_cast<HostCall&>(ended);
  const bool early = (has(PlantedHostWork::EarlyRecycling) && made.writes) ||
                     (has(PlantedHostWork::ReadRecycling) && !made.writes);
  if (!failed_ && !early && !has(PlantedHostWork::BlockLost)) pool_.give_back(made.block);
}

// --- failures ---

DeviceWork::CallPtr HostWork::oldest() const {
  if (!ending_.empty()) return ending_.front();
  if (calls_.empty()) return nullptr;
  return calls_.front();
}

// Holds polling_. Memory is left alone: the host may still work there.
void HostWork::let_all_go(const std::string& kind, const std::string& why) {
  if (flags_ && !has(PlantedHostWork::FlagsKept)) {
    device_->api->flag_store(device_, go_, gos_.load(std::memory_order_acquire) + kFarAhead);
  }
  std::deque<HostCallPtr> all;
  all.swap(calls_);
  come_ = 0;
  for (const HostCallPtr& made : all) {
    made->fail(kind, why);
    if (made->at_work && !made->host_done) failed_at_work_.push_back(made);
    // Its arrays may be written until its end flag comes.
    if (made->is_gated) {
      ending_.push_back(made);
    } else {
      finish(made);
    }
  }
  take_ended();
}

// --- the end ---

StagedWork::Rest HostWork::host_is_done() {
  const bool all = std::all_of(failed_at_work_.begin(), failed_at_work_.end(),
                               [](const HostCallPtr& made) { return made->host_done; });
  return all ? Rest::Released : Rest::Later;
}

void HostWork::free_all() {
  failed_at_work_.clear();
  pool_.each([&](void* base) { device_->api->pinned_free(device_, base); });
}

}  // namespace commrt
