// SPDX-License-Identifier: Apache-2.0
// Gives the device the commands of MPI's calls, and makes their progress (mpi_work.hpp).
#include "library_calls/mpi_work.hpp"

#include "devices/device_error.hpp"
#include "engine/comm.hpp"
#include "engine/device_refusals.hpp"
#include "engine/engine.hpp"

namespace commrt {

COMMRT_NAMES_OF_BUGS(
    PlantedInMpi,
    "ungated", "no_go", "go_early", "go_off_by_one", "no_ready", "ready_after",
    "start_other_stream", "end_early", "end_other_stream", "no_end_wait", "values_again",
    "copy_late", "copy_other_stream", "no_copy", "copy_early", "not_behind_nccl",
    "not_before_nccl", "flags_kept", "not_started", "not_behind_graphs", "not_before_graphs")

namespace {

// 0, CU_STREAM_LEGACY and CU_STREAM_PER_THREAD.
constexpr Stream kLastDefaultStream = 2;

bool overlap(const unsigned char* a, std::size_t a_nbytes, const unsigned char* b,
             std::size_t b_nbytes) {
  return a_nbytes != 0 && b_nbytes != 0 && a < b + b_nbytes && b < a + a_nbytes;
}

}  // namespace

MpiCall::~MpiCall() {
  if (work != nullptr && started != 0) work->events().give(started);
}

MpiWork::MpiWork(Comm& comm, Engine& engine, Device* on, std::shared_ptr<void> keeps,
                 std::shared_ptr<NcclOrder> order, const StagerOptions& options)
    : StagedWork(comm, engine, on, keeps, options), order_(std::move(order)),
      issued_(options.first_value), scratch_(on) {
  shares_ = engine.share_with_mpi(on, std::move(keeps));
  if (shares_) return;
  StagedWork::close();
  throw DeviceFailure(DeviceStatus::Invalid,
                      "the MPI library was given memory of another device of this process, and "
                      "takes that of one only");
}

const char* MpiWork::why_no_graph() const {
  return "an operation of MPI cannot be a part of a graph: the host calls MPI at each replay, and "
         "values of flags would come twice";
}

// --- the call ---

DeviceWork::CallPtr MpiWork::start(const std::shared_ptr<const MpiDevicePlan>& plan,
                                   unsigned char* in, unsigned char* out, Stream stream,
                                   bool orders, void* const* keep, double timeout_s) {
  auto made = std::make_shared<MpiCall>();
  made->plan = plan;
  made->in = in;
  made->out = out;
  made->timeout_s = timeout_s;
  made->orders = orders;
  issue(made, stream, keep);
  announce();
  engine_.wake();
  tell_graphs(*made);
  if (orders) order_after(made, stream);
  return made;
}

void MpiWork::issue(const MpiPtr& made, Stream stream, void* const* keep) {
  HostLock own(device_, issue_);
  check(own.status());
  refuse_capture(stream);
  check_failed();
  if (has(PlantedInMpi::ValuesAgain)) issued_ = options_.first_value;
  made->end = events_.take();
  if (!flags_) made->started = events_.take();
  made->work = shared_from_this();
  made->value = made->end_value = issued_ + 1;
  unsigned char* copy_to = nullptr;
  std::size_t copy_nbytes = 0;
  bind(*made, &copy_to, &copy_nbytes);
  const auto give = [&] {
    give_or_fail(
        [&] {
          enqueue_start(*made, stream, copy_to, copy_nbytes);
          submit(*made, stream);
          // An operation that has begun has read its input. A simulated device is told so.
          if (has(PlantedInMpi::Ungated)) touch(*made);
        },
        "no host memory is left to start a call of MPI on device memory: free memory first");
    if (copy_to != nullptr && copy_to != made->out) scratch_user_ = made;
    make_known(made, keep);
    finish_giving(made);
  };
  // NCCL's work and MPI's are given to the device under one lock, each behind the other.
  if (order_ == nullptr) {
    give();
    return;
  }
  HostLock order(device_, order_->issue);
  check(order.status());
  give();
}

// Before the device has the wait for MPI: the caller may be blocked in the driver behind it.
void MpiWork::make_known(const MpiPtr& made, void* const* keep) {
  {
    HostLock polling(device_, polling_);
    check(polling.status());
    take_up(*made, keep);
    calls_.push_back(made);
    // The streams are let go already; it needs no more than to be told.
    if (failed_) fail(failure_kind_, failure_, device_gone_);
  }
  if (!flags_) return;
  announce();
  engine_.wake();
}

// Holds the order's lock.
void MpiWork::finish_giving(const MpiPtr& made) {
  try {
    if (flags_) enqueue_end(*made);
    stay_before_nccl(made);
  } catch (const DeviceFailure& failure) {
    give_up_call(made, failure);
    throw;
  }
}

// Settles what addresses MPI is given, and what is to be copied where before.
void MpiWork::bind(MpiCall& made, unsigned char** copy_to, std::size_t* copy_nbytes) {
  const MpiDevicePlan& plan = *made.plan;
  // MPI may refuse equal addresses of nothing, and null.
  static unsigned char nowhere[2];
  if (plan.in_nbytes == 0 && plan.out_nbytes == 0) {
    made.in = nowhere;
    made.out = nowhere + 1;
    return;
  }
  const auto* const in = made.in;
  if (has(PlantedInMpi::NoCopy)) return;
  if (plan.sends_out) {
    if (in == made.out) return;
    *copy_to = made.out;
    *copy_nbytes = plan.out_nbytes;
  } else if (!(plan.in_place && in == made.out) &&
             overlap(in, plan.in_nbytes, made.out, plan.out_nbytes)) {
    // It may wait for all that the device was given.
    *copy_to = scratch_.of(plan.in_nbytes);
    *copy_nbytes = plan.in_nbytes;
    if (scratch_user_ != nullptr && !has(PlantedInMpi::CopyEarly)) {
      StagedWork::order_after(scratch_user_, d2h_);
    }
  }
}

void MpiWork::enqueue_start(MpiCall& made, Stream stream, unsigned char* copy_to,
                            std::size_t copy_nbytes) {
  using Api = DeviceApi;
  const auto copy = [&] {
    if (copy_to == nullptr) return;
    call(&Api::memcpy_async, static_cast<void*>(copy_to), static_cast<const void*>(made.in),
         copy_nbytes, has(PlantedInMpi::CopyOtherStream) ? h2d_ : d2h_);
    made.in = copy_to;
  };
  if (has(PlantedInMpi::ReadyAfter)) call(&Api::stream_wait_event, d2h_, ready_);
  call(&Api::event_record, ready_, stream);
  if (!has(PlantedInMpi::NoReady) && !has(PlantedInMpi::ReadyAfter)) {
    call(&Api::stream_wait_event, d2h_, ready_);
  }
  come_after_nccl();
  if (!has(PlantedInMpi::CopyLate)) copy();
  issued_.store(made.value, std::memory_order_release);
  if (!flags_) {
    call(&Api::event_record, made.started, d2h_);
  } else {
    call(&Api::write_value32, has(PlantedInMpi::StartOtherStream) ? h2d_ : d2h_, start_,
         made.value);
  }
  if (has(PlantedInMpi::CopyLate)) copy();
}

void MpiWork::enqueue_end(MpiCall& made) {
  using Api = DeviceApi;
  if (has(PlantedInMpi::EndEarly)) record_end(made);
  // The stream itself waits, too: a failure lets the streams go at once.
  if (!has(PlantedInMpi::NotStarted)) call(&Api::wait_value32_geq, h2d_, start_, made.value);
  if (!has(PlantedInMpi::NoGo)) {
    const std::uint32_t less = has(PlantedInMpi::GoOffByOne) ? 1 : 0;
    call(&Api::wait_value32_geq, h2d_, go_, made.value - less);
  }
  if (!has(PlantedInMpi::EndEarly)) record_end(made);
  call(&Api::write_value32, h2d_, end_, made.end_value);
  made.end_issued.store(true, std::memory_order_release);
}

void MpiWork::record_end(const MpiCall& made) {
  call(&DeviceApi::event_record, made.end, has(PlantedInMpi::EndOtherStream) ? d2h_ : h2d_);
}

// Holds the order's lock.
void MpiWork::come_after_nccl() {
  if (order_ == nullptr || has(PlantedInMpi::NotBehindNccl)) return;
  order_->wait_for_last(d2h_);
  if (!order_->has_captured || has(PlantedInMpi::NotBehindGraphs)) return;
  call(&DeviceApi::stream_wait_event, d2h_, order_->serial);
}

// Holds the order's lock.
void MpiWork::stay_before_nccl(const MpiPtr& made) {
  if (order_ == nullptr || has(PlantedInMpi::NotBeforeNccl)) return;
  order_->beside[this] = made;
  // Graphs that are launched later wait for it.
  const bool tells = flags_ && !has(PlantedInMpi::NotBeforeGraphs);
  if (order_->has_captured && tells) call(&DeviceApi::event_record, order_->serial, h2d_);
}

// Without flags the end is given late, and a graph that is launched before that would not wait for
// it. So once there are graphs, a call without flags ends before it returns.
void MpiWork::tell_graphs(const MpiCall& made) {
  if (order_ == nullptr || flags_ || has(PlantedInMpi::NotBeforeGraphs)) return;
  {
    HostLock own(device_, order_->issue);
    check(own.status());
    if (!order_->has_captured) return;
  }
  progress_until([&] { return made.end_issued.load(std::memory_order_acquire) || made.ended(); });
  HostLock own(device_, order_->issue);
  check(own.status());
  if (!made.failed()) call(&DeviceApi::event_record, order_->serial, h2d_);
}

void MpiWork::submit(MpiCall& made, Stream stream) {
  const std::lock_guard<std::mutex> own(engine_.mutex);
  comm_->refusals.on_devices->note(comm_->next_seq, made.plan->words, made.orders);
  made.may_be_refused = true;
  const Gate gate{has(PlantedInMpi::Ungated) ? nullptr : &opened_, made.value};
  made.op = comm_->start_gated(made.plan->runs, made.in, made.out, gate, stream);
  made.seq = made.op->seq;
}

void MpiWork::order_after(const StagedPtr& waited_for, Stream stream) {
  if (has(PlantedInMpi::NoEndWait)) return;
  const auto& made = static_cast<const MpiCall&>(*waited_for);
  if (stream <= kLastDefaultStream) {
    progress_until([&] { return made.released.load(std::memory_order_acquire) || made.ended(); });
  }
  StagedWork::order_after(waited_for, stream);
}

// --- progress ---

// Tells a simulated device what MPI reads and writes, from the opening of the gate until MPI is
// done.
void MpiWork::touch(const MpiCall& made) {
  if (!simulated()) return;
  const CurrentDevice current(device_);
  const MpiDevicePlan& plan = *made.plan;
  if (plan.in_nbytes != 0 && !plan.sends_out) {
    device_->api->host_access(device_, made.in, plan.in_nbytes, false);
  }
  if (plan.out_nbytes != 0) {
    device_->api->host_access(device_, made.out, plan.out_nbytes, true);
  }
}

// Opens the gates of calls whose earlier work in the caller's stream is done.
bool MpiWork::open_gates() {
  if (open_ == calls_.size()) return false;
  std::uint32_t started = 0;
  if (flags_ && device_->api->flag_load(device_, start_, &started) != DeviceStatus::Ok) {
    return false;
  }
  bool any = false;
  for (; open_ < calls_.size(); ++open_) {
    MpiCall& made = *calls_[open_];
    if (flags_) {
      if (!flag_reached(started, made.value) && !has(PlantedInMpi::Ungated)) break;
    } else {
      const DeviceStatus status = query(made.started);
      if (status == DeviceStatus::NotReady) break;
      if (status != DeviceStatus::Ok) {
        fail(std::string("device:") + status_name(status), device_error(),
             status == DeviceStatus::Failed);
        return true;
      }
      events_.give(made.started);
      made.started = 0;
    }
    touch(made);
    made.opened_s = now_s();
    opened_.store(made.value, std::memory_order_release);
    if (has(PlantedInMpi::GoEarly)) device_->api->flag_store(device_, go_, made.value);
    any = true;
  }
  return any;
}

// Lets go of calls that MPI is done with, in the order of the stream that waits for it.
bool MpiWork::let_go() {
  bool any = false;
  while (open_ > 0) {
    const MpiPtr made = calls_.front();
    if (!made->op->finished()) {
      // A thread that looks at a simulated device pauses until something has changed.
      if (any || (++idle_ % kIdleLooks != 0 && !simulated())) return any;
      return look_after(*made);
    }
    if (made->op->state.load(std::memory_order_acquire) == static_cast<int>(OpState::Failed)) {
      fail(made->op->failure_kind(), made->op->error, false);
      return true;
    }
    touch(*made);
    if (!flags_) {
      give_end(*made);
      if (failed_) return true;
    } else if (!has(PlantedInMpi::GoEarly)) {
      device_->api->flag_store(device_, go_, made->value);
    }
    made->released.store(true, std::memory_order_release);
    ending_.push_back(made);
    calls_.pop_front();
    --open_;
    any = true;
  }
  return any;
}

// Called when nothing has changed for a while: a peer may have given up, or come too late.
bool MpiWork::look_after(MpiCall& made) {
  bool ended = false;
  {
    const std::lock_guard<std::mutex> own(engine_.mutex);
    ended = !made.op->finished() && comm_->fail_after_peer(made.op);
  }
  if (ended) return true;  // the next pass finds it
  if (now_s() <= made.opened_s + made.timeout_s) return false;
  fail("timeout", "", false);
  return true;
}

// Without flags, the end is given once MPI is done. A thread that waits for the end blocks until
// then.
void MpiWork::give_end(MpiCall& made) {
  try {
    call(&DeviceApi::event_record, made.end, h2d_);
    made.end_issued.store(true, std::memory_order_release);
  } catch (const DeviceFailure& failure) {
    fail_as(failure);
  }
}

void MpiWork::give_memory_back(StagedCall& ended) {
  auto& made = static_cast<MpiCall&>(ended);
  // MPI may still read and write the arrays of what failed: they are kept for ever.
  if (made.op->held) made.keep[0] = made.keep[1] = nullptr;
  made.op = nullptr;
}

// --- failures ---

DeviceWork::CallPtr MpiWork::oldest() const {
  if (!ending_.empty()) return ending_.front();
  if (calls_.empty()) return nullptr;
  return calls_.front();
}

// Holds polling_.
void MpiWork::let_all_go(const std::string& kind, const std::string& why) {
  if (comm_ != nullptr) {
    const std::lock_guard<std::mutex> engine(engine_.mutex);
    for (const MpiPtr& made : calls_) {
      if (!made->op->finished()) comm_->fail_op(*made->op, why);
    }
  }
  for (const MpiPtr& made : calls_) {
    made->fail(kind, why);
    if (!flags_) device_->api->event_record(device_, made->end, d2h_);
  }
  // Streams that still wait may go on, and so may those that are given a wait later.
  if (flags_ && !has(PlantedInMpi::FlagsKept)) {
    device_->api->flag_store(device_, go_, issued_.load(std::memory_order_acquire) + kFarAhead);
  }
  for (const MpiPtr& made : calls_) {
    failed_ops_.push_back(made->op);
    ending_.push_back(made);
  }
  calls_.clear();
  open_ = 0;
  take_ended();
}

// --- the end ---

void MpiWork::close() {
  StagedWork::close();
  {
    HostLock own(device_, issue_);
    scratch_user_ = nullptr;
  }
  if (order_ == nullptr) return;
  HostLock own(device_, order_->issue);
  order_->beside.erase(this);
}

StagedWork::Rest MpiWork::host_is_done() {
  for (const auto& op : failed_ops_) {
    if (op->held) return Rest::Never;
    if (!op->finished()) return Rest::Later;
  }
  return Rest::Released;
}

void MpiWork::free_all() {
  failed_ops_.clear();
  scratch_.free();
  if (shares_) engine_.leave_mpi();
  shares_ = false;
}

}  // namespace commrt
