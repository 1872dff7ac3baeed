// SPDX-License-Identifier: Apache-2.0
// The reductions of two vectors.
#pragma once

#include <type_traits>

#include "kernels/kernels_vector.hpp"

namespace commrt {
namespace {

// Applies Op to all parts of a vector of 16-bit or 8-bit floats.
template <class Op>
struct Widened {
  static COMMRT_INLINE Floats apply(Floats x, Floats y) {
    return {Op::apply(x.a, y.a), Op::apply(x.b, y.b)};
  }
  static COMMRT_INLINE Quarters apply(Quarters x, Quarters y) {
    return {Op::apply(x.a, y.a), Op::apply(x.b, y.b), Op::apply(x.c, y.c),
            Op::apply(x.d, y.d)};
  }
};

struct Add {
  template <class V>
  static COMMRT_INLINE V apply(V x, V y) {
    return x + y;
  }
};

// The same sum to the last bit, by the units that multiply: float16's conversions leave them
// free, and keep those busy that add.
struct AddFused {
  static COMMRT_INLINE F32s apply(F32s x, F32s y) {
#if COMMRT_VEC_BYTES == 64
    return (F32s)_mm512_fmadd_ps((__m512)x, _mm512_set1_ps(1), (__m512)y);
#else
    return x + y;
#endif
  }
};

struct Multiply {
  template <class V>
  static COMMRT_INLINE V apply(V x, V y) {
    return x * y;
  }
};

// Element i of the result is element (i & And) ^ Xor of v: with pairs of (real, imaginary),
// <~1, 0> spreads the real parts, <~1, 1> the imaginary ones, and <~0, 1> swaps the two.
template <int And, int Xor, class V>
COMMRT_INLINE V pick(V v) {
  constexpr int kCount = sizeof(V) / sizeof(v[0]);
#if defined(__clang__)
  V picked{};
#pragma unroll
  for (int i = 0; i < kCount; ++i) picked[i] = v[(i & And) ^ Xor];
  return picked;
#else
  decltype(v == v) from{};
#pragma GCC unroll 16
  for (int i = 0; i < kCount; ++i) from[i] = (i & And) ^ Xor;
  return __builtin_shuffle(v, from);
#endif
}

// x < y of 64-bit integers where there is no such comparison: the sign of the difference, or
// that of the operand which decides.
#if defined(__SSE2__) && !defined(__SSE4_2__)
constexpr bool kCompares64 = false;
#else
constexpr bool kCompares64 = true;
#endif

template <class T>
COMMRT_INLINE Vec<T> lesser_wide(Vec<T> x, Vec<T> y, Vec<T> otherwise) {
  using Wraps = Vec<std::uint64_t>;
  Vec<T> decides = T(-1) < T(0) ? x & ~y : ~x & y;
  Vec<T> sign = decides | (~(x ^ y) & (Vec<T>)((Wraps)x - (Wraps)y));
  using Halves = Vec<std::int32_t>;
  Vec<T> less = (Vec<T>)(pick<~1, 1>((Halves)sign) >> 31);
  return (x & less) | (otherwise & ~less);
}

// x < y ? x : y, and x > y ? x : y.
template <class V>
COMMRT_INLINE V lesser(V x, V y) {
  using T = std::remove_reference_t<decltype(x[0])>;
  if constexpr (std::is_integral_v<T> && sizeof(T) == 8 && !kCompares64)
    return lesser_wide<T>(x, y, y);
  else
    return x < y ? x : y;
}

template <class V>
COMMRT_INLINE V greater(V x, V y) {
  using T = std::remove_reference_t<decltype(x[0])>;
  if constexpr (std::is_integral_v<T> && sizeof(T) == 8 && !kCompares64)
    return x ^ y ^ lesser(x, y);
  else
    return x > y ? x : y;
}

struct Least {
  template <class V>
  static COMMRT_INLINE V apply(V x, V y) {
    return lesser(x, y);
  }
};

struct Greatest {
  template <class V>
  static COMMRT_INLINE V apply(V x, V y) {
    return greater(x, y);
  }
};

COMMRT_INLINE Vec<float> quiet_nan(Vec<float>) {
  return (Vec<float>)splat<std::uint32_t>(0x7fc00000u);
}
COMMRT_INLINE Vec<double> quiet_nan(Vec<double>) {
  return (Vec<double>)splat<std::uint64_t>(0x7ff8000000000000u);
}

// Floats to be compared; for the greatest, with their signs flipped. (Not by "-": compilers
// then turn the comparisons round, and miss that they are minimums.)
template <class T, bool kGreatest>
struct Ordered : Same<T> {
  using Acc = Vec<T>;
  static COMMRT_INLINE Acc flip(Acc acc) {
    using Word = std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>;
    constexpr Word kSign = kGreatest ? Word(1) << (8 * sizeof(T) - 1) : 0;
    return (Acc)((Vec<Word>)acc ^ splat<Word>(kSign));
  }
  static COMMRT_INLINE Acc widen(Raw raw) { return flip((Acc)raw); }
  static COMMRT_INLINE Raw narrow(Acc acc) {
    return (Raw)(acc == acc ? flip(acc) : quiet_nan(acc));
  }
};

// The second of two that are equal or not ordered is taken, once in each order. The bits of
// both together are those of either, or of -0 and 0, of which "or" keeps the negative, or
// have all of a NaN's exponent.
struct LeastOrdered {
  template <class V>
  static COMMRT_INLINE V apply(V x, V y) {
    using Bits = decltype(x == y);
    return (V)((Bits)lesser(x, y) | (Bits)lesser(y, x));
  }
};

// 16-bit and 8-bit floats (as the signed integer T) to be compared, as integers in the same order: those below zero have their
// other bits flipped. Then all of them are moved by the number of NaNs of one sign, so that
// the NaNs of both signs come to lie before -infinity, or for the greatest after infinity.
template <class T, class Word, Word kInfinity, Word kQuiet, bool kGreatest>
struct OrderedShort : Same<T> {
  using typename Same<T>::Acc;
  using Bits = Vec<Word>;
  static constexpr Word kMagnitude = static_cast<Word>(Word(~Word(0)) >> 1);
  static constexpr Word kNaNs = kMagnitude - kInfinity;
  static constexpr auto kMoved = static_cast<Word>(kGreatest ? -kNaNs : kNaNs);
  static constexpr auto kLast =
      static_cast<Word>((kGreatest ? kInfinity : ~kInfinity) + kMoved);

  static COMMRT_INLINE Bits fold(Bits bits) {
    if constexpr (sizeof(T) == 1)  // no instruction set shifts bytes
      return bits ^ ((Bits)((Acc)bits < splat<T>(0)) & splat<Word>(kMagnitude));
    else
      return bits ^ ((Bits)((Acc)bits >> 15) & splat<Word>(kMagnitude));
  }
  static COMMRT_INLINE Acc widen(Raw raw) {
    return (Acc)(fold((Bits)raw) + splat<Word>(kMoved));
  }
  static COMMRT_INLINE Raw narrow(Acc acc) {
    Bits value = fold((Bits)acc - splat<Word>(kMoved));
    Acc last = (Acc)splat<Word>(kLast);
    Bits nan = kGreatest ? (Bits)(acc > last) : (Bits)(acc < last);
    return (Raw)((value & ~nan) | (splat<Word>(kQuiet) & nan));
  }
};

struct And {
  template <class V>
  static COMMRT_INLINE V apply(V x, V y) {
    return x & y;
  }
};

struct Or {
  template <class V>
  static COMMRT_INLINE V apply(V x, V y) {
    return x | y;
  }
};

struct Xor {
  template <class V>
  static COMMRT_INLINE V apply(V x, V y) {
    return x ^ y;
  }
};

// All bits of an element are set where x is zero.
template <class T>
COMMRT_INLINE auto zeros(Vec<T> x) {
  using Mask = decltype(x == x);
  if constexpr (sizeof(T) == 8 && !kCompares64) {
    auto parts = (Vec<std::uint32_t>)x == 0;
    return (Mask)(parts & pick<~0, 1>(parts));
  } else {
    return x == 0;
  }
}

// Tells logical reductions whether an element is false. It is true if any bit of Value is set,
// which leaves out the sign of floats: -0 is false. True is written as One.
template <class T, T Value, T One>
struct Falsity : Same<T> {
  using Acc = decltype(Vec<T>{} == Vec<T>{});
  static COMMRT_INLINE Acc widen(Raw raw) { return zeros<T>((Vec<T>)raw & splat<T>(Value)); }
  static COMMRT_INLINE Raw narrow(Acc acc) { return (Raw)((Vec<T>)~acc & splat<T>(One)); }
};

// complex128 is wider than a vector's element: both lanes of a pair learn its falsity.
struct FalsityComplex : Same<double> {
  using Acc = Vec<std::int64_t>;
  static COMMRT_INLINE Acc widen(Raw raw) {
    auto parts = (Vec<double>)raw == 0;
    return (Acc)(parts & pick<~0, 1>(parts));
  }
  static COMMRT_INLINE Raw narrow(Acc acc) {
    return (Raw)(~acc & (Acc)pick<1, 0>(Vec<double>{1, 0}));
  }
};

struct NotXor {
  template <class V>
  static COMMRT_INLINE V apply(V x, V y) {
    return ~(x ^ y);
  }
};

// Products of bytes, of which no instruction set has any: as those of 16 bits, where the low
// byte is right whatever the high ones are.
struct MultiplyBytes {
  static COMMRT_INLINE Vec<std::uint8_t> apply(Vec<std::uint8_t> x, Vec<std::uint8_t> y) {
    using Pairs = Vec<std::uint16_t>;
    Pairs low = (Pairs)x * (Pairs)y & splat<std::uint16_t>(0xff);
    Pairs high = ((Pairs)x >> 8) * ((Pairs)y & splat<std::uint16_t>(0xff00));
    return (Vec<std::uint8_t>)(low | high);
  }
};

// (a, b)(c, d) = (ac - bd, ad + bc), as a sum with the sign of bd flipped: GCC 12 turns
// alternating differences and sums into fused ones even under -ffp-contract=off.
struct MultiplyComplex {
  template <class V>
  static COMMRT_INLINE V apply(V x, V y) {
    V cross = pick<~1, 1>(x) * pick<~0, 1>(y);
    V signs = pick<1, 1>(V{0, -0.0});  // -0 at the real parts
    using Bits = decltype(x == x);
    return pick<~1, 0>(x) * y + (V)((Bits)cross ^ (Bits)signs);
  }
};

}  // namespace
}  // namespace commrt
