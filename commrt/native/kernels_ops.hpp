// SPDX-License-Identifier: Apache-2.0
// The reductions of two vectors.
#pragma once

#include "kernels_vector.hpp"

namespace commrt {
namespace {

// Applies Op to both halves of a vector of 16-bit floats.
template <class Op>
struct Widened {
  static COMMRT_INLINE Floats apply(Floats x, Floats y) {
    return {Op::apply(x.a, y.a), Op::apply(x.b, y.b)};
  }
};

struct Add {
  template <class V>
  static COMMRT_INLINE V apply(V x, V y) {
    return x + y;
  }
};

struct Multiply {
  template <class V>
  static COMMRT_INLINE V apply(V x, V y) {
    return x * y;
  }
};

struct Least {
  template <class V>
  static COMMRT_INLINE V apply(V x, V y) {
    return x < y ? x : y;
  }
};

struct Greatest {
  template <class V>
  static COMMRT_INLINE V apply(V x, V y) {
    return x > y ? x : y;
  }
};

COMMRT_INLINE Vec<float> quiet_nan(Vec<float>) {
  return (Vec<float>)splat<std::uint32_t>(0x7fc00000u);
}
COMMRT_INLINE Vec<double> quiet_nan(Vec<double>) {
  return (Vec<double>)splat<std::uint64_t>(0x7ff8000000000000u);
}

// Where x == y their bits are equal, or they are zeros, of which "or" keeps the negative.
struct LeastFloat {
  template <class V>
  static COMMRT_INLINE V apply(V x, V y) {
    auto equal = x == y;
    auto least = (decltype(equal))(x < y ? x : y) | ((decltype(equal))x & equal);
    return ((x == x) & (y == y)) ? (V)least : quiet_nan(x);
  }
};

// As LeastFloat; "and" keeps the positive zero.
struct GreatestFloat {
  template <class V>
  static COMMRT_INLINE V apply(V x, V y) {
    auto equal = x == y;
    auto greatest = (decltype(equal))(x > y ? x : y) & ((decltype(equal))x | ~equal);
    return ((x == x) & (y == y)) ? (V)greatest : quiet_nan(x);
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

// An element is true if any bit of Value is set; true is written as One. Floats leave the
// sign bit out of Value, so that -0 is false.
template <class Op, class T, T Value, T One>
struct Logical {
  static COMMRT_INLINE Vec<T> apply(Vec<T> x, Vec<T> y) {
    auto truth = Op::apply((x & splat<T>(Value)) != 0, (y & splat<T>(Value)) != 0);
    return (Vec<T>)truth & splat<T>(One);
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

// complex128 is wider than a vector's element: both lanes of a pair learn its truth.
template <class Op>
struct LogicalComplex {
  template <class V>
  static COMMRT_INLINE auto truth(V x) {
    auto parts = x != 0;
    return parts | pick<~0, 1>(parts);
  }
  template <class V>
  static COMMRT_INLINE V apply(V x, V y) {
    auto one = (decltype(x == x))pick<1, 0>(V{1, 0});
    return (V)(Op::apply(truth(x), truth(y)) & one);
  }
};

}  // namespace
}  // namespace commrt
