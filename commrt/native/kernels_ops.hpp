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
    return (x == x) & (y == y) ? (V)least : quiet_nan(x);
  }
};

// As LeastFloat; "and" keeps the positive zero.
struct GreatestFloat {
  template <class V>
  static COMMRT_INLINE V apply(V x, V y) {
    auto equal = x == y;
    auto greatest = (decltype(equal))(x > y ? x : y) & ((decltype(equal))x | ~equal);
    return (x == x) & (y == y) ? (V)greatest : quiet_nan(x);
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

// complex128 is wider than a vector's element, and products need both parts: element by
// element.
template <class T>
struct Complex {
  T re, im;
};

struct MultiplyComplex {
  template <class T>
  static COMMRT_INLINE Complex<T> apply(Complex<T> x, Complex<T> y) {
    return {x.re * y.re - x.im * y.im, x.re * y.im + x.im * y.re};
  }
};

template <class Op>
struct LogicalComplex {
  template <class T>
  static COMMRT_INLINE Complex<T> apply(Complex<T> x, Complex<T> y) {
    int truth = Op::apply(int(x.re != 0 || x.im != 0), int(y.re != 0 || y.im != 0));
    return {T(truth), T(0)};
  }
};

}  // namespace
}  // namespace commrt
