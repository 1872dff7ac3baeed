// SPDX-License-Identifier: Apache-2.0
// The moves of a redistribution: what any two ranks have in common of two layouts of an array.
//
// boxes/layouts.py and boxes/redistribution.py have the definition. Here is the same for calls
// whose shapes are new: a test compares the two.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/box_program.hpp"

namespace commrt {

// A layout without its lengths.
struct LayoutKind {
  // How a dimension of the array is distributed.
  struct Axis {
    std::vector<int> grid_dims;  // of the grid, the last one fastest; none: every rank has it all
    int64_t block = 0;  // elements of a block that is dealt out in turn; 0: one piece per place
    bool has_sizes = false;  // the call says the pieces' elements
  };
  std::vector<int64_t> grid;
  std::vector<Axis> axes;

  int64_t num_ranks() const;
  // Lengths of a call: the array's, then those of pieces.
  size_t num_numbers() const;
  // A rank's place in a dimension of the grid.
  int64_t coordinate(int rank, size_t dim) const;
  // Places along the dimensions that distribute an axis, and a rank's place among them.
  int64_t num_places(const Axis& axis) const;
  int64_t place(int rank, const Axis& axis) const;
  // True if `of` is where `rank` takes what `of` has.
  bool is_holder(int rank, int of) const;
};

// Array 0 is a rank's part before, array 1 its part behind.
class LayoutPair {
 public:
  LayoutKind source, target;

  // Appends the moves of one rank. `numbers`: the source's lengths, then the target's; `strides`:
  // of the rank's part before, then of that behind.
  void add_moves(const int64_t* numbers, const int64_t* strides, int rank,
                 std::vector<BoxMove>& moves) const;
  size_t num_numbers() const { return source.num_numbers() + target.num_numbers(); }
  size_t nbytes() const;
};

}  // namespace commrt
