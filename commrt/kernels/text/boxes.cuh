// SPDX-License-Identifier: Apache-2.0
// Boxes: strided parts of arrays, packed into a buffer, taken out of it, or combined with
// what arrives in it. One launch does all boxes; commrt/kernels/boxes.py writes the tables.

constexpr int kMostDims = 8, kMostArrays = 16;

// Where the arrays begin: tables are made once, and arrays come with each launch.
struct Arrays {
  u8* first[kMostArrays];
};

// Its units (words, or items) are those from `first` on, among all boxes of a launch, in C
// order. `offset` and `strides` are bytes in the array. It is met by `terms` of the table's
// terms, from `term` on.
struct Box {
  u64 first;
  i64 offset;
  u32 array, unit, ndim, term, terms, unused;
  u64 shape[kMostDims];
  i64 strides[kMostDims];
};

// The same elements in the buffer.
struct Term {
  i64 offset;
  i64 strides[kMostDims];
};
static_assert(sizeof(Box) == 168 && sizeof(Term) == 72, "as commrt/kernels/boxes.py has them");

struct Table {
  const Box* boxes;
  const Term* terms;
  u32 num_boxes;
  u64 units;
};

// The box that unit number i belongs to: the last one that begins at i or before.
COMMRT_DEVICE const Box& box_of(const Table& table, u64 i) {
  u32 low = 0, high = table.num_boxes;
  while (high - low > 1) {
    const u32 middle = (low + high) / 2;
    if (table.boxes[middle].first <= i)
      low = middle;
    else
      high = middle;
  }
  return table.boxes[low];
}

// Where unit i of the box lies in the array; `place` is where it lies in each dimension.
COMMRT_DEVICE i64 place_in(const Box& box, u64 i, u64* place) {
  i64 at = box.offset;
#pragma unroll
  for (int dim = kMostDims - 1; dim >= 0; --dim) {
    if (dim >= int(box.ndim)) continue;
    const u64 extent = box.shape[dim];
    // Dividing 64 bits takes several times as long.
    const u64 rest = (i | extent) >> 32 ? i / extent : u32(i) / u32(extent);
    place[dim] = i - rest * extent;
    at += i64(place[dim]) * box.strides[dim];
    i = rest;
  }
  return at;
}

COMMRT_DEVICE i64 place_in(const Term& term, u32 ndim, const u64* place) {
  i64 at = term.offset;
#pragma unroll
  for (int dim = 0; dim < kMostDims; ++dim)
    if (dim < int(ndim)) at += i64(place[dim]) * term.strides[dim];
  return at;
}

template <class Word>
COMMRT_DEVICE void copy_unit_by(u8* to, const u8* from, u32 unit) {
  for (u32 at = 0; at < unit; at += u32(sizeof(Word))) store(to + at, load<Word>(from + at));
}

// By the longest words that divide a unit and both addresses.
COMMRT_DEVICE void copy_unit(u8* to, const u8* from, u32 unit) {
  const u64 all = address(to) | address(from) | unit;
  if (all % 16 == 0) return copy_unit_by<Line>(to, from, unit);
  if (all % 8 == 0) return copy_unit_by<u64>(to, from, unit);
  if (all % 4 == 0) return copy_unit_by<u32>(to, from, unit);
  if (all % 2 == 0) return copy_unit_by<u16>(to, from, unit);
  copy_unit_by<u8>(to, from, unit);
}

// Boxes of a pack or an unpack have one term each.
template <bool kPacks>
COMMRT_DEVICE void move_boxes(u8* buffer, const Arrays& arrays, const Table& table) {
  for (u64 i = thread_number(); i < table.units; i += thread_count()) {
    const Box& box = box_of(table, i);
    u64 place[kMostDims];
    u8* const in_array = arrays.first[box.array] + place_in(box, i - box.first, place);
    u8* const in_buffer = buffer + place_in(table.terms[box.term], box.ndim, place);
    if (kPacks)
      copy_unit(in_buffer, in_array, box.unit);
    else
      copy_unit(in_array, in_buffer, box.unit);
  }
}

// Boxes that do not overlap; each item is combined with its terms, one after the other.
template <class Bits, class Function>
COMMRT_DEVICE void combine_boxes(const u8* buffer, const Arrays& arrays, const Table& table,
                                 Function function) {
  for (u64 i = thread_number(); i < table.units; i += thread_count()) {
    const Box& box = box_of(table, i);
    u64 place[kMostDims];
    u8* const in_array = arrays.first[box.array] + place_in(box, i - box.first, place);
    Bits value = load_any<Bits>(in_array);
    for (u32 k = 0; k < box.terms; ++k) {
      const u8* const from = buffer + place_in(table.terms[box.term + k], box.ndim, place);
      value = function(value, load_any<Bits>(from));
    }
    store_any(in_array, value);
  }
}
