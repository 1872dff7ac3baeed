// SPDX-License-Identifier: Apache-2.0
// Twins: two boxes of a message whose short rows lie alike, moved in one pass.
//
// Opposite faces of a block across its fastest dimension are columns of a few bytes per row:
// the last cells of one row and the first of the next one lie in the same cache line, or beside
// it, and so does the halo between them. Such an exchange takes what its lines take to come and
// go. Box by box each line comes from the second cache or beyond it for every column; in turns
// of a few rows it is still in the first one for the next column.
#include <algorithm>

#include "kernels/box_rows.hpp"

namespace commrt {

namespace {

constexpr int64_t kTurnRows = 32;      // of one twin before those of the other
constexpr int64_t kAheadBytes = 2048;  // of each twin's part of a message that are fetched

// Two twins to copy. Their parts lie one after the other in a message.
struct Twins {
  unsigned char* to[2];
  const unsigned char* from[2];
  int64_t rows, to_stride, from_stride;
};

// The lines of a message that lie a bit ahead of row `first` of its parts.
template <class Fetch>
inline void fetch_ahead(const unsigned char* const parts[2], int64_t first, int64_t rows,
                        int64_t row, Fetch fetch) {
  const int64_t begin = first == 0 ? 0 : first * row + kAheadBytes;
  const int64_t end = std::min(rows * row, (first + kTurnRows) * row + kAheadBytes);
  for (int64_t at = begin; at < end; at += kLineBytes) {
    fetch(parts[0] + at);
    fetch(parts[1] + at);
  }
}

// Copies in turns; before each, prepare(first row) is called.
template <size_t kBytes, bool kToWhole, bool kFromWhole, class Prepare>
inline void copy_turns(const Twins& twins, Prepare prepare) {
  const int64_t to_stride = kToWhole ? kBytes : twins.to_stride;
  const int64_t from_stride = kFromWhole ? kBytes : twins.from_stride;
  int64_t done = 0;
  for (; done + kTurnRows <= twins.rows; done += kTurnRows) {
    prepare(done);
    for (int i = 0; i < 2; ++i) {
      unsigned char* to = twins.to[i] + done * to_stride;
      const unsigned char* from = twins.from[i] + done * from_stride;
      for (int64_t k = 0; k < kTurnRows; k += kAtOnce) {
        copy_eight<kBytes, kToWhole, kFromWhole>(to, from, to_stride, from_stride);
        to += kAtOnce * to_stride;
        from += kAtOnce * from_stride;
      }
    }
  }
  for (int i = 0; i < 2; ++i) {
    copy_each<kBytes, kToWhole, kFromWhole>(twins.to[i] + done * to_stride,
                                            twins.from[i] + done * from_stride,
                                            twins.rows - done, to_stride, from_stride);
  }
}

// Joints: the last cell of a row, the halo of one cell behind it, that before the next row, and
// the next row's first cell are 16 bytes where cells have four. One load takes both outer ones,
// one store writes both inner ones: such faces took 0.8 of their time in turns.
using Four = uint32_t __attribute__((vector_size(16)));
using Two = uint64_t __attribute__((vector_size(16)));
constexpr int64_t kOwnSpan = 12;  // from one outer cell to the other
constexpr int64_t kHaloSpan = 4;

inline Four load_four(const unsigned char* from) {
  Four four;
  std::memcpy(&four, from, sizeof four);
  return four;
}

inline void part_four(unsigned char* lower, unsigned char* upper, const unsigned char* joints,
                      int64_t stride) {
  const Four ab = __builtin_shuffle(load_four(joints), load_four(joints + stride),
                                    Four{0, 3, 4, 7});
  const Four cd = __builtin_shuffle(load_four(joints + 2 * stride), load_four(joints + 3 * stride),
                                    Four{0, 3, 4, 7});
  const Four low = __builtin_shuffle(ab, cd, Four{0, 2, 4, 6});
  const Four high = __builtin_shuffle(ab, cd, Four{1, 3, 5, 7});
  std::memcpy(lower, &low, sizeof low);
  std::memcpy(upper, &high, sizeof high);
}

inline void join_four(unsigned char* joints, const unsigned char* lower, const unsigned char* upper,
                      int64_t stride) {
  const Four low = load_four(lower), high = load_four(upper);
  const auto ab = reinterpret_cast<Two>(__builtin_shuffle(low, high, Four{0, 4, 1, 5}));
  const auto cd = reinterpret_cast<Two>(__builtin_shuffle(low, high, Four{2, 6, 3, 7}));
  const uint64_t each[] = {ab[0], ab[1], cd[0], cd[1]};
  for (int k = 0; k < 4; ++k) std::memcpy(joints + k * stride, &each[k], sizeof each[k]);
}

// Packs or unpacks twins of four bytes per row; false where they are not at joints.
template <bool kPacks>
bool copy_joints(const Twins& twins) {
  constexpr int64_t kRow = 4, kSpan = kPacks ? kOwnSpan : kHaloSpan;
  const int64_t stride = kPacks ? twins.from_stride : twins.to_stride;
  const auto place = [&](int i) { return kPacks ? twins.from[i] : twins.to[i]; };
  int lower = 0;
  if (place(0) + kSpan != place(1) + stride) lower = 1;
  const int upper = 1 - lower;
  if (place(lower) + kSpan != place(upper) + stride || twins.rows < 2) return false;
  const auto copy_one = [&](int i, int64_t row) {
    std::memcpy(twins.to[i] + row * twins.to_stride, twins.from[i] + row * twins.from_stride, kRow);
  };
  copy_one(upper, 0);
  const unsigned char* const parts[] = {kPacks ? twins.to[0] : twins.from[0],
                                        kPacks ? twins.to[1] : twins.from[1]};
  const int64_t joints = twins.rows - 1;
  int64_t done = 0;
  for (; done + kTurnRows <= joints; done += kTurnRows) {
    fetch_ahead(parts, done, twins.rows, kRow, kPacks ? fetch_to_write : fetch_to_read);
    for (int64_t row = done; row < done + kTurnRows; row += 4) {
      if (kPacks) {
        part_four(twins.to[lower] + row * kRow, twins.to[upper] + (row + 1) * kRow,
                  twins.from[lower] + row * stride, stride);
      } else {
        join_four(twins.to[lower] + row * stride, twins.from[lower] + row * kRow,
                  twins.from[upper] + (row + 1) * kRow, stride);
      }
    }
  }
  for (; done < joints; ++done) {
    copy_one(lower, done);
    copy_one(upper, done + 1);
  }
  copy_one(lower, joints);
  return true;
}

enum class Way { Pack, PackStreamed, Unpack, Within };

template <size_t kBytes>
void copy_twin_rows(const Twins& twins, Way way) {
  constexpr auto kRow = static_cast<int64_t>(kBytes);
  if (kBytes == 4 && way == Way::Pack && copy_joints<true>(twins)) return;
  if (kBytes == 4 && way == Way::Unpack && copy_joints<false>(twins)) return;
  if (way == Way::Pack) {
    return copy_turns<kBytes, true, false>(twins, [&](int64_t first) {
      fetch_ahead(twins.to, first, twins.rows, kRow, fetch_to_write);
    });
  }
  if (way == Way::Unpack) {
    return copy_turns<kBytes, false, true>(twins, [&](int64_t first) {
      fetch_ahead(twins.from, first, twins.rows, kRow, fetch_to_read);
    });
  }
  const auto nothing = [](int64_t) {};
  if (way == Way::Within) return copy_turns<kBytes, false, false>(twins, nothing);
  alignas(64) unsigned char whole[2][kBatchBytes];  // only whole lines can be streamed
  constexpr int64_t kBatch = static_cast<int64_t>(kBatchBytes) / kRow;
  for (int64_t done = 0; done < twins.rows; done += kBatch) {
    const int64_t some = std::min(kBatch, twins.rows - done);
    const int64_t at = done * twins.from_stride;
    copy_turns<kBytes, true, false>(
        Twins{{whole[0], whole[1]}, {twins.from[0] + at, twins.from[1] + at}, some, kRow,
              twins.from_stride},
        nothing);
    for (int i = 0; i < 2; ++i) {
      copy(twins.to[i] + done * kRow, whole[i], static_cast<size_t>(some * kRow), true);
    }
  }
}

void copy_twin_rows(const Twins& twins, size_t row_nbytes, Way way) {
  with_short_row(row_nbytes, [&](auto row) { copy_twin_rows<row>(twins, way); });
}

}  // namespace

bool are_twins(const Box& box, const Box& other) {
  return box.array == other.array && box.ndim == other.ndim &&
         std::equal(box.shape, box.shape + box.ndim, other.shape) &&
         std::equal(box.strides, box.strides + box.ndim, other.strides) &&
         with_short_row(box.in_message.row_nbytes, [](auto) {});
}

void pack_twins(unsigned char* message, const unsigned char* array, const Box& box,
                const Box& other, bool streaming) {
  const int64_t apart = other.offset - box.offset;
  each_run(box.in_message, array + box.offset, message,
           [&](const unsigned char* from, unsigned char* to, int64_t rows, int64_t stride,
               int64_t whole) {
             copy_twin_rows({{to, to + box.nbytes}, {from, from + apart}, rows, whole, stride},
                            box.in_message.row_nbytes,
                            streaming ? Way::PackStreamed : Way::Pack);
           });
}

void unpack_twins(unsigned char* array, const Box& box, const Box& other,
                  const unsigned char* message) {
  const int64_t apart = other.offset - box.offset;
  each_run(box.in_message, array + box.offset, message,
           [&](unsigned char* to, const unsigned char* from, int64_t rows, int64_t stride,
               int64_t whole) {
             copy_twin_rows({{to, to + apart}, {from, from + box.nbytes}, rows, stride, whole},
                            box.in_message.row_nbytes, Way::Unpack);
           });
}

void copy_twins(unsigned char* array, const Box& box, const Box& other,
                const unsigned char* from_array, const Box& from_box, const Box& from_other) {
  const Walk walk = walk_between(box, from_box);
  if (!with_short_row(walk.row_nbytes, [](auto) {})) {  // a part of the rows that they have
    copy_box(array, box, from_array, from_box);
    return copy_box(array, other, from_array, from_other);
  }
  const int64_t apart = other.offset - box.offset;
  const int64_t from_apart = from_other.offset - from_box.offset;
  each_run(walk, array + box.offset, from_array + from_box.offset,
           [&](unsigned char* to, const unsigned char* from, int64_t rows, int64_t to_stride,
               int64_t from_stride) {
             copy_twin_rows({{to, to + apart}, {from, from + from_apart}, rows, to_stride,
                             from_stride},
                            walk.row_nbytes, Way::Within);
           });
}

}  // namespace commrt
