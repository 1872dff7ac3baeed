// SPDX-License-Identifier: Apache-2.0
// Ranks that made different calls: whoever finds it tells all ranks, which raise the same error.
#include <cstring>
#include <utility>

#include "engine/chaos.hpp"
#include "engine/collective_codes.hpp"
#include "engine/comm.hpp"
#include "engine/stand_ins.hpp"

namespace commrt {

std::string Comm::words_of_difference(const std::string& found) {
  if (broken.load(std::memory_order_relaxed)) return calls_differ ? failure : found;
  calls_differ = true;
  const std::string text = shortened(found, kWhyBytes - 1);
  if (arena == nullptr) return text;
  // Before the claim: whoever finds it taken reads them.
  show_why(text);
  const auto me = static_cast<uint64_t>(member_of(rank)) + 1;
  uint64_t first = 0;
  auto& claim = header(0)->first_to_differ;
  if (claim.compare_exchange_strong(first, me, std::memory_order_acq_rel)) return text;
  return first == me ? text : why_of(static_cast<int>(first) - 1);
}

// Takes over what another rank says.
void Op::take_over(const GaveUp& found) {
  given_up = found.is_any();
  by_death = found.has_died;
  by_damage = comm->is_damaged = comm->is_damaged || found.is_damage;
  by_calls = found.calls_differ;
}

// True if nobody else has said why this operation fails: by what this rank has compared.
bool Op::finds_difference() const {
  return p2p == nullptr && std::strcmp(failure_kind(), "mismatch") == 0;
}

// Lets all ranks say the same of calls that differ. An operation of gloo's has not begun where the
// ranks find a difference: all of them find it by themselves, in equal words.
void Op::tell_difference(bool is_own) {
  by_calls = true;
  if (is_own) {
    const bool all_find_it = had_agreed();
    const std::string who = all_find_it ? "" : ", rank " + std::to_string(comm->rank);
    const std::string what = is_agreement ? "comparison before operation" : called(plan->coll);
    error = what + " #" + std::to_string(seq) + " on " + comm->name + who + ": " + error;
    error = comm->words_of_difference(error);
    if (comm->calls_differ && !all_find_it) comm->end_everywhere(seq, error);
    return;
  }
  error = comm->words_of_difference(error);
}

// Says how a peer's call differs from an operation that waits, as far as peers of this node show it;
// empty: it does not. Such calls may wait for each other, or for a message that nobody sends.
std::string Comm::differing_call(const Op& op) const {
  if (refusals.is_due() || refusals.disturb()) return {};
  const uint64_t mine = call_mark(op.plan->mark, op.seq);
  if ((mine & 1) == 0) return {};
  for (const int peer : members) {
    if (peer == rank) continue;
    // In the same call as this rank. The count follows what it counts, so the mark is not older than
    // the call before.
    const RankHeader& its = *header(member_of(peer));
    const uint64_t shown = its.latest_mark.load(std::memory_order_acquire);
    const bool is_there = its.started.load(std::memory_order_relaxed) == op.seq + 1 &&
                          order_of(shown) == order_of(mine) && (shown & 1) != 0;
    if (is_there && shown != mine) return describe_marks(peer, shown, rank, mine, op.seq);
    // Or further: there is a message for this call, which expects no more of them.
    const Link& link = links_[static_cast<size_t>(peer)];
    const uint64_t id = link.next_in;
    const uint64_t word = link.in_lines[id & (kLines - 1)].seq.load(std::memory_order_acquire);
    if (!has_id(word, id) || order_of(word - id) != order_of(mine)) continue;
    return describe_marks(peer, word - id, rank, op.mark(), op.seq);
  }
  return {};
}

bool Comm::look_for_difference(Op& op) {
  if (const std::string why = trails.look_in_wait(); !why.empty()) {
    op.fail(why);
    return true;
  }
  bool is_first = true;
  for (const auto& one : active_) {
    if (one->is_over() || one->p2p != nullptr || one->is_agreement || one->seq > op.seq) continue;
    if (std::exchange(is_first, false)) far_waits.tell(*one);
    const std::string why = arena == nullptr ? "" : differing_call(*one);
    if (why.empty()) continue;
    one->fail(why);
    return op.finished() || fail_after_own(op);
  }
  far_waits.look();
  return false;
}

// The word of another rank of this node that the calls differ, up to that operation; empty: none has
// said so. A rank that waits for nobody hears it only here. It reads a line that each call reads.
std::string Comm::told_difference(uint64_t seq) const {
  if (arena == nullptr) return {};
  if (header(0)->first_to_differ.load(std::memory_order_relaxed) == 0) return {};
  const GaveUp found = who_gave_up(seq);
  return found.calls_differ ? found.why : "";
}

// The mark of an operation that has not ended, of that number.
std::optional<uint64_t> Comm::mark_in_flight(uint64_t seq) const {
  for (const auto& one : active_) {
    if (one->seq != seq || one->is_over() || one->p2p != nullptr || one->is_agreement) continue;
    return call_mark(one->plan->mark, seq);
  }
  return {};
}

// Writes a call down before a library gets it. False: ranks made different calls, and it has failed.
bool Op::left_trail() {
  if (left_trail_) return true;
  left_trail_ = true;
  const NativeCall& call = plan->call;
  CallTrail& trail = comm->trails.by_host;
  if (const std::string why = comm->told_difference(seq); !why.empty()) {
    fail(why);  // in the words of whoever has found it
    return false;
  }
  const bool is_root = plan->coll == kScatterv && comm->rank == plan->root;
  if (is_root || plan->coll == kAlltoallv) comm->refusals.stand_ins->remember(seq, plan);
  if (trail.add(seq, call_mark(plan->mark, seq), call.length, call.hash)) return true;
  fail(trail.why());
  return false;
}

}  // namespace commrt
