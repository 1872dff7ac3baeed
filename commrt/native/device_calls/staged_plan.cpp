// SPDX-License-Identifier: Apache-2.0
// How much memory plans of staged calls take.
#include "device_calls/staged_plan.hpp"

#include <set>

#include "engine/plan.hpp"

namespace commrt {

std::size_t StagedPlan::memory_nbytes() const {
  const auto of = [](const auto& one) { return one.capacity() * sizeof one[0]; };
  std::size_t sum = sizeof *this + of(parts);
  std::set<const Plan*> plans;
  for (const StagedPart& part : parts) {
    plans.insert(part.runs.get());
    sum += of(part.packs) + of(part.unpacks) + of(part.in) + of(part.out) + of(part.table);
    for (const auto* launches : {&part.packs, &part.unpacks}) {
      for (const StagedLaunch& launch : *launches) sum += of(launch.arrays);
    }
  }
  if (agreement != nullptr) {
    sum += sizeof *agreement + of(agreement->words) + of(agreement->names);
    for (const std::string& name : agreement->names) sum += name.capacity();
    plans.insert(agreement->runs.get());
  }
  for (const Plan* plan : plans) {
    if (plan != nullptr) sum += plan->nbytes();
  }
  return sum;
}

}  // namespace commrt
