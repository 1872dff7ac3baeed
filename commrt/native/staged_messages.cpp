// SPDX-License-Identifier: Apache-2.0
// What messages of device memory give the device, and what becomes of them (staged_messages.hpp).
#include "staged_messages.hpp"

#include <algorithm>

#include "comm.hpp"
#include "device_error.hpp"
#include "engine.hpp"

namespace commrt {

namespace {

constexpr std::size_t kLine = 64;
// What a failure adds to the go flag: also what is still to be given its commands is let go.
constexpr std::uint32_t kFarAhead = std::uint32_t{1} << 30;
constexpr unsigned kIdleLooks = 256;
std::size_t in_lines(std::size_t nbytes) { return (nbytes + kLine - 1) / kLine * kLine; }

}  // namespace

const char* const kPlantedMessageNames[kNumPlantedMessages] = {
    "none",         "ungated",     "rest_ungated",    "no_go",          "go_early",
    "no_ready",     "sent_early",  "end_early",       "no_end_wait",    "not_copied",
    "early_recycling", "sent_recycling", "given_at_once", "rest_lost",  "flags_kept"};

MessageStager::MessageStager(Comm& comm, Engine& engine, Device* device,
                             std::shared_ptr<void> keeps, const StagerOptions& options)
    : DeviceWork(comm, engine, device, std::move(keeps)), options_(options),
      starts_(options.first_value), ends_(options.first_value), gos_(options.first_value),
      opened_(options.first_value) {
  using Api = DeviceApi;
  std::uint32_t** const flags[] = {&start_, &go_, &end_};
  make_flags(3, options.first_value, flags);
  call(&Api::stream_create, -1, false, &d2h_);
  call(&Api::stream_create, -1, false, &h2d_);
  call(&Api::event_create, &ready_);
  void* first = nullptr;
  call(&Api::pinned_alloc, options_.first_nbytes, &first);
  pool_.add_first(first, options_.first_nbytes);
}

std::size_t MessageStager::pinned_nbytes() {
  HostLock own(device_, polling_);
  return pool_.total();
}

std::size_t MessageStager::num_leaving() {
  HostLock own(device_, polling_);
  return leaving_.size();
}

PinnedPool::Block MessageStager::take_memory(std::size_t nbytes, double timeout_s) {
  const double deadline = now_s() + timeout_s;
  const int size_class = PinnedPool::class_for(nbytes);
  const std::size_t rounded = PinnedPool::nbytes_of(size_class);
  Backoff backoff(0);
  for (;;) {
    PinnedPool::Block block;
    bool grow = false;
    {
      HostLock own(device_, polling_);
      check(own.status());
      check_failed();
      if (pool_.take(size_class, &block)) return block;
      grow = rounded > options_.most_nbytes || pool_.total() + rounded <= options_.most_nbytes;
    }
    if (grow) {
      // It may wait for all that the device was given, so nothing is held that progress needs.
      void* more = nullptr;
      call(&DeviceApi::pinned_alloc, rounded, &more);
      HostLock own(device_, polling_);
      check(own.status());
      pool_.add(more, size_class);
      continue;
    }
    wait_for_memory(backoff, deadline, timeout_s, options_.most_nbytes);
  }
}

// --- the call ---

// Where everything is in pinned memory, and the same lists there.
void MessageStager::lay_out(StagedCall& made, const MessageLists& lists,
                            MessageLists& on_host) const {
  std::size_t at = 0;
  auto place = [&](const std::vector<Message>& list, std::vector<StagedCopy>& copies) {
    for (const Message& one : list) {
      const int array = static_cast<int>(made.arrays.size());
      made.arrays.push_back(static_cast<unsigned char*>(one.data));
      copies.push_back({array, 0, 0, one.nbytes, at});
      at += in_lines(one.nbytes);
    }
  };
  place(lists.sends, made.in);
  place(lists.recvs, made.out);
  on_host = lists;
  on_host.in_place = false;  // each has its own memory there
  std::size_t next = 0;
  for (auto* list : {&on_host.sends, &on_host.recvs}) {
    for (Message& one : *list) {
      one.data = made.block.at + next;
      one.replaced = false;
      next += in_lines(one.nbytes);
    }
  }
}

std::shared_ptr<StagedCall> MessageStager::start(const MessageLists& lists, Stream stream,
                                                 bool orders, void* const* keep,
                                                 double timeout_s) {
  auto made = std::make_shared<StagedCall>();
  made->timeout_s = timeout_s;
  made->asked = !orders;
  {
    HostLock own(device_, issue_);
    check(own.status());
    refuse_capture(stream);
    std::size_t nbytes = 0;
    for (const auto* list : {&lists.sends, &lists.recvs}) {
      for (const Message& one : *list) nbytes += in_lines(one.nbytes);
    }
    made->block = take_memory(std::max(nbytes, kLine), timeout_s);
    made->end = take_event();
    if (!lists.recvs.empty()) made->copied = take_event();
    made->work = shared_from_this();
    MessageLists on_host;
    lay_out(*made, lists, on_host);
    made->start_value = starts_ + 1;
    const bool gated = !has(PlantedMessage::Ungated) &&
                       !(has(PlantedMessage::RestUngated) && lists.sends.empty());
    const Gate gate{gated ? &opened_ : nullptr, made->start_value};
    try {
      copy_to_host(*made, stream);
      {
        const std::lock_guard<std::mutex> engine(engine_.mutex);
        made->messages = comm_->p2p->multi(on_host, {}, gate);
        made->seq = made->messages->seq;
      }
      // What has begun already has read, which a simulated device is told.
      if (!gated) touch(*made, made->in, false);
    } catch (const DeviceFailure& failure) {
      give_up(std::string("device:") + status_name(failure.status), failure.what());
      throw;
    } catch (...) {
      give_up("backend", "no memory for what messages of device memory need");
      throw;
    }
    starts_ = made->start_value;
    HostLock polling(device_, polling_);
    check(polling.status());
    made->keep[0] = keep[0];
    made->keep[1] = keep[1];
    outstanding_.fetch_add(1, std::memory_order_release);
    leaving_.push_back(made);
    if (failed_) fail(failure_kind_, failure_, device_gone_);
  }
  announce();
  engine_.wake();
  if (has(PlantedMessage::GivenAtOnce)) give(made);
  if (orders) wait_on(made, stream);
  return made;
}

void MessageStager::copy_to_host(StagedCall& made, Stream stream) {
  using Api = DeviceApi;
  call(&Api::event_record, ready_, stream);
  if (!has(PlantedMessage::NoReady)) call(&Api::stream_wait_event, d2h_, ready_);
  const bool sent_early = has(PlantedMessage::SentEarly);
  // Of what only leaves, the copy is the end: the array is the caller's again.
  const Event copied = made.out.empty() ? made.end : made.copied;
  if (sent_early) call(&Api::event_record, copied, d2h_);
  const bool rest = !has(PlantedMessage::RestLost);
  for (const auto* copies : {&made.in, &made.out}) {
    if (copies == &made.out && !rest) break;
    for (const StagedCopy& one : *copies) {
      if (one.nbytes == 0) continue;
      const unsigned char* const array = made.arrays[static_cast<std::size_t>(one.array)];
      call(&Api::memcpy_async, static_cast<void*>(made.block.at + one.pinned),
           static_cast<const void*>(array), one.nbytes, d2h_);
    }
  }
  if (!sent_early) call(&Api::event_record, copied, d2h_);
  if (flags_) call(&Api::write_value32, d2h_, start_, made.start_value);
  made.end_given.store(made.out.empty(), std::memory_order_release);
}

void MessageStager::copy_back(StagedCall& made) {
  using Api = DeviceApi;
  for (const StagedCopy& one : made.out) {
    if (one.nbytes == 0) continue;
    unsigned char* const array = made.arrays[static_cast<std::size_t>(one.array)];
    call(&Api::memcpy_async, static_cast<void*>(array),
         static_cast<const void*>(made.block.at + one.pinned), one.nbytes, h2d_);
  }
}

// Gives the device the copies back, which wait there for the messages. Without flags they cannot,
// and whoever makes progress gives them.
void MessageStager::give(const CallPtr& made) {
  using Api = DeviceApi;
  HostLock own(device_, issue_);
  check(own.status());
  if (!flags_ || made->given || made->out.empty() || closed_ || made->ended()) return;
  try {
    if (!has(PlantedMessage::NotCopied)) call(&Api::stream_wait_event, h2d_, made->copied);
    made->go_value = gos_.fetch_add(1, std::memory_order_acq_rel) + 1;
    if (!has(PlantedMessage::NoGo)) call(&Api::wait_value32_geq, h2d_, go_, made->go_value);
    if (has(PlantedMessage::EndEarly)) call(&Api::event_record, made->end, h2d_);
    copy_back(*made);
    if (!has(PlantedMessage::EndEarly)) call(&Api::event_record, made->end, h2d_);
    made->end_value = ++ends_;
    call(&Api::write_value32, h2d_, end_, made->end_value);
  } catch (const DeviceFailure& failure) {
    give_up(std::string("device:") + status_name(failure.status), failure.what());
    throw;
  }
  HostLock polling(device_, polling_);
  check(polling.status());
  made->given = true;
  made->end_given.store(true, std::memory_order_release);
  if (made->ended()) return;  // it failed meanwhile
  open_.remove(made);
  given_.push_back(made);
  if (failed_) fail(failure_kind_, failure_, device_gone_);
}

// Without flags: what has come goes back. Holds polling_.
bool MessageStager::give_finished(const CallPtr& made) {
  using Api = DeviceApi;
  try {
    touch(*made, made->out, true);
    call(&Api::stream_wait_event, h2d_, made->copied);
    copy_back(*made);
    call(&Api::event_record, made->end, h2d_);
    made->given = true;
    made->end_given.store(true, std::memory_order_release);
    ending_.push_back(made);
    return true;
  } catch (const DeviceFailure& failure) {
    fail_as(failure);
    return false;
  }
}

void MessageStager::advance(const CallPtr& made) {
  if (made->ended()) return;
  if (!made->messages->finished()) {  // a peer may have given up
    Op& op = *made->messages;
    const std::lock_guard<std::mutex> own(engine_.mutex);
    if (!op.finished()) op.comm->p2p->fail_after_peer(made->messages);
    return;
  }
  give(made);
  progress();
}

void MessageStager::wait_on(const CallPtr& made, Stream stream) {
  if (has(PlantedMessage::NoEndWait)) return;
  if (!made->out.empty()) {
    give(made);
    progress();
    announce();
    engine_.wake();
    Backoff backoff(0);
    while (!made->end_given.load(std::memory_order_acquire) && !made->ended()) {
      if (engine_.step()) {
        backoff.reset();
      } else {
        pause(backoff);
      }
    }
  }
  if (closed_ || made->failed()) return;
  call(&DeviceApi::stream_wait_event, stream, made->end);
}

// --- progress ---

bool MessageStager::progress() {
  if (outstanding() == 0) return false;
  HostLock own(device_, polling_);
  if (own.status() != DeviceStatus::Ok || comm_ == nullptr || outstanding() == 0) return false;
  bool any = false;
  if (!failed_) any = open_gates();
  if (!failed_) any = settle() || any;
  if (!failed_) any = let_go() || any;
  return take_ended() || any;
}

void MessageStager::touch(const StagedCall& made, const std::vector<StagedCopy>& copies,
                          bool writes) {
  if (!simulated()) return;
  for (const StagedCopy& one : copies) {
    if (one.nbytes == 0) continue;
    device_->api->host_access(device_, made.block.at + one.pinned, one.nbytes, writes);
  }
}

// Where the copies to the host are there.
bool MessageStager::open_gates() {
  if (leaving_.empty()) return false;
  std::uint32_t started = 0;
  if (flags_ && device_->api->flag_load(device_, start_, &started) != DeviceStatus::Ok) {
    return false;
  }
  bool any = false;
  for (; !leaving_.empty(); leaving_.pop_front()) {
    const CallPtr& made = leaving_.front();
    if (flags_) {
      const bool ungated =
          has(PlantedMessage::Ungated) ||
          (has(PlantedMessage::RestUngated) && made->in.empty());
      if (!flag_reached(started, made->start_value) && !ungated) break;
    } else {
      const Event event = made->out.empty() ? made->end : made->copied;
      const DeviceStatus status = device_->api->event_query(device_, event);
      if (status == DeviceStatus::NotReady) break;
      if (status != DeviceStatus::Ok) {
        fail(std::string("device:") + status_name(status), device_error(),
             status == DeviceStatus::Failed);
        return true;
      }
    }
    touch(*made, made->in, false);
    touch(*made, made->out, true);  // the messages come over what is there
    made->opened_s = now_s();
    opened_.store(made->start_value, std::memory_order_release);
    if (has(PlantedMessage::SentRecycling) && made->out.empty()) pool_.give_back(made->block);
    if (!made->given) open_.push_back(made);
    any = true;
  }
  return any;
}

// What ends without a copy back: sends, and receives that failed.
bool MessageStager::settle() {
  bool any = false;
  for (auto next = open_.begin(); next != open_.end();) {
    const CallPtr made = *next;
    const bool finished = made->messages->finished();
    const bool failed =
        finished && made->messages->state.load(std::memory_order_acquire) ==
                        static_cast<int>(OpState::Failed);
    if (!finished || (flags_ && !failed && !made->out.empty())) {
      ++next;
      continue;
    }
    next = open_.erase(next);
    if (!failed) touch(*made, made->in, false);  // until now it has been read
    if (!failed && !made->out.empty()) {
      if (!give_finished(made)) return true;
      any = true;
      continue;
    }
    if (failed) fail_one(*made);
    finish(made);
    any = true;
  }
  return any;
}

// What the host is done with, in the order in which it was given to the device.
bool MessageStager::let_go() {
  bool any = false;
  while (!given_.empty()) {
    const CallPtr& made = given_.front();
    if (!made->messages->finished() && !has(PlantedMessage::GoEarly)) {
      if (any || (++idle_ % kIdleLooks != 0 && !simulated())) return any;
      look_after(made);
      return any;
    }
    const bool failed = made->messages->state.load(std::memory_order_acquire) ==
                        static_cast<int>(OpState::Failed);
    if (failed) {
      fail_one(*made);
    } else {
      touch(*made, made->in, false);
      touch(*made, made->out, true);
    }
    device_->api->flag_store(device_, go_, made->go_value);
    if (has(PlantedMessage::EarlyRecycling)) pool_.give_back(made->block);
    ending_.push_back(made);
    given_.pop_front();
    any = true;
  }
  return any;
}

// Nothing has changed for a while: a peer may have given up, or come too late.
void MessageStager::look_after(const CallPtr& made) {
  std::string why;
  {
    const std::lock_guard<std::mutex> own(engine_.mutex);
    if (!made->messages->finished()) comm_->p2p->fail_after_peer(made->messages);
    if (!made->messages->finished() && comm_->broken.load(std::memory_order_acquire)) {
      why = comm_->failure;
    }
  }
  if (made->messages->finished()) return;  // the next pass finds it
  if (!why.empty()) {
    fail("revoked", why, false);
  } else if (made->opened_s != 0 && now_s() > made->opened_s + made->timeout_s) {
    fail("timeout", "", false);
  }
}

bool MessageStager::take_ended() {
  if (ending_.empty()) return false;
  std::uint32_t value = 0;
  if (flags_ && device_->api->flag_load(device_, end_, &value) != DeviceStatus::Ok) return false;
  bool any = false;
  while (!ending_.empty()) {
    const CallPtr made = ending_.front();
    const bool ended =
        flags_ ? flag_reached(value, made->end_value)
               : device_->api->event_query(device_, made->end) != DeviceStatus::NotReady;
    if (!ended && !device_gone_) break;
    ending_.pop_front();
    finish(made);
    any = true;
  }
  return any;
}

// Neither the host nor the device uses its memory any more.
void MessageStager::finish(const CallPtr& made) {
  const bool early = has(PlantedMessage::EarlyRecycling) ||
                     (has(PlantedMessage::SentRecycling) && made->out.empty());
  if (!failed_ && !early) pool_.give_back(made->block);
  drop(*made);
}

// --- failures ---

MessageStager::CallPtr MessageStager::oldest() const {
  if (!ending_.empty()) return ending_.front();
  if (!given_.empty()) return given_.front();
  return leaving_.empty() ? nullptr : leaving_.front();
}

// Of a call that blocked nobody nobody asks: later calls say it.
void MessageStager::fail_one(StagedCall& made) {
  made.fail(failure_kind(*made.messages), made.messages->error);
  if (made.asked) return;
  const std::lock_guard<std::mutex> own(engine_.mutex);
  comm_->break_down(made.error);
}

// Holds polling_. Memory is left alone: the host's messages may still come.
void MessageStager::let_all_go(const std::string& kind, const std::string& why) {
  if (flags_ && !has(PlantedMessage::FlagsKept)) {
    device_->api->flag_store(device_, go_, gos_.load(std::memory_order_acquire) + kFarAhead);
  }
  std::vector<CallPtr> all(given_.begin(), given_.end());
  for (const CallPtr& made : leaving_) {
    if (!made->given) all.push_back(made);
  }
  all.insert(all.end(), open_.begin(), open_.end());
  given_.clear();
  leaving_.clear();
  open_.clear();
  for (const CallPtr& made : all) {
    made->fail(kind, why);
    if (made->given && made->end_given) {
      ending_.push_back(made);
    } else {
      finish(made);
    }
  }
  take_ended();
}

// --- the end ---

void MessageStager::close() {
  using Api = DeviceApi;
  abandon();
  HostLock issue(device_, issue_);
  {
    HostLock own(device_, polling_);
    if (closed_) return;
    closed_ = true;
    if (failed_ || outstanding() != 0) return;
  }
  device_->api->stream_destroy(device_, d2h_);
  device_->api->stream_destroy(device_, h2d_);
  device_->api->event_destroy(device_, ready_);
  destroy_events();
  pool_.each([&](void* base) { device_->api->pinned_free(device_, base); });
  free_flags();
}

}  // namespace commrt
