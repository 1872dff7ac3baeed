// SPDX-License-Identifier: Apache-2.0
#include "values.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace stub {

size_t type_size(int dtype) {
  constexpr size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return sizes[dtype];
}

namespace {

// A short float. Those of 8 bits have no place for what is too large: they keep the largest.
template <class Bits, int kExponent, int kFraction, bool kHasInfinity, bool kSaturates>
struct Short {
  static constexpr int kBias = (1 << (kExponent - 1)) - 1;
  static constexpr int kTop = (1 << kExponent) - 1;
  static constexpr int kOnes = (1 << kFraction) - 1;
  Bits bits;

  double value() const {
    const int exponent = bits >> kFraction & kTop, fraction = bits & kOnes;
    const bool is_negative = bits >> (kExponent + kFraction) & 1;
    double found;
    if (kHasInfinity && exponent == kTop) {
      found = fraction ? NAN : INFINITY;
    } else if (!kHasInfinity && exponent == kTop && fraction == kOnes) {
      found = NAN;
    } else if (exponent == 0) {
      found = std::ldexp(fraction, 1 - kBias - kFraction);
    } else {
      found = std::ldexp(fraction + kOnes + 1, exponent - kBias - kFraction);
    }
    return is_negative ? -found : found;
  }

  // Rounds to the nearest, and to even between two.
  static Short of(double x) {
    const int sign = std::signbit(x) ? 1 << (kExponent + kFraction) : 0;
    const int nan = kTop << kFraction | kOnes;
    const int largest = kHasInfinity ? (kTop << kFraction) - 1 : nan - 1;
    const int too_large = kSaturates ? largest : largest + 1;
    if (std::isnan(x)) return {static_cast<Bits>(sign | nan)};
    x = std::fabs(x);
    if (x == 0) return {static_cast<Bits>(sign)};
    if (std::isinf(x)) return {static_cast<Bits>(sign | too_large)};
    int exponent = 0;
    std::frexp(x, &exponent);
    // The place of the last bit; of the smallest numbers it is the same.
    const int last = std::max(exponent - 1, 1 - kBias) - kFraction;
    const double steps = std::nearbyint(std::ldexp(x, -last));
    // Their bits count upwards: a fraction that runs over is the next exponent.
    const double bits = steps + std::ldexp(last + kBias + kFraction - 1, kFraction);
    return {static_cast<Bits>(sign | (bits > largest ? too_large : static_cast<int>(bits)))};
  }
};

using Half = Short<uint16_t, 5, 10, true, false>;
using Brain = Short<uint16_t, 8, 7, true, false>;
using E4m3 = Short<uint8_t, 4, 3, false, true>;
using E5m2 = Short<uint8_t, 5, 2, true, true>;

template <class T> double load(T x) {
  if constexpr (std::is_arithmetic_v<T>) {
    return static_cast<double>(x);
  } else {
    return x.value();
  }
}
template <class T> T store(double x) {
  if constexpr (std::is_arithmetic_v<T>) {
    return static_cast<T>(x);
  } else {
    return T::of(x);
  }
}

// Integers wrap, so they are added as they are.
template <class T>
T combine(T a, T b, int op) {
  if constexpr (std::is_integral_v<T>) {
    using U = std::make_unsigned_t<T>;
    if (op == 0 || op >= 4) return static_cast<T>(static_cast<U>(a) + static_cast<U>(b));
    if (op == 1) return static_cast<T>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
    return op == 2 ? std::max(a, b) : std::min(a, b);
  } else {
    const double x = load(a), y = load(b);
    if (op == 0 || op >= 4) return store<T>(x + y);
    if (op == 1) return store<T>(x * y);
    return store<T>(op == 2 ? std::fmax(x, y) : std::fmin(x, y));
  }
}

template <class T>
void reduce_typed(int op, const std::vector<Part>& parts, size_t count, void* result) {
  const auto size = static_cast<int>(parts.size());
  T* out = static_cast<T*>(result);
  for (size_t i = 0; i < count; ++i) {
    T sum{};
    for (int r = 0; r < size; ++r) {
      const Part& part = parts[static_cast<size_t>(r)];
      T x = static_cast<const T*>(part.in)[i];
      if (part.scaled) {
        if constexpr (std::is_integral_v<T>) {  // which wrap
          x = static_cast<T>(static_cast<uint64_t>(x) *
                             static_cast<uint64_t>(static_cast<int64_t>(part.factor)));
        } else {
          x = store<T>(load(x) * part.factor);
        }
      } else if (op == 4 && !std::is_integral_v<T>) {
        x = store<T>(load(x) / size);
      }
      sum = r == 0 ? x : combine(sum, x, op);
    }
    if constexpr (std::is_integral_v<T>) {
      if (op == 4) sum = static_cast<T>(sum / static_cast<std::conditional_t<
                       std::is_signed_v<T>, int64_t, uint64_t>>(size));
    }
    out[i] = sum;
  }
}

// Calls `use` with a number of the type.
template <class Use>
bool with_type(int dtype, Use&& use) {
  switch (dtype) {
    case 0: use(int8_t{}); return true;
    case 1: use(uint8_t{}); return true;
    case 2: use(int32_t{}); return true;
    case 3: use(uint32_t{}); return true;
    case 4: use(int64_t{}); return true;
    case 5: use(uint64_t{}); return true;
    case 6: use(Half{}); return true;
    case 7: use(float{}); return true;
    case 8: use(double{}); return true;
    case 9: use(Brain{}); return true;
    case 10: use(E4m3{}); return true;
    case 11: use(E5m2{}); return true;
    default: return false;
  }
}

}  // namespace

bool reduce_parts(int dtype, int redop, const std::vector<Part>& parts, size_t count, void* out) {
  return with_type(dtype, [&](auto like) {
    reduce_typed<decltype(like)>(redop, parts, count, out);
  });
}

bool read_factor(int dtype, const void* scalar, double* factor) {
  constexpr int kFirstOf8Bits = 10;
  return dtype < kFirstOf8Bits && with_type(dtype, [&](auto like) {
    memcpy(&like, scalar, sizeof like);
    *factor = load(like);
  });
}

}  // namespace stub
