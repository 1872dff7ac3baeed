// SPDX-License-Identifier: Apache-2.0
// Gives the device the commands of NCCL's calls, and sees their ends (nccl_work.hpp).
#include "library_calls/nccl_work.hpp"

#include <utility>

#include "device_calls/staged_work.hpp"
#include "devices/device_error.hpp"
#include "engine/comm.hpp"
#include "engine/engine.hpp"
#include "library_calls/nccl_program.hpp"

namespace commrt {

std::size_t NcclPlan::memory_nbytes() const {
  const auto of = [](const auto& one) { return one.capacity() * sizeof one[0]; };
  std::size_t sum = sizeof *this + more_nbytes() + operation.capacity() + factor.capacity() +
                    of(send_counts) + of(recv_counts) + of(phases);
  for (const NcclPhase& phase : phases) {
    sum += of(phase.packs) + of(phase.unpacks) + of(phase.copies) + of(phase.messages);
  }
  return sum;
}

namespace {

constexpr int kRemoteError = 6;  // ncclRemoteError
// A simulated device has no time: the abort is over before anything else goes on.
constexpr double kSimulatedAbort_s = 10;

std::string seconds(double time_s) {
  std::string text = std::to_string(time_s);
  text.erase(text.find_last_not_of('0') + 1);
  if (!text.empty() && text.back() == '.') text.pop_back();
  return text;
}

// True if an input has to be copied to another place first.
bool reads_what_it_writes(const NcclPlan& plan, const unsigned char* in,
                          const unsigned char* out) {
  if (plan.program == nullptr && plan.phases.empty()) {
    return plan.in_nbytes != 0 && plan.needs_copy && in == out;
  }
  return plan.overlaps(in, out);
}

}  // namespace

COMMRT_NAMES_OF_BUGS(
    NcclPlanted,
    "no_ready", "ready_late", "no_end_wait", "end_early", "end_other_stream", "end_flag_early",
    "no_chain", "chain_self", "unlocked", "wrong_stream", "copy_other_stream", "no_copy", "kept",
    "graph_no_wait", "graph_no_record", "graph_no_chain", "graph_no_seed", "graph_seed_alone",
    "graph_eager_no_wait", "graph_eager_no_record", "graph_own_stream", "graph_flags",
    "graph_drops", "pack_late", "unpack_early", "unpack_other")

NcclWork::NcclWork(Comm& comm, Engine& engine, std::shared_ptr<NcclOrder> order,
                   std::shared_ptr<NcclComm> native)
    : WatchedWork(comm, engine, order->device(), order, order->events), order_(std::move(order)),
      native_(std::move(native)) {
  activity_ = order_->lines[2];
  if (order_->flags) {
    begun_ = order_->lines[0];
    ended_ = order_->lines[1];
  }
  native_->meanwhile = [this] {
    if (engine_.step()) return true;
    if (!simulated()) return false;
    check(device_->api->pause(device_));
    return true;
  };
}

// The capture that a stream is in; 0: none.
std::uint64_t NcclWork::capture_of(Stream stream) {
  CaptureState state = CaptureState::None;
  call(&DeviceApi::is_capturing, stream, &state);
  if (state == CaptureState::None) return 0;
  if (state == CaptureState::Invalidated) {
    throw DeviceFailure(DeviceStatus::Capturing,
                        "the capture of stream " + std::to_string(stream) +
                            " was lost before; nothing was given to the device");
  }
  std::uint64_t capture = 0;
  call(&DeviceApi::capture_id, stream, &capture);
  return capture;
}

// --- the call ---

DeviceWork::CallPtr NcclWork::start(const std::shared_ptr<const NcclPlan>& plan,
                                    std::vector<unsigned char*> arrays, Stream stream,
                                    bool orders, void* const* keep, double timeout_s) {
  for (const NcclPhase& phase : plan->phases) {
    if (static_cast<std::size_t>(phase.num_arrays) > arrays.size())
      throw std::invalid_argument("fewer arrays than the plan speaks of");
  }
  auto made = std::make_shared<NcclCall>();
  made->plan = plan;
  made->timeout_s = timeout_s;
  if (has(NcclPlanted::Unlocked)) {
    issue(made, arrays, stream, orders, keep);
  } else {
    while (!issue_behind_others(made, arrays, stream, orders, keep)) {}
  }
  announce();
  engine_.wake();
  return made;
}

// False where it has first waited for an end that was still to be given to the device.
bool NcclWork::issue_behind_others(const NcclPtr& made, std::vector<unsigned char*>& arrays,
                                   Stream stream, bool orders, void* const* keep) {
  std::shared_ptr<StagedCall> other;
  {
    HostLock own(device_, order_->issue);
    check(own.status());
    other = order_->unended();
    if (other == nullptr) {
      issue(made, arrays, stream, orders, keep);
      return true;
    }
  }
  progress_until([&] { return other->end_issued.load(std::memory_order_acquire) || other->ended(); });
  return false;
}

// Holds the device's lock.
void NcclWork::issue(const NcclPtr& made, std::vector<unsigned char*>& arrays, Stream stream,
                     bool orders, void* const* keep) {
  unsigned char*& in = arrays[0];
  unsigned char*& out = arrays[1];
  made->capture = capture_of(stream);
  const bool captured = made->capture != 0;
  check_failed();
  // Memory, events and streams may have to be made.
  std::optional<RelaxedCapture> relaxed;
  if (captured) relaxed.emplace(device_);
  if (!captured) order_->sweep_locked();
  const NcclPlan& plan = *made->plan;
  if (plan.program != nullptr && plan.program->size != native_->size)
    throw std::invalid_argument("the program is for " + std::to_string(plan.program->size) +
                                " ranks, and the communicator has " +
                                std::to_string(native_->size) +
                                ": make the program for the ranks of the communicator");
  // First, as it may wait for all that the device was given.
  unsigned char* copy = nullptr;
  if (plan.is_barrier) out = order_->scratch.of(1);
  unsigned char* scratch = nullptr;
  const bool copies = reads_what_it_writes(plan, in, out) && !has(NcclPlanted::NoCopy);
  if (copies || plan.scratch_nbytes != 0) {
    // The program's begins it, on the device's own alignment.
    scratch = order_->scratch.of(plan.scratch_nbytes + (copies ? plan.in_nbytes : 0));
    if (copies) copy = scratch + plan.scratch_nbytes;
  }
  made->end = events_.take();
  if (!order_->flags && !captured) made->begun = events_.take();
  made->work = shared_from_this();
  made->value = ++order_->issued;
  const bool forks = captured && !has(NcclPlanted::GraphOwnStream);
  const Stream own_stream = forks ? order_->fork(made->capture) : order_->stream;
  count(*made, plan, stream, orders);
  const bool in_callers = orders && !has(NcclPlanted::WrongStream);
  const Stream on = in_callers ? stream : own_stream;
  const Stream other = in_callers ? own_stream : stream;
  try {
    order_before(*made, on, stream, orders);
    if (copy != nullptr) {
      const Stream copies_on = has(NcclPlanted::CopyOtherStream) ? other : on;
      call(&DeviceApi::memcpy_async, copy, static_cast<const void*>(in), plan.in_nbytes, copies_on);
      in = copy;
    }
    stuck_timeout_s_.store(made->timeout_s, std::memory_order_relaxed);
    const int code = run(plan, arrays, scratch, on, other, made->timeout_s);
    if (code != kNcclSuccess) {
      const std::string text = text_of(code, made->timeout_s);
      give_up(kind_of(code), text, made->seq);
      // Another thread may have found that the ranks' calls differ, and have aborted it by that.
      if (failure_kind_ == "calls" || failure_kind_ == "refused") {
        throw CallFailure(failure_kind_, failure_);
      }
      throw CallFailure(kind_of(code), plan.operation + " #" + std::to_string(made->seq) + " on " +
                                           comm_->name + ", rank " + std::to_string(comm_->rank) +
                                           ": " + text);
    }
    if (has(NcclPlanted::ReadyLate) && !orders) {
      call(&DeviceApi::event_record, order_->ready, stream);
      call(&DeviceApi::stream_wait_event, on, order_->ready);
    }
    order_after(*made, on, other);
  } catch (const DeviceFailure& failure) {
    // A capture that was lost has run nothing: the communicator is as it was.
    if (captured && failure.status == DeviceStatus::Capturing) throw;
    give_up_as(failure, made->seq);
    throw;
  } catch (const CallFailure&) {
    throw;
  } catch (...) {  // Ctrl-C: whether NCCL has taken it up is not known
    give_up("revoked", "a call was interrupted while NCCL took it up", made->seq);
    throw;
  }
  if (captured) {
    HostLock own(device_, polling_);
    check(own.status());
    void* kept[2] = {keep[0], keep[1]};
    if (has(NcclPlanted::GraphDrops)) engine_.discard_objects(kept);
    for (void* object : kept)
      if (object != nullptr) captured_.push_back(object);
    return;
  }
  order_->last = made;
  order_->last_is_own = !in_callers;
  order_->beside.clear();
  last_value_ = made->value;
  order_->under_way.fetch_add(1, std::memory_order_acq_rel);
  watch(made, keep);
}

void NcclWork::order_before(NcclCall& made, Stream on, Stream stream, bool orders) {
  using Api = DeviceApi;
  const bool waits = !orders && !has(NcclPlanted::NoReady) && !has(NcclPlanted::ReadyLate);
  if (waits) {
    call(&Api::event_record, order_->ready, stream);
    call(&Api::stream_wait_event, on, order_->ready);
  }
  wait_for_others(made, on);
  if (made.capture != 0 && !has(NcclPlanted::GraphFlags)) return;
  if (order_->flags) {
    call(&Api::write_value32, on, order_->lines[0], made.value);
  } else {
    call(&Api::event_record, made.begun, on);
  }
  if (has(NcclPlanted::EndFlagEarly) && order_->flags) {
    call(&Api::write_value32, on, order_->lines[1], made.value);
  }
  if (has(NcclPlanted::EndEarly)) call(&Api::event_record, made.end, on);
}

// Lets this call run on the device after the operation that was given before it.
void NcclWork::wait_for_others(const NcclCall& made, Stream on) {
  using Api = DeviceApi;
  if (made.capture != 0) {
    begin_graphs();
    if (const Event* const tip = order_->tip(made.capture)) {
      if (!has(NcclPlanted::GraphNoChain)) call(&Api::stream_wait_event, on, *tip);
    } else if (!has(NcclPlanted::GraphNoWait)) {
      call(&Api::stream_wait_external, on, order_->serial);
    }
    return;
  }
  order_->wait_for_beside(on);
  // Streams of the caller's are not compared: a new one may have the handle of one that is gone.
  const NcclCall* const before = order_->last.get();
  const bool is_behind = order_->last_is_own && on == order_->stream;
  const bool is_own = before != nullptr && before->value == last_value_;
  if (before != nullptr && !is_behind && !has(NcclPlanted::NoChain) &&
      (is_own || !has(NcclPlanted::ChainSelf))) {
    call(&Api::stream_wait_event, on, before->end);
  }
  if (order_->has_captured && !has(NcclPlanted::GraphEagerNoWait)) {
    call(&Api::stream_wait_event, on, order_->serial);
  }
}

void NcclWork::tell_others(const NcclCall& made, Stream on) {
  using Api = DeviceApi;
  if (made.capture != 0) {
    const Event tip = events_.take();
    order_->set_tip(made.capture, tip);
    call(&Api::event_record, tip, on);
    if (!has(NcclPlanted::GraphNoRecord)) call(&Api::event_record_external, order_->serial, on);
  } else if (order_->has_captured && !has(NcclPlanted::GraphEagerNoRecord)) {
    call(&Api::event_record, order_->serial, on);
  }
}

// From the first capture on, graphs may be launched, and have to be told of what was given before.
void NcclWork::begin_graphs() {
  if (order_->has_captured) return;
  const bool any = order_->last != nullptr || !order_->beside.empty();
  if (any && !has(NcclPlanted::GraphNoSeed)) {
    order_->wait_for_last(order_->stream);
    if (!has(NcclPlanted::GraphSeedAlone)) order_->wait_for_beside(order_->stream);
    call(&DeviceApi::event_record, order_->serial, order_->stream);
  }
  order_->has_captured = true;
}

void NcclWork::order_after(NcclCall& made, Stream on, Stream other) {
  using Api = DeviceApi;
  tell_others(made, on);
  const bool writes = made.capture == 0 || has(NcclPlanted::GraphFlags);
  if (order_->flags && writes && !has(NcclPlanted::EndFlagEarly)) {
    call(&Api::write_value32, on, order_->lines[1], made.value);
  }
  if (has(NcclPlanted::EndEarly)) return;
  call(&Api::event_record, made.end, has(NcclPlanted::EndOtherStream) ? other : on);
}

int NcclWork::run(const NcclPlan& plan, const std::vector<unsigned char*>& arrays, void* scratch,
                  Stream on, Stream other, double timeout_s) {
  if (!plan.phases.empty()) return run_phases(plan, arrays, on, other, timeout_s);
  unsigned char* const in = arrays[0];
  unsigned char* const out = arrays[1];
  auto* const stream = reinterpret_cast<NcclStream>(on);
  if (plan.program != nullptr) {
    // Kernels read an input, and write it only where it is the output.
    unsigned char* bases[] = {in, out, static_cast<unsigned char*>(scratch)};
    DeviceStatus failed = DeviceStatus::Ok;
    const int code =
        run_on_nccl(*native_, *plan.program, device_, bases, on, timeout_s, &failed);
    check(failed);
    return code;
  }
  // NCCL takes it as memory that may be written; it only reads it.
  std::string factor = plan.factor;
  void* const scalar = factor.empty() ? nullptr : factor.data();
  if (plan.is_barrier) {
    return native_->collective(NcclColl::Allreduce, out, out, 1, kNcclUint8, 0, 0, stream,
                               timeout_s);
  }
  if (plan.is_counted) {
    return native_->counted(plan.coll, reinterpret_cast<const char*>(in),
                            reinterpret_cast<char*>(out),
                            plan.send_counts, plan.recv_counts, plan.itemsize, plan.dtype,
                            plan.op, scalar, plan.root, stream, timeout_s);
  }
  if (scalar != nullptr) {
    return native_->premul(plan.coll, in, out, plan.count, plan.dtype, scalar, plan.root, stream,
                           timeout_s);
  }
  return native_->collective(plan.coll, in, out, plan.count, plan.dtype, plan.op, plan.root,
                             stream, timeout_s);
}

void NcclWork::wait_on(const CallPtr& waited_for, Stream stream) {
  const auto& made = static_cast<const NcclCall&>(*waited_for);
  const std::uint64_t capture = capture_of(stream);
  if (capture != made.capture) {
    const std::string number = "stream " + std::to_string(stream);
    throw DeviceFailure(
        DeviceStatus::Capturing,
        made.capture == 0
            ? number + " is being captured, and the operation was started outside of the capture: "
                       "a graph cannot wait for it. Wait before the capture begins"
            : "the operation was captured into a graph, and " + number +
                  " is not a part of that capture: give wait() a stream of the capture before it "
                  "ends; later, wait for the stream that the graph is launched into");
  }
  if (has(NcclPlanted::NoEndWait) || closed_ || made.failed()) return;
  call(&DeviceApi::stream_wait_event, stream, made.end);
}

// --- what the host sees ---

void NcclWork::free_who_sticks() {
  if (native_->is_stuck()) give_up("timeout", text_of(kNcclTimedOut, stuck_timeout_s_.load()));
}

void NcclWork::see_end(const WatchedCall&) {
  order_->under_way.fetch_sub(1, std::memory_order_acq_rel);
}

bool NcclWork::look_further() {
  const int code = native_->poll();
  if (code == kNcclSuccess || code == kNcclInProgress || code == kNcclInterrupted) return false;
  fail(kind_of(code), text_of(code, 0), false);
  return true;
}

// --- failures ---

std::string NcclWork::kind_of(int code) const {
  if (code == kNcclTimedOut || code == kNcclBusy) return "timeout";
  if (code == kNcclInterrupted || code == kNcclUnusable) return "revoked";
  return code == kRemoteError ? "peer" : "backend";
}

std::string NcclWork::text_of(int code, double timeout_s) const {
  if (code == kNcclTimedOut || code == kNcclBusy) {
    return "NCCL had not taken it up after " + seconds(timeout_s) +
           " s: a peer may not have called it; the NCCL communicator was aborted";
  }
  if (code == kNcclInterrupted || code == kNcclUnusable) return "its NCCL communicator was aborted";
  return "NCCL failed: " + native_->describe(code) +
         "; the NCCL communicator was aborted. NCCL_DEBUG=WARN tells more";
}

// Its kernels end by that, and the streams go on.
void NcclWork::let_streams_go() {
  if (std::exchange(is_aborted_, true) || has(NcclPlanted::Kept)) return;
  native_->abort(simulated() ? kSimulatedAbort_s : 0.0);
}

// --- the end ---

void NcclWork::close() {
  abandon();
  bool is_whole = false;
  {
    HostLock own(device_, polling_);
    if (closed_) return;
    closed_ = true;
    is_whole = !failed_ && calls_.empty();
    // Nobody looks at the flags of its calls any more.
    order_->under_way.fetch_sub(static_cast<int>(calls_.size()), std::memory_order_acq_rel);
    // Graphs of the communicator must not be launched any more.
    for (std::size_t i = 0; i < captured_.size(); i += 2) {
      void* two[2] = {captured_[i], i + 1 < captured_.size() ? captured_[i + 1] : nullptr};
      engine_.discard_objects(two);
    }
    captured_.clear();
  }
  native_->meanwhile = nullptr;
  if (is_whole) order_->retire(native_);
}

}  // namespace commrt
