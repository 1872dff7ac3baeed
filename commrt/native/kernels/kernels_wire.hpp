// SPDX-License-Identifier: Apache-2.0
// The wire formats as loops over vectors; included by each kernels_<isa>.cpp, and under its rules
// (kernels_vector.hpp).
#pragma once

#include "kernels/kernels_ops.hpp"
#include "kernels/wire.hpp"

namespace commrt {
namespace {

using I32s = Vec<std::int32_t>;
constexpr std::size_t kLanes = kVec / 4;

COMMRT_INLINE F32s load_floats(const float* p) {
  return (F32s)load(reinterpret_cast<const Byte*>(p));
}
COMMRT_INLINE void store_floats(float* p, F32s v) { store(reinterpret_cast<Byte*>(p), (Raw)v); }
COMMRT_INLINE U32s bits32(std::uint32_t value) { return splat<std::uint32_t>(value); }

// A block's values are put into an array, or added to one.
struct PutFloats {
  float* out;
  COMMRT_INLINE void operator()(std::size_t at, F32s v) const { store_floats(out + at, v); }
};
struct AddFloats {
  float* sum;
  COMMRT_INLINE void operator()(std::size_t at, F32s v) const {
    store_floats(sum + at, load_floats(sum + at) + v);
  }
};

struct WireFloat16 {
  static constexpr WireFormat kFormat = WireFormat::F16;
  static constexpr std::size_t kBlock = wire_block(kFormat);
  static COMMRT_INLINE void encode(const float* v, Byte* out, float*) {
    for (std::size_t w = 0; w < kBlock; w += kLanes) {
#if COMMRT_VEC_BYTES >= 32
      HalfRaw half = to_float16(load_floats(v + w));
#elif defined(__aarch64__)
      float16x4_t half = vcvt_f16_f32((float32x4_t)load_floats(v + w));
#else
      typedef std::uint16_t Shorts __attribute__((vector_size(8)));
      Shorts half = __builtin_convertvector(Float16::from_float(load_floats(v + w)), Shorts);
#endif
      __builtin_memcpy(out + 2 * w, &half, kVec / 2);
    }
  }
  template <class Take>
  static COMMRT_INLINE void decode(const Byte* in, float, Take take) {
    for (std::size_t w = 0; w < kBlock; w += kLanes) {
#if COMMRT_VEC_BYTES >= 32
      take(w, from_float16(load_half(in + 2 * w)));
#elif defined(__aarch64__)
      float16x4_t half;
      __builtin_memcpy(&half, in + 2 * w, sizeof(half));
      take(w, (F32s)vcvt_f32_f16(half));
#else
      typedef std::uint16_t Shorts __attribute__((vector_size(8)));
      Shorts half;
      __builtin_memcpy(&half, in + 2 * w, sizeof(half));
      take(w, Float16::to_float(__builtin_convertvector(half, U32s)));
#endif
    }
  }
};

struct WireBFloat16 {
  static constexpr WireFormat kFormat = WireFormat::BF16;
  static constexpr std::size_t kBlock = wire_block(kFormat);
  static constexpr std::size_t kWords = kBlock / 2;
  static COMMRT_INLINE void encode(const float* v, Byte* out, float*) {
    for (std::size_t w = 0; w < kWords; w += kLanes) {
      U32s low = BFloat16::round_any(load_floats(v + w)) >> 16;
      U32s high = BFloat16::round_any(load_floats(v + kWords + w)) & bits32(0xffff0000u);
      store(out + 4 * w, (Raw)(low | high));
    }
  }
  template <class Take>
  static COMMRT_INLINE void decode(const Byte* in, float, Take take) {
    for (std::size_t w = 0; w < kWords; w += kLanes) {
      U32s words = (U32s)load(in + 4 * w);
      take(w, (F32s)(words << 16));
      take(kWords + w, (F32s)(words & bits32(0xffff0000u)));
    }
  }
};

struct WireInt8 {
  static constexpr WireFormat kFormat = WireFormat::I8;
  static constexpr std::size_t kBlock = wire_block(kFormat);
  static constexpr std::size_t kWords = kBlock / 4;
  static constexpr float kLeast = 0x1p-126f;  // below, a scale would lose its own places
  static constexpr float kMost = 0x1.020406p+121f;  // above, 127 of it would be infinite
  // Beside it a number has its units in the last place of the sum.
  static constexpr float kUnits = 0x1.8p23f;

  static COMMRT_INLINE float bits_as_float(std::uint32_t bits) {
    float value;
    __builtin_memcpy(&value, &bits, sizeof(value));
    return value;
  }
  static COMMRT_INLINE I32s greater(I32s x, I32s y) { return x > y ? x : y; }
  // Magnitudes have the same order as integers and as floats, and NaN comes last.
  static COMMRT_INLINE std::uint32_t largest(const float* v) {
    I32s most[4] = {};
    for (std::size_t w = 0; w < kBlock; w += 4 * kLanes) {
      for (int u = 0; u < 4; ++u) {
        I32s one = (I32s)((U32s)load_floats(v + w + u * kLanes) & bits32(0x7fffffff));
        most[u] = greater(one, most[u]);
      }
    }
    I32s found = greater(greater(most[0], most[1]), greater(most[2], most[3]));
    if constexpr (kLanes > 8) found = greater(found, pick<~0, 8>(found));
    if constexpr (kLanes > 4) found = greater(found, pick<~0, 4>(found));
    found = greater(found, pick<~0, 2>(found));
    return static_cast<std::uint32_t>(greater(found, pick<~0, 1>(found))[0]);
  }
  // The lowest byte is the nearest number of units, -127 to 127; ties go to the even one.
  static COMMRT_INLINE U32s units(const float* v, F32s per_unit) {
    return (U32s)(load_floats(v) * per_unit + splat<float>(kUnits));
  }
  // The highest byte as a signed number.
  static COMMRT_INLINE F32s number(U32s words) {
    return __builtin_convertvector((I32s)words >> 24, F32s);
  }
  static COMMRT_INLINE void encode(const float* v, Byte* out, float* scale) {
    const std::uint32_t most = largest(v);
    if (most >= 0x7f800000u) {
      *scale = bits_as_float(0x7fc00000u);
      __builtin_memset(out, 0, kBlock);
      return;
    }
    const float wanted = bits_as_float(most) / 127.0f;
    *scale = wanted < kLeast ? kLeast : wanted > kMost ? kMost : wanted;
    const F32s per_unit = splat<float>(1.0f / *scale);
    const U32s byte = bits32(0xff);
    for (std::size_t w = 0; w < kWords; w += kLanes) {
      const float* at = v + w;
      U32s words = (units(at, per_unit) & byte) | ((units(at + kWords, per_unit) & byte) << 8) |
                   ((units(at + 2 * kWords, per_unit) & byte) << 16) |
                   (units(at + 3 * kWords, per_unit) << 24);
      store(out + 4 * w, (Raw)words);
    }
  }
  template <class Take>
  static COMMRT_INLINE void decode(const Byte* in, float scale, Take take) {
    const F32s unit = splat<float>(scale);
    for (std::size_t w = 0; w < kWords; w += kLanes) {
      U32s words = (U32s)load(in + 4 * w);
      take(w, number(words << 24) * unit);
      take(kWords + w, number(words << 16) * unit);
      take(2 * kWords + w, number(words << 8) * unit);
      take(3 * kWords + w, number(words) * unit);
    }
  }
};

template <class T>
COMMRT_INLINE T finite_or_zero(T x) {
  return x - x == 0 ? x : T(0);
}

// The kernels of a format and a type of elements.
template <class W, class T>
struct Wire {
  static constexpr std::size_t kBlock = W::kBlock;
  static constexpr std::size_t kNbytes = wire_block_nbytes(W::kFormat);
  static constexpr bool kPlain = sizeof(T) == sizeof(float);

  // One part's scales and blocks.
  struct Place {
    Byte* wire;
    std::size_t scales;
    COMMRT_INLINE Place(const void* at, std::size_t n)
        : wire(static_cast<Byte*>(const_cast<void*>(at))),
          scales(wire_scales_nbytes(W::kFormat, n)) {}
    COMMRT_INLINE Byte* block(std::size_t b) const { return wire + scales + b * kNbytes; }
    COMMRT_INLINE float* scale(std::size_t b) const {
      return reinterpret_cast<float*>(wire) + (scales ? b : 0);
    }
    COMMRT_INLINE float scale_of(std::size_t b) const { return scales ? *scale(b) : 1.0f; }
  };

  static COMMRT_INLINE std::size_t length(std::size_t b, std::size_t n) {
    const std::size_t rest = n - b * kBlock;
    return rest < kBlock ? rest : kBlock;
  }

  // A block of x + residual as floats: in place where it can be, else in `room`, zeros behind.
  static COMMRT_INLINE const float* floats(const T* x, const T* residual, std::size_t count,
                                           float* room) {
    if constexpr (kPlain) {
      if (!residual && count == kBlock) return x;
    }
    if (count == kBlock && residual) {
      for (std::size_t i = 0; i < kBlock; ++i) room[i] = static_cast<float>(x[i] + residual[i]);
      return room;
    }
    if (count == kBlock) {
      for (std::size_t i = 0; i < kBlock; ++i) room[i] = static_cast<float>(x[i]);
      return room;
    }
    for (std::size_t i = 0; i < count; ++i)
      room[i] = static_cast<float>(residual ? x[i] + residual[i] : x[i]);
    for (std::size_t i = count; i < kBlock; ++i) room[i] = 0;
    return room;
  }

  static void encode(const void* xv, const void* rv, std::size_t n, void* wire) {
    alignas(64) float room[kBlock];
    const T* x = static_cast<const T*>(xv);
    const T* residual = static_cast<const T*>(rv);
    const Place to(wire, n);
    for (std::size_t b = 0; b * kBlock < n; ++b) {
      const T* rest = residual ? residual + b * kBlock : nullptr;
      W::encode(floats(x + b * kBlock, rest, length(b, n), room), to.block(b), to.scale(b));
    }
  }

  static void decode(const void* wire, std::size_t n, void* out) {
    alignas(64) float room[kBlock];
    const Place from(wire, n);
    for (std::size_t b = 0; b * kBlock < n; ++b) {
      T* to = static_cast<T*>(out) + b * kBlock;
      const std::size_t count = length(b, n);
      if constexpr (kPlain) {
        if (count == kBlock) {
          W::decode(from.block(b), from.scale_of(b), PutFloats{to});
          continue;
        }
      }
      W::decode(from.block(b), from.scale_of(b), PutFloats{room});
      for (std::size_t i = 0; i < count; ++i) to[i] = room[i];
    }
  }

  static void sum(const void* const* parts, int num, int own, const void* xv, const void* rv,
                  std::size_t n, float divisor, void* wire, void* lost) {
    alignas(64) float total[kBlock], room[kBlock];
    const T* x = static_cast<const T*>(xv);
    const T* residual = static_cast<const T*>(rv);
    const Place to(wire, n);
    for (std::size_t b = 0; b * kBlock < n; ++b) {
      const std::size_t count = length(b, n);
      for (std::size_t i = 0; i < kBlock; ++i) total[i] = 0;
      for (int k = 0; k < num; ++k) {
        if (k != own) {
          const Place from(parts[k], n);
          W::decode(from.block(b), from.scale_of(b), AddFloats{total});
          continue;
        }
        const T* rest = residual ? residual + b * kBlock : nullptr;
        const float* mine = floats(x + b * kBlock, rest, count, room);
        for (std::size_t i = 0; i < kBlock; ++i) total[i] += mine[i];
      }
      const float* said = total;
      if (divisor != 1) {
        for (std::size_t i = 0; i < kBlock; ++i) room[i] = total[i] / divisor;
        said = room;
      }
      W::encode(said, to.block(b), to.scale(b));
      if (!lost) continue;
      W::decode(to.block(b), to.scale_of(b), PutFloats{room});
      T* rest = static_cast<T*>(lost) + b * kBlock;
      for (std::size_t i = 0; i < count; ++i)
        rest[i] = finite_or_zero(total[i] - room[i] * divisor);
    }
  }

  static void settle(const void* wire, std::size_t n, const void* xv, void* rv) {
    alignas(64) float room[kBlock];
    const Place from(wire, n);
    for (std::size_t b = 0; b * kBlock < n; ++b) {
      W::decode(from.block(b), from.scale_of(b), PutFloats{room});
      const T* x = static_cast<const T*>(xv) + b * kBlock;
      T* residual = static_cast<T*>(rv) + b * kBlock;
      const std::size_t count = length(b, n);
      for (std::size_t i = 0; i < count; ++i)
        residual[i] = finite_or_zero(x[i] + residual[i] - static_cast<T>(room[i]));
    }
  }

  static constexpr WireKernels kernels() { return {encode, decode, sum, settle}; }
};

}  // namespace
}  // namespace commrt
