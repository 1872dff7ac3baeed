// SPDX-License-Identifier: Apache-2.0
// Questions and answers about a refused call that other ranks have given to devices.
#include "engine/device_refusals.hpp"

#include <algorithm>
#include <utility>

#include "engine/comm.hpp"
#include "engine/engine.hpp"
#include "engine/p2p.hpp"

namespace commrt {

void DeviceRefusals::note(uint64_t seq, Words words, bool is_quiet) {
  given_[num_given_++ % kKept] = {seq, std::move(words), is_quiet};
}

const DeviceRefusals::Given* DeviceRefusals::find(uint64_t seq) const {
  const auto found = std::find_if(given_.begin(), given_.end(),
                                  [seq](const Given& one) { return one.seq == seq; });
  return found == given_.end() ? nullptr : &*found;
}

void DeviceRefusals::ask(const std::string& reason) {
  const uint64_t seq = comm_.next_seq;
  asking_ = seq;
  said_.assign(static_cast<size_t>(comm_.size), {});
  said_[static_cast<size_t>(comm_.rank)].part = Part::Refused;
  for (const Asked& one : asked_) {
    if (one.seq == seq) said_[static_cast<size_t>(one.rank)].part = Part::Refused;
  }
  asked_.erase(std::remove_if(asked_.begin(), asked_.end(),
                              [seq](const Asked& one) { return one.seq == seq; }),
               asked_.end());
  for (int rank = 0; rank < comm_.size; ++rank) {
    if (rank != comm_.rank) comm_.p2p->ask_of_device(rank, seq, shortened(reason, kMostReason));
  }
  comm_.refusals.see();
}

void DeviceRefusals::end_question() {
  asking_.reset();
  said_.clear();
}

void DeviceRefusals::hear_question(int rank, uint64_t seq, const std::string& reason) {
  if (asking_ == seq) {
    said_[static_cast<size_t>(rank)].part = Part::Refused;
    return;
  }
  asked_.push_back({rank, seq, reason});
  look();
  comm_.refusals.see();
}

void DeviceRefusals::hear_answer(int rank, uint64_t seq, Part part, std::string words) {
  if (asking_ == seq) said_[static_cast<size_t>(rank)] = {part, std::move(words)};
}

void DeviceRefusals::look() {
  const auto may_answer = [this](const Asked& one) { return one.seq < comm_.next_seq; };
  for (const Asked& one : asked_) {
    if (may_answer(one)) answer(one);
  }
  asked_.erase(std::remove_if(asked_.begin(), asked_.end(), may_answer), asked_.end());
}

void DeviceRefusals::wait_elsewhere() {
  const auto is_next = [this](const Asked& one) { return one.seq == comm_.next_seq; };
  for (const Asked& one : asked_) {
    if (is_next(one)) comm_.p2p->tell_of_device(one.rank, one.seq, Part::Elsewhere, {});
  }
  asked_.erase(std::remove_if(asked_.begin(), asked_.end(), is_next), asked_.end());
  comm_.refusals.see();
}

// The call is marked before the other rank hears of it.
void DeviceRefusals::answer(const Asked& one) {
  const Given* const given = find(one.seq);
  if (given == nullptr) return comm_.p2p->tell_of_device(one.rank, one.seq, Part::Elsewhere, {});
  const std::string why = said_refused(one.rank, one.reason);
  if (refused_.emplace(one.seq, why).second && given->is_quiet) leave_untold(one.seq, why);
  while (refused_.size() > kKept) refused_.erase(refused_.begin());
  has_refused_.store(true, std::memory_order_release);
  comm_.p2p->tell_of_device(one.rank, one.seq, Part::Given,
                            given->words == nullptr ? std::string() : *given->words);
}

std::string DeviceRefusals::take_refused(uint64_t seq) {
  if (!has_refused_.load(std::memory_order_acquire)) return {};
  const std::lock_guard<std::mutex> own(comm_.engine.mutex);
  const auto found = refused_.find(seq);
  if (found == refused_.end()) return {};
  std::string why = std::move(found->second);
  refused_.erase(found);
  has_refused_.store(!refused_.empty(), std::memory_order_release);
  return why;
}

void DeviceRefusals::leave_untold(uint64_t seq, const std::string& why) {
  const std::lock_guard<std::mutex> own(telling_);
  untold_.emplace(seq, "operation #" + std::to_string(seq) + " on " + comm_.name + ": " + why);
  comm_.refusals.set_untold(!untold_.empty());
}

void DeviceRefusals::has_told(uint64_t seq) {
  if (!comm_.refusals.has_untold()) return;
  const std::lock_guard<std::mutex> own(telling_);
  untold_.erase(seq);
  comm_.refusals.set_untold(!untold_.empty());
}

std::map<uint64_t, std::string> DeviceRefusals::take_untold() {
  const std::lock_guard<std::mutex> own(telling_);
  comm_.refusals.set_untold(false);
  return std::exchange(untold_, {});
}

}  // namespace commrt
