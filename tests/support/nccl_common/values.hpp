// SPDX-License-Identifier: Apache-2.0
// NCCL's types of elements, and its reductions of them.
#pragma once

#include <cstddef>
#include <vector>

namespace stub {

size_t type_size(int dtype);

// What a rank gives to a reduction.
struct Part {
  const void* in;
  bool scaled;    // by the factor of a premul-sum
  double factor;
};

// Reduces the parts in their order, `count` elements each. False: the type has no reductions.
bool reduce_parts(int dtype, int redop, const std::vector<Part>& parts, size_t count, void* out);

// Reads a factor of a premul-sum in the format of its type; false for a type that has none.
bool read_factor(int dtype, const void* scalar, double* factor);

}  // namespace stub
