// SPDX-License-Identifier: Apache-2.0
#include "engine/context_ends.hpp"

#include <algorithm>
#include <atomic>

#include "engine/comm.hpp"
#include "engine/p2p.hpp"

namespace commrt {

void ContextEnds::begin_meeting() {
  const uint64_t seq = comm_.next_seq;
  meets_ = meets_at(seq) + 1;
  met_at_ = seq;
  is_meeting_ = true;
  if (comm_.arena != nullptr) {
    const uint64_t word = seq << ContextSlots::kMeetsBits | low_bits(meets_, ContextSlots::kMeetsBits);
    slots(comm_.member_of(comm_.rank)).meeting.store(word, std::memory_order_release);
  }
  look();
}

void ContextEnds::end_meeting() {
  is_meeting_ = false;
  if (comm_.arena == nullptr) return;
  slots(comm_.member_of(comm_.rank)).meeting.store(0, std::memory_order_release);
}

void ContextEnds::note() {
  say({Count::Known, comm_.next_seq, 0});
  ++number_;
}

void ContextEnds::lose() {
  answers_.clear();
  say({Count::Lost, comm_.next_seq, 0});
  for (int rank = 0; rank < comm_.size; ++rank) {
    if (rank != comm_.rank && comm_.link(rank).kind == LinkKind::Mpi) {
      comm_.p2p->tell_context_end(rank, number_, {});
    }
  }
  comm_.p2p->look_closely();
}

ContextEnds::End ContextEnds::find() const {
  End furthest{Count::Lost, comm_.next_seq, 0};
  bool is_gone = false;
  for (int rank = 0; rank < comm_.size; ++rank) {
    if (rank == comm_.rank) continue;
    End its{Count::Inside, 0, 0};
    if (comm_.link(rank).kind != LinkKind::Mpi) {
      its = of_member(comm_.member_of(rank), number_);
    } else if (const auto found = answers_.find(rank); found != answers_.end()) {
      its = found->second;
    }
    if (its.count == Count::Known) return its;
    is_gone |= its.count == Count::Gone;
    if (its.count == Count::Inside) furthest.count = Count::Inside;
    // It waits for a meeting in which this rank has not been.
    if (its.seq == comm_.next_seq && its.meets > meets_at(its.seq)) ++its.seq;
    furthest.seq = std::max(furthest.seq, its.seq);
  }
  return is_gone ? End{Count::Gone, 0, 0} : furthest;
}

void ContextEnds::regain() { note(); }

void ContextEnds::hear_question(int rank, uint64_t number) {
  const End end = own(number);
  if (end.count == Count::Inside) asked_.push_back({rank, number, end});
  comm_.p2p->tell_context_end(rank, number, end);
  comm_.refusals.see();
}

void ContextEnds::look() {
  for (Asked& one : asked_) {
    const End now = inside();
    if (one.number != number_ || (one.told.seq == now.seq && one.told.meets == now.meets)) continue;
    one.told = now;
    comm_.p2p->tell_context_end(one.rank, number_, now);
  }
}

void ContextEnds::hear_answer(int rank, uint64_t number, End end) {
  if (number == number_) answers_[rank] = end;
}

// Says where context `number_` ends here, to ranks of the node and to those that have asked.
void ContextEnds::say(End end) {
  own_[number_ % kContextEnds] = end;
  if (comm_.arena != nullptr) {
    EndSlot& mine = slot(comm_.member_of(comm_.rank), number_);
    mine.word.store(0, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_release);
    mine.seq.store(end.seq, std::memory_order_relaxed);
    mine.word.store(EndSlot::word_of(number_, end.count == Count::Lost), std::memory_order_release);
  }
  if (asked_.empty()) return;
  for (const Asked& one : asked_) {
    if (one.number == number_) comm_.p2p->tell_context_end(one.rank, number_, end);
  }
  asked_.erase(std::remove_if(asked_.begin(), asked_.end(),
                              [this](const Asked& one) { return one.number == number_; }),
               asked_.end());
  comm_.refusals.see();
}

ContextEnds::End ContextEnds::own(uint64_t number) const {
  if (number > number_) return inside();
  if (number + kContextEnds <= number_) return {Count::Gone, 0, 0};
  const End found = own_[number % kContextEnds];
  // The one that ends next has the place of an older one.
  const bool is_old = number == number_ && found.count != Count::Lost;
  return is_old ? inside() : found;
}

ContextEnds::End ContextEnds::of_member(int member, uint64_t number) const {
  // First: operations to which it comes after the context are behind its word.
  const unsigned char* const region = comm_.arena + static_cast<size_t>(member) * comm_.region_nbytes;
  const uint64_t started =
      reinterpret_cast<const RankHeader*>(region)->started.load(std::memory_order_acquire);
  const uint64_t meeting = slots(member).meeting.load(std::memory_order_acquire);
  const uint64_t meets = low_bits(meeting, ContextSlots::kMeetsBits);
  const uint64_t met_at = meeting >> ContextSlots::kMeetsBits;
  const bool is_meeting = meets != 0 && met_at >= started;
  const End inside{Count::Inside, is_meeting ? met_at : started, is_meeting ? meets : 0};
  const EndSlot& its = slot(member, number);
  const uint64_t word = its.word.load(std::memory_order_acquire);
  const uint64_t seq = its.seq.load(std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_acquire);
  if (word == 0 || its.word.load(std::memory_order_relaxed) != word) return inside;
  if (word == EndSlot::word_of(number, false)) return {Count::Known, seq, 0};
  if (word == EndSlot::word_of(number, true)) return {Count::Lost, seq, 0};
  return word > EndSlot::word_of(number, true) ? End{Count::Gone, 0, 0} : inside;
}

// How far this rank has come.
ContextEnds::End ContextEnds::inside() const {
  return {Count::Inside, comm_.next_seq, is_meeting_ ? meets_at(comm_.next_seq) : 0};
}

ContextSlots& ContextEnds::slots(int member) const {
  unsigned char* const region = comm_.arena + static_cast<size_t>(member) * comm_.region_nbytes;
  return *reinterpret_cast<ContextSlots*>(region + comm_.layout.ends);
}

EndSlot& ContextEnds::slot(int member, uint64_t number) const {
  return slots(member).ends[number % kContextEnds];
}

void P2P::tell_context_end(int rank, uint64_t number, ContextEnds::End end) {
  answer(rank, {PacketKind::ContextEnd, kAnyType, static_cast<int32_t>(end.count), 0, number,
                end.seq, end.meets});
  urgent_ = true;
}

void P2P::hear_of_context_end(int source, const PacketHeader& header) {
  ContextEnds& ends = comm_.refusals.context_ends;
  const auto count = static_cast<ContextEnds::Count>(header.tag);
  if (count == ContextEnds::Count::Unknown) return ends.hear_question(source, header.send_id);
  ends.hear_answer(source, header.send_id, {count, header.recv_id, header.offset});
}

}  // namespace commrt
