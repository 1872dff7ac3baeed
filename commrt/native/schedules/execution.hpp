// SPDX-License-Identifier: Apache-2.0
// Runs the steps of all ranks as a rendezvous transport would (commrt/schedule/execute.py).
#pragma once

#include <cstdint>
#include <vector>

#include "schedules/steps.hpp"

namespace commrt {

// One rank's steps, and where its steps are numbered from among those of all ranks.
struct RankSteps {
  const StepColumns* steps;
  std::int64_t base;
};
using AllSteps = std::vector<RankSteps>;

std::int64_t num_steps(const AllSteps& all);

// For each step of all ranks the other end of its message, or -1: the k-th send to a rank meets
// its k-th receive. Throws ScheduleFault "unmatched".
std::vector<std::int64_t> match_messages(const AllSteps& all);

// Who waits for each step, of all ranks.
struct Followers {
  std::vector<std::int64_t> starts;
  std::vector<std::int64_t> steps;

  explicit Followers(const AllSteps& all);
};

struct Events {
  std::vector<std::int64_t> done;     // a receive, or a local step
  std::vector<std::int64_t> sent_by;  // the receive's send, or -1
  std::int32_t longest = 0;           // messages on the longest chain
};

// An order in which all steps run. Throws ScheduleFault "deadlock" with the circle.
Events run_steps(const AllSteps& all, const std::vector<std::int64_t>& partners);

// Checks that conflicting accesses of a rank are ordered; throws "race".
template <class Reads, class Writes>
class RaceCheck {
 public:
  RaceCheck(std::int32_t rank, const BlockSpaces& spaces, const IndexRows& deps)
      : rank_(rank), spaces_(spaces), deps_(deps), seen_(static_cast<std::size_t>(deps.size()), -1), direct_(seen_) {}

  void access(std::int32_t item, const Reads& reads, const Writes& writes) {
    needed_.clear();
    tracker_.access(item, reads, writes,
                    [this](const BlockSlice& where) -> std::int64_t {
                      return spaces_[where.space].first;
                    },
                    needed_);
    missing_.clear();
    for (const auto* dep = deps_.begin(item); dep != deps_.end(item); ++dep) direct_[*dep] = item;
    for (std::int32_t one : needed_)
      if (direct_[one] != item) missing_.push_back(one);
    if (missing_.empty()) return;
    find_ancestors(item, missing_.front());
    for (auto one = missing_.rbegin(); one != missing_.rend(); ++one)
      if (seen_[*one] != item) throw ScheduleFault("race", {rank_, item, *one});
  }

 private:
  void find_ancestors(std::int32_t item, std::int32_t first) {
    todo_.assign(deps_.begin(item), deps_.end(item));
    while (!todo_.empty()) {
      const std::int32_t one = todo_.back();
      todo_.pop_back();
      if (one < first || seen_[one] == item) continue;
      seen_[one] = item;
      todo_.insert(todo_.end(), deps_.begin(one), deps_.end(one));
    }
  }

  std::int32_t rank_;
  const BlockSpaces& spaces_;
  const IndexRows& deps_;
  DataDependencies tracker_;
  std::vector<std::int32_t> seen_;    // the item whose ancestor it was found to be
  std::vector<std::int32_t> direct_;  // the item that waits for it
  std::vector<std::int32_t> needed_, missing_, todo_;
};

}  // namespace commrt
