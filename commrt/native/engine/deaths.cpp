// SPDX-License-Identifier: Apache-2.0
// What a communicator does about ranks that have died, have left, or have given it up.
#include <algorithm>
#include <utility>

#include "engine/comm.hpp"
#include "engine/kin.hpp"
#include "engine/p2p.hpp"
#include "engine/relay.hpp"

namespace commrt {

void Comm::attach_liveness(std::shared_ptr<Liveness> liveness, std::vector<int> of) {
  liveness_ = std::move(liveness);
  life_of_ = std::move(of);
}

bool Comm::has_ended(int peer) const {
  const int member = liveness_ == nullptr ? -1 : life_of_[static_cast<size_t>(peer)];
  return member >= 0 && liveness_->has_ended(member);
}

bool Comm::has_left(int peer) const {
  if (links_[static_cast<size_t>(peer)].kind == LinkKind::Mpi) {
    const int member = liveness_ == nullptr ? -1 : life_of_[static_cast<size_t>(peer)];
    return member >= 0 && liveness_->has_left(member);
  }
  const Farewell said = header(member_of(peer))->farewell.load(std::memory_order_acquire);
  return said == Farewell::Left || (said == Farewell::Freed && has_ended(peer));
}

bool Comm::is_gone(int peer) const {
  if (links_[static_cast<size_t>(peer)].kind == LinkKind::Self) return false;
  return has_ended(peer) || has_left(peer);
}

std::string Comm::who_is_lost() const {
  std::string said;
  for (const Link& link : links_) {
    if (link.kind != LinkKind::Mpi || relay_ == nullptr) continue;
    const std::string why = relay_->failure_of(link.mpi_rank);
    if (!why.empty()) said += (said.empty() ? "" : "; ") + why;
  }
  return said;
}

std::string Comm::who_died(int peer, bool anew) const {
  if (liveness_ != nullptr) liveness_->look(anew);
  std::string left;  // counts where nobody has died: others may leave because of a death
  for (int one = 0; one < size; ++one) {
    if (!is_gone(one)) continue;
    const std::string said = "rank " + std::to_string(one);
    if (!has_left(one)) {
      return said + " " + liveness_->fate(life_of_[static_cast<size_t>(one)]);
    }
    if (one == peer) left = said + " has left, and takes part in nothing any more";
  }
  return left;
}

GaveUp Comm::who_gave_up(uint64_t seq, bool still_agrees, bool heeds_leavers) const {
  bool by_death = false;
  const std::string who = arena == nullptr ? "" : who_says_so(seq, still_agrees, by_death);
  // A rank that tells of its failure may have failed by the end of a process, which it has seen
  // first.
  if (liveness_ != nullptr) liveness_->look(!who.empty());
  for (const int one : members) {
    if (!is_gone(one)) continue;
    const RankHeader& its = *header(member_of(one));
    // One that has told of its failure has ended by that.
    if (Failure::ends(its.failed.load(std::memory_order_acquire), seq, still_agrees)) continue;
    if (has_left(one) &&
        (!heeds_leavers || its.started.load(std::memory_order_acquire) > seq)) continue;
    return {who_died(one), true};
  }
  for (int one = 0; one < size && liveness_ != nullptr && liveness_->any(); ++one) {
    const Link& link = links_[static_cast<size_t>(one)];
    if (link.kind != LinkKind::Mpi || !is_gone(one)) continue;
    if (has_left(one) && (!heeds_leavers || (relay_ != nullptr &&
                                             relay_->did_its_part(link.mpi_rank, mpi_tag, seq)))) {
      continue;
    }
    return {who_died(one), true};
  }
  const auto who_tells = [&](FailureCause cause) {
    return std::find_if(members.begin(), members.end(), [&](int one) {
      const RankHeader& its = *header(member_of(one));
      return one != rank && Failure::ends(its.failed.load(std::memory_order_acquire), seq, still_agrees) &&
             its.cause.load(std::memory_order_relaxed) == cause;
    });
  };
  if (who.empty()) return who_gave_up_origin();
  if (who_tells(FailureCause::Damage) != members.end()) return {who, by_death, true};
  const auto found = who_tells(FailureCause::Difference);
  if (found == members.end() || by_death) return {who, by_death};
  return {why_of(member_of(*found)), false, false, true};
}

GaveUp Comm::who_gave_up_origin() const {
  for (Kin* next = kin_->next(); next != nullptr; next = next->next()) {
    const Comm& from = *next->comm;
    for (size_t i = 0; from.arena != nullptr && i < from.members.size(); ++i) {
      const RankHeader& its = *from.header(static_cast<int>(i));
      if (its.failed.load(std::memory_order_acquire) == 0) continue;
      const uint32_t dead = its.failed_by_death.load(std::memory_order_relaxed);
      if (dead == 0 || dead > from.life_of_.size()) continue;
      const auto here = std::find(life_of_.begin(), life_of_.end(), from.life_of_[dead - 1]);
      if (here == life_of_.end()) continue;  // these ranks can do without it
      said_dead_ = static_cast<uint32_t>(here - life_of_.begin()) + 1;
      return {"rank " + std::to_string(from.members[i]) + " gave up on " + from.name +
                  ", from which this was made: " + from.why_of(static_cast<int>(i)),
              true};
    }
  }
  return {};
}

std::string Comm::who_says_so(uint64_t seq, bool still_agrees, bool& by_death) const {
  for (size_t i = 0; i < members.size(); ++i) {
    const RankHeader& its = *header(static_cast<int>(i));
    const uint64_t failed = its.failed.load(std::memory_order_acquire);
    if (members[i] == rank || !Failure::ends(failed, seq, still_agrees)) continue;
    const uint64_t at = Failure::seq_of(failed);
    const std::string reason = refusals.reason_of(static_cast<int>(i), at);
    const uint32_t dead = its.failed_by_death.load(std::memory_order_relaxed);
    by_death = reason.empty() && dead != 0;
    if (by_death) said_dead_ = dead;
    return "rank " + std::to_string(members[i]) + " gave up at operation #" + std::to_string(at) +
           ": " + (reason.empty() ? why_of(static_cast<int>(i)) : reason);
  }
  return {};
}

uint32_t Comm::who_is_dead() const {
  for (int one = 0; one < size; ++one) {
    if (is_gone(one) && !has_left(one)) return static_cast<uint32_t>(one) + 1;
  }
  return said_dead_;
}

bool Comm::fail_after_peer(const std::shared_ptr<Op>& given) {
  Op& op = *given;
  if (op.p2p != nullptr) {
    return p2p->fail_after_peer(given) || (ends_with_origin() && op.finished());
  }
  const GaveUp found = who_gave_up(op.seq, op.still_agrees());
  if (!found.is_any()) {  // its own end counts before that of its origin
    if (look_for_difference(op)) return true;
    return ends_with_origin() && (op.finished() || fail_after_own(op));
  }
  if (found.has_died) {
    // All that it wrote before its end is there by now, and counts.
    while (!op.finished() && op.advance(kNoLimit)) continue;
    if (op.finished()) return true;
    if (p2p->fail_after_last_words(op)) return true;
  }
  op.take_over(found);
  op.fail(found.why);
  return true;
}

void Comm::break_down(const std::string& why, bool by_death) {
  if (broken.load(std::memory_order_relaxed)) return;
  failure = why;
  failed_by_death = by_death;
  broken.store(true, std::memory_order_release);
}

void Comm::tell_failure(uint64_t seq, bool had_agreed) {
  // Ranks of other nodes may not know of a death, or wait for what this rank does not do any more.
  const bool is_news = failed_by_death && seq < failed_from;
  failed_from = std::min(failed_from, seq);
  if (is_news) p2p->tell_death(seq);
  if (arena == nullptr) return;
  RankHeader& mine = *header(member_index_[rank]);
  std::atomic<uint64_t>& failed = mine.failed;
  const uint64_t told = failed.load(std::memory_order_relaxed);
  const uint64_t word = Failure::word(seq, had_agreed);
  if (told == 0) {
    publish_why();
    mine.failed_by_death.store(failed_by_death ? who_is_dead() : 0, std::memory_order_relaxed);
    mine.cause.store(cause(), std::memory_order_relaxed);
  }
  if (told == 0 || told > word) failed.store(word, std::memory_order_release);
  // Before the caller writes to buffers that peers still read (gave_up()).
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (int peer : members) ring(peer);
}

void P2P::tell_ended(int rank, uint64_t seq, uint64_t dead) {
  if (comm_.link(rank).kind != LinkKind::Mpi) return;  // ranks of this node see it
  if (!attached_) attach();
  if (!channels_[rank].failure.empty() || comm_.is_gone(rank)) return;
  PacketHeader header{
      PacketKind::Ended, kAnyType, static_cast<int32_t>(comm_.cause()), 0, seq, dead, comm_.was_revoked};
  const std::string words = comm_.calls_differ ? comm_.failure : "";
  header.nbytes = words.size();
  // At once, if it can be: this rank may not call for long.
  const bool at_once = dead != 0 || comm_.calls_differ || comm_.is_damaged;
  if (at_once && push(rank, header, reinterpret_cast<const unsigned char*>(words.data()), words.size())) {
    lingering_ = true;
  } else if (channels_[rank].failure.empty()) {
    header.nbytes = 0;
    answer(rank, header);
    urgent_ = true;
  }
}

bool P2P::fail_after_last_words(Op& op) {
  for (int peer = 0; peer < comm_.size; ++peer) {
    if (comm_.link(peer).kind != LinkKind::Mpi || !comm_.is_gone(peer)) continue;
    if (!attached_) attach();
    if (channels_[peer].failure.empty()) drain(peer);
  }
  const bool is_theirs = ended_by_ >= 0 && !comm_.failed_by_death && comm_.is_gone(ended_by_);
  const bool is_told = comm_.is_damaged || comm_.calls_differ || is_theirs;
  return op.finished() || (is_told && comm_.fail_after_own(op));
}

void P2P::tell_death(uint64_t seq) {
  const uint64_t dead = comm_.who_is_dead();
  for (int peer = 0; peer < comm_.size; ++peer) tell_ended(peer, seq, dead);
}

// A rank of another node says that one has died. By MPI there is no doubt of it.
std::string Comm::who_died_as_told(int rank, int by) const {
  if (liveness_ != nullptr && !off_node->is_relay && rank >= 0 && rank < size) {
    liveness_->note_told(life_of_[static_cast<size_t>(rank)], life_of_[static_cast<size_t>(by)]);
  }
  return who_died(-1, true);
}

void P2P::hear_of_end(int source, const PacketHeader& header, const unsigned char* words) {
  const std::string who = "rank " + std::to_string(source) + " of another node";
  const auto cause = static_cast<FailureCause>(header.tag);
  comm_.was_revoked = comm_.was_revoked || header.offset != 0;  // what was made from it ends, too
  comm_.is_damaged = comm_.is_damaged || cause == FailureCause::Damage;
  const char* const damage = cause == FailureCause::Damage
                                 ? ", as a message to it was damaged on its way: its checksum does not fit"
                             : cause == FailureCause::Difference
                                 ? ", as the ranks made different calls"
                                 : "";
  std::string why = who + " has ended it" + damage + ": look for the error of that rank";
  if (cause == FailureCause::Difference) {
    const std::string told(reinterpret_cast<const char*>(words), header.nbytes);
    why = comm_.words_of_difference(told.empty() ? why : told);
  }
  bool by_death = header.recv_id != 0;
  if (cause == FailureCause::Revoked && !by_death) {
    const std::string died = comm_.who_died(-1, true);
    by_death = !died.empty();
    if (by_death) why = died;
  } else if (by_death) {
    const int dead = static_cast<int>((header.recv_id - 1) % comm_.links_.size());
    comm_.said_dead_ = static_cast<uint32_t>(header.recv_id);
    why = comm_.who_died_as_told(dead, source);
    if (why.empty()) {
      const int member = comm_.liveness_ == nullptr ? -1 : comm_.life_of_[static_cast<size_t>(dead)];
      why = "rank " + std::to_string(dead) + " has died: " +
            (member < 0 ? "its process" : comm_.liveness_->name(member)) +
            " has ended or cannot be reached, as " + who + " says";
    }
  }
  if (!comm_.broken.load(std::memory_order_relaxed)) ended_by_ = source;
  comm_.break_down(why, by_death);
  comm_.tell_failure(header.send_id);
  take_all_back("this rank gave up: " + comm_.failure);
}

}  // namespace commrt
