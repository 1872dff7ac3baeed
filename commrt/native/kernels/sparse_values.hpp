// SPDX-License-Identifier: Apache-2.0
// The element types of the sparse kernels: their neutral value, addition and magnitude.
//
// The neutral value of floats is -0: added to anything it changes nothing, not even +0 or -0,
// so a merge can add it without a branch where an index is in one input only.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "types.hpp"

namespace commrt::sparse {

template <class To, class From>
inline To bits_as(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  std::memcpy(&result, &value, sizeof(To));
  return result;
}

// A value that is taken or not, without a branch.
template <class Word>
inline Word either(bool taken, Word value, Word otherwise) {
  const Word mask = static_cast<Word>(-static_cast<Word>(taken));
  return static_cast<Word>((value & mask) | (otherwise & static_cast<Word>(~mask)));
}

// Integers wrap; magnitudes of signed ones are unsigned, so that the least has one too.
template <class T>
struct Integer {
  using Item = std::make_unsigned_t<T>;
  using Key = Item;
  static constexpr int kKeyBits = 8 * sizeof(T);
  static Item pick(bool taken, Item v) { return either<Item>(taken, v, 0); }
  static Item add(Item a, Item b) { return static_cast<Item>(a + b); }
  static Item zero() { return 0; }
  static Item neutral() { return 0; }
  static bool is_zero(Item v) { return v == 0; }
  static Key magnitude(Item v) {
    if constexpr (std::is_signed_v<T>) {
      const Item sign = static_cast<Item>(-static_cast<Item>(v >> (8 * sizeof(T) - 1)));
      return static_cast<Key>((v ^ sign) - sign);
    } else {
      return v;
    }
  }
};

struct Boolean : Integer<std::uint8_t> {
  static Item add(Item a, Item b) { return a | b; }
};

// NaN has the largest magnitude of all, so that it is never hidden.
template <class T, class Word>
struct Real {
  using Item = T;
  using Key = Word;
  static constexpr Word kSign = Word{1} << (8 * sizeof(T) - 1);
  static constexpr int kKeyBits = 8 * sizeof(T) - 1;
  static Item pick(bool taken, Item v) {
    return bits_as<T>(either<Word>(taken, bits_as<Word>(v), kSign));
  }
  static Item add(Item a, Item b) { return a + b; }
  static Item zero() { return 0; }
  static Item neutral() { return bits_as<T>(kSign); }
  static bool is_zero(Item v) { return v == 0; }
  static Key magnitude(Item v) { return bits_as<Word>(v) & ~kSign; }
};

template <class Part>
struct Complex {
  struct Item {
    typename Part::Item re, im;
  };
  static Item pick(bool taken, Item v) {
    return {Part::pick(taken, v.re), Part::pick(taken, v.im)};
  }
  static Item add(Item a, Item b) { return {a.re + b.re, a.im + b.im}; }
  static Item zero() { return {0, 0}; }
  static Item neutral() { return {Part::neutral(), Part::neutral()}; }
  static bool is_zero(Item v) { return v.re == 0 && v.im == 0; }
};

// After https://gist.github.com/rygorous/2156668.
inline float float_of_half(std::uint16_t half) {
  std::uint32_t u = (half & 0x7fffu) << 13;
  const std::uint32_t exponent = u & 0x0f800000u;
  u += 112u << 23;
  if (exponent == 0x0f800000u) {
    u += 112u << 23;
  } else if (exponent == 0) {
    u = bits_as<std::uint32_t>(bits_as<float>(u + (1u << 23)) - bits_as<float>(113u << 23));
  }
  return bits_as<float>(u | (half & 0x8000u) << 16);
}

inline std::uint16_t half_of_float(float value) {
  const std::uint32_t u = bits_as<std::uint32_t>(value);
  const std::uint32_t sign = u >> 16 & 0x8000u, m = u & 0x7fffffffu;
  std::uint32_t half;
  if (m > 0x7f800000u) {
    half = 0x7e00u;
  } else if (m >= 143u << 23) {
    half = 0x7c00u;
  } else if (m < 113u << 23) {
    half = bits_as<std::uint32_t>(bits_as<float>(m) + 0.5f) - (126u << 23);
  } else {
    half = (m - (112u << 23) + 0xfffu + (m >> 13 & 1)) >> 13;
  }
  return static_cast<std::uint16_t>(half | sign);
}

inline float float_of_bfloat(std::uint16_t bits) {
  return bits_as<float>(static_cast<std::uint32_t>(bits) << 16);
}

inline std::uint16_t bfloat_of_float(float value) {
  const std::uint32_t u = bits_as<std::uint32_t>(value);
  if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>(u >> 16 | 0x40u);
  return static_cast<std::uint16_t>((u + (u >> 16 & 1) + 0x7fffu) >> 16);
}

// Both 16-bit floats: added in float32, rounded once to nearest even.
template <float (*Widen)(std::uint16_t), std::uint16_t (*Narrow)(float)>
struct Half {
  using Item = std::uint16_t;
  using Key = std::uint16_t;
  static constexpr int kKeyBits = 15;
  static Item pick(bool taken, Item v) { return either<Item>(taken, v, 0x8000u); }
  static Item add(Item a, Item b) { return Narrow(Widen(a) + Widen(b)); }
  static Item zero() { return 0; }
  static Item neutral() { return 0x8000u; }
  static bool is_zero(Item v) { return (v & 0x7fffu) == 0; }
  static Key magnitude(Item v) { return v & 0x7fffu; }
};

using Float16 = Half<float_of_half, half_of_float>;
using BFloat16 = Half<float_of_bfloat, bfloat_of_float>;
using Float32 = Real<float, std::uint32_t>;
using Float64 = Real<double, std::uint64_t>;

// Calls f with an object of the class above that stands for an element type.
template <class F>
auto with_values(DType dtype, F f) {
  switch (dtype) {
    case DType::Bool: return f(Boolean{});
    case DType::I8: return f(Integer<std::int8_t>{});
    case DType::I16: return f(Integer<std::int16_t>{});
    case DType::I32: return f(Integer<std::int32_t>{});
    case DType::I64: return f(Integer<std::int64_t>{});
    case DType::U8: return f(Integer<std::uint8_t>{});
    case DType::U16: return f(Integer<std::uint16_t>{});
    case DType::U32: return f(Integer<std::uint32_t>{});
    case DType::U64: return f(Integer<std::uint64_t>{});
    case DType::F16: return f(Float16{});
    case DType::BF16: return f(BFloat16{});
    case DType::F64: return f(Float64{});
    case DType::C64: return f(Complex<Float32>{});
    case DType::C128: return f(Complex<Float64>{});
    default: return f(Float32{});
  }
}

}  // namespace commrt::sparse
