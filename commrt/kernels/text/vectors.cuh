// SPDX-License-Identifier: Apache-2.0
// Loops over contiguous memory: any number of items, at any address.

// Where an item-by-item walk and one by lines meet: the head comes before the first line.
struct Split {
  u64 head, lines;
};

// Lines are used where both addresses come to a line's at the same item.
template <class Bits>
COMMRT_DEVICE Split split(const u8* to, const u8* from, u64 count) {
  const u64 away = (0 - address(to)) % kLine;
  if ((address(to) - address(from)) % kLine || away % sizeof(Bits)) return Split{0, 0};
  const u64 head = away / sizeof(Bits) < count ? away / sizeof(Bits) : count;
  return Split{head, (count - head) * sizeof(Bits) / kLine};
}

// Calls on_line(byte) for every whole line, and on_item(byte) for every other item.
template <class Bits, class OnLine, class OnItem>
COMMRT_DEVICE void walk(const u8* to, const u8* from, u64 count, OnLine on_line, OnItem on_item) {
  const u64 first = thread_number(), step = thread_count();
  const Split parts = split<Bits>(to, from, count);
  const u64 begin = parts.head * sizeof(Bits);
  for (u64 i = first; i < parts.lines; i += step) on_line(begin + i * kLine);
  const u64 in_lines = parts.lines * (kLine / sizeof(Bits));
  for (u64 i = first; i < count - in_lines; i += step)
    on_item((i < parts.head ? i : i + in_lines) * sizeof(Bits));
}

// to[i] = function(to[i], from[i]). All loads of a thread come before its store: `to` may be
// `from`.
template <class Bits, class Function>
COMMRT_DEVICE void combine(void* dst, const void* src, u64 count, Function function) {
  u8* to = static_cast<u8*>(dst);
  const u8* from = static_cast<const u8*>(src);
  const bool is_aligned = (address(to) | address(from)) % sizeof(Bits) == 0;
  walk<Bits>(
      to, from, count,
      [&](u64 at) {
        const Line x = load<Line>(to + at), y = load<Line>(from + at);
        Line result;
#pragma unroll
        for (int i = 0; i < Items<Bits>::kCount; ++i)
          Items<Bits>::put(result, i, function(Items<Bits>::get(x, i), Items<Bits>::get(y, i)));
        store(to + at, result);
      },
      [&](u64 at) {
        if (is_aligned)
          store(to + at, function(load<Bits>(to + at), load<Bits>(from + at)));
        else
          Bytes<Bits>::store(to + at, function(Bytes<Bits>::load(to + at),
                                               Bytes<Bits>::load(from + at)));
      });
}

template <class Op>
COMMRT_DEVICE void reduce(void* dst, const void* src, u64 count) {
  using Bits = typename Op::Bits;
  combine<Bits>(dst, src, count, [](Bits x, Bits y) { return Op::apply(x, y); });
}

template <class E>
COMMRT_DEVICE void scaled_sum(void* dst, const void* src, u64 count, u32 which, Factor factor) {
  using Bits = typename E::Bits;
  combine<Bits>(dst, src, count,
                [=](Bits x, Bits y) { return scaled(E{}, x, y, which, factor); });
}

// In 64 bits, as on the host: a divisor may lie outside the type. Toward zero.
template <class T, class U>
COMMRT_DEVICE void divide(Integer<T, U>, void* dst, u64 count, i64 divisor) {
  combine<U>(dst, dst, count, [=](U x, U) {
    return T(-1) < T(0) ? U(i64(T(x)) / divisor) : U(u64(x) / u64(divisor));
  });
}

// Words that both addresses allow.
template <class Word>
COMMRT_DEVICE void copy_words(u8* to, const u8* from, u64 nbytes) {
  walk<Word>(
      to, from, nbytes / sizeof(Word),
      [&](u64 at) { store(to + at, load<Line>(from + at)); },
      [&](u64 at) { store(to + at, load<Word>(from + at)); });
}

// Copies between addresses that come to a word's at different bytes are by smaller words.
COMMRT_DEVICE void copy(void* dst, const void* src, u64 nbytes) {
  u8* to = static_cast<u8*>(dst);
  const u8* from = static_cast<const u8*>(src);
  const u64 both = address(to) | address(from);
  const bool is_congruent = (address(to) - address(from)) % kLine == 0;
  if (is_congruent || both % 4) return copy_words<u8>(to, from, nbytes);
  const u64 whole = both % 8 ? nbytes / 4 * 4 : nbytes / 8 * 8;
  if (both % 8)
    copy_words<u32>(to, from, whole);
  else
    copy_words<u64>(to, from, whole);
  for (u64 i = whole + thread_number(); i < nbytes; i += thread_count()) to[i] = from[i];
}
