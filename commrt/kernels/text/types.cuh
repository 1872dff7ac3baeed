// SPDX-License-Identifier: Apache-2.0
// Element types: what is computed with, and what stands in memory.
//
// A type is: Bits, an item as it stands in memory; Value, what is computed with; widen and
// narrow between the two; kOne, the bits of "true"; is_true.

COMMRT_DEVICE float as_float(u32 bits) { return __uint_as_float(bits); }
COMMRT_DEVICE u32 as_bits(float value) { return __float_as_uint(value); }
COMMRT_DEVICE double as_float(u64 bits) { return __longlong_as_double(i64(bits)); }
COMMRT_DEVICE u64 as_bits(double value) { return u64(__double_as_longlong(value)); }

// In integer arithmetic where there is no instruction for it (after
// https://gist.github.com/rygorous/2156668), as on the host.
COMMRT_DEVICE float half_to_float(u16 half) {
#ifdef __CUDA_ARCH__
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
  return value;
#else
  u32 bits = u32(half & 0x7fff) << 13;
  const bool is_subnormal = bits < 1u << 23;  // or zero
  const bool is_special = bits > 0x0f7fffff;  // infinity or NaN
  bits += 112u << 23;
  if (is_special) bits += 112u << 23;
  // Subnormals get the exponent of the least normal number, which is then taken away.
  if (is_subnormal) bits = as_bits(as_float(bits + (1u << 23)) - as_float(113u << 23));
  return as_float(bits | u32(half & 0x8000) << 16);
#endif
}

// A float32 to fewer bits, to nearest even: kMantissa bits behind the point, exponents
// counted from kBias. From kLargest (the bits of a float32) on all numbers are written as
// that one, which is infinite or, where there is no infinity, NaN.
template <int kMantissa, u32 kBias, u32 kLargest>
COMMRT_DEVICE u32 float_to_short(u32 magnitude) {
  constexpr int kShift = 23 - kMantissa;
  constexpr u32 kRebias = 127 - kBias;
  const u32 bits = magnitude < kLargest ? magnitude : kLargest;
  // Adding a float32 whose last place is the smallest subnormal rounds to that place.
  constexpr u32 kPlace = (127 + 24 - kBias - kMantissa) << 23;
  if (bits < (kRebias + 1) << 23) return as_bits(as_float(bits) + as_float(kPlace)) - kPlace;
  return (bits - ((kRebias << 23) - ((1u << (kShift - 1)) - 1)) + (bits >> kShift & 1)) >> kShift;
}

COMMRT_DEVICE u16 float_to_half(float value) {
#ifdef __CUDA_ARCH__
  // By way of 32 bits: ptxas takes a 16-bit register that a cvt to f16 has written for a number,
  // and a store of its lower byte for a conversion to u8 (seen on an H200, and in 13.0's SASS).
  u32 half;
  asm("{\n"
      "  .reg .b16 low, high;\n"
      "  cvt.rn.f16.f32 low, %1;\n"
      "  mov.b16 high, 0;\n"
      "  mov.b32 %0, {low, high};\n"
      "}"
      : "=r"(half)
      : "f"(value));
  return u16(half);
#else
  const u32 bits = as_bits(value), magnitude = bits & 0x7fffffff;
  const u32 half = magnitude > 0x7f800000 ? 0x7e00 : float_to_short<10, 15, 143u << 23>(magnitude);
  return u16(half | (bits >> 16 & 0x8000));
#endif
}

template <class T, class U>
struct Integer {
  using Bits = U;
  using Value = T;
  static constexpr U kOne = 1;
  static COMMRT_DEVICE T widen(U bits) { return T(bits); }
  static COMMRT_DEVICE U narrow(T value) { return U(value); }
  static COMMRT_DEVICE bool is_true(U bits) { return bits != 0; }
};
using Bool = Integer<u8, u8>;
using Int8 = Integer<i8, u8>;
using Int16 = Integer<i16, u16>;
using Int32 = Integer<i32, u32>;
using Int64 = Integer<i64, u64>;
using UInt8 = Integer<u8, u8>;
using UInt16 = Integer<u16, u16>;
using UInt32 = Integer<u32, u32>;
using UInt64 = Integer<u64, u64>;

// kQuiet is the NaN that min and max write. -0 is false.
template <class T, class U, U kOneBits, U kQuietBits>
struct Floating {
  using Bits = U;
  using Value = T;
  static constexpr U kOne = kOneBits, kQuiet = kQuietBits;
  static constexpr U kMagnitude = U(~U(0)) >> 1;
  static COMMRT_DEVICE bool is_true(U bits) { return (bits & kMagnitude) != 0; }
};

struct Float32 : Floating<float, u32, 0x3f800000, 0x7fc00000> {
  static COMMRT_DEVICE float widen(u32 bits) { return as_float(bits); }
  static COMMRT_DEVICE u32 narrow(float value) { return as_bits(value); }
};

struct Float64 : Floating<double, u64, 0x3ff0000000000000, 0x7ff8000000000000> {
  static COMMRT_DEVICE double widen(u64 bits) { return as_float(bits); }
  static COMMRT_DEVICE u64 narrow(double value) { return as_bits(value); }
};

struct Float16 : Floating<float, u16, 0x3c00, 0x7e00> {
  static COMMRT_DEVICE float widen(u16 bits) { return half_to_float(bits); }
  static COMMRT_DEVICE u16 narrow(float value) { return float_to_half(value); }
};

// The upper half of a float32.
struct BFloat16 : Floating<float, u16, 0x3f80, 0x7fc0> {
  static COMMRT_DEVICE float widen(u16 bits) { return as_float(u32(bits) << 16); }
  // A NaN stays one because its quiet bit is set instead of rounding.
  static COMMRT_DEVICE u16 narrow(float value) {
    const u32 bits = as_bits(value);
    const u32 rounded = bits + ((bits >> 16 & 1) + 0x7fff);
    return u16((value == value ? rounded : bits | 0x00400000) >> 16);
  }
};

// No infinity: beyond 464 is NaN, which is all ones but the sign.
struct Float8E4M3 : Floating<float, u8, 0x38, 0x7f> {
  // As a float16 its exponent counts from 15 instead of 7.
  static COMMRT_DEVICE float widen(u8 bits) {
    const float value = half_to_float(u16((bits & 0x7f) << 7 | (bits & 0x80) << 8)) * 256.0f;
    return (bits & 0x7f) == 0x7f ? as_float(0x7fc00000u) : value;
  }
  static COMMRT_DEVICE u8 narrow(float value) {
    const u32 bits = as_bits(value);
    return u8(float_to_short<3, 7, 0x43f00000>(bits & 0x7fffffff) | (bits >> 24 & 0x80));
  }
};

// The upper byte of a float16.
struct Float8E5M2 : Floating<float, u8, 0x3c, 0x7e> {
  static COMMRT_DEVICE float widen(u8 bits) { return half_to_float(u16(bits << 8)); }
  static COMMRT_DEVICE u8 narrow(float value) {
    const u32 bits = as_bits(value), magnitude = bits & 0x7fffffff;
    const u32 byte = magnitude > 0x7f800000 ? 0x7e : float_to_short<2, 15, 143u << 23>(magnitude);
    return u8(byte | (bits >> 24 & 0x80));
  }
};

template <class T>
struct Complex {
  T re, im;
};

// Both parts in one word, the real one in its lower half.
struct Complex64 {
  using Bits = u64;
  using Value = Complex<float>;
  static constexpr u64 kOne = 0x3f800000;
  static COMMRT_DEVICE Value widen(u64 bits) {
    return Value{as_float(u32(bits)), as_float(u32(bits >> 32))};
  }
  static COMMRT_DEVICE u64 narrow(Value value) {
    return as_bits(value.re) | u64(as_bits(value.im)) << 32;
  }
  static COMMRT_DEVICE bool is_true(u64 bits) {
    return (bits & 0x7fffffff7fffffff) != 0;
  }
};

struct Complex128 {
  using Bits = Pair;
  using Value = Complex<double>;
  static constexpr u64 kOne = 0x3ff0000000000000;
  static COMMRT_DEVICE Value widen(Pair bits) {
    return Value{as_float(bits.first), as_float(bits.second)};
  }
  static COMMRT_DEVICE Pair narrow(Value value) {
    return Pair{as_bits(value.re), as_bits(value.im)};
  }
  static COMMRT_DEVICE bool is_true(Pair bits) {
    return ((bits.first | bits.second) & 0x7fffffffffffffff) != 0;
  }
};
