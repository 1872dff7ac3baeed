// SPDX-License-Identifier: Apache-2.0
// Walks over strided boxes, with loops of their own for rows of a few bytes.
#include <algorithm>
#include <cstring>

#include "kernels/box_rows.hpp"

namespace commrt {

namespace {

constexpr size_t kShortRow = 512;      // longer ones are fetched well enough by themselves
constexpr size_t kStreamedRow = 1024;  // shorter ones leave too many half lines

void walk_over(Walk& walk, int ndim, const int64_t* shape, const int64_t* first,
               const int64_t* second, size_t itemsize) {
  walk.ndim = 0;
  for (int dim = 0; dim < ndim; ++dim) {
    if (shape[dim] == 1) continue;
    if (walk.ndim > 0) {
      const int outer = walk.ndim - 1;
      if (walk.first[outer] == first[dim] * shape[dim] &&
          walk.second[outer] == second[dim] * shape[dim]) {
        walk.shape[outer] *= shape[dim];
        walk.first[outer] = first[dim];
        walk.second[outer] = second[dim];
        continue;
      }
    }
    walk.shape[walk.ndim] = shape[dim];
    walk.first[walk.ndim] = first[dim];
    walk.second[walk.ndim] = second[dim];
    ++walk.ndim;
  }
  walk.row_nbytes = itemsize;
  const int last = walk.ndim - 1;
  const auto item = static_cast<int64_t>(itemsize);
  if (last >= 0 && walk.first[last] == item && walk.second[last] == item) {
    walk.row_nbytes *= static_cast<size_t>(walk.shape[last]);
    --walk.ndim;
  }
}

template <size_t kBytes>
void copy_short(unsigned char* to, const unsigned char* from, int64_t rows, int64_t to_stride,
                int64_t from_stride) {
  constexpr auto kWhole = static_cast<int64_t>(kBytes);
  const auto copy_these = to_stride == kWhole     ? copy_each<kBytes, true, false>
                          : from_stride == kWhole ? copy_each<kBytes, false, true>
                                                  : copy_each<kBytes, false, false>;
  copy_these(to, from, rows, to_stride, from_stride);
}

void copy_rows(unsigned char* to, const unsigned char* from, int64_t rows, int64_t to_stride,
               int64_t from_stride, size_t row_nbytes, bool streaming = false) {
  const bool is_short = with_short_row(row_nbytes, [&](auto row) {
    copy_short<row>(to, from, rows, to_stride, from_stride);
  });
  if (is_short) return;
  const bool streamed = streaming && row_nbytes >= kStreamedRow;
  for (int64_t i = 0; i < rows; ++i) {
    copy(to + i * to_stride, from + i * from_stride, row_nbytes, streamed);
  }
}

// Calls run(first row, rows) for batches of a message's short rows, and has the lines of the
// next batch fetched meanwhile: they come from another core, and stores of a few bytes would
// wait for one line after another.
template <class Fetch, class Run>
void each_batch(const unsigned char* message, int64_t rows, int64_t row, Fetch fetch, Run run) {
  const int64_t batch = static_cast<int64_t>(kBatchBytes) / row;
  auto fetch_rows = [&](int64_t first) {
    const int64_t end = std::min(rows, first + batch) * row;
    for (int64_t at = first * row; at < end; at += kLineBytes) fetch(message + at);
  };
  fetch_rows(0);
  for (int64_t done = 0; done < rows; done += batch) {
    fetch_rows(done + batch);
    run(done, std::min(batch, rows - done));
  }
}

void pack_rows(unsigned char* message, const unsigned char* from, int64_t rows,
               int64_t from_stride, size_t row_nbytes, bool streaming) {
  const auto row = static_cast<int64_t>(row_nbytes);
  if (row_nbytes > kShortRow) {
    return copy_rows(message, from, rows, row, from_stride, row_nbytes, streaming);
  }
  if (!streaming) {
    return each_batch(message, rows, row, fetch_to_write, [&](int64_t first, int64_t some) {
      copy_rows(message + first * row, from + first * from_stride, some, row, from_stride,
                row_nbytes);
    });
  }
  const auto keep = [](const unsigned char*) {};
  each_batch(message, rows, row, keep, [&](int64_t first, int64_t some) {
    alignas(64) unsigned char whole[kBatchBytes];  // only whole lines can be streamed
    copy_rows(whole, from + first * from_stride, some, row, from_stride, row_nbytes);
    copy(message + first * row, whole, static_cast<size_t>(some * row), true);
  });
}

void unpack_rows(unsigned char* to, const unsigned char* message, int64_t rows,
                 int64_t to_stride, size_t row_nbytes) {
  const auto row = static_cast<int64_t>(row_nbytes);
  if (row_nbytes > kShortRow) {
    return copy_rows(to, message, rows, to_stride, row, row_nbytes);
  }
  each_batch(message, rows, row, fetch_to_read, [&](int64_t first, int64_t some) {
    copy_rows(to + first * to_stride, message + first * row, some, to_stride, row, row_nbytes);
  });
}

// to = to ⊕ from, row by row; short rows are collected first.
void combine_rows(CombineFn combine, size_t itemsize, unsigned char* to,
                  const unsigned char* from, int64_t rows, int64_t to_stride,
                  int64_t from_stride, size_t row_nbytes) {
  auto apply = [&](unsigned char* own, const unsigned char* other, size_t nbytes) {
    const void* inputs[] = {own, other};
    combine(own, nullptr, inputs, 2, nbytes / itemsize, nullptr, Scale{}, Store::Plain);
  };
  if (rows == 1 || row_nbytes > kBatchBytes / 4) {
    for (int64_t i = 0; i < rows; ++i) apply(to + i * to_stride, from + i * from_stride, row_nbytes);
    return;
  }
  alignas(64) unsigned char own[kBatchBytes], other[kBatchBytes];
  const auto row = static_cast<int64_t>(row_nbytes);
  const int64_t batch = static_cast<int64_t>(kBatchBytes) / row;
  for (int64_t done = 0; done < rows; done += batch) {
    const int64_t some = std::min(batch, rows - done);
    unsigned char* const own_rows = to + done * to_stride;
    const unsigned char* other_rows = from + done * from_stride;
    copy_rows(own, own_rows, some, row, to_stride, row_nbytes);
    if (from_stride != row) {
      copy_rows(other, other_rows, some, row, from_stride, row_nbytes);
      other_rows = other;
    }
    apply(own, other_rows, static_cast<size_t>(some * row));
    copy_rows(own_rows, own, some, to_stride, row, row_nbytes);
  }
}

}  // namespace

Walk walk_between(const Box& box, const Box& other) {
  Walk walk;
  walk_over(walk, box.ndim, box.shape, box.strides, other.strides, box.itemsize);
  return walk;
}

void Box::settle() {
  int64_t contiguous[kMostDims];
  nbytes = itemsize;
  for (int dim = ndim - 1; dim >= 0; --dim) {
    contiguous[dim] = static_cast<int64_t>(nbytes);
    nbytes *= static_cast<size_t>(shape[dim]);
  }
  walk_over(in_message, ndim, shape, strides, contiguous, itemsize);
}

void pack_box(unsigned char* message, const unsigned char* array, const Box& box,
              bool streaming) {
  const size_t row = box.in_message.row_nbytes;
  each_run(box.in_message, array + box.offset, message,
           [&](const unsigned char* from, unsigned char* to, int64_t rows, int64_t from_stride,
               int64_t) { pack_rows(to, from, rows, from_stride, row, streaming); });
}

void unpack_box(unsigned char* array, const Box& box, const unsigned char* message) {
  const size_t row = box.in_message.row_nbytes;
  each_run(box.in_message, array + box.offset, message,
           [&](unsigned char* to, const unsigned char* from, int64_t rows, int64_t to_stride,
               int64_t) { unpack_rows(to, from, rows, to_stride, row); });
}

void combine_box(unsigned char* array, const Box& box, const unsigned char* message) {
  const size_t row = box.in_message.row_nbytes;
  each_run(box.in_message, array + box.offset, message,
           [&](unsigned char* to, const unsigned char* from, int64_t rows, int64_t to_stride,
               int64_t from_stride) {
             combine_rows(box.combine, box.itemsize, to, from, rows, to_stride, from_stride,
                          row);
           });
}

void copy_box(unsigned char* array, const Box& box, const unsigned char* from_array,
              const Box& from_box) {
  const Walk walk = walk_between(box, from_box);
  each_run(walk, array + box.offset, from_array + from_box.offset,
           [&](unsigned char* to, const unsigned char* from, int64_t rows, int64_t to_stride,
               int64_t from_stride) {
             copy_rows(to, from, rows, to_stride, from_stride, walk.row_nbytes);
           });
}

void combine_boxes(unsigned char* array, const Box& box, const unsigned char* from_array,
                   const Box& from_box) {
  const Walk walk = walk_between(box, from_box);
  each_run(walk, array + box.offset, from_array + from_box.offset,
           [&](unsigned char* to, const unsigned char* from, int64_t rows, int64_t to_stride,
               int64_t from_stride) {
             combine_rows(box.combine, box.itemsize, to, from, rows, to_stride, from_stride,
                          walk.row_nbytes);
           });
}

}  // namespace commrt
