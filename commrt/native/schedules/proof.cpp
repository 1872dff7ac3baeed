// SPDX-License-Identifier: Apache-2.0
// Checks of steps, rank by rank, and one symbolic run of all ranks.
#include "schedules/proof.hpp"

#include <algorithm>
#include <cstdlib>
#include <memory>

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

// Runs every step once, in memories where `in` and `out` are two buffers, and one.
class MeaningRun {
 public:
  MeaningRun(const std::vector<RankProgramView>& programs, const AllSteps& all,
             const OperationGoal& goal, CombineRule rule, bool in_place_too)
      : all_(all), goal_(goal), rule_(rule), moved_(in_place_too ? 2 : 1) {
    std::vector<const BlockSpaces*> spaces;
    for (const RankProgramView& one : programs) spaces.push_back(one.spaces);
    for (std::size_t mode = 0; mode < moved_.size(); ++mode)
      memories_.push_back(std::make_unique<SymbolicMemory>(goal, spaces, sets_, mode == 1));
    for (std::size_t rank = 0; rank < all.size(); ++rank)
      rank_of_.insert(rank_of_.end(), static_cast<std::size_t>(all[rank].steps->size()),
                      static_cast<std::int32_t>(rank));
  }

  void run(const Events& events) {
    for (std::size_t i = 0; i < events.done.size(); ++i) {
      const std::int64_t place = events.done[i], sender = events.sent_by[i];
      try {
        for (std::size_t mode = 0; mode < moved_.size(); ++mode) perform(mode, place, sender);
        // Equal messages either way: then any mixture of ranks in place is right.
        if (moved_.front() != moved_.back()) throw ScheduleFault("in place", {});
      } catch (ScheduleFault& fault) {
        const std::int32_t rank = rank_of_[place];
        fault.numbers.insert(fault.numbers.begin(), {rank, place - all_[rank].base});
        throw;
      }
    }
    for (const auto& memory : memories_) memory->check(goal_);
  }

 private:
  const ScheduleStep& step_at(std::int64_t place) const {
    const RankSteps& own = all_[rank_of_[place]];
    return own.steps->row(static_cast<std::int32_t>(place - own.base));
  }

  // Carries out a local step or a message.
  void perform(std::size_t mode, std::int64_t place, std::int64_t sender) {
    SymbolicMemory& memory = *memories_[mode];
    const std::int32_t rank = rank_of_[place];
    const ScheduleStep& step = step_at(place);
    Value& moved = moved_[mode];
    if (sender >= 0) {
      memory.read(rank_of_[sender], step_at(sender).src, moved);
    } else {
      memory.read(rank, step.src, moved);
    }
    if (step.op != kRredStep && step.op != kRedStep) {
      memory.write(rank, step.dst, moved);
      return;
    }
    memory.read(rank, step.op == kRredStep ? step.src : step.dst, own_);
    const bool peer_first = step.op == kRredStep && step.peer < rank;
    combine_values(peer_first ? moved : own_, peer_first ? own_ : moved, rule_, goal_.idempotent,
                   sets_, result_);
    memory.write(rank, step.dst, result_);
  }

  const AllSteps& all_;
  const OperationGoal& goal_;
  CombineRule rule_;
  RankSets sets_;
  std::vector<std::unique_ptr<SymbolicMemory>> memories_;
  std::vector<std::int32_t> rank_of_;
  std::vector<Value> moved_;
  Value own_, result_;
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
  const BlockSpaces& spaces = *program.spaces;
  if (spaces.size() < 2 || !spaces[1].may_be_input) return;
  std::vector<std::uint8_t> gone(static_cast<std::size_t>(spaces[1].nblk), 0);
  for (std::int32_t index = 0; index < program.steps->size(); ++index) {
    const ScheduleStep& step = program.steps->row(index);
    if (step.src.given() && step.src.space == 0) {
      for (std::int32_t block = step.src.lo; block < step.src.hi; ++block)
        if (gone[block]) throw ScheduleFault("gone", {rank, index, block});
    }
    if (step.dst.space != 1) continue;
    if (step.op == kCopyStep && step.src == BlockSlice{0, step.dst.lo, step.dst.hi}) continue;
    std::fill(gone.begin() + step.dst.lo, gone.begin() + step.dst.hi, std::uint8_t{1});
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
                   const Events& events, const OperationGoal& goal, CombineRule rule,
                   bool in_place_too) {
  MeaningRun(programs, all, goal, rule, in_place_too).run(events);
}

}  // namespace commrt
