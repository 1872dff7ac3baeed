// SPDX-License-Identifier: Apache-2.0
// Gives the device the commands of messages, and makes their progress (staged_messages.hpp).
#include "staging/staged_messages.hpp"

#include <algorithm>

#include "devices/device_error.hpp"
#include "engine/comm.hpp"
#include "engine/engine.hpp"

namespace commrt {

COMMRT_NAMES_OF_BUGS(
    PlantedMessage,
    "ungated", "rest_ungated", "no_go", "go_early", "no_ready", "sent_early", "end_early",
    "no_end_wait", "not_copied", "early_recycling", "sent_recycling", "issued_at_once",
    "rest_lost", "flags_kept", "block_lost")

MessagesCall::~MessagesCall() {
  if (work != nullptr && copied != 0) work->events().give(copied);
}

// Before the end is given, the copy to the host tells as much.
Event MessagesCall::asked() const {
  return end_issued.load(std::memory_order_acquire) ? end : copied;
}

MessageStager::MessageStager(Comm& comm, Engine& engine, Device* device,
                             std::shared_ptr<void> keeps, const StagerOptions& options)
    : StagedWork(comm, engine, device, std::move(keeps), options), of_(&comm),
      starts_(options.first_value), ends_(options.first_value), gos_(options.first_value) {
  void* first = nullptr;
  call(&DeviceApi::pinned_alloc, options_.first_nbytes, &first);
  pool_.add_first(first, options_.first_nbytes);
}

std::size_t MessageStager::num_leaving() {
  HostLock own(device_, polling_);
  return leaving_.size();
}

PinnedPool::Block MessageStager::take_block(std::size_t nbytes, double timeout_s) {
  const int size_class = PinnedPool::class_for(nbytes);
  const std::size_t rounded = PinnedPool::nbytes_of(size_class);
  PinnedPool::Block block;
  const auto take = [&](std::size_t* grow) {
    if (pool_.take(size_class, &block)) return true;
    const std::size_t most = options_.most_nbytes;
    if (rounded > most || pool_.total() + rounded <= most) *grow = rounded;
    return false;
  };
  take_memory(take, [&](void* more, std::size_t) { pool_.add(more, size_class); }, timeout_s);
  return block;
}

// --- the call ---

// Gives each message a place in pinned memory, and makes `on_host`, the same lists with these
// places.
void MessageStager::lay_out(MessagesCall& made, const MessageLists& lists,
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

DeviceWork::CallPtr MessageStager::start(const MessageLists& lists, Stream stream, bool orders,
                                            void* const* keep, double timeout_s) {
  auto made = std::make_shared<MessagesCall>();
  made->timeout_s = timeout_s;
  made->asked_for = !orders;
  {
    HostLock own(device_, issue_);
    check(own.status());
    refuse_capture(stream);
    std::size_t nbytes = 0;
    for (const auto* list : {&lists.sends, &lists.recvs}) {
      for (const Message& one : *list) nbytes += in_lines(one.nbytes);
    }
    made->block = take_block(std::max(nbytes, kLine), timeout_s);
    made->end = events_.take();
    if (!lists.recvs.empty()) made->copied = events_.take();
    made->work = shared_from_this();
    MessageLists on_host;
    lay_out(*made, lists, on_host);
    made->start_value = starts_ + 1;
    const bool gated = !has(PlantedMessage::Ungated) &&
                       !(has(PlantedMessage::RestUngated) && lists.sends.empty());
    const Gate gate{gated ? &opened_ : nullptr, made->start_value};
    give_or_fail(
        [&] {
          copy_to_host(*made, stream);
          {
            const std::lock_guard<std::mutex> engine(engine_.mutex);
            made->op = comm_->p2p->multi(on_host, {}, gate);
            made->seq = made->op->seq;
          }
          // An operation that has begun has read its input. A simulated device is told so.
          if (!gated) touch(*made, made->in, false);
        },
        "no host memory is left to start messages of device memory: free memory first");
    starts_ = made->start_value;
    HostLock polling(device_, polling_);
    check(polling.status());
    take_up(*made, keep);
    leaving_.push_back(made);
    if (failed_) fail(failure_kind_, failure_, device_gone_);
  }
  announce();
  engine_.wake();
  if (has(PlantedMessage::IssuedAtOnce)) give(made);
  if (orders) order_after(made, stream);
  return made;
}

void MessageStager::copy_to_host(MessagesCall& made, Stream stream) {
  using Api = DeviceApi;
  call(&Api::event_record, ready_, stream);
  if (!has(PlantedMessage::NoReady)) call(&Api::stream_wait_event, d2h_, ready_);
  const bool sent_early = has(PlantedMessage::SentEarly);
  // If there are only sends, the copy is the end: the arrays are the caller's again.
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
  made.end_issued.store(made.out.empty(), std::memory_order_release);
}

void MessageStager::copy_back(MessagesCall& made) {
  using Api = DeviceApi;
  for (const StagedCopy& one : made.out) {
    if (one.nbytes == 0) continue;
    unsigned char* const array = made.arrays[static_cast<std::size_t>(one.array)];
    call(&Api::memcpy_async, static_cast<void*>(array),
         static_cast<const void*>(made.block.at + one.pinned), one.nbytes, h2d_);
  }
}

// Makes the call known to progress before the device has its wait: the caller may be blocked in the
// driver behind it, until the go flag is set. Also takes it out of the reach of settle(), which would
// end it without that flag: its copy back would then wait for ever. False where nothing is to be
// given. Holds issue_.
bool MessageStager::begin_giving(const MessagesPtr& made) {
  if (!flags_ || made->out.empty() || closed_) return false;
  HostLock polling(device_, polling_);
  check(polling.status());
  if (made->given || made->ended()) return false;
  given_.push_back(made);
  open_.remove(made);
  made->given = true;
  made->go_value = gos_.fetch_add(1, std::memory_order_acq_rel) + 1;
  made->end_value = ++ends_;
  return true;
}

// Gives the device the copies back, which wait there for the messages. Without flags they cannot
// wait, and the thread that makes progress gives them.
void MessageStager::give(const MessagesPtr& made) {
  using Api = DeviceApi;
  HostLock own(device_, issue_);
  check(own.status());
  if (!begin_giving(made)) return;
  // Whoever makes progress has to do so before all is given.
  announce();
  engine_.wake();
  try {
    if (!has(PlantedMessage::NotCopied)) call(&Api::stream_wait_event, h2d_, made->copied);
    if (!has(PlantedMessage::NoGo)) call(&Api::wait_value32_geq, h2d_, go_, made->go_value);
    if (has(PlantedMessage::EndEarly)) call(&Api::event_record, made->end, h2d_);
    copy_back(*made);
    if (!has(PlantedMessage::EndEarly)) call(&Api::event_record, made->end, h2d_);
    call(&Api::write_value32, h2d_, end_, made->end_value);
  } catch (const DeviceFailure& failure) {
    give_up_call(made, failure);
    throw;
  }
  made->end_issued.store(true, std::memory_order_release);
}

// Without flags, sends back what has come. The caller holds polling_.
bool MessageStager::give_finished(const MessagesPtr& made) {
  using Api = DeviceApi;
  try {
    touch(*made, made->out, true);
    call(&Api::stream_wait_event, h2d_, made->copied);
    copy_back(*made);
    call(&Api::event_record, made->end, h2d_);
    made->given = true;
    made->end_issued.store(true, std::memory_order_release);
    ending_.push_back(made);
    return true;
  } catch (const DeviceFailure& failure) {
    fail_as(failure);
    return false;
  }
}

void MessageStager::advance(const CallPtr& call) {
  const MessagesPtr made = as_messages(call);
  if (made->ended()) return;
  if (!made->op->finished()) {  // a peer may have given up
    Op& op = *made->op;
    const std::lock_guard<std::mutex> own(engine_.mutex);
    if (!op.finished()) op.comm->p2p->fail_after_peer(made->op);
    return;
  }
  give(made);
  progress();
}

void MessageStager::order_after(const StagedPtr& made, Stream stream) {
  if (has(PlantedMessage::NoEndWait)) return;
  const MessagesPtr messages = as_messages(made);
  if (!messages->out.empty()) {
    give(messages);
    progress();
    announce();
    engine_.wake();
  }
  StagedWork::order_after(made, stream);
}

// --- progress ---

void MessageStager::touch(const MessagesCall& made, const std::vector<StagedCopy>& copies,
                          bool writes) {
  if (!simulated()) return;
  for (const StagedCopy& one : copies) {
    if (one.nbytes == 0) continue;
    device_->api->host_access(device_, made.block.at + one.pinned, one.nbytes, writes);
  }
}

// Lets the messages begin whose copies to the host are there.
bool MessageStager::open_gates() {
  if (leaving_.empty()) return false;
  std::uint32_t started = 0;
  if (flags_ && device_->api->flag_load(device_, start_, &started) != DeviceStatus::Ok) {
    return false;
  }
  bool any = false;
  for (; !leaving_.empty(); leaving_.pop_front()) {
    const MessagesPtr& made = leaving_.front();
    if (flags_) {
      const bool ungated =
          has(PlantedMessage::Ungated) ||
          (has(PlantedMessage::RestUngated) && made->in.empty());
      if (!flag_reached(started, made->start_value) && !ungated) break;
    } else {
      const Event event = made->out.empty() ? made->end : made->copied;
      const DeviceStatus status = query(event);
      if (status == DeviceStatus::NotReady) break;
      if (status != DeviceStatus::Ok) {
        fail(std::string("device:") + status_name(status), device_error(),
             status == DeviceStatus::Failed);
        return true;
      }
    }
    if (!made->failed()) {  // what did is let go, and may be on its way back
      touch(*made, made->in, false);
      touch(*made, made->out, true);  // the messages come over what is there
    }
    made->opened_s = now_s();
    opened_.store(made->start_value, std::memory_order_release);
    if (has(PlantedMessage::SentRecycling) && made->out.empty()) pool_.give_back(made->block);
    if (!made->given) open_.push_back(made);
    any = true;
  }
  return any;
}

// Ends calls without a copy back: sends, and receives that failed. Without flags, gives the other
// receives their copies back.
bool MessageStager::settle() {
  bool any = false;
  for (auto next = open_.begin(); next != open_.end();) {
    const MessagesPtr made = *next;
    const bool finished = made->op->finished();
    const bool failed =
        finished && made->op->state.load(std::memory_order_acquire) ==
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

// Sends back what the host is done with, in the order in which it was given to the device.
bool MessageStager::let_go() {
  bool any = settle();
  if (failed_) return any;
  while (!given_.empty()) {
    const MessagesPtr& made = given_.front();
    if (!made->op->finished() && !has(PlantedMessage::GoEarly)) {
      if (any || (++idle_ % kIdleLooks != 0 && !simulated())) return any;
      look_after(made);
      return any;
    }
    const bool failed = made->op->state.load(std::memory_order_acquire) ==
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

// Called when nothing has changed for a while: a peer may have given up, or come too late.
void MessageStager::look_after(const MessagesPtr& made) {
  std::string why;
  {
    const std::lock_guard<std::mutex> own(engine_.mutex);
    if (!made->op->finished()) comm_->p2p->fail_after_peer(made->op);
    if (!made->op->finished() && comm_->broken.load(std::memory_order_acquire)) {
      why = comm_->failure;
    }
  }
  if (made->op->finished()) return;  // the next pass finds it
  if (!why.empty()) {
    fail("revoked", why, false);
  } else if (made->opened_s != 0 && now_s() > made->opened_s + made->timeout_s) {
    fail("timeout", "", false);
  }
}

void MessageStager::give_memory_back(StagedCall& ended) {
  auto& made = static_cast<MessagesCall&>(ended);
  const bool early = has(PlantedMessage::EarlyRecycling) ||
                     (has(PlantedMessage::SentRecycling) && made.out.empty());
  if (!failed_ && !early && !has(PlantedMessage::BlockLost)) pool_.give_back(made.block);
}

// --- failures ---

DeviceWork::CallPtr MessageStager::oldest() const {
  if (!ending_.empty()) return ending_.front();
  if (!given_.empty()) return given_.front();
  if (leaving_.empty()) return nullptr;
  return leaving_.front();
}

// Nobody asks for the end of a call that blocked nobody, so later calls report its failure.
void MessageStager::fail_one(MessagesCall& made) {
  made.fail(made.op->failure_kind(), made.op->error);
  if (made.asked_for) return;
  const std::lock_guard<std::mutex> own(engine_.mutex);
  comm_->break_down(made.error);
}

// Holds polling_. Memory is left alone: the host's messages may still come.
void MessageStager::let_all_go(const std::string& kind, const std::string& why) {
  if (flags_ && !has(PlantedMessage::FlagsKept)) {
    device_->api->flag_store(device_, go_, gos_.load(std::memory_order_acquire) + kFarAhead);
  }
  std::vector<MessagesPtr> all(given_.begin(), given_.end());
  for (const MessagesPtr& made : leaving_) {
    if (!made->given) all.push_back(made);
  }
  all.insert(all.end(), open_.begin(), open_.end());
  given_.clear();
  leaving_.clear();
  open_.clear();
  for (const MessagesPtr& made : all) {
    failed_ops_.push_back(made->op);
    made->fail(kind, why);
    // Its arrays may be written until its end flag comes.
    if (made->given) {
      ending_.push_back(made);
    } else {
      finish(made);
    }
  }
  take_ended();
}

// --- the end ---

// A message may still come while its communicator is there. MPI is given packets, never this memory.
StagedWork::Rest MessageStager::host_is_done() {
  const bool all = std::all_of(failed_ops_.begin(), failed_ops_.end(),
                               [](const auto& op) { return op->finished(); });
  return all || !engine_.has(of_) ? Rest::Released : Rest::Later;
}

void MessageStager::free_all() {
  failed_ops_.clear();
  pool_.each([&](void* base) { device_->api->pinned_free(device_, base); });
}

}  // namespace commrt
