// SPDX-License-Identifier: Apache-2.0
// Puts a call's numbers into the places of a template, and makes its plan.
#include "engine/box_template.hpp"

#include <algorithm>
#include <numeric>
#include <stdexcept>

#include "engine/call_mark.hpp"
#include "engine/kept_list.hpp"

namespace commrt {

BoxProgram BoxTemplate::program(const int64_t* numbers, size_t num, const int64_t* strides,
                                size_t num_strides, std::vector<Box> memory) const {
  const auto all_strides = static_cast<size_t>(std::accumulate(dims.begin(), dims.end(), 0));
  if (all_strides != num_strides) {
    throw std::invalid_argument(std::to_string(num_strides) + " strides for arrays of " +
                                std::to_string(all_strides) + " dimensions: expected one for each");
  }
  thread_local std::vector<BoxMove> kept;
  KeptList made(kept);
  if (layouts == nullptr) {
    place_moves(numbers, num, strides, *made);
  } else if (num != layouts->num_numbers()) {
    throw std::invalid_argument(std::to_string(num) + " lengths of two layouts: expected " +
                                std::to_string(layouts->num_numbers()));
  } else {
    layouts->add_moves(numbers, strides, rank, *made);
  }
  return compile_moves(*made, types, kind, rank, size, std::move(memory));
}

void BoxTemplate::place_moves(const int64_t* numbers, size_t num, const int64_t* strides,
                              std::vector<BoxMove>& made) const {
  const auto at = [&](const Place& place) {
    if (place.number < 0) return place.offset;
    if (static_cast<size_t>(place.number) >= num) {
      throw std::invalid_argument("a box begins or ends at number " +
                                  std::to_string(place.number) + " of a call that has " +
                                  std::to_string(num) + ": expected more");
    }
    return numbers[place.number] + place.offset;
  };
  const auto put = [&](const End& end, BoxEnd& box) {
    box.array = end.array;
    box.ndim = static_cast<int>(end.start.size());
    const int64_t* const own =
        strides + std::accumulate(dims.begin(), dims.begin() + end.array, 0);
    for (size_t dim = 0; dim < end.start.size(); ++dim) {
      box.start[dim] = at(end.start[dim]);
      box.stop[dim] = at(end.stop[dim]);
      box.strides[dim] = own[end.axes[dim]] * end.steps[dim];
    }
  };
  made.reserve(moves.size());
  for (const Move& move : moves) {
    BoxMove& one = made.emplace_back();
    one.phase = move.phase;
    one.number = move.number;
    one.peer = move.peer;
    one.leaves = move.source.array >= 0;
    one.arrives = move.target.array >= 0;
    if (one.leaves) put(move.source, one.source);
    if (one.arrives) put(move.target, one.target);
  }
}

std::shared_ptr<Plan> BoxTemplate::make(const int64_t* numbers, size_t num, const int64_t* strides,
                                        size_t num_strides, Comm& comm,
                                        std::shared_ptr<Plan> used) const {
  std::vector<Box> memory;
  if (used != nullptr && !used->spaces.empty()) memory = std::move(used->spaces[0].boxes);
  BoxProgram made = program(numbers, num, strides, num_strides, std::move(memory));
  const size_t longest = made.longest_nbytes;
  const size_t slots = std::max({slots_nbytes / std::max<size_t>(1, longest), fewest_slots,
                                 static_cast<size_t>(made.fewest_slots)});
  const Store* const kinds = longest < stores.learns_from ? stores.is_short : stores.is_long;
  auto plan = plan_of_boxes(std::move(made), kind, static_cast<int>(slots), kinds[0], kinds[1],
                            comm, std::move(used));
  if (layouts != nullptr) {
    plan->mark = mark_of_plan(kind.coll, kind.dtype, static_cast<uint64_t>(kind.redop),
                              facts_with(numbers, num));
  }
  return plan;
}

// Lengths of layouts are those of the whole array, so they are the same on all ranks.
uint16_t BoxTemplate::facts_with(const int64_t* numbers, size_t num) const {
  constexpr uint64_t kPrime = 0x100000001b3;  // of the hash FNV-1a
  uint64_t sum = kind.facts;
  for (size_t i = 0; i < num; ++i) sum = (sum ^ static_cast<uint64_t>(numbers[i])) * kPrime;
  return static_cast<uint16_t>(sum ^ sum >> 16 ^ sum >> 32 ^ sum >> 48);
}

size_t BoxTemplate::nbytes() const {
  const auto of = [](const auto& one) { return one.capacity() * sizeof one[0]; };
  size_t sum = sizeof *this + kind.label.capacity() + of(types) + of(dims) + of(moves);
  for (const Move& move : moves) {
    for (const End* end : {&move.source, &move.target}) {
      sum += of(end->start) + of(end->stop) + of(end->axes) + of(end->steps);
    }
  }
  return layouts == nullptr ? sum : sum + layouts->nbytes();
}

}  // namespace commrt
