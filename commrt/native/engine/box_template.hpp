// SPDX-License-Identifier: Apache-2.0
// Calls that move boxes without their lengths: what differs between calls of one kind are the
// places where boxes begin and end, or the lengths of two layouts.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "engine/layout_moves.hpp"

namespace commrt {

class BoxTemplate : public std::enable_shared_from_this<BoxTemplate> {
 public:
  // A place in a dimension: so much behind one of the call's numbers, or, with a negative
  // `number`, behind 0.
  struct Place {
    int64_t offset;
    int32_t number;
  };
  struct End {
    int array = -1;  // negative: there is none
    // For each dimension: where the box begins and ends, and which stride it has, times what.
    std::vector<Place> start, stop;
    std::vector<int32_t> axes;
    std::vector<int64_t> steps;
  };
  struct Move {
    int phase;
    int64_t number;
    int peer;
    End source, target;
  };
  struct Stores {
    size_t learns_from = 0;  // bytes of a message
    Store is_short[2], is_long[2];  // the first kind, and the adaptive one
  };

  BoxCallKind kind;
  std::vector<DType> types;  // of the arrays
  std::vector<int> dims;     // their dimensions
  std::vector<Move> moves;
  std::unique_ptr<const LayoutPair> layouts;  // what the moves follow from; null: they are `moves`
  Stores stores;
  size_t slots_nbytes = 0, fewest_slots = 1;  // payloads that may be unread at once
  int rank = 0, size = 1;

  // The program of a call: `numbers` of the template's places, and all arrays' strides. Throws
  // std::invalid_argument where these are not as many as there should be.
  BoxProgram program(const int64_t* numbers, size_t num, const int64_t* strides,
                     size_t num_strides, std::vector<Box> memory = {}) const;
  // `used`: a plan by this template that nobody has any more, or null.
  std::shared_ptr<Plan> make(const int64_t* numbers, size_t num, const int64_t* strides,
                             size_t num_strides, Comm& comm,
                             std::shared_ptr<Plan> used = nullptr) const;
  size_t nbytes() const;

 private:
  uint16_t facts_with(const int64_t* numbers, size_t num) const;
  void place_moves(const int64_t* numbers, size_t num, const int64_t* strides,
                   std::vector<BoxMove>& made) const;
};

}  // namespace commrt
