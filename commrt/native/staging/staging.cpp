// SPDX-License-Identifier: Apache-2.0
// Gives the device the commands of staged collectives, and makes their progress (staging.hpp).
#include "staging/staging.hpp"

#include <algorithm>
#include <exception>

#include "devices/device_error.hpp"
#include "engine/comm.hpp"
#include "engine/device_refusals.hpp"
#include "engine/engine.hpp"

namespace commrt {

namespace {
// A quarter of what a stream takes: calls before it may have some of the room.
constexpr std::size_t kFewCommands = 256;
constexpr char kNoHostMemory[] =
    "no host memory is left to start a call on device memory: free memory first";
}

COMMRT_NAMES_OF_BUGS(
    Planted,
    "ungated", "no_go", "early_recycling", "no_end_wait", "no_ready", "start_early", "end_early",
    "go_early", "go_all", "go_off_by_one", "end_flag_early", "start_other_stream",
    "end_other_stream", "ready_after", "not_drained", "not_copied", "flags_kept", "wrong_slot",
    "late_copy", "values_again", "recycled_at_call", "ring_unlocked", "ready_late", "not_packed",
    "unpacked_early", "event_lost", "memory_kept", "references_kept", "kernel_aside",
    "kernel_back", "given_back_early", "unagreed", "agreement_unread", "words_in_place",
    "drained_early", "drained_next", "pack_aside", "unpack_aside", "stale_end", "opened_all",
    "start_ahead")

void StagedAgreement::say(std::uint64_t* place) const {
  for (std::size_t i = 0; i < words.size(); ++i) {
    place[i] = words[i];
    place[words.size() + i] = words[i] == 0 ? 0 : ~words[i];
  }
}

std::string StagedAgreement::differences(const std::uint64_t* heard) const {
  std::string found;
  for (std::size_t i = 0; i < words.size(); ++i) {
    if (heard[i] == ~heard[words.size() + i]) continue;
    found += (found.empty() ? "" : ", ") + names[i];
  }
  return found;
}

Stager::Stager(Comm& comm, Engine& engine, Device* device, std::shared_ptr<void> keeps,
               const StagerOptions& options)
    : StagedWork(comm, engine, device, std::move(keeps), options), issued_(options.first_value),
      ends_(options.first_value) {
  for (int slot = 0; slot < options_.slots; ++slot) {
    drained_.push_back(0);
    call(&DeviceApi::event_create, &drained_.back());
  }
  void* first = nullptr;
  call(&DeviceApi::pinned_alloc, options_.first_nbytes, &first);
  ring_.add(first, options_.first_nbytes);
}

PinnedRing::Part Stager::take_part(std::size_t nbytes, double timeout_s) {
  PinnedRing::Part part;
  const auto take = [&](std::size_t* grow) {
    if (ring_.take(nbytes, &part)) return true;
    const std::size_t wanted = std::max(2 * ring_.largest(), 4 * nbytes);
    const std::size_t room =
        options_.most_nbytes > ring_.total() ? options_.most_nbytes - ring_.total() : 0;
    // A part that fits into no memory there is gets memory of its own, whatever the limit.
    *grow = std::max(std::min(wanted, room), nbytes > ring_.largest() ? nbytes + kLine * 4 : 0);
    if (*grow < nbytes) *grow = 0;
    return false;
  };
  const auto add = [&](void* more, std::size_t grown) { ring_.add(more, grown); };
  take_memory(take, add, timeout_s, !has(Planted::RingUnlocked));
  return part;
}

// --- the call ---

DeviceWork::CallPtr Stager::start(const std::shared_ptr<const StagedPlan>& plan,
                                  std::vector<unsigned char*> arrays, Stream stream,
                                  bool orders, void* const* keep, double timeout_s) {
  auto made = std::make_shared<PiecesCall>();
  made->plan = plan;
  made->arrays = std::move(arrays);
  made->timeout_s = timeout_s;
  made->orders = orders;
  issue(made, stream, keep);
  announce();
  engine_.wake();
  if (orders) order_after(made, stream);
  return made;
}

void Stager::issue(const PiecesPtr& made, Stream stream, void* const* keep) {
  HostLock own(device_, issue_);
  check(own.status());
  refuse_capture(stream);
  const StagedPlan& plan = *made->plan;
  // If streams have no flags, a piece cannot wait for the one that had its place.
  const std::int64_t slots = plan.serial ? 1
                             : flags_    ? std::min<std::int64_t>(plan.pieces, options_.slots)
                                         : plan.pieces;
  const std::size_t nbytes = static_cast<std::size_t>(slots) * plan.slot_nbytes;
  const std::size_t said = plan.agreement == nullptr ? 0 : plan.agreement->nbytes();
  made->memory = take_part(nbytes + 2 * said, made->timeout_s);
  if (said != 0) {
    unsigned char* const at = made->memory.at + (has(Planted::WordsInPlace) ? 0 : nbytes);
    made->words = reinterpret_cast<std::uint64_t*>(at);
  }
  made->end = events_.take();
  if (has(Planted::EventLost)) events_.take();
  made->work = shared_from_this();
  if (has(Planted::ValuesAgain)) issued_ = options_.first_value;

  std::vector<Piece> pieces(static_cast<std::size_t>(plan.pieces));
  const auto places = static_cast<std::size_t>(slots);
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    pieces[i] = {made,
                 nullptr,
                 &plan.part(i),
                 i,
                 made->memory.at + i % places * plan.slot_nbytes,
                 issued_ + 1 + static_cast<std::uint32_t>(i),
                 i + 1 == pieces.size(),
                 0};
  }
  made->end_value = ends_ + 1;
  // Whatever waits for the host is given once the host has its part: the caller may be blocked in the
  // driver, by a stream that is full or by another thread's free, until the host has done it.
  const bool host_first = flags_ && !has(Planted::LateCopy);
  const bool is_long = host_first && pieces.size() > 1 &&
                       (pieces.size() > places || most_commands(pieces) > kFewCommands);
  const std::size_t first = is_long ? 1 : pieces.size();
  give_or_fail(
      [&] {
        begin(stream);
        // If a piece depends on the one before, it is given when that one is on its way back.
        const std::size_t now = plan.serial ? 1 : first;
        for (std::size_t i = 0; i < now; ++i) copy_to_host(pieces[i], places);
        if (has(Planted::ReadyLate)) {
          call(&DeviceApi::event_record, ready_, stream);
          call(&DeviceApi::stream_wait_event, d2h_, ready_);
        }
        submit(pieces.data(), pieces.data() + first, stream);
      },
      kNoHostMemory);
  ends_ = made->end_value;
  {
    HostLock polling(device_, polling_);
    check(polling.status());
    take_up(*made, keep);
    if (has(Planted::RecycledAtCall)) ring_.give_back(made->memory);
    pieces_.insert(pieces_.end(), pieces.begin(), pieces.begin() + static_cast<std::ptrdiff_t>(first));
    // The streams are let go already; it needs no more than to be told.
    if (failed_) fail(failure_kind_, failure_, device_gone_);
  }
  if (!host_first) return;
  // Whoever makes progress has to do so before this call ends.
  announce();
  engine_.wake();
  give_rest(*made, pieces, first, stream, places);
}

// The most that a call gives one of its streams.
std::size_t Stager::most_commands(const std::vector<Piece>& pieces) {
  constexpr std::size_t kWaitsAndRecords = 3;
  std::size_t in = 0, out = 0;
  for (const Piece& piece : pieces) {
    in += piece.part->packs.size() + piece.part->in.size() + kWaitsAndRecords;
    out += piece.part->unpacks.size() + piece.part->out.size() + kWaitsAndRecords;
  }
  return std::max(in, out);
}

void Stager::begin(Stream stream) {
  using Api = DeviceApi;
  if (has(Planted::ReadyAfter)) call(&Api::stream_wait_event, d2h_, ready_);
  if (!has(Planted::ReadyLate)) call(&Api::event_record, ready_, stream);
  if (!has(Planted::NoReady) && !has(Planted::ReadyAfter) && !has(Planted::ReadyLate)) {
    call(&Api::stream_wait_event, d2h_, ready_);
  }
}

// The call counts as under way, and keeps its arrays also where this throws.
// All pieces that have a place are copied before the first one is waited for: on one hardware queue
// a copy behind the wait would come after it.
void Stager::give_rest(PiecesCall& made, std::vector<Piece>& pieces, std::size_t given,
                       Stream stream, std::size_t slots) {
  std::exception_ptr found;
  try {
    for (std::size_t i = 0; i + 1 < pieces.size() + slots; ++i) {
      if (i < pieces.size() && i >= given) {
        submit(&pieces[i], &pieces[i] + 1, stream);
        {
          HostLock polling(device_, polling_);
          check(polling.status());
          pieces_.push_back(pieces[i]);
          ++given;
        }
        copy_to_host(pieces[i], slots);
      }
      if (i + 1 < slots) continue;
      Piece& piece = pieces[i + 1 - slots];
      copy_back(piece, has(Planted::WrongSlot) ? pieces[0].memory : piece.memory, slots);
    }
    give_end(made);
  } catch (const DeviceFailure& failure) {
    give_up_as(failure);
    found = std::current_exception();
  } catch (const std::bad_alloc&) {
    give_up("backend", kNoHostMemory);
    found = std::current_exception();
  }
  {
    HostLock polling(device_, polling_);
    // Nothing of the rest will run. The last piece has the call's end.
    if (failed_) {
      for (; given < pieces.size(); ++given) pieces_.push_back(pieces[given]);
      fail(failure_kind_, failure_, device_gone_);
    }
  }
  if (found) std::rethrow_exception(found);
}

void Stager::give_end(PiecesCall& made) {
  using Api = DeviceApi;
  if (!has(Planted::EndEarly)) {
    call(&Api::event_record, made.end, has(Planted::EndOtherStream) ? d2h_ : h2d_);
  }
  if (!has(Planted::EndFlagEarly)) call(&Api::write_value32, h2d_, end_, made.end_value);
  made.end_issued.store(true, std::memory_order_release);
}

// A kernel writes to pinned memory as to the device's own, at the same address; its writes are
// visible to the host before the flag that its stream writes next.
void Stager::copy(const PiecesCall& made, void* to, const void* from, std::size_t nbytes,
                  Stream stream) {
  if (made.plan->by_kernel && has_kernels_) {
    Stream in = stream;
    if (has(Planted::KernelAside) && stream == d2h_) in = h2d_;
    if (has(Planted::KernelBack) && stream == h2d_) in = d2h_;
    const DeviceStatus status = device_->api->launch_copy(device_, to, from, nbytes, in);
    if (status != DeviceStatus::NoKernels) return check(status);
    has_kernels_ = false;  // they are not loaded: the copy engines do as well
  }
  call(&DeviceApi::memcpy_async, to, from, nbytes, stream);
}

void Stager::launch(const StagedLaunch& what, const PiecesCall& made, Stream stream) {
  BoxLaunch now = what.launch;
  now.buffer = made.arrays[static_cast<std::size_t>(what.buffer)];
  for (std::size_t i = 0; i < what.arrays.size(); ++i) {
    now.arrays[i] = made.arrays[static_cast<std::size_t>(what.arrays[i])];
  }
  check(device_->api->launch_boxes(device_, now, stream));
}

void Stager::copy_to_host(Piece& piece, std::size_t slots) {
  using Api = DeviceApi;
  const PiecesCall& made = *piece.call;
  const std::size_t i = piece.number;
  if (i >= slots && flags_ && !has(Planted::NotDrained)) {
    call(&Api::stream_wait_event, d2h_, drained_[(i + has(Planted::DrainedNext)) % slots]);
  }
  if (flags_ && has(Planted::StartEarly)) call(&Api::write_value32, d2h_, start_, piece.value);
  if (!has(Planted::NotPacked)) {
    const Stream in = has(Planted::PackAside) ? h2d_ : d2h_;
    for (const StagedLaunch& pack : piece.part->packs) launch(pack, made, in);
  }
  for (const StagedCopy& one : piece.part->in) {
    const unsigned char* const array = made.arrays[static_cast<std::size_t>(one.array)];
    copy(made, piece.memory + one.pinned, array + one.at + i * one.stride, one.nbytes, d2h_);
  }
  issued_.store(piece.value, std::memory_order_release);
  if (!flags_) {
    piece.copied = events_.take();
    call(&Api::event_record, piece.copied, d2h_);
    return;
  }
  if (!has(Planted::StartEarly)) {
    call(&Api::write_value32, has(Planted::StartOtherStream) ? h2d_ : d2h_, start_,
         piece.value + has(Planted::StartAhead));
  }
}

void Stager::give_output(const Piece& piece, const unsigned char* memory) {
  const PiecesCall& made = *piece.call;
  const bool early = has(Planted::UnpackedEarly);
  auto unpack = [&] {
    const Stream in = has(Planted::UnpackAside) ? d2h_ : h2d_;
    for (const StagedLaunch& one : piece.part->unpacks) launch(one, made, in);
  };
  if (early) unpack();
  for (const StagedCopy& one : piece.part->out) {
    unsigned char* const array = made.arrays[static_cast<std::size_t>(one.array)];
    copy(made, array + one.at + piece.number * one.stride, memory + one.pinned, one.nbytes, h2d_);
  }
  if (!early) unpack();
}

void Stager::copy_back(Piece& piece, const unsigned char* memory, std::size_t slots) {
  using Api = DeviceApi;
  const PiecesCall& made = *piece.call;
  const std::size_t i = piece.number;
  // The stream itself waits, too: a failure lets the streams go at once.
  if (!has(Planted::NotCopied)) call(&Api::wait_value32_geq, h2d_, start_, piece.value);
  if (!has(Planted::NoGo)) {
    const std::uint32_t less = has(Planted::GoOffByOne) ? 1 : 0;
    call(&Api::wait_value32_geq, h2d_, go_, piece.value - less);
  }
  if (piece.last && has(Planted::EndEarly)) call(&Api::event_record, made.end, h2d_);
  if (piece.last && has(Planted::EndFlagEarly)) {
    call(&Api::write_value32, h2d_, end_, made.end_value);
  }
  const bool is_awaited = i + slots < static_cast<std::size_t>(made.plan->pieces);
  const bool early = has(Planted::DrainedEarly);
  if (is_awaited && early) call(&Api::event_record, drained_[i % slots], h2d_);
  give_output(piece, memory);
  if (is_awaited && !early) call(&Api::event_record, drained_[i % slots], h2d_);
}

void Stager::submit(Piece* first, Piece* last, Stream stream) {
  PiecesCall& made = *first->call;
  const bool begins = first->number == 0;
  const StagedAgreement* const facts = begins ? made.plan->agreement.get() : nullptr;
  if (facts != nullptr) {
    if (simulated()) device_->api->host_access(device_, made.words, 2 * facts->nbytes(), true);
    facts->say(made.words);
  }
  const std::lock_guard<std::mutex> own(engine_.mutex);
  if (begins) {
    made.seq = comm_->next_seq;
    comm_->refusals.on_devices->note(made.seq, made.plan->words, made.orders);
    made.may_be_refused = true;
  }
  // No gate: what is compared is here at the call.
  if (facts != nullptr) {
    std::uint64_t* const heard = made.words + facts->nbytes() / sizeof(std::uint64_t);
    made.agreement = comm_->start_gated(facts->runs, made.words, heard, Gate{}, stream);
  }
  for (Piece* each = first; each != last; ++each) {
    Piece& piece = *each;
    const StagedPart& part = *piece.part;
    const Gate gate{has(Planted::Ungated) ? nullptr : &opened_, piece.value};
    const void* in = piece.memory;
    void* out = piece.memory + part.out_at;
    if (part.has_table) {
      std::vector<std::uint64_t> table;
      for (const std::size_t at : part.table) {
        table.push_back(reinterpret_cast<std::uint64_t>(piece.memory + at));
      }
      made.tables.push_back(std::move(table));
      in = made.tables.back().data();
      out = nullptr;
    }
    piece.op = comm_->start_gated(part.runs, in, out, gate, stream);
  }
}

void Stager::order_after(const StagedPtr& made, Stream stream) {
  if (has(Planted::NoEndWait)) return;
  if (has(Planted::LateCopy)) {
    call(&DeviceApi::wait_value32_geq, stream, end_, made->end_value);
    return;
  }
  if (has(Planted::StaleEnd)) {
    if (stale_ != 0) call(&DeviceApi::stream_wait_event, stream, stale_);
    stale_ = made->end;
    return;
  }
  StagedWork::order_after(made, stream);
}

// --- progress ---

// The host's part of a piece reads or wrote what is copied.
void Stager::touch(const Piece& piece, const std::vector<StagedCopy>& copies, bool writes) {
  if (!simulated()) return;
  for (const StagedCopy& one : copies) {
    device_->api->host_access(device_, piece.memory + one.pinned, one.nbytes, writes);
  }
}

// True once the ranks are known to have made the same call. If they have not, all fails.
bool Stager::is_agreed(Piece& piece, bool has_come) {
  PiecesCall& made = *piece.call;
  if (made.agreement == nullptr || has(Planted::Unagreed)) return true;
  const std::shared_ptr<Op> op = made.agreement;
  if (!op->finished()) {
    if (has_come && piece.opened_s == 0) piece.opened_s = now_s();
    if (++idle_ % kIdleLooks == 0 || simulated()) look_after(piece, op);
    return false;
  }
  if (op->state.load(std::memory_order_acquire) == static_cast<int>(OpState::Failed)) {
    fail(op->failure_kind(), op->error, false);
    return false;
  }
  made.agreement.reset();
  const StagedAgreement& facts = *made.plan->agreement;
  if (simulated()) device_->api->host_access(device_, made.words, 2 * facts.nbytes(), true);
  const std::string differ = facts.differences(made.words + facts.nbytes() / sizeof(std::uint64_t));
  if (differ.empty() || has(Planted::AgreementUnread)) return true;
  fail("mismatch", "the ranks disagree on " + differ + "; nothing was sent. COMMRT_DEBUG=check "
       "says which rank passed what", false);
  return false;
}

// Lets the pieces begin whose copy to the host is there.
bool Stager::open_gates() {
  if (open_ == pieces_.size()) return false;
  std::uint32_t started = 0;
  if (flags_ && device_->api->flag_load(device_, start_, &started) != DeviceStatus::Ok) {
    return false;
  }
  bool any = false;
  for (; open_ < pieces_.size(); ++open_) {
    Piece& piece = pieces_[open_];
    const bool has_come = flags_ ? flag_reached(started, piece.value) : piece.copied != 0;
    if (!is_agreed(piece, has_come)) return any || failed_;
    if (flags_) {
      if (!has_come && !has(Planted::Ungated)) break;
    } else {
      if (!has_come) break;  // the piece before is not back
      const DeviceStatus status = query(piece.copied);
      if (status == DeviceStatus::NotReady) break;
      if (status != DeviceStatus::Ok) {
        fail(std::string("device:") + status_name(status), device_error(),
             status == DeviceStatus::Failed);
        return true;
      }
      events_.give(piece.copied);
      piece.copied = 0;
    }
    touch(piece, piece.part->in, false);
    if (piece.opened_s == 0) piece.opened_s = now_s();
    const auto rest = static_cast<std::uint32_t>(piece.call->plan->pieces);
    opened_.store(piece.value + (has(Planted::OpenedAll) ? rest : 0), std::memory_order_release);
    if (has(Planted::GoEarly)) device_->api->flag_store(device_, go_, piece.value);
    any = true;
  }
  return any;
}

// Sends back what the host is done with, in the order of the streams.
bool Stager::let_go() {
  bool any = false;
  while (open_ > 0) {
    Piece& piece = pieces_.front();
    if (!piece.op->finished()) {
      // A thread that looks at a simulated device pauses until something has changed.
      if (any || (++idle_ % kIdleLooks != 0 && !simulated())) return any;
      return look_after(piece, piece.op);
    }
    if (piece.op->state.load(std::memory_order_acquire) == static_cast<int>(OpState::Failed)) {
      fail(piece.op->failure_kind(), piece.op->error, false);
      return true;
    }
    touch(piece, piece.part->out, true);
    if (!flags_ || has(Planted::LateCopy)) {
      give_copy_back(piece);
      if (failed_) return true;
    } else if (!has(Planted::GoEarly)) {
      const auto rest = static_cast<std::uint32_t>(piece.call->plan->pieces);
      device_->api->flag_store(device_, go_, piece.value + (has(Planted::GoAll) ? rest : 0));
    }
    if (piece.last) {
      if (has(Planted::EarlyRecycling)) ring_.give_back(piece.call->memory);
      ending_.push_back(std::move(piece.call));
    }
    pieces_.pop_front();
    --open_;
    any = true;
  }
  return any;
}

// Called when nothing has changed for a while: a peer may have given up, or come too late.
bool Stager::look_after(Piece& piece, const std::shared_ptr<Op>& op) {
  bool ended = false;
  {
    const std::lock_guard<std::mutex> own(engine_.mutex);
    ended = !op->finished() && comm_->fail_after_peer(op);
  }
  if (ended) return true;  // the next pass finds it
  // A piece that this rank's own device has not copied yet has no time limit.
  if (piece.opened_s == 0 || now_s() <= piece.opened_s + piece.call->timeout_s) return false;
  fail("timeout", "", false);
  return true;
}

// If streams have no flags, the copy back is given once the host is done. A thread that waits for
// the end blocks until then.
void Stager::give_copy_back(Piece& piece) {
  using Api = DeviceApi;
  try {
    give_output(piece, piece.memory);
    if (!piece.last) {
      if (!piece.call->plan->serial) return;
      call(&Api::event_record, drained_[0], h2d_);
      call(&Api::stream_wait_event, d2h_, drained_[0]);
      copy_to_host(pieces_[1], 1);
      return;
    }
    call(&Api::event_record, piece.call->end, h2d_);
    if (flags_) call(&Api::write_value32, h2d_, end_, piece.call->end_value);
    piece.call->end_issued.store(true, std::memory_order_release);
  } catch (const DeviceFailure& failure) {
    fail_as(failure);
  }
}

void Stager::give_memory_back(StagedCall& made) {
  // Memory of a failed call is left alone: MPI may still write to it, and nothing follows that
  // could use it.
  if (made.failed() || has(Planted::EarlyRecycling) || has(Planted::RecycledAtCall)) return;
  if (has(Planted::ReferencesKept)) made.keep[0] = made.keep[1] = nullptr;
  if (has(Planted::MemoryKept)) return;
  ring_.give_back(static_cast<PiecesCall&>(made).memory);
}

// --- failures ---

DeviceWork::CallPtr Stager::oldest() const {
  if (!ending_.empty()) return ending_.front();
  if (pieces_.empty()) return nullptr;
  return pieces_.front().call;
}

// Holds polling_.
void Stager::let_all_go(const std::string& kind, const std::string& why) {
  if (comm_ != nullptr) {
    const std::lock_guard<std::mutex> engine(engine_.mutex);
    for (Piece& piece : pieces_) {
      Op* const agreement = piece.call == nullptr ? nullptr : piece.call->agreement.get();
      if (agreement != nullptr && !agreement->finished()) comm_->fail_op(*agreement, why);
      if (piece.op != nullptr && !piece.op->finished()) comm_->fail_op(*piece.op, why);
    }
  }
  for (Piece& piece : pieces_) {
    if (piece.call == nullptr || piece.call->ended()) continue;
    piece.call->fail(kind, why);
    if (!flags_) device_->api->event_record(device_, piece.call->end, d2h_);
  }
  // Streams that still wait may go on, and so may those that are given a wait later.
  if (flags_ && !has(Planted::FlagsKept)) {
    device_->api->flag_store(device_, go_, issued_.load(std::memory_order_acquire) + kFarAhead);
  }
  for (Piece& piece : pieces_) {
    if (piece.call != nullptr && piece.call->agreement != nullptr) {
      failed_ops_.push_back(std::move(piece.call->agreement));
    }
    if (piece.op != nullptr) failed_ops_.push_back(piece.op);
    if (piece.copied != 0) events_.give(piece.copied);
    piece.copied = 0;
  }
  for (Piece& piece : pieces_) {
    if (piece.last) ending_.push_back(std::move(piece.call));
  }
  pieces_.clear();
  open_ = 0;
  take_ended();
}

// --- the end ---

// All operations have ended: let_all_go() failed them, and nothing of them runs any more.
StagedWork::Rest Stager::host_is_done() {
  for (const auto& op : failed_ops_) {
    if (op->held) return Rest::Never;
    if (!op->finished()) return Rest::Later;
  }
  return Rest::Released;
}

void Stager::free_all() {
  failed_ops_.clear();
  for (const Event event : drained_) device_->api->event_destroy(device_, event);
  ring_.each([&](unsigned char* base) { device_->api->pinned_free(device_, base); });
}

}  // namespace commrt
