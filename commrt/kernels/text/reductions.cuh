// SPDX-License-Identifier: Apache-2.0
// The reductions of two items, as commrt/native/kernels/kernels_ops.hpp has them for the host.
//
// Compiled with --fmad=false: a product and a sum that became one instruction would round
// once, and the host rounds twice.

// Integers are added and multiplied without a sign, where they wrap; those of fewer than 32
// bits would be widened to signed ones.
template <class U>
struct Wide {
  using Type = U;
};
template <>
struct Wide<u8> {
  using Type = u32;
};
template <>
struct Wide<u16> {
  using Type = u32;
};

template <class T, class U>
COMMRT_DEVICE U added(Integer<T, U>, U x, U y) {
  using W = typename Wide<U>::Type;
  return U(W(x) + W(y));
}
template <class T, class U>
COMMRT_DEVICE U multiplied(Integer<T, U>, U x, U y) {
  using W = typename Wide<U>::Type;
  return U(W(x) * W(y));
}
template <class E>
COMMRT_DEVICE typename E::Bits added(E, typename E::Bits x, typename E::Bits y) {
  return E::narrow(E::widen(x) + E::widen(y));
}
template <class E>
COMMRT_DEVICE typename E::Bits multiplied(E, typename E::Bits x, typename E::Bits y) {
  return E::narrow(E::widen(x) * E::widen(y));
}
template <class T>
COMMRT_DEVICE Complex<T> operator+(Complex<T> x, Complex<T> y) {
  return Complex<T>{x.re + y.re, x.im + y.im};
}
template <class T>
COMMRT_DEVICE Complex<T> operator*(Complex<T> x, Complex<T> y) {
  return Complex<T>{x.re * y.re - x.im * y.im, x.re * y.im + x.im * y.re};
}

template <class E>
struct Sum {
  using Bits = typename E::Bits;
  static COMMRT_DEVICE Bits apply(Bits x, Bits y) { return added(E{}, x, y); }
};

template <class E>
struct Prod {
  using Bits = typename E::Bits;
  static COMMRT_DEVICE Bits apply(Bits x, Bits y) { return multiplied(E{}, x, y); }
};

// The least, or the greatest. -0 is less than 0: of numbers that are equal, "or" keeps the
// sign, and "and" drops it.
template <bool kGreatest, class T, class U>
COMMRT_DEVICE U chosen(Integer<T, U>, U x, U y) {
  return (T(x) < T(y)) != kGreatest ? x : y;
}
template <bool kGreatest, class E>
COMMRT_DEVICE typename E::Bits chosen(E, typename E::Bits x, typename E::Bits y) {
  using Bits = typename E::Bits;
  const typename E::Value a = E::widen(x), b = E::widen(y);
  if (a != a || b != b) return E::kQuiet;
  if (a == b) return kGreatest ? Bits(x & y) : Bits(x | y);
  return (a < b) != kGreatest ? x : y;
}

template <class E>
struct Min {
  using Bits = typename E::Bits;
  static COMMRT_DEVICE Bits apply(Bits x, Bits y) { return chosen<false>(E{}, x, y); }
};

template <class E>
struct Max {
  using Bits = typename E::Bits;
  static COMMRT_DEVICE Bits apply(Bits x, Bits y) { return chosen<true>(E{}, x, y); }
};

template <class E>
COMMRT_DEVICE typename E::Bits truth(E, bool is_true) {
  return is_true ? typename E::Bits(E::kOne) : typename E::Bits(0);
}
COMMRT_DEVICE Pair truth(Complex128, bool is_true) {
  return Pair{is_true ? Complex128::kOne : 0, 0};
}

template <class E>
struct Land {
  using Bits = typename E::Bits;
  static COMMRT_DEVICE Bits apply(Bits x, Bits y) {
    return truth(E{}, E::is_true(x) && E::is_true(y));
  }
};

template <class E>
struct Lor {
  using Bits = typename E::Bits;
  static COMMRT_DEVICE Bits apply(Bits x, Bits y) {
    return truth(E{}, E::is_true(x) || E::is_true(y));
  }
};

template <class E>
struct Lxor {
  using Bits = typename E::Bits;
  static COMMRT_DEVICE Bits apply(Bits x, Bits y) {
    return truth(E{}, E::is_true(x) != E::is_true(y));
  }
};

template <class E>
struct Band {
  using Bits = typename E::Bits;
  static COMMRT_DEVICE Bits apply(Bits x, Bits y) { return Bits(x & y); }
};

template <class E>
struct Bor {
  using Bits = typename E::Bits;
  static COMMRT_DEVICE Bits apply(Bits x, Bits y) { return Bits(x | y); }
};

template <class E>
struct Bxor {
  using Bits = typename E::Bits;
  static COMMRT_DEVICE Bits apply(Bits x, Bits y) { return Bits(x ^ y); }
};

// Multiplies what `which` says, bit 0 the first and bit 1 the second, and adds both; or, with
// bit 2, multiplies the second and leaves the first out. Short floats are rounded once.
struct Factor {
  double real;
  i64 integer;
};
COMMRT_DEVICE float times(float value, double factor) { return value * float(factor); }
COMMRT_DEVICE double times(double value, double factor) { return value * factor; }
template <class T>
COMMRT_DEVICE Complex<T> times(Complex<T> value, double factor) {
  return Complex<T>{times(value.re, factor), times(value.im, factor)};
}
template <class T, class U>
COMMRT_DEVICE U scaled(Integer<T, U> type, U x, U y, u32 which, Factor factor) {
  const U by = U(u64(factor.integer));
  if (which & 1) x = multiplied(type, x, by);
  if (which & 2) y = multiplied(type, y, by);
  return which & 4 ? y : added(type, x, y);
}
template <class E>
COMMRT_DEVICE typename E::Bits scaled(E, typename E::Bits x, typename E::Bits y, u32 which,
                                      Factor factor) {
  typename E::Value a = E::widen(x), b = E::widen(y);
  if (which & 1) a = times(a, factor.real);
  if (which & 2) b = times(b, factor.real);
  return E::narrow(which & 4 ? b : a + b);
}
