// SPDX-License-Identifier: Apache-2.0
// Buffers in the symmetric heap: memory that every on-node peer has mapped.
//
// A payload then need not pass through a slot. A sender may *expose* its own buffer, which the
// peer reads in place; the operation ends once it has been read. Or it may *deliver* the value to
// where the peer wants it: for that each rank shows, as a long operation starts, where its result
// goes. The line of the message says which of the three it was. So each rank may put its own
// buffers into the heap or not, and any mixture works. It is settled beforehand
// (schedule/exposure.py) whether memory may be read later, or written earlier, than the schedule's
// steps do.
#include <algorithm>
#include <cstring>

#include "engine/comm.hpp"

namespace commrt {

CallLine& Comm::call_line(int member, uint64_t seq) const {
  unsigned char* region = arena + static_cast<size_t>(member) * region_nbytes;
  return reinterpret_cast<CallLine*>(region + layout.calls)[seq % kCallLines];
}

Place Comm::place_in_heap(const void* data, size_t nbytes) const {
  const auto* start = static_cast<const unsigned char*>(data);
  const size_t me = static_cast<size_t>(member_index_[rank]);
  for (size_t i = 0; i < heap_.size(); ++i) {
    const Segment& segment = heap_[i];
    const unsigned char* mine = segment.base + me * segment.part_nbytes;
    if (start < mine || start + nbytes > mine + segment.part_nbytes) continue;
    return place_of(i, static_cast<uint64_t>(start - mine));
  }
  for (const Mirror& mirror : mirrors_) {
    if (start < mirror.start || start + nbytes > mirror.start + mirror.nbytes) continue;
    return mirror.place + static_cast<uint64_t>(start - mirror.start);
  }
  return 0;
}

bool Comm::add_mirror(const void* start, size_t nbytes, const void* original) {
  const Place place = place_in_heap(original, nbytes);
  if (place == 0) return false;
  mirrors_.push_back({static_cast<const unsigned char*>(start), nbytes, place});
  return true;
}

void Comm::remove_mirror(const void* start) {
  const auto is_there = [start](const Mirror& mirror) { return mirror.start == start; };
  mirrors_.erase(std::remove_if(mirrors_.begin(), mirrors_.end(), is_there), mirrors_.end());
}

// Looks where the buffers lie. If they overlap in a way that no schedule knows of, they count as
// ordinary ones.
void Op::find_in_heap() {
  const Plan& p = *plan;
  in_heap = true;
  sharing_ = 0;
  const size_t in_nbytes = static_cast<size_t>(p.in_elems) * p.itemsize;
  const size_t out_nbytes = static_cast<size_t>(p.out_elems) * p.itemsize;
  const unsigned char* const in_end = in + in_nbytes;
  const unsigned char* const out_end = out + out_nbytes;
  Sharing sharing = Sharing::Apart;
  if (in_nbytes != 0 && out_nbytes != 0 && in < out_end && out < in_end) {
    const bool in_inside = in >= out && in_end <= out_end;
    const size_t part = in_inside ? in_nbytes : out_nbytes;
    const size_t at = static_cast<size_t>(in_inside ? in - out : out - in);
    if (in == out && in_nbytes == out_nbytes) {
      sharing = Sharing::InPlace;
    } else if ((in_inside || (out >= in && out_end <= in_end)) &&
               at == part * static_cast<size_t>(comm->rank)) {
      sharing = Sharing::OwnBlock;
    } else {
      return;
    }
  }
  sharing_ = static_cast<uint8_t>(sharing);
  if (in_nbytes != 0) in_place_ = comm->place_in_heap(in, in_nbytes);
  if (out_nbytes != 0) out_place_ = comm->place_in_heap(out, out_nbytes);
}

// Tells the peers where the result goes, or that it lies where they cannot reach it.
bool Op::show_result() {
  bool& taken = comm->showing_[seq % kCallLines];
  if (taken) return false;  // by an operation in flight that is so much older
  taken = shown_ = true;
  CallLine& line = comm->call_line(comm->member_of(comm->rank), seq);
  // A run from the caller's stack that found no lane has shown the same already.
  if (line.seq.load(std::memory_order_relaxed) == seq + mark()) return true;
  line.out = out_place_;
  line.sharing = sharing_;
  line.seq.store(seq + mark(), std::memory_order_release);
  return true;
}

bool Comm::show_ordinary(const Plan& plan, const void* in, const void* out) {
  const size_t item = plan.itemsize;
  if (showing_[next_seq % kCallLines] ||
      place_in_heap(in, static_cast<size_t>(plan.in_elems) * item) != 0 ||
      place_in_heap(out, static_cast<size_t>(plan.out_elems) * item) != 0) {
    return false;
  }
  CallLine& line = call_line(member_of(rank), next_seq);
  line.out = 0;
  line.seq.store(next_seq + call_mark(plan.mark, next_seq), std::memory_order_release);
  return true;
}

// The line that show_ordinary() has written belongs to this operation from now on.
void Op::mark_shown() {
  in_heap = shown_ = true;
  sharing_ = 0;
  comm->showing_[seq % kCallLines] = true;
}

void Op::stop_showing() {
  if (shown_) comm->showing_[seq % kCallLines] = false;
  shown_ = false;
}

// Returns where a peer wants its result, which is not known before the peer has started the
// operation. The peer cannot show another one in the same line as long as it waits for this rank's
// message.
const Op::Result& Op::result_of(int peer) {
  Result& result = results_[peer];
  if (result.known) return result;
  const int member = comm->member_of(plan->peers[peer].rank);
  const CallLine& line = comm->call_line(member, seq);
  if (line.seq.load(std::memory_order_acquire) != seq + mark()) return result;
  result.known = true;
  result.sharing = line.sharing;
  if (comm->is_place(line.out)) result.at = comm->address_of(member, line.out);
  return result;
}

// Returns where peers may read what an instruction sends: its only operand, or its result here.
// Nobody writes to a send buffer apart from the result, so peers may read it at once. For a mean,
// they read it as it is, and multiply it as they add.
Op::Source Op::source_in_heap(const Instr& ins) const {
  auto place = [&](const Ref& ref) -> Place {
    if (ref.is_message) return 0;
    const SpaceKind kind = plan->spaces[ref.space].kind;
    const Place buffer = kind == SpaceKind::In    ? in_place_
                         : kind == SpaceKind::Out ? out_place_
                                                  : 0;
    return buffer == 0 ? 0 : buffer + static_cast<uint64_t>(ref.offset_nbytes);
  };
  const bool raw = ins.scaled() != nullptr;
  if ((!raw || plan->shows_raw) && (ins.operand_exposable & sharing_) != 0) {
    const Place operand = place(ins.inputs[0]);
    const bool is_input = plan->spaces[ins.inputs[0].space].kind == SpaceKind::In;
    const bool is_apart = sharing_ == static_cast<uint8_t>(Sharing::Apart);
    if (operand != 0) return {operand, is_input && is_apart, raw};
  }
  if ((ins.exposable & sharing_) != 0) return {place(ins.local_outs[0]), false, false};
  return {0, false, false};
}

// Shows peers where they may read a value of `nbytes`.
void Op::expose(const Instr& ins, int64_t fragment, size_t nbytes) {
  for (size_t s = 0; s < ins.sends.size(); ++s) {
    const Ref& ref = ins.sends[s];
    Link& link = comm->link(plan->peers[ref.peer].rank);
    if (link.kind != LinkKind::Shared || routes_[s].by != Route::By::Exposed) continue;
    const uint64_t id = out_id(ref, fragment);
    Line& line = link.out_lines[id & (kLines - 1)];
    const Shown shown{source_.place, source_.raw ? uint64_t{1} : uint64_t{0}};
    std::memcpy(line.payload, &shown, sizeof shown);
    exposed_[ref.peer] = std::max(exposed_[ref.peer], id + 1);
    publish(line, id + mark(), pack_meta(0, kExposedFlag, nbytes));
  }
}

// Decides how each message of an instruction travels; false if that is not known yet. A value
// computed here is written to the peer while it is at hand. A value that already lies in memory is
// left there for the peers to read, each on its own core.
bool Op::choose_routes(const Instr& ins) {
  source_ = source_in_heap(ins);
  const bool exposes = source_.place != 0;
  const bool delivers = ins.inputs.size() > 1 || (!exposes && ins.sends.size() == 1);
  routes_.clear();
  for (const Ref& ref : ins.sends) {
    Route route{exposes ? Route::By::Exposed : Route::By::Slot, nullptr};
    if (delivers && ref.deliverable != 0) {
      const Result& result = result_of(ref.peer);
      // A rank that uses the heap itself expects its peers to: the slot would cost more than
      // waiting for them to start.
      if (!result.known && uses_heap()) return false;
      if (result.at != nullptr && (ref.deliverable & result.sharing) != 0) {
        route = {Route::By::Delivered, result.at + ref.landing_nbytes};
      }
    }
    routes_.push_back(route);
  }
  return true;
}

// Reduces what lies in peers' buffers, each rank beginning at another place: ranks that read
// the same lines of each other's buffers at the same time are up to twice as slow.
void Op::compute_from_own_part(const Instr& ins, unsigned char* first, unsigned char* second,
                               std::vector<const void*>& inputs, size_t elems,
                               uint64_t raw) const {
  if (first == nullptr && second == nullptr) return;
  constexpr size_t kPage = 4096;
  const size_t per_page = std::max<size_t>(1, kPage / plan->itemsize);
  const size_t members = comm->members.size();
  const size_t me = static_cast<size_t>(comm->member_of(comm->rank));
  const size_t start = elems / members * me / per_page * per_page;
  const size_t nbytes = start * plan->itemsize;
  auto move = [&](std::ptrdiff_t by) {
    for (const void*& input : inputs) input = static_cast<const unsigned char*>(input) + by;
  };
  auto at = [](unsigned char* p, size_t offset) { return p != nullptr ? p + offset : nullptr; };
  move(static_cast<std::ptrdiff_t>(nbytes));
  plan->compute(ins, store, at(first, nbytes), at(second, nbytes), inputs.data(), elems - start,
                raw);
  if (start == 0) return;
  move(-static_cast<std::ptrdiff_t>(nbytes));
  plan->compute(ins, store, first, second, inputs.data(), start, raw);
}

// True once the peers have read what was exposed to them.
bool Op::all_taken() {
  if (!uses_heap()) return true;
  for (size_t i = 0; i < exposed_.size(); ++i) {
    if (exposed_[i] == 0) continue;
    if (!comm->link(plan->peers[i].rank).is_acked(exposed_[i] - 1)) return false;
  }
  return true;
}

}  // namespace commrt
