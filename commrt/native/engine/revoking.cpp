// SPDX-License-Identifier: Apache-2.0
// A rank ends a communicator on all of its ranks, and says why.
#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "engine/comm.hpp"
#include "engine/kin.hpp"
#include "engine/p2p.hpp"

namespace commrt {

void Comm::publish_why() {
  if (!failure.empty()) show_why(failure);
}

void Comm::show_why(const std::string& why) {
  char* const mine = reinterpret_cast<char*>(header(member_of(rank))) + layout.why;
  const std::string text = shortened(why, kWhyBytes - 1);
  // Others may read by now what was shown before a claim: it is not written again.
  if (std::strncmp(mine, text.c_str(), text.size() + 1) == 0) return;
  std::memcpy(mine, text.c_str(), text.size() + 1);
}

std::string Comm::why_of(int member) const {
  const char* const its = reinterpret_cast<const char*>(header(member)) + layout.why;
  const std::string said(its, strnlen(its, kWhyBytes));
  return said.empty() ? "look for the error of that rank" : said;
}

void Comm::end_everywhere(uint64_t seq, const std::string& why) {
  break_down(why);
  tell_failure(seq);
  for (int peer = 0; peer < size; ++peer) p2p->tell_ended(peer, seq);
}

void Comm::revoke(const std::string& why) {
  was_revoked = true;
  uint64_t first = next_seq;
  for (const auto& op : active_) {
    if (!op->is_over()) first = std::min(first, op->seq);
  }
  if (arena != nullptr) header(member_of(rank))->revoked.store(true, std::memory_order_relaxed);
  // All ranks name one that has died, whoever of them has noticed that.
  if (!broken.load(std::memory_order_relaxed)) {
    if (liveness_ != nullptr) liveness_->look(true);
    const GaveUp found = who_gave_up(next_seq, false, false);
    if (found.has_died) break_down(found.why + ", and " + why, true);
  }
  end_everywhere(first, why);
  p2p->take_all_back("this rank gave up: " + failure);
}

int Comm::who_revoked() const {
  for (const int one : members) {
    const RankHeader& its = *header(member_of(one));
    if (one != rank && its.failed.load(std::memory_order_acquire) != 0 &&
        its.revoked.load(std::memory_order_relaxed)) return one;
  }
  return -1;
}

void Comm::end_with(Comm& origin) {
  origin.kin_->next();  // so that the line of a communicator that replaces another stays short
  kin_->origin = origin.kin_;
}

// The rank that revokes it may have left this one, and then does not tell its other ranks.
bool Comm::ends_with_origin() {
  if (broken.load(std::memory_order_relaxed)) return false;
  for (Kin* next = kin_->next(); next != nullptr; next = next->next()) {
    const Comm& from = *next->comm;
    const int who = from.arena == nullptr ? -1 : from.who_revoked();
    if (who < 0 && !from.was_revoked) continue;
    if (liveness_ != nullptr && liveness_->look(true) && !who_died().empty()) return false;
    const std::string made = "it was made from " + from.name + ", and ";
    revoke(made + (who < 0 ? from.failure
                           : "rank " + std::to_string(who) + " has ended that for all ranks: " +
                                 from.why_of(from.member_of(who))));
    return true;
  }
  return false;
}

void P2P::take_all_back(const std::string& why) {
  std::vector<std::shared_ptr<Op>> waiting;
  for (const auto& [of, ops] : posted_) waiting.insert(waiting.end(), ops.begin(), ops.end());
  for (const auto& [id, op] : announced_) waiting.push_back(op);
  for (const Channel& c : channels_) {
    waiting.insert(waiting.end(), c.unannounced.begin(), c.unannounced.end());
  }
  for (const auto& op : waiting) {
    if (op->finished()) continue;
    op->by_death = comm_.failed_by_death;
    take_back(op, why);
  }
}

}  // namespace commrt
