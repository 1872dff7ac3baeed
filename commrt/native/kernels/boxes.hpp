// SPDX-License-Identifier: Apache-2.0
// Boxes: strided n-dimensional parts of a caller's arrays, packed into messages and taken
// out of them, or combined with what they hold, in one pass and without a copy in between.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/kernels.hpp"

namespace commrt {

constexpr int kMostDims = 16;  // every dimension of an array may count as two

// A walk over two arrangements of the same elements: dimensions that follow each other
// without a gap in both are one, and the innermost is a row that is contiguous in both.
struct Walk {
  int ndim = 0;
  int64_t shape[kMostDims];
  int64_t first[kMostDims], second[kMostDims];  // strides in bytes
  size_t row_nbytes = 0;

  Walk() {}  // writes nothing into dimensions that there are not
};

struct Box {
  int array = 0;  // the number of the caller's array
  size_t itemsize = 1;
  CombineFn combine = nullptr;  // null where nothing is combined
  int64_t offset = 0;           // of its first element, in bytes from the array's
  int ndim = 0;
  int64_t shape[kMostDims];
  int64_t strides[kMostDims];  // in bytes
  size_t nbytes = 0;
  Walk in_message;  // against the same elements one after another, in C order

  Box() {}  // as above: each line of memory that it leaves alone shows
  // Fills what follows from the rest.
  void settle();
};

// `array` is where the caller's array begins; a message holds nbytes of the box.
void pack_box(unsigned char* message, const unsigned char* array, const Box& box, bool streaming);
void unpack_box(unsigned char* array, const Box& box, const unsigned char* message);
void combine_box(unsigned char* array, const Box& box, const unsigned char* message);
// Copies from one box to another of the same shape, which do not overlap.
void copy_box(unsigned char* array, const Box& box, const unsigned char* from_array,
              const Box& from);
void combine_boxes(unsigned char* array, const Box& box, const unsigned char* from_array,
                   const Box& from);

// Twins are two boxes of an array with the same shape and strides and short rows, such as
// opposite faces of a block: box_twins.cpp. A box's twin follows it in the message.
bool are_twins(const Box& box, const Box& other);
void pack_twins(unsigned char* message, const unsigned char* array, const Box& box,
                const Box& other, bool streaming);
void unpack_twins(unsigned char* array, const Box& box, const Box& other,
                  const unsigned char* message);
// Copies from twins to twins; neither of the first overlaps one of the second.
void copy_twins(unsigned char* array, const Box& box, const Box& other,
                const unsigned char* from_array, const Box& from_box, const Box& from_other);

}  // namespace commrt
