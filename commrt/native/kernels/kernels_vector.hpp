// SPDX-License-Identifier: Apache-2.0
// Vectors of one instruction set: loads, stores, and the element types as vectors.
//
// Included once by each kernels_<isa>.cpp, which defines COMMRT_VEC_BYTES. Those files are
// compiled with that set's flags, so everything here has internal linkage and nothing of the
// standard library is called: the linker could keep an AVX-512 copy of a shared inline
// function for all callers.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define COMMRT_INLINE inline __attribute__((always_inline))

namespace commrt {
namespace {

using Byte = unsigned char;
constexpr std::size_t kVec = COMMRT_VEC_BYTES;
constexpr std::size_t kLine = 64;

template <class T>
struct VecOf {
  typedef T type __attribute__((vector_size(COMMRT_VEC_BYTES)));
};
template <class T>
using Vec = typename VecOf<T>::type;
using Raw = Vec<std::uint8_t>;
using U32s = Vec<std::uint32_t>;
using F32s = Vec<float>;

template <class T>
COMMRT_INLINE Vec<T> splat(T value) {
  return value - Vec<T>{};  // a sum would turn -0 into 0
}

COMMRT_INLINE Raw load(const Byte* p) {
  Raw v;
  __builtin_memcpy(&v, p, kVec);
  return v;
}

COMMRT_INLINE void store(Byte* p, Raw v) { __builtin_memcpy(p, &v, kVec); }

// p is a multiple of kVec.
COMMRT_INLINE void store_stream(Byte* p, Raw v) {
#if COMMRT_VEC_BYTES == 64
  _mm512_stream_si512(reinterpret_cast<__m512i*>(p), (__m512i)v);
#elif COMMRT_VEC_BYTES == 32
  _mm256_stream_si256(reinterpret_cast<__m256i*>(p), (__m256i)v);
#elif defined(__x86_64__)
  _mm_stream_si128(reinterpret_cast<__m128i*>(p), (__m128i)v);
#else
  store(p, v);  // arm64 cores detect streams of full lines by themselves
#endif
}

#if COMMRT_VEC_BYTES == 64
// 0 < nbytes < kVec.
COMMRT_INLINE Raw load_some(const Byte* p, std::size_t nbytes) {
  return (Raw)_mm512_maskz_loadu_epi8(_bzhi_u64(~0ull, unsigned(nbytes)), p);
}

COMMRT_INLINE void store_some(Byte* p, Raw v, std::size_t nbytes) {
  _mm512_mask_storeu_epi8(p, _bzhi_u64(~0ull, unsigned(nbytes)), (__m512i)v);
}
#else
template <class Word>
COMMRT_INLINE std::uint64_t read(const Byte* p) {
  Word word;
  __builtin_memcpy(&word, p, sizeof(Word));
  return word;
}

template <class Word>
COMMRT_INLINE void write(Byte* p, std::uint64_t value) {
  Word word = static_cast<Word>(value);
  __builtin_memcpy(p, &word, sizeof(Word));
}

// A rest shorter than a vector is held as its first and its last word, which may overlap:
// one pair of moves serves every length from one word to two, and computing an element
// twice does no harm. (Through a padded buffer the loads would wait for the narrower stores.)
COMMRT_INLINE Raw load_some(const Byte* p, std::size_t nbytes) {
  const Byte* end = p + nbytes;
#if COMMRT_VEC_BYTES == 32
  if (nbytes >= 16)
    return (Raw)_mm256_loadu2_m128i(reinterpret_cast<const __m128i*>(end - 16),
                                    reinterpret_cast<const __m128i*>(p));
#endif
  Vec<std::uint64_t> words{};
  if (nbytes >= 8)
    words[0] = read<std::uint64_t>(p), words[1] = read<std::uint64_t>(end - 8);
  else if (nbytes >= 4)
    words[0] = read<std::uint32_t>(p) | read<std::uint32_t>(end - 4) << 32;
  else if (nbytes >= 2)
    words[0] = read<std::uint16_t>(p) | read<std::uint16_t>(end - 2) << 16;
  else
    words[0] = *p;
  return (Raw)words;
}

COMMRT_INLINE void store_some(Byte* p, Raw v, std::size_t nbytes) {
  Byte* end = p + nbytes;
#if COMMRT_VEC_BYTES == 32
  if (nbytes >= 16)
    return _mm256_storeu2_m128i(reinterpret_cast<__m128i*>(end - 16),
                                reinterpret_cast<__m128i*>(p), (__m256i)v);
#endif
  Vec<std::uint64_t> words = (Vec<std::uint64_t>)v;
  if (nbytes >= 8)
    write<std::uint64_t>(p, words[0]), write<std::uint64_t>(end - 8, words[1]);
  else if (nbytes >= 4)
    write<std::uint32_t>(p, words[0]), write<std::uint32_t>(end - 4, words[0] >> 32);
  else if (nbytes >= 2)
    write<std::uint16_t>(p, words[0]), write<std::uint16_t>(end - 2, words[0] >> 16);
  else
    *p = static_cast<Byte>(words[0]);
}
#endif

// An element type is: kItem bytes; Acc, what is reduced; widen and narrow between the bytes
// in memory (written as Out) and Acc; scale. kUnroll vectors are in flight at once. With
// kTogether, narrow_all does so many at a time; with kFetches, fetch is load and widen.
// Inputs are fetched into the cache kAhead bytes before they are used.
template <class T>
struct Same {
  using Acc = Vec<T>;
  using Out = Raw;
  using Factor = T;
  static constexpr std::size_t kItem = sizeof(T);
  static constexpr int kUnroll = 8;
  static constexpr bool kTogether = false;
  static constexpr bool kFetches = false;
  static constexpr std::size_t kAhead = 0;  // the processor itself looks as far ahead
  static COMMRT_INLINE Acc widen(Raw raw) { return (Acc)raw; }
  static COMMRT_INLINE Raw narrow(Acc acc) { return (Raw)acc; }
  static COMMRT_INLINE Acc scale(Acc acc, T factor) { return acc * splat<T>(factor); }
};

// A vector of 16-bit floats as two vectors of float32.
struct Floats {
  F32s a, b;
};

struct Half {
  using Acc = Floats;
  using Out = Raw;
  using Factor = float;
  static constexpr std::size_t kItem = 2;
  static constexpr int kUnroll = 4;
  static constexpr bool kTogether = false;
  static constexpr bool kFetches = false;
  // With so many instructions for a line, the processor has few lines in view at a time. Lines
  // that another core has just written then come slowly, above all from far away.
  static constexpr std::size_t kAhead = 1536;
  static COMMRT_INLINE Acc scale(Acc acc, float factor) {
    return {acc.a * splat<float>(factor), acc.b * splat<float>(factor)};
  }
};

// Finds out whether there was a NaN in any of the vectors seen.
#if COMMRT_VEC_BYTES == 64
struct NanSearch {
  __mmask16 numbers = 0xffff;
  COMMRT_INLINE void see(Floats v) {
    numbers = _mm512_mask_cmp_ps_mask(numbers, (__m512)v.a, (__m512)v.b, _CMP_ORD_Q);
  }
  COMMRT_INLINE bool found() const { return numbers != 0xffff; }
};
#elif COMMRT_VEC_BYTES == 32
struct NanSearch {
  U32s nans{};
  COMMRT_INLINE void see(Floats v) {
    nans |= (U32s)_mm256_cmp_ps((__m256)v.a, (__m256)v.b, _CMP_UNORD_Q);
  }
  COMMRT_INLINE bool found() const { return _mm256_movemask_ps((__m256)nans) != 0; }
};
#elif defined(__x86_64__)
struct NanSearch {
  U32s nans{};
  COMMRT_INLINE void see(Floats v) {
    nans |= (U32s)_mm_cmpunord_ps((__m128)v.a, (__m128)v.b);
  }
  COMMRT_INLINE bool found() const { return _mm_movemask_ps((__m128)nans) != 0; }
};
#else
struct NanSearch {
  U32s nans{};
  COMMRT_INLINE void see(Floats v) { nans |= (U32s)((v.a != v.a) | (v.b != v.b)); }
  COMMRT_INLINE bool found() const { return vmaxvq_u32((uint32x4_t)nans) != 0; }
};
#endif

// A vector of 8-bit floats as four vectors of float32: elements 0, 4, 8 ..., then 1, 5, 9 ...
struct Quarters {
  F32s a, b, c, d;
};

// 8-bit floats of kMantissa bits and that bias, in integer arithmetic as Float16 below. From
// kLargest (the bits of a float32) on all numbers are written as that one, which is infinite
// or, where there is no infinity, NaN. kNaN: the NaN that is written.
template <int kMantissa, std::uint32_t kBias, std::uint32_t kLargest, std::uint32_t kNaN>
struct Quarter {
  using Acc = Quarters;
  using Out = Raw;
  using Factor = float;
  using I32s = Vec<std::int32_t>;
  static constexpr std::size_t kItem = 1;
  static constexpr int kUnroll = 1;
  static constexpr bool kTogether = false;
  static constexpr bool kFetches = false;
  static constexpr std::size_t kAhead = 1536;
  static constexpr int kShift = 23 - kMantissa;
  static constexpr std::uint32_t kRebias = 127 - kBias;
  static constexpr bool kHasInfinity = kNaN != 0x7f;

  static COMMRT_INLINE U32s u32(std::uint32_t value) { return splat<std::uint32_t>(value); }
  static COMMRT_INLINE U32s less(U32s x, U32s y) { return (U32s)((I32s)x < (I32s)y); }
  static COMMRT_INLINE F32s to_float(U32s byte) {
    U32s u = (byte & u32(0x7f)) << kShift;
    U32s subnormal = less(u, u32(1u << 23));  // or zero
    // Subnormals get the exponent of the least normal number, which is then taken away.
    U32s value = u + u32(kRebias << 23) + (subnormal & u32(1u << 23));
    if constexpr (kHasInfinity)
      value += less(u32((0x7cu << kShift) - 1), u) & u32(kRebias << 23);
    else
      value |= less(u32((0x7fu << kShift) - 1), u) & u32(0x7fc00000);
    value = (U32s)((F32s)value - (F32s)(subnormal & u32((kRebias + 1) << 23)));
    return (F32s)(value | ((byte & u32(0x80)) << 24));
  }
  // Rounds to nearest even.
  static COMMRT_INLINE U32s from_float(F32s value) {
    U32s u = (U32s)value;
    U32s magnitude = u & u32(0x7fffffff);
    U32s large = less(u32(kLargest), magnitude);
    U32s m = (magnitude & ~large) | (u32(kLargest) & large);
    U32s normal = (m - u32((kRebias << 23) - ((1u << (kShift - 1)) - 1)) +
                   ((m >> kShift) & u32(1))) >> kShift;
    // A float32 whose last place is the smallest subnormal.
    U32s place = u32((127 + 24 - kBias - kMantissa) << 23);
    U32s subnormal = (U32s)((F32s)m + (F32s)place) - place;
    U32s small = less(m, u32((kRebias + 1) << 23));
    U32s byte = (subnormal & small) | (normal & ~small);
    if constexpr (kHasInfinity) byte |= less(u32(0x7f800000), magnitude) & u32(kNaN);
    return byte | ((u >> 24) & u32(0x80));
  }
  static COMMRT_INLINE Acc widen(Raw raw) {
    U32s fours = (U32s)raw;
    return {to_float(fours), to_float(fours >> 8), to_float(fours >> 16),
            to_float(fours >> 24)};
  }
  static COMMRT_INLINE Raw narrow(Acc acc) {
    return (Raw)(from_float(acc.a) | (from_float(acc.b) << 8) | (from_float(acc.c) << 16) |
                 (from_float(acc.d) << 24));
  }
  static COMMRT_INLINE Acc scale(Acc acc, float factor) {
    F32s by = splat<float>(factor);
    return {acc.a * by, acc.b * by, acc.c * by, acc.d * by};
  }
};

using Float8E4M3 = Quarter<3, 7, 0x43f00000 /* 480 */, 0x7f>;
using Float8E5M2 = Quarter<2, 15, 143u << 23 /* 65536 */, 0x7e>;

// bfloat16 is the upper half of a float32: a = elements 0, 2, 4 ..., b = 1, 3, 5 ...
struct BFloat16 : Half {
  static constexpr bool kTogether = true;

  static COMMRT_INLINE Acc widen(Raw raw) {
    U32s pairs = (U32s)raw;
    return {(F32s)(pairs << 16), (F32s)(pairs & splat<std::uint32_t>(0xffff0000u))};
  }
  // Rounds to nearest even in the upper half; not for NaNs.
  static COMMRT_INLINE U32s round(F32s value) {
    U32s u = (U32s)value;
    return u + (((u >> 16) & splat<std::uint32_t>(1)) + splat<std::uint32_t>(0x7fff));
  }
  // A NaN stays one because its quiet bit is set instead of rounding.
  static COMMRT_INLINE U32s round_any(F32s value) {
    U32s quiet = (U32s)value | splat<std::uint32_t>(0x00400000u);
    return value == value ? round(value) : quiet;
  }
  static COMMRT_INLINE Raw upper_halves(U32s a, U32s b) {
#if COMMRT_VEC_BYTES == 64
    return (Raw)_mm512_mask_blend_epi16(0xaaaaaaaa, (__m512i)(a >> 16), (__m512i)b);
#elif COMMRT_VEC_BYTES == 32
    return (Raw)_mm256_blend_epi16((__m256i)(a >> 16), (__m256i)b, 0xaa);
#else
    return (Raw)((a >> 16) | (b & splat<std::uint32_t>(0xffff0000u)));
#endif
  }
  static COMMRT_INLINE Raw narrow(Acc acc) {
    return upper_halves(round_any(acc.a), round_any(acc.b));
  }
  // Without NaNs.
  static COMMRT_INLINE Raw narrow_numbers(Acc acc) {
#if COMMRT_VEC_BYTES == 64
    // Rounds all elements at once. Their upper halves are one more where the lower ones are above
    // the middle, or in the middle with an odd upper half.
    const __m512i swap = _mm512_broadcast_i32x4(
        _mm_set_epi8(13, 12, 15, 14, 9, 8, 11, 10, 5, 4, 7, 6, 1, 0, 3, 2));
    constexpr __mmask64 kEven = 0x3333333333333333;
    __m512i a = (__m512i)acc.a, b = (__m512i)acc.b;
    __m512i upper = _mm512_mask_shuffle_epi8(b, kEven, a, swap);
    __m512i lower = _mm512_mask_shuffle_epi8(a, ~kEven, b, swap);
    constexpr int kOrAnd = 0xf8;  // lower | (upper & 1)
    lower = _mm512_ternarylogic_epi32(lower, upper, _mm512_set1_epi16(1), kOrAnd);
    __mmask32 up = _mm512_cmpgt_epu16_mask(lower, _mm512_set1_epi16(-0x8000));
    return (Raw)_mm512_mask_sub_epi16(upper, up, upper, _mm512_set1_epi16(-1));
#else
    return upper_halves(round(acc.a), round(acc.b));
#endif
  }
  // NaNs are rare, so all vectors together are asked for one.
  template <int Count>
  static COMMRT_INLINE void narrow_all(const Acc* acc, Raw* out) {
    NanSearch search;
#pragma GCC unroll 8
    for (int u = 0; u < Count; ++u) search.see(acc[u]);
    if (__builtin_expect(search.found(), false)) {
      for (int u = 0; u < Count; ++u) out[u] = narrow(acc[u]);
      return;
    }
#pragma GCC unroll 8
    for (int u = 0; u < Count; ++u) out[u] = narrow_numbers(acc[u]);
  }
};

#if COMMRT_VEC_BYTES >= 32
// The bytes of a vector as two halves. Conversions between them and memory need no moves
// between the halves of a register, which keep the same units busy as conversions do.
#if COMMRT_VEC_BYTES == 64
using HalfRaw = __m256i;
COMMRT_INLINE HalfRaw load_half(const Byte* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
COMMRT_INLINE F32s from_float16(HalfRaw v) { return (F32s)_mm512_cvtph_ps(v); }
COMMRT_INLINE HalfRaw to_float16(F32s v) {
  return _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT);
}
COMMRT_INLINE HalfRaw upper_half(Raw v) { return _mm512_extracti64x4_epi64((__m512i)v, 1); }
COMMRT_INLINE HalfRaw lower_half(Raw v) { return _mm512_castsi512_si256((__m512i)v); }
COMMRT_INLINE Raw joined(HalfRaw lower, HalfRaw upper) {
  return (Raw)_mm512_inserti64x4(_mm512_castsi256_si512(lower), upper, 1);
}
#else
using HalfRaw = __m128i;
COMMRT_INLINE HalfRaw load_half(const Byte* p) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
}
COMMRT_INLINE F32s from_float16(HalfRaw v) { return (F32s)_mm256_cvtph_ps(v); }
COMMRT_INLINE HalfRaw to_float16(F32s v) {
  return _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT);
}
COMMRT_INLINE HalfRaw upper_half(Raw v) { return _mm256_extracti128_si256((__m256i)v, 1); }
COMMRT_INLINE HalfRaw lower_half(Raw v) { return _mm256_castsi256_si128((__m256i)v); }
COMMRT_INLINE Raw joined(HalfRaw lower, HalfRaw upper) {
  return (Raw)_mm256_inserti128_si256(_mm256_castsi128_si256(lower), upper, 1);
}
#endif

struct Halves {
  HalfRaw lower, upper;
  COMMRT_INLINE Raw whole() const { return joined(lower, upper); }
};

COMMRT_INLINE void store(Byte* p, Halves v) {
  __builtin_memcpy(p, &v.lower, kVec / 2);
  __builtin_memcpy(p + kVec / 2, &v.upper, kVec / 2);
}
COMMRT_INLINE void store_stream(Byte* p, Halves v) { store_stream(p, v.whole()); }
COMMRT_INLINE void store_some(Byte* p, Halves v, std::size_t nbytes) {
  store_some(p, v.whole(), nbytes);
}

struct Float16 : Half {
  using Out = Halves;
  static constexpr bool kFetches = true;
  static COMMRT_INLINE Acc widen(Raw raw) {
    return {from_float16(lower_half(raw)), from_float16(upper_half(raw))};
  }
  static COMMRT_INLINE Acc fetch(const Byte* p) {
    return {from_float16(load_half(p)), from_float16(load_half(p + kVec / 2))};
  }
  static COMMRT_INLINE Out narrow(Acc acc) { return {to_float16(acc.a), to_float16(acc.b)}; }
};
#elif defined(__aarch64__)
struct Float16 : Half {
  static COMMRT_INLINE Acc widen(Raw raw) {
    float16x8_t v = vreinterpretq_f16_u8((uint8x16_t)raw);
    return {(F32s)vcvt_f32_f16(vget_low_f16(v)), (F32s)vcvt_f32_f16(vget_high_f16(v))};
  }
  static COMMRT_INLINE Raw narrow(Acc acc) {
    float16x4_t lo = vcvt_f16_f32((float32x4_t)acc.a);
    float16x4_t hi = vcvt_f16_f32((float32x4_t)acc.b);
    return (Raw)vreinterpretq_u8_f16(vcombine_f16(lo, hi));
  }
};
#else
// In integer arithmetic (after https://gist.github.com/rygorous/2156668): a = elements 0, 2,
// 4 ..., b = 1, 3, 5 ... Adding and subtracting normal numbers makes the subnormals right
// even where the process flushes subnormals to zero. Comparisons are of signed integers, the
// only ones there are, and choices are masks, which compilers do not make of "?:" here.
struct Float16 : Half {
  static constexpr int kUnroll = 1;
  using I32s = Vec<std::int32_t>;
  static COMMRT_INLINE U32s u32(std::uint32_t value) { return splat<std::uint32_t>(value); }
  static COMMRT_INLINE U32s less(U32s x, U32s y) { return (U32s)((I32s)x < (I32s)y); }
  static COMMRT_INLINE F32s to_float(U32s h) {
    U32s u = (h & u32(0x7fff)) << 13;
    U32s subnormal = less(u, u32(1u << 23));     // or zero
    U32s special = less(u32(0x0f7fffff), u);     // infinity or NaN
    // Subnormals get the exponent of the least normal number, which is then taken away.
    U32s value = u + u32(112u << 23) + (subnormal & u32(1u << 23)) + (special & u32(112u << 23));
    value = (U32s)((F32s)value - (F32s)(subnormal & u32(113u << 23)));
    return (F32s)(value | ((h & u32(0x8000)) << 16));
  }
  static COMMRT_INLINE U32s from_float(F32s value) {
    U32s u = (U32s)value;
    U32s magnitude = u & u32(0x7fffffff);
    U32s nan = less(u32(0x7f800000), magnitude) & u32(0x7e00);
    // From 65536 on all are infinite, as that is after rounding.
    U32s large = less(u32(143u << 23), magnitude);
    U32s m = (magnitude & ~large) | (u32(143u << 23) & large);
    U32s shift = u32(126u << 23);  // 0.5, whose last place is float16's smallest subnormal
    U32s subnormal = (U32s)((F32s)m + (F32s)shift) - shift;
    U32s normal = (m - u32((112u << 23) - 0xfff) + ((m >> 13) & u32(1))) >> 13;
    U32s small = less(m, u32(113u << 23));
    U32s half = (subnormal & small) | (normal & ~small);
    return half | nan | ((u >> 16) & u32(0x8000));
  }
  static COMMRT_INLINE Acc widen(Raw raw) {
    U32s pairs = (U32s)raw;
    return {to_float(pairs & u32(0xffff)), to_float(pairs >> 16)};
  }
  static COMMRT_INLINE Raw narrow(Acc acc) {
    return (Raw)(from_float(acc.a) | (from_float(acc.b) << 16));
  }
};
#endif

}  // namespace
}  // namespace commrt
