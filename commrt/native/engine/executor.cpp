// SPDX-License-Identifier: Apache-2.0
// Runs a plan: finds the instructions that can run now, and runs them.
//
// The position of instruction i of fragment f in an operation's stream is f * m + i. Positions
// below head_ are done. Above it, up to `depth` fragments are tried, in order, so that a rank
// waiting for one message does whatever else it can. A call does one slice of the work, or all
// that can be done if the thread waits anyway.
#include <algorithm>
#include <cstring>

#include "engine/chaos.hpp"
#include "engine/comm.hpp"
#include "engine/engine.hpp"
#include "engine/in_flight.hpp"
#include "kernels/checksum.hpp"

namespace commrt {

namespace {

// Scratch shared by all operations of a thread: an instruction has at most a few hundred
// inputs, and pieces are handled one after the other.
struct Operands {
  std::vector<const void*> inputs;
  std::vector<const unsigned char*> messages;
  std::vector<bool> exposed;  // a message that lies in the peer's buffer, as the blocks there
  std::vector<unsigned char*> targets;  // in peers' buffers
  std::vector<unsigned char> gathered;  // payloads that came in several lines
};
thread_local Operands operands;

}  // namespace

const unsigned char* Op::base(int space) const {
  const SpaceSpec& spec = plan->spaces[space];
  switch (spec.kind) {
    case SpaceKind::In: return in;
    case SpaceKind::Out: return out;
    case SpaceKind::Tmp: return tmp + spec.tmp_offset;
  }
  return nullptr;
}

// Takes a plan and buffers; sizes what depends on the plan unless it is the last one again.
void Op::adopt(const std::shared_ptr<const Plan>& plan_, const void* in_, void* out_) {
  const bool same = plan.get() == plan_.get();
  if (!same) plan = plan_;
  in = static_cast<const unsigned char*>(in_);
  out = static_cast<unsigned char*>(out_);
  error.clear();
  native_started_ = left_trail_ = false;
  gloo = nullptr;
  copied_ = 0;
  lane_ = -1;
  head_ = 0;
  head_fragment_ = 0;
  completed_ = 0;
  in_heap = shown_ = false;
  in_place_ = out_place_ = 0;
  const Plan& p = *plan;
  if (p.shows_result) {
    results_.assign(p.peers.size(), Result{});
    exposed_.assign(p.peers.size(), 0);
  }
  if (p.native) {
    tmp_storage.reset();
    return;
  }
  const uint64_t m = p.instrs.size();
  total_ = m * static_cast<uint64_t>(p.fragments);
  if (same) return;
  uint64_t window = 64;
  while (window < m * static_cast<uint64_t>(p.depth + 1)) window *= 2;
  done_bits_.assign(window / 64, 0);
  done_mask_ = window - 1;
  out_base_.resize(p.peers.size());
  in_base_.resize(p.peers.size());
  tmp_storage.reset(p.tmp_nbytes ? new unsigned char[p.tmp_nbytes] : nullptr);
  tmp = tmp_storage.get();
}

void Op::bind(const std::shared_ptr<const Plan>& plan_, const void* in_, void* out_) {
  adopt(plan_, in_, out_);
  const Plan& p = *plan;
  for (size_t i = 0; i < p.peers.size(); ++i) {
    Link& link = comm->link(p.peers[i].rank);
    out_base_[i] = link.next_out;
    in_base_[i] = link.next_in;
    link.next_out += p.peers[i].num_sends();
    link.next_in += p.peers[i].num_recvs();
  }
}

void Op::resume(const std::shared_ptr<const Plan>& plan_, const void* in_, void* out_,
                size_t done, int lane) {
  bind(plan_, in_, out_);
  head_ = done;
  lane_ = lane;
}

bool Op::deps_done(const Instr& ins, uint64_t first) const {
  for (int dep : ins.deps) {
    const uint64_t pos = first + static_cast<uint64_t>(dep);
    if (pos >= head_ && !is_done(pos)) return false;
  }
  return true;
}

bool Op::advance(uint64_t limit) {
  if (was_refused) {
    if (!comm->refusals.afar.is_at_rest(*this)) return false;
    end_record(OpState::Failed);
    return true;
  }
  const Plan& p = *plan;
  if (p.native) {
    const Refusals& refusals = comm->refusals;
    // Ranks that wait in gloo do not look at refusals. Nothing of one is in gloo's order.
    const bool holds_back = agreement == nullptr && refusals.hold_back(seq);
    const bool in_step = !refusals.is_due() && !holds_back;
    if (gate.is_open() && (native_started_ || in_step)) return advance_native(limit);
    comm->native_refused_ = true;  // the library matches its collectives by their order
    return false;
  }
  bool any = false;
  if (in_heap && !shown_) any = show_result();
  if (p.needs_lane && lane_ < 0) {
    lane_ = comm->acquire_lane(p);
    if (lane_ < 0) return false;
    any = true;
    // A rank that only sends is timed from here, while it writes: to get the lane, it has waited
    // for what was sent before.
    if (timed_from != 0 && !p.answered) timed_from = ticks();
  }
  // An operation behind a gate has its lane already: lanes are taken in the order of operations.
  if (!gate.is_open()) return any;
  const uint64_t m = p.instrs.size();
  worked_ = 0;
  for (bool again = true; again && !is_over();) {
    again = false;
    uint64_t index = head_ - head_fragment_ * m;
    while (head_ < total_ && !is_over()) {
      if (is_done(head_)) {
        clear_done(head_);
      } else if (!run(static_cast<int64_t>(head_fragment_), static_cast<int>(index))) {
        break;
      }
      any = true;
      ++head_;
      if (++index == m) {
        index = 0;
        ++head_fragment_;
      }
      if (worked_ >= limit && head_ < total_) return true;
    }
    // The buffers of a failed operation may be gone: its waiting caller has been told.
    if (is_over()) return true;
    if (head_ == total_) {
      if (!all_sent() || !all_taken()) return any;
      if (!finished() && complete(limit)) finish();
      return true;
    }
    const uint64_t window_end =
        p.ahead != 0 ? std::min(total_, head_ + p.ahead)
                     : std::min(total_, (head_fragment_ + static_cast<uint64_t>(p.depth)) * m);
    uint64_t fragment = head_fragment_;
    ++index;
    for (uint64_t pos = head_ + 1; pos < window_end; ++pos, ++index) {
      if (index >= m) {
        index = 0;
        ++fragment;
      }
      if (is_done(pos) || !deps_done(p.instrs[index], fragment * m)) continue;
      if (!run(static_cast<int64_t>(fragment), static_cast<int>(index))) continue;
      if (is_over()) return true;
      set_done(pos);
      any = again = true;
      if (worked_ >= limit) return true;
    }
  }
  return any;
}

bool Op::inputs_arrived(const Instr& ins, int64_t fragment) {
  const Refusals& refusals = comm->refusals;
  const bool unsettled = refusals.disturb();
  bool any = false;
  for (const Ref& ref : ins.inputs) {
    if (!ref.is_message) continue;
    const Link& link = comm->link(plan->peers[ref.peer].rank);
    if (link.kind != LinkKind::Shared) continue;
    if (unsettled && refusals.hold_back(rank_of(ref), seq)) return false;
    any = true;
    const uint64_t id = in_id(ref, fragment);
    const uint64_t word = link.in_lines[id & (kLines - 1)].seq.load(std::memory_order_acquire);
    if (word == id + mark()) continue;
    // After a refusal that is not looked at, ids say nothing yet.
    if (has_id(word, id) && !refusals.is_due()) {
      // Of a call that its rank has given up: that is why it is here.
      const GaveUp found = comm->who_gave_up(seq);
      take_over(found);
      fail(given_up ? found.why
                    : describe_marks(rank_of(ref), word - id, comm->rank, mark(), seq));
    }
    return false;
  }
  return !any || !refusals.is_due();
}

bool Op::outputs_free(const Instr& ins, int64_t fragment) {
  for (const Ref& ref : ins.sends) {
    Link& link = comm->link(plan->peers[ref.peer].rank);
    if (link.kind == LinkKind::Shared && !link.line_free(out_id(ref, fragment))) return false;
  }
  if (!ins.sends.empty() && comm->refusals.is_due()) return false;
  if (ins.publish < 0 || !plan->needs_lane) return true;
  if (in_heap) {
    if (!choose_routes(ins)) return false;
    const auto in_slot = [](const Route& route) { return route.by == Route::By::Slot; };
    if (std::none_of(routes_.begin(), routes_.end(), in_slot)) return true;
  }
  const int64_t per_fragment = static_cast<int64_t>(plan->publish_instr.size());
  const int64_t previous = fragment * per_fragment + ins.publish - plan->slots;
  if (previous < 0) return true;
  const Instr& before = plan->instrs[plan->publish_instr[previous % per_fragment]];
  for (const Ref& ref : before.sends) {
    Link& link = comm->link(plan->peers[ref.peer].rank);
    if (link.kind != LinkKind::Shared) continue;
    if (!link.is_acked(out_id(ref, previous / per_fragment))) return false;
  }
  return true;
}

bool Op::run(int64_t fragment, int index) {
  const Instr& ins = plan->instrs[index];
  if (fragment >= ins.fragments) return true;
  if (ins.has_mpi) {
    if (!run_mpi(fragment, index)) return false;
  } else {
    if (!inputs_arrived(ins, fragment) || !outputs_free(ins, fragment)) return is_over();
    if (!value_ready(ins, fragment, index, nullptr)) return is_over();
    compute_and_send(ins, fragment, nullptr);
  }
  worked_ += ins.slice_nbytes;
  return true;
}

// True once only copying is left of an instruction that needs Python. The first call gathers the
// inputs. Until the value is there, nothing else of the operation gets to Python.
bool Op::value_ready(const Instr& ins, int64_t fragment, int index,
                     const unsigned char* const* arrived) {
  const bool used = !ins.local_outs.empty() || !ins.sends.empty();
  if (!plan->user.python || ins.inputs.size() < 2 || !used) return true;
  const uint64_t position =
      static_cast<uint64_t>(fragment) * plan->instrs.size() + static_cast<uint64_t>(index);
  if (user_value != nullptr) {
    return user_value->position == position && user_value->state == UserValue::State::Done;
  }
  user_value = std::make_unique<UserValue>();
  user_value->position = position;
  compute_and_send(ins, fragment, arrived);
  if (is_over()) return false;
  const bool empty = user_value->nbytes == 0;
  user_value->state = empty ? UserValue::State::Done : UserValue::State::Wanted;
  if (!empty) comm->engine.want_python();
  return empty;
}

// Reduces the instruction's inputs, stores the value to its local outputs and publishes it.
// `arrived[i]`, where given, is the payload of input i that came over MPI.
void Op::compute_and_send(const Instr& ins, int64_t fragment,
                          const unsigned char* const* arrived) {
  const Plan& p = *plan;
  if (ins.local_outs.empty() && ins.sends.empty()) {
    take_inputs(ins, fragment);
    return;
  }
  const size_t item = p.itemsize;
  const int nin = static_cast<int>(ins.inputs.size());

  // Lengths of this fragment: one piece per block where blocks are cut.
  const Ref* shape = nullptr;
  for (const Ref& ref : ins.inputs) if (!ref.is_message) shape = &ref;
  for (const Ref& ref : ins.local_outs) shape = &ref;
  const bool whole = p.fragments == 1;
  const int pieces = whole ? 1 : shape->hi - shape->lo;
  const auto& offsets = p.spaces[shape->space].offsets;
  auto piece_elems = [&](int piece) -> int64_t {
    if (whole) return ins.elems;
    const int64_t len = offsets[shape->lo + piece + 1] - offsets[shape->lo + piece];
    return p.cut(ins, len, fragment + 1) - p.cut(ins, len, fragment);
  };
  auto local = [&](const Ref& ref, int piece) -> const unsigned char* {
    const unsigned char* start = base(ref.space);
    if (whole) return start + ref.offset_nbytes;
    const auto& at = p.spaces[ref.space].offsets;
    const int64_t lo = at[ref.lo + piece];
    const int64_t len = at[ref.lo + piece + 1] - lo;
    return start + static_cast<size_t>(lo + p.cut(ins, len, fragment)) * item;
  };
  size_t total = 0;
  for (int piece = 0; piece < pieces; ++piece) {
    total += static_cast<size_t>(piece_elems(piece)) * item;
  }

  UserValue* const by_python = p.user.python && nin > 1 ? user_value.get() : nullptr;
  const bool gathers =
      by_python != nullptr && by_python->state == UserValue::State::Gathering;
  if (gathers) by_python->gather(nin, total);

  // From the start of a slice that has the same blocks.
  auto within = [&](int piece) -> size_t {
    if (whole) return 0;
    const int64_t lo = offsets[shape->lo + piece];
    const int64_t len = offsets[shape->lo + piece + 1] - lo;
    return static_cast<size_t>(lo - offsets[shape->lo] + p.cut(ins, len, fragment)) * item;
  };

  auto& messages = operands.messages;
  auto& exposed = operands.exposed;
  messages.resize(static_cast<size_t>(nin));
  exposed.assign(static_cast<size_t>(nin), false);
  bool delivered = false, reads_peer = false;
  uint64_t raw = 0;  // inputs that peers show as they are
  for (int i = 0; i < nin; ++i) {
    const Ref& ref = ins.inputs[i];
    if (!ref.is_message) continue;
    const Link& link = comm->link(p.peers[ref.peer].rank);
    if (link.kind == LinkKind::Mpi) {
      messages[i] = arrived[i];  // may be null where nothing was to arrive
      continue;
    }
    const Line& line = link.in_lines[in_id(ref, fragment) & (kLines - 1)];
    const uint64_t meta = line.meta;
    if (!meta_length_is(meta, total)) return fail_by_length(p.peers[ref.peer].rank, total);
    messages[i] = (meta & kInlineFlag) ? line.payload : comm->arena + (meta & kSlotMask);
    if ((meta & kInlineFlag) && total > kInlineBytes) {
      operands.gathered.resize(static_cast<size_t>(nin) * kMostInlineBytes);
      unsigned char* const whole_of = &operands.gathered[static_cast<size_t>(i) * kMostInlineBytes];
      gather(whole_of, line, link.in_more[in_id(ref, fragment) & (kLines - 1)], total);
      messages[i] = whole_of;
    }
    if (comm->checksums && !fits(messages[i], total, link.in_more[in_id(ref, fragment) & (kLines - 1)].sum,
                                 p.peers[ref.peer].rank)) {
      return;
    }
    if ((meta & (kExposedFlag | kDeliveredFlag)) == 0) continue;
    Shown shown;
    std::memcpy(&shown, line.payload, sizeof shown);
    delivered = (meta & kDeliveredFlag) != 0;
    if (!in_heap || !(delivered ? nin == 1 && !ins.local_outs.empty() : comm->is_place(shown.place))) {
      fail("rank " + std::to_string(p.peers[ref.peer].rank) +
           " refers to a shared buffer where none is expected: the ranks called with different "
           "arguments");
      return;
    }
    if (delivered) continue;
    exposed[i] = reads_peer = true;
    messages[i] = comm->address_of(comm->member_of(p.peers[ref.peer].rank), shown.place);
    if (shown.raw != 0) raw |= uint64_t{1} << i;
  }

  const bool inline_send = total <= ins.inline_nbytes;
  auto route_of = [&](size_t s) { return in_heap ? routes_[s].by : Route::By::Slot; };
  auto& targets = operands.targets;
  targets.clear();
  bool has_shared_send = false, exposes = false;
  for (size_t s = 0; s < ins.sends.size(); ++s) {
    if (comm->link(p.peers[ins.sends[s].peer].rank).kind != LinkKind::Shared) continue;
    if (inline_send || route_of(s) == Route::By::Slot) {
      has_shared_send = true;
    } else if (route_of(s) == Route::By::Delivered) {
      targets.push_back(routes_[s].to);
    } else {
      exposes = true;
    }
  }
  // Peers may read it while this rank is at work.
  if (exposes && source_.constant && !gathers) expose(ins, fragment, total);
  alignas(64) unsigned char small[kMostInlineBytes];
  unsigned char* slot = nullptr;
  if (has_shared_send) {
    if (inline_send) {
      slot = small;
    } else {
      const int64_t publish =
          fragment * static_cast<int64_t>(p.publish_instr.size()) + ins.publish;
      slot = comm->lane_base(lane_) + static_cast<size_t>(publish % p.slots) * p.slot_nbytes;
      if (!ins.boxed && !in_parts()) {
        slot += p.slot_shift(local(ins.local_outs.empty() ? *shape : ins.local_outs[0], 0));
      }
    }
  }

  auto& inputs = operands.inputs;
  inputs.resize(static_cast<size_t>(nin));
  if (ins.boxed) move_boxes(ins, messages.data(), slot);
  if (in_parts()) compute_in_parts(ins, fragment, messages.data(), slot);
  const bool contiguous = !ins.boxed && !in_parts();
  size_t cursor = 0;
  for (int piece = 0; piece < pieces && contiguous; ++piece) {
    const size_t elems = static_cast<size_t>(piece_elems(piece));
    const size_t nbytes = elems * item;
    for (int i = 0; i < nin; ++i) {
      const Ref& ref = ins.inputs[i];
      inputs[i] = !ref.is_message ? local(ref, piece)
                  : exposed[i]   ? messages[i] + within(piece)
                                 : messages[i] + cursor;
    }
    if (gathers) {
      for (int i = 0; nbytes != 0 && i < nin; ++i) {
        std::memcpy(by_python->inputs[i].get() + cursor, inputs[i], nbytes);
      }
      cursor += nbytes;
      continue;
    }
    unsigned char* first = nullptr;
    if (!ins.local_outs.empty()) {
      first = const_cast<unsigned char*>(local(ins.local_outs[0], piece));
    }
    if (delivered) inputs[0] = first;
    unsigned char* second = slot != nullptr ? slot + cursor : nullptr;
    size_t done = 0;  // targets
    if (second == nullptr && !targets.empty()) second = targets[done++] + within(piece);
    if (nbytes != 0) {
      if (by_python != nullptr) {
        const unsigned char* value = by_python->inputs[0].get() + cursor;
        if (first != nullptr) copy(first, value, nbytes);
        if (second != nullptr) copy(second, value, nbytes);
      } else if (nin > 1 && reads_peer) {
        compute_from_own_part(ins, first, second, inputs, elems, raw);
      } else if (first != nullptr || second != nullptr) {
        p.compute(ins, store, first, second, inputs.data(), elems, raw);
      }
      for (; done < targets.size(); ++done) {
        copy(targets[done] + within(piece), first != nullptr ? first : second, nbytes,
             streams_second(store));
      }
      for (size_t i = 1; i < ins.local_outs.size(); ++i) {
        auto* more = const_cast<unsigned char*>(local(ins.local_outs[i], piece));
        if (more != first) copy(more, first, nbytes);
      }
    }
    cursor += nbytes;
  }
  if (gathers) return;
  if (by_python != nullptr) user_value.reset();
  if (reads_peer && comm->refusals.is_due()) {
    comm->refusals.look();  // a rank that has left may have written to its array again
    if (is_over()) return;
  }
  for (int i = 0; i < nin; ++i) {
    if (!exposed[i] || !comm->gave_up(p.peers[ins.inputs[i].peer].rank, seq)) continue;
    // It has left its array to its caller, who may have written to it by now.
    const GaveUp found = comm->who_gave_up(seq);
    take_over(found);
    fail(found.why);
    return;
  }

  const uint64_t sum = comm->checksums && slot != nullptr ? checksum(slot, total) : 0;
  if (fault != nullptr) {
    if (slot != nullptr) damage(slot, total);
    for (unsigned char* const target : targets) damage(target, total);
  }
  // Peers read the slot, and after the end another thread of this rank may read the result.
  if (store != Store::Plain) store_fence();
  for (size_t s = 0; s < ins.sends.size(); ++s) {
    const Ref& ref = ins.sends[s];
    Link& link = comm->link(p.peers[ref.peer].rank);
    if (link.kind != LinkKind::Shared) continue;
    const uint64_t id = out_id(ref, fragment);
    Line& line = link.out_lines[id & (kLines - 1)];
    if (!inline_send && route_of(s) != Route::By::Slot) {
      if (route_of(s) == Route::By::Delivered) {
        publish(line, id + mark(), pack_meta(0, kDeliveredFlag, total));
      }
      continue;
    }
    if (comm->checksums) link.out_more[id & (kLines - 1)].sum = sum;
    if (!inline_send) comm->lanes_[lane_].last[p.peers[ref.peer].rank] = id + 1;
    if (inline_send && total > kInlineBytes) {
      spread(line, link.out_more[id & (kLines - 1)], small, total);
    } else if (inline_send) {
      std::memcpy(line.payload, small, total);
    }
    publish(line, id + mark(), inline_send,
            inline_send ? 0 : static_cast<uint64_t>(slot - comm->arena), total);
    if (fault != nullptr) repeat_message(p.peers[ref.peer].rank, id);
  }
  if (exposes && !source_.constant) expose(ins, fragment, total);
  // At once: this pass may have much more to do.
  if (!ins.sends.empty()) comm->ring(p);
  take_inputs(ins, fragment);
}

void Op::take_inputs(const Instr& ins, int64_t fragment) {
  for (const Ref& ref : ins.inputs) {
    if (!ref.is_message) continue;
    Link& link = comm->link(plan->peers[ref.peer].rank);
    if (link.kind == LinkKind::Shared) link.consume(in_id(ref, fragment));
  }
}

void Op::fail_by_user(const std::string& why) {
  by_user = true;
  fail(why);
}

void Op::fail(std::string message) {
  error = std::move(message);
  abandon_mpi();
  stop_showing();
  const bool finds = finds_difference();
  if (finds || by_calls) tell_difference(finds);
  comm->break_down(error, by_death);
  comm->tell_failure(seq, had_agreed());
  end_record(OpState::Failed);
}

// The last step: from here on it belongs to whoever waits for it.
void Op::end_record(OpState how) {
  Record& record = comm->records[seq % Comm::kRecords];
  if (record.seq == seq && !is_agreement) {
    record.end_ticks = ticks();
    record.state = static_cast<uint8_t>(how);
  }
  state.store(static_cast<int>(how), std::memory_order_release);
  comm->engine.ring();
}

// Fails, and leaves the communicator as it is.
void Op::refuse(const std::string& why) {
  error = why;
  was_refused = true;
  stop_showing();
  comm->release_lane(*this);
  if (comm->refusals.afar.is_at_rest(*this)) end_record(OpState::Failed);
}

// Does what is left to do with the result; true once all of it is complete.
bool Op::complete(uint64_t limit) {
  const Plan& p = *plan;
  if (!p.completes()) return true;
  const size_t elems = static_cast<size_t>(p.out_elems);
  if (in_parts()) {
    if (completed_ != elems) parts->complete(p);
    completed_ = elems;
    return true;
  }
  const size_t piece = std::min<uint64_t>(elems - completed_, limit / p.itemsize);
  p.complete(out + completed_ * p.itemsize, piece);
  completed_ += piece;
  return completed_ == elems;
}

void Op::finish() {
  const Plan& p = *plan;
  complete(kNoLimit);  // what a vendor collective leaves
  if (parts != nullptr && parts->is_packed()) parts->unpack(p.itemsize);
  if (timed_from != 0) comm->report_run(p, ticks() - timed_from, uses_heap());
  comm->release_lane(*this);
  stop_showing();
  if (in_flight != nullptr) was_changed = in_flight->has_changed();
  end_record(OpState::Done);
  if (fault != nullptr) comm->chaos->settle(*fault);
}

}  // namespace commrt
