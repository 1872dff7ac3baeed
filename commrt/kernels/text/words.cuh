// SPDX-License-Identifier: Apache-2.0
// Words of memory, and loads and stores of them at any address.
//
// All texts of this folder are CUDA C that needs no header, not even CUDA's: NVRTC compiles
// them at run time. tests/support/kernels_on_cpu/cuda_as_cpp.hpp lets a C++ compiler take the same text.

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i8 = signed char;
using i16 = short;
using i32 = int;
using i64 = long long;

#define COMMRT_DEVICE __device__ __forceinline__
#define COMMRT_KERNEL extern "C" __global__ void __launch_bounds__(256)
// A structure that threads index, without a copy for each.
#define COMMRT_PARAMETER const __grid_constant__

// Both parts of a complex128.
struct alignas(16) Pair {
  u64 first, second;
};

// What one instruction loads or stores.
struct alignas(16) Line {
  u32 word[4];
};
constexpr u64 kLine = sizeof(Line);

COMMRT_DEVICE u64 address(const void* p) { return reinterpret_cast<u64>(p); }

// This thread's number in the launch, and how many there are.
COMMRT_DEVICE u64 thread_number() { return u64(blockIdx.x) * blockDim.x + threadIdx.x; }
COMMRT_DEVICE u64 thread_count() { return u64(gridDim.x) * blockDim.x; }

// A GPU loads whole words from multiples of their size only.
template <class Word>
COMMRT_DEVICE Word load(const u8* p) {
  return *reinterpret_cast<const Word*>(p);
}
template <class Word>
COMMRT_DEVICE void store(u8* p, Word value) {
  *reinterpret_cast<Word*>(p) = value;
}

// From any address, byte by byte.
template <class Word>
struct Bytes {
  static COMMRT_DEVICE Word load(const u8* p) {
    Word value = 0;
    for (int i = 0; i < int(sizeof(Word)); ++i) value |= Word(Word(p[i]) << (8 * i));
    return value;
  }
  static COMMRT_DEVICE void store(u8* p, Word value) {
    for (int i = 0; i < int(sizeof(Word)); ++i) p[i] = u8(value >> (8 * i));
  }
};
template <>
struct Bytes<Pair> {
  static COMMRT_DEVICE Pair load(const u8* p) {
    return Pair{Bytes<u64>::load(p), Bytes<u64>::load(p + 8)};
  }
  static COMMRT_DEVICE void store(u8* p, Pair value) {
    Bytes<u64>::store(p, value.first);
    Bytes<u64>::store(p + 8, value.second);
  }
};

template <class Word>
COMMRT_DEVICE Word load_any(const u8* p) {
  return address(p) % sizeof(Word) ? Bytes<Word>::load(p) : load<Word>(p);
}
template <class Word>
COMMRT_DEVICE void store_any(u8* p, Word value) {
  if (address(p) % sizeof(Word))
    Bytes<Word>::store(p, value);
  else
    store(p, value);
}

// The items of a line, with i known to the compiler: lines stay in registers.
template <class Bits>
struct Items {
  static constexpr int kCount = int(kLine / sizeof(Bits));
  static constexpr int kPerWord = int(4 / sizeof(Bits));
  static constexpr int kShift = 8 * int(sizeof(Bits));
  static COMMRT_DEVICE Bits get(const Line& line, int i) {
    return Bits(line.word[i / kPerWord] >> (i % kPerWord * kShift));
  }
  static COMMRT_DEVICE void put(Line& line, int i, Bits value) {
    const u32 part = u32(value) << (i % kPerWord * kShift);
    line.word[i / kPerWord] = i % kPerWord ? line.word[i / kPerWord] | part : part;
  }
};
template <>
struct Items<u64> {
  static constexpr int kCount = 2;
  static COMMRT_DEVICE u64 get(const Line& line, int i) {
    return line.word[2 * i] | u64(line.word[2 * i + 1]) << 32;
  }
  static COMMRT_DEVICE void put(Line& line, int i, u64 value) {
    line.word[2 * i] = u32(value);
    line.word[2 * i + 1] = u32(value >> 32);
  }
};
template <>
struct Items<Pair> {
  static constexpr int kCount = 1;
  static COMMRT_DEVICE Pair get(const Line& line, int) {
    return Pair{Items<u64>::get(line, 0), Items<u64>::get(line, 1)};
  }
  static COMMRT_DEVICE void put(Line& line, int, Pair value) {
    Items<u64>::put(line, 0, value.first);
    Items<u64>::put(line, 1, value.second);
  }
};
