// SPDX-License-Identifier: Apache-2.0
// What is proved of a schedule's steps before they move a byte (commrt/schedule/verify.py).
#pragma once

#include <cstdint>
#include <vector>

#include "schedules/contents.hpp"
#include "schedules/execution.hpp"
#include "schedules/steps.hpp"

namespace commrt {

// The program of one rank.
struct RankProgramView {
  const StepColumns* steps;
  const BlockSpaces* spaces;
};

// Throws "step" with the first step that may be malformed: rank, step.
void check_well_formed(const std::vector<RankProgramView>& programs);

// Throws "gone" if a block of `in` is read after `out` took its place: rank, step, block.
void check_input_lasts(std::int32_t rank, const RankProgramView& program);

// Throws "lengths" if a step's ends may differ in length: rank, step, other rank, its slice.
void check_lengths(const std::vector<RankProgramView>& programs, const AllSteps& all,
                   const std::vector<std::int64_t>& partners);

// Returns whether both slices are equally long for every vector.
bool equally_long(const BlockSpace& one, const BlockSlice& src, const BlockSpace& other,
                  const BlockSlice& dst);

void check_step_races(std::int32_t rank, const RankProgramView& program);

// Throws what the first step does wrong, or "ends". It runs the steps out of place: in place
// they do the same, once `check_input_lasts` and `check_step_races` have passed.
void check_meaning(const std::vector<RankProgramView>& programs, const AllSteps& all,
                   const Events& events, const OperationGoal& goal, CombineRule rule);

}  // namespace commrt
