// SPDX-License-Identifier: Apache-2.0
// A step is posted when its dependencies are done. A message is done, at both ends, when both
// ends are posted; a local step when it is posted.
#include "schedules/execution.hpp"

#include <algorithm>

namespace commrt {

namespace {

// The messages of one rank to, or from, each of its peers: steps in order, peer by peer.
struct Ends {
  std::vector<std::int32_t> peers;
  IndexRows steps;

  // Returns the row of a peer, or -1.
  std::int32_t row(std::int32_t peer) const {
    const auto at = std::lower_bound(peers.begin(), peers.end(), peer);
    return at == peers.end() || *at != peer ? -1 : static_cast<std::int32_t>(at - peers.begin());
  }
};

Ends ends_of(const StepColumns& steps, bool sends) {
  std::vector<std::pair<std::int32_t, std::int32_t>> found;
  for (std::int32_t index = 0; index < steps.size(); ++index) {
    const ScheduleStep& step = steps.row(index);
    if (step.peer >= 0 && (step.op == kSendStep) == sends) found.push_back({step.peer, index});
  }
  std::stable_sort(found.begin(), found.end(),
                   [](const auto& x, const auto& y) { return x.first < y.first; });
  Ends made;
  for (const auto& [peer, index] : found) {
    if (made.peers.empty() || made.peers.back() != peer) {
      if (!made.peers.empty()) made.steps.close_row();
      made.peers.push_back(peer);
    }
    made.steps.values.push_back(index);
  }
  if (!made.peers.empty()) made.steps.close_row();
  return made;
}

class Run {
 public:
  Run(const AllSteps& all, const std::vector<std::int64_t>& partners)
      : all_(all), partners_(partners), followers_(all) {
    const auto total = static_cast<std::size_t>(num_steps(all));
    waiting_.resize(total);
    level_.resize(total);
    posted_.resize(total);
    sends_.resize(total);
    for (const RankSteps& own : all) {
      for (std::int32_t index = 0; index < own.steps->size(); ++index) {
        waiting_[own.base + index] = own.steps->deps().count(index);
        sends_[own.base + index] = own.steps->row(index).op == kSendStep;
      }
    }
  }

  Events run() {
    auto left = static_cast<std::int64_t>(waiting_.size());
    for (auto place = left - 1; place >= 0; --place)
      if (waiting_[place] == 0) ready_.push_back(place);
    while (!ready_.empty()) {
      const std::int64_t place = ready_.back();
      ready_.pop_back();
      const std::int64_t other = partners_[place];
      posted_[place] = 1;
      if (other < 0) {
        add(place, -1);
        finish(place);
        --left;
      } else if (posted_[other]) {
        const std::int64_t sent = sends_[place] ? place : other;
        const std::int64_t received = sends_[place] ? other : place;
        add(received, sent);
        // A message is one step after its send, however early its receive was posted.
        const std::int32_t arrival = level_[sent] + 1;
        level_[received] = std::max(level_[received], arrival);
        events_.longest = std::max(events_.longest, arrival);
        finish(sent);
        finish(received);
        left -= 2;
      }
    }
    if (left != 0) explain();
    return std::move(events_);
  }

 private:
  void add(std::int64_t done, std::int64_t sent_by) {
    events_.done.push_back(done);
    events_.sent_by.push_back(sent_by);
  }

  void finish(std::int64_t place) {
    for (auto at = followers_.starts[place]; at < followers_.starts[place + 1]; ++at) {
      const std::int64_t follower = followers_.steps[at];
      level_[follower] = std::max(level_[follower], level_[place]);
      if (--waiting_[follower] == 0) ready_.push_back(follower);
    }
    waiting_[place] = -1;
  }

  // Follows who waits for whom from a stuck step until it comes round.
  [[noreturn]] void explain() {
    std::int64_t place = 0;
    while (waiting_[place] < 0) ++place;
    std::vector<std::int64_t> chain;
    std::vector<std::int64_t> seen(waiting_.size(), -1);
    while (seen[place] < 0) {
      seen[place] = static_cast<std::int64_t>(chain.size());
      chain.push_back(place);
      place = waits_for(place);
    }
    std::vector<std::int64_t> numbers;
    for (auto at = seen[place]; at < static_cast<std::int64_t>(chain.size()); ++at) {
      const auto [rank, index] = step_at(chain[at]);
      numbers.push_back(rank);
      numbers.push_back(index);
    }
    throw ScheduleFault("deadlock", numbers);
  }

  std::pair<std::int64_t, std::int32_t> step_at(std::int64_t place) const {
    const auto after = std::upper_bound(
        all_.begin(), all_.end(), place,
        [](std::int64_t value, const RankSteps& own) { return value < own.base; });
    return {after - all_.begin() - 1, static_cast<std::int32_t>(place - (after - 1)->base)};
  }

  std::int64_t waits_for(std::int64_t place) const {
    if (posted_[place]) return partners_[place];
    const auto [rank, index] = step_at(place);
    const IndexRows& deps = all_[rank].steps->deps();
    const std::int64_t base = all_[rank].base;
    const auto* dep = deps.begin(index);
    while (waiting_[base + *dep] < 0) ++dep;
    return base + *dep;
  }

  const AllSteps& all_;
  const std::vector<std::int64_t>& partners_;
  Followers followers_;
  std::vector<std::int32_t> waiting_;  // steps that must be done first; -1: done
  std::vector<std::int32_t> level_;
  std::vector<std::uint8_t> posted_;
  std::vector<std::uint8_t> sends_;
  std::vector<std::int64_t> ready_;
  Events events_;
};

}  // namespace

std::int64_t num_steps(const AllSteps& all) {
  return all.empty() ? 0 : all.back().base + all.back().steps->size();
}

Followers::Followers(const AllSteps& all)
    : starts(static_cast<std::size_t>(num_steps(all)) + 1) {
  for (const RankSteps& own : all)
    for (std::int32_t dep : own.steps->deps().values) ++starts[own.base + dep + 1];
  for (std::size_t i = 1; i < starts.size(); ++i) starts[i] += starts[i - 1];
  steps.resize(static_cast<std::size_t>(starts.back()));
  std::vector<std::int64_t> next(starts.begin(), starts.end() - 1);
  for (const RankSteps& own : all) {
    const IndexRows& deps = own.steps->deps();
    for (std::int32_t index = 0; index < own.steps->size(); ++index)
      for (const auto* dep = deps.begin(index); dep != deps.end(index); ++dep)
        steps[next[own.base + *dep]++] = own.base + index;
  }
}

std::vector<std::int64_t> match_messages(const AllSteps& all) {
  std::vector<std::int64_t> partners(static_cast<std::size_t>(num_steps(all)), -1);
  std::vector<Ends> received;
  for (const RankSteps& own : all) received.push_back(ends_of(*own.steps, false));
  const auto size = static_cast<std::int32_t>(all.size());
  std::vector<std::size_t> met(all.size(), 0);  // senders from which each rank receives
  const auto unmatched = [](std::int64_t src, std::int64_t dst, std::int64_t sent,
                            std::int64_t taken, std::int64_t rank, std::int64_t index) {
    throw ScheduleFault("unmatched", {src, dst, sent, taken, rank, index});
  };
  for (std::int32_t src = 0; src < size; ++src) {
    const Ends sent = ends_of(*all[src].steps, true);
    for (std::size_t i = 0; i < sent.peers.size(); ++i) {
      const std::int32_t dst = sent.peers[i];
      const auto row = static_cast<std::int32_t>(i);
      const std::int32_t other = dst < size ? received[dst].row(src) : -1;
      const std::int32_t count = sent.steps.count(row);
      const std::int32_t taken = other < 0 ? 0 : received[dst].steps.count(other);
      const std::int32_t both = std::min(count, taken);
      const auto* sends = sent.steps.begin(row);
      const auto* receives = other < 0 ? nullptr : received[dst].steps.begin(other);
      if (count > taken) unmatched(src, dst, count, taken, src, sends[both]);
      if (count < taken) unmatched(src, dst, count, taken, dst, receives[both]);
      ++met[dst];
      for (std::int32_t k = 0; k < count; ++k) {
        partners[all[src].base + sends[k]] = all[dst].base + receives[k];
        partners[all[dst].base + receives[k]] = all[src].base + sends[k];
      }
    }
  }
  for (std::int32_t dst = 0; dst < size; ++dst) {
    if (met[dst] == received[dst].peers.size()) continue;
    for (std::size_t i = 0; i < received[dst].peers.size(); ++i) {
      const auto row = static_cast<std::int32_t>(i);
      const std::int32_t index = *received[dst].steps.begin(row);
      if (partners[all[dst].base + index] < 0)
        unmatched(received[dst].peers[i], dst, 0, received[dst].steps.count(row), dst, index);
    }
  }
  return partners;
}

Events run_steps(const AllSteps& all, const std::vector<std::int64_t>& partners) {
  return Run(all, partners).run();
}

}  // namespace commrt
