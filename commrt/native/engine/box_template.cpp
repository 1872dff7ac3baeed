// SPDX-License-Identifier: Apache-2.0
// Puts a call's numbers into the places of a template, and makes its plan.
#include "engine/box_template.hpp"

#include <algorithm>
#include <stdexcept>

namespace commrt {

BoxProgram BoxTemplate::program(const int64_t* numbers, size_t num, const int64_t* strides,
                                size_t num_strides) const {
  std::vector<size_t> first_stride;
  size_t all_strides = 0;
  for (const int ndim : dims) {
    first_stride.push_back(all_strides);
    all_strides += static_cast<size_t>(ndim);
  }
  if (all_strides != num_strides) {
    throw std::invalid_argument(std::to_string(num_strides) + " strides for arrays of " +
                                std::to_string(all_strides) + " dimensions: expected one for each");
  }
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
    for (size_t dim = 0; dim < end.start.size(); ++dim) {
      box.start[dim] = at(end.start[dim]);
      box.stop[dim] = at(end.stop[dim]);
      const auto stride = first_stride[static_cast<size_t>(end.array)] +
                          static_cast<size_t>(end.axes[dim]);
      box.strides[dim] = strides[stride] * end.steps[dim];
    }
  };
  std::vector<BoxMove> made(moves.size());
  for (size_t i = 0; i < moves.size(); ++i) {
    const Move& move = moves[i];
    made[i].phase = move.phase;
    made[i].number = move.number;
    made[i].peer = move.peer;
    made[i].leaves = move.source.array >= 0;
    made[i].arrives = move.target.array >= 0;
    if (made[i].leaves) put(move.source, made[i].source);
    if (made[i].arrives) put(move.target, made[i].target);
  }
  return compile_moves(made, types, kind, rank, size);
}

std::shared_ptr<Plan> BoxTemplate::make(const int64_t* numbers, size_t num, const int64_t* strides,
                                        size_t num_strides, Comm& comm) const {
  BoxProgram made = program(numbers, num, strides, num_strides);
  const size_t longest = made.longest_nbytes;
  const size_t slots = std::max({slots_nbytes / std::max<size_t>(1, longest), fewest_slots,
                                 static_cast<size_t>(made.fewest_slots)});
  const Store* const kinds = longest < stores.learns_from ? stores.is_short : stores.is_long;
  return plan_of_boxes(std::move(made), kind, static_cast<int>(slots), kinds[0], kinds[1], comm);
}

size_t BoxTemplate::nbytes() const {
  const auto of = [](const auto& one) { return one.capacity() * sizeof one[0]; };
  size_t sum = sizeof *this + kind.label.capacity() + of(types) + of(dims) + of(moves);
  for (const Move& move : moves) {
    for (const End* end : {&move.source, &move.target}) {
      sum += of(end->start) + of(end->stop) + of(end->axes) + of(end->steps);
    }
  }
  return sum;
}

}  // namespace commrt
