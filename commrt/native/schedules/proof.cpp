// SPDX-License-Identifier: Apache-2.0
// Checks of steps, rank by rank, and one symbolic run of all ranks.
#include "schedules/proof.hpp"

#include <algorithm>
#include <cstdlib>

namespace commrt {

namespace {

bool may_be_malformed(const RankProgramView& program, std::int32_t rank, std::int32_t index,
                      std::int32_t size) {
  const ScheduleStep& step = program.steps->row(index);
  const BlockSpaces& spaces = *program.spaces;
  if (step.op < kSendStep || step.op > kCopyStep) return true;
  const bool moves = step.op == kSendStep || step.op == kRecvStep || step.op == kRredStep;
  if (step.src.given() != (step.op != kRecvStep)) return true;
  if (step.dst.given() != (step.op != kSendStep)) return true;
  if ((step.peer >= 0) != moves || step.peer == rank || step.peer >= size) return true;
  const IndexRows& deps = program.steps->deps();
  for (const auto* dep = deps.begin(index); dep != deps.end(index); ++dep)
    if (*dep < 0 || *dep >= index) return true;
  for (const BlockSlice* end : {&step.src, &step.dst}) {
    if (!end->given()) continue;
    if (end->space >= static_cast<std::int32_t>(spaces.size())) return true;
    if (end->lo < 0 || end->lo >= end->hi || end->hi > spaces[end->space].nblk) return true;
  }
  if (step.dst.given() && spaces[step.dst.space].kind == BlockSpaceKind::kIn) return true;
  if (!step.src.given() || !step.dst.given()) return false;
  if (step.src.count() != step.dst.count()) return true;
  // Block by block they may be the same memory, also in place; but not shifted.
  const std::int32_t shift = spaces[step.src.space].first + step.src.lo -
                             spaces[step.dst.space].first - step.dst.lo;
  return shift != 0 && std::abs(shift) < step.src.count();
}

// Runs every step once, with `in` and `out` as two buffers.
class MeaningRun {
 public:
  MeaningRun(const std::vector<RankProgramView>& programs, const AllSteps& all,
             const OperationGoal& goal, CombineRule rule)
      : all_(all), goal_(goal), rule_(rule), sets_(goal.size),
        memory_(goal, spaces_of(programs), sets_, false) {
    for (std::size_t rank = 0; rank < all.size(); ++rank)
      rank_of_.insert(rank_of_.end(), static_cast<std::size_t>(all[rank].steps->size()),
                      static_cast<std::int32_t>(rank));
  }

  void run(const Events& events) {
    for (std::size_t i = 0; i < events.done.size(); ++i) {
      const std::int64_t place = events.done[i];
      try {
        perform(place, events.sent_by[i]);
      } catch (ScheduleFault& fault) {
        const std::int32_t rank = rank_of_[place];
        fault.numbers.insert(fault.numbers.begin(), {rank, place - all_[rank].base});
        throw;
      }
    }
    memory_.check(goal_);
  }

 private:
  static std::vector<const BlockSpaces*> spaces_of(const std::vector<RankProgramView>& programs) {
    std::vector<const BlockSpaces*> spaces;
    for (const RankProgramView& one : programs) spaces.push_back(one.spaces);
    return spaces;
  }

  const ScheduleStep& step_at(std::int64_t place) const {
    const RankSteps& own = all_[rank_of_[place]];
    return own.steps->row(static_cast<std::int32_t>(place - own.base));
  }

  // Carries out a local step or a message.
  void perform(std::int64_t place, std::int64_t sender) {
    const std::int32_t rank = rank_of_[place];
    const ScheduleStep& step = step_at(place);
    if (sender >= 0) {
      memory_.read(rank_of_[sender], step_at(sender).src, moved_);
    } else {
      memory_.read(rank, step.src, moved_);
    }
    if (step.op != kRredStep && step.op != kRedStep) {
      memory_.write(rank, step.dst, moved_);
      return;
    }
    memory_.read(rank, step.op == kRredStep ? step.src : step.dst, own_);
    const bool peer_first = step.op == kRredStep && step.peer < rank;
    combine_values(peer_first ? moved_ : own_, peer_first ? own_ : moved_, rule_,
                   goal_.idempotent, sets_, result_);
    memory_.write(rank, step.dst, result_);
  }

  const AllSteps& all_;
  const OperationGoal& goal_;
  CombineRule rule_;
  RankSets sets_;
  SymbolicMemory memory_;
  std::vector<std::int32_t> rank_of_;
  Value moved_, own_, result_;
};

}  // namespace

void check_well_formed(const std::vector<RankProgramView>& programs) {
  const auto size = static_cast<std::int32_t>(programs.size());
  for (std::int32_t rank = 0; rank < size; ++rank)
    for (std::int32_t index = 0; index < programs[rank].steps->size(); ++index)
      if (may_be_malformed(programs[rank], rank, index, size))
        throw ScheduleFault("step", {rank, index});
}

void check_input_lasts(std::int32_t rank, const RankProgramView& program) {
  InputWatch input(*program.spaces);
  for (std::int32_t index = 0; index < program.steps->size(); ++index) {
    const ScheduleStep& step = program.steps->row(index);
    if (step.src.given()) {
      const std::int32_t block = input.read(step.src);
      if (block >= 0) throw ScheduleFault("gone", {rank, index, block});
    }
    if (step.dst.given() &&
        !(step.op == kCopyStep && InputWatch::changes_nothing(step.src, step.dst)))
      input.write(step.dst);
  }
}

bool equally_long(const BlockSpace& one, const BlockSlice& src, const BlockSpace& other,
                  const BlockSlice& dst) {
  if (src.count() != dst.count() || one.numerator != other.numerator ||
      one.denominator != other.denominator)
    return false;
  if (one.denominator != 0) {
    // floor(b w n) - floor(a w n) agrees for every n if a shift is whole, or w is.
    return (src.lo - dst.lo) % one.denominator * one.numerator % one.denominator == 0;
  }
  if (one.split != other.split) return false;
  if (one.lengths.empty() || other.lengths.empty()) return src.lo == dst.lo;
  return std::equal(one.lengths.begin() + src.lo, one.lengths.begin() + src.hi,
                    other.lengths.begin() + dst.lo);
}

void check_lengths(const std::vector<RankProgramView>& programs, const AllSteps& all,
                   const std::vector<std::int64_t>& partners) {
  std::vector<std::int32_t> rank_of;
  for (std::size_t rank = 0; rank < all.size(); ++rank)
    rank_of.insert(rank_of.end(), static_cast<std::size_t>(all[rank].steps->size()),
                   static_cast<std::int32_t>(rank));
  for (std::size_t rank = 0; rank < programs.size(); ++rank) {
    for (std::int32_t index = 0; index < programs[rank].steps->size(); ++index) {
      const ScheduleStep& step = programs[rank].steps->row(index);
      std::size_t at = rank;
      BlockSlice dst = step.dst;
      if (step.op == kSendStep) {
        const std::int64_t place = partners[all[rank].base + index];
        at = static_cast<std::size_t>(rank_of[place]);
        dst = all[at].steps->row(static_cast<std::int32_t>(place - all[at].base)).dst;
      }
      if (!step.src.given() || !dst.given()) continue;
      if (!equally_long((*programs[rank].spaces)[step.src.space], step.src,
                        (*programs[at].spaces)[dst.space], dst))
        throw ScheduleFault("lengths", {static_cast<std::int64_t>(rank), index,
                                        static_cast<std::int64_t>(at), dst.space, dst.lo, dst.hi});
    }
  }
}

void check_step_races(std::int32_t rank, const RankProgramView& program) {
  struct Few {
    BlockSlice slices[2];
    int count = 0;
    const BlockSlice* begin() const { return slices; }
    const BlockSlice* end() const { return slices + count; }
    void add(const BlockSlice& one) { slices[count++] = one; }
  };
  RaceCheck<Few, Few> check(rank, *program.spaces, program.steps->deps());
  for (std::int32_t index = 0; index < program.steps->size(); ++index) {
    const ScheduleStep& step = program.steps->row(index);
    Few reads, writes;
    if (step.src.given()) reads.add(step.src);
    if (step.op == kRedStep && step.dst.given()) reads.add(step.dst);
    if (step.dst.given()) writes.add(step.dst);
    check.access(index, reads, writes);
  }
}

void check_meaning(const std::vector<RankProgramView>& programs, const AllSteps& all,
                   const Events& events, const OperationGoal& goal, CombineRule rule) {
  MeaningRun(programs, all, goal, rule).run(events);
}

}  // namespace commrt
