// SPDX-License-Identifier: Apache-2.0
// The loops over memory, and the table of all kernels of one instruction set.
#pragma once

#include <initializer_list>
#include <type_traits>

#include "kernels/kernels.hpp"
#include "kernels/kernels_csr.hpp"
#include "kernels/kernels_norm.hpp"
#include "kernels/kernels_ops.hpp"
#include "kernels/kernels_set.hpp"
#include "kernels/kernels_wire.hpp"

namespace commrt {
namespace {

// The buffers of one call; offsets are in bytes.
struct Job {
  Byte* dst;
  Byte* dst2;
  const void* const* srcs;
  int nsrc;
  std::size_t nbytes;
  const std::uint64_t* scaled;
  Scale factor;
  bool stream, stream2;
};

template <class T>
COMMRT_INLINE T factor_of(Scale factor) {
  if constexpr (std::is_integral_v<T>)
    return static_cast<T>(factor.integer);
  else
    return static_cast<T>(factor.real);
}

// N inputs, or any number if N = 0; Unroll vectors in each turn of the loop.
template <class E, class Op, int N, bool Scaled, int Unroll = E::kUnroll>
struct Loop {
  using Acc = typename E::Acc;
  using Out = typename E::Out;
  using Factor = typename E::Factor;
  static constexpr std::size_t kBlock = kVec * Unroll;

  Job job;
  // Local copies: stores cannot change them, so they stay in registers.
  const Byte* fixed[N ? N : 1];
  std::uint64_t scaled_first = 0;

  COMMRT_INLINE explicit Loop(const Job& j) : job(j) {
    for (int k = 0; k < N; ++k) fixed[k] = static_cast<const Byte*>(j.srcs[k]);
    if constexpr (Scaled) scaled_first = j.scaled[0];
  }

  COMMRT_INLINE int nsrc() const { return N ? N : job.nsrc; }
  COMMRT_INLINE const Byte* src(int k) const {
    return N ? fixed[k] : static_cast<const Byte*>(job.srcs[k]);
  }

  static COMMRT_INLINE Acc fetch(const Byte* p) {
    if constexpr (E::kFetches)
      return E::fetch(p);
    else
      return E::widen(load(p));
  }

  // Multiplying by one is exact, so unscaled inputs need no code of their own.
  COMMRT_INLINE Acc input(Acc widened, int k) const {
    if constexpr (Scaled) {
      bool chosen = (k < 64 ? scaled_first >> k : job.scaled[k / 64] >> (k % 64)) & 1;
      return E::scale(widened, chosen ? factor_of<Factor>(job.factor) : Factor(1));
    } else {
      return widened;
    }
  }

  template <int Count>
  static COMMRT_INLINE void put(Byte* p, const Out* value, bool stream) {
    if (stream) {
#pragma GCC unroll 8
      for (int u = 0; u < Count; ++u) store_stream(p + u * kVec, value[u]);
    } else {
#pragma GCC unroll 8
      for (int u = 0; u < Count; ++u) store(p + u * kVec, value[u]);
    }
  }

  // All loads come before the first store: dst may be one of the inputs.
  template <int Count>
  COMMRT_INLINE void block(std::size_t at, bool stream, bool stream2) const {
    Acc acc[Count];
    const Byte* p = src(0) + at;
#pragma GCC unroll 8
    for (int u = 0; u < Count; ++u) acc[u] = input(fetch(p + u * kVec), 0);
    for (int k = 1; k < nsrc(); ++k) {
      p = src(k) + at;
#pragma GCC unroll 8
      for (int u = 0; u < Count; ++u)
        acc[u] = Op::apply(acc[u], input(fetch(p + u * kVec), k));
    }
    Out value[Count];
    if constexpr (E::kTogether) {
      E::template narrow_all<Count>(acc, value);
    } else {
#pragma GCC unroll 8
      for (int u = 0; u < Count; ++u) value[u] = E::narrow(acc[u]);
    }
    put<Count>(job.dst + at, value, stream);
    if (job.dst2) put<Count>(job.dst2 + at, value, stream2);
  }

  // Fewer than kVec bytes.
  COMMRT_INLINE void part(std::size_t at, std::size_t rest) const {
    Acc acc = input(E::widen(load_some(src(0) + at, rest)), 0);
    for (int k = 1; k < nsrc(); ++k)
      acc = Op::apply(acc, input(E::widen(load_some(src(k) + at, rest)), k));
    Out value = E::narrow(acc);
    store_some(job.dst + at, value, rest);
    if (job.dst2) store_some(job.dst2 + at, value, rest);
  }

  // Bytes [at, end), fewer than a block. Takes the job by value: a Loop whose address is
  // passed on would live in memory instead of registers.
  static __attribute__((noinline)) void edge(Job job, std::size_t at, std::size_t end) {
    Loop loop(job);
    for (; at + kVec <= end; at += kVec) loop.template block<1>(at, false, false);
    if (at < end) loop.part(at, end - at);
  }

  // The lines of all inputs that hold bytes [at, end).
  COMMRT_INLINE void prefetch(std::size_t at, std::size_t end) const {
    for (; at < end; at += kLine)
      for (int k = 0; k < nsrc(); ++k) __builtin_prefetch(src(k) + at);
  }

  // Streams whole lines from an aligned address on; a second streamed destination that is
  // aligned differently, and pointers that never reach a line boundary, are stored plainly.
  COMMRT_INLINE void run() const {
    if (job.nbytes < kVec) {
      if (job.nbytes) part(0, job.nbytes);
      return;
    }
    bool stream = job.stream, stream2 = job.stream2;
    std::size_t at = 0;
    if (stream || stream2) {
      at = (0 - reinterpret_cast<std::uintptr_t>(stream ? job.dst : job.dst2)) % kLine;
      if (at % E::kItem || job.nbytes < at + kBlock) at = 0, stream = stream2 = false;
      if (stream && stream2 && (reinterpret_cast<std::uintptr_t>(job.dst) -
                                reinterpret_cast<std::uintptr_t>(job.dst2)) % kLine)
        stream2 = false;
      if (at) edge(job, 0, at);
    }
    if constexpr (E::kAhead > 0) {
      prefetch(at, job.nbytes < at + E::kAhead ? job.nbytes : at + E::kAhead);
      for (; at + kBlock + E::kAhead <= job.nbytes; at += kBlock) {
        prefetch(at + E::kAhead, at + E::kAhead + kBlock);
        block<Unroll>(at, stream, stream2);
      }
    }
    for (; at + kBlock <= job.nbytes; at += kBlock) block<Unroll>(at, stream, stream2);
    if (at < job.nbytes) edge(job, at, job.nbytes);
  }
};

// One input: whatever the type, bytes are copied.
struct Copy : Same<std::uint8_t> {};

void copy_one(const Job& job) {
  const Byte* src = static_cast<const Byte*>(job.srcs[0]);
  Job todo = job;
  if (job.dst == src) {
    if (!job.dst2) return;
    todo.dst = job.dst2;
    todo.stream = job.stream2;
    todo.dst2 = nullptr;
    todo.stream2 = false;
  }
  if (!todo.dst2 && !todo.stream)
    __builtin_memcpy(todo.dst, src, todo.nbytes);
  else
    Loop<Copy, Add, 1, false>(todo).run();
}

void copy_streaming_kernel(void* dst, const void* src, std::size_t nbytes) {
  copy_one(Job{static_cast<Byte*>(dst), nullptr, &src, 1, nbytes, nullptr, {}, true, false});
}

COMMRT_INLINE Job make_job(void* dst, void* dst2, const void* const* srcs, int nsrc,
                           std::size_t nbytes, const std::uint64_t* scaled, Scale factor,
                          Store store) {
  int bits = static_cast<int>(store);
  return Job{static_cast<Byte*>(dst), static_cast<Byte*>(dst2), srcs, nsrc, nbytes, scaled, factor,
             (bits & 1) != 0, dst2 && (bits & 2) != 0};
}

// Parts = 2 treats a complex element as two floats. One loop for two inputs and one, a short
// one, for all other counts: there are many of these.
template <class E, class Op, std::size_t Parts = 1>
void reduce(void* dst, void* dst2, const void* const* srcs, int nsrc, std::size_t n,
            const std::uint64_t*, Scale, Store store) {
  Job job = make_job(dst, dst2, srcs, nsrc, n * E::kItem * Parts, nullptr, {}, store);
  if (nsrc == 1) return copy_one(job);
  if (nsrc == 2) return Loop<E, Op, 2, false>(job).run();
  Loop<E, Op, 0, false, (E::kUnroll + 1) / 2>(job).run();
}

// Does the same as reduce, with a loop of its own for each common number of inputs.
template <class E, class Op, std::size_t Parts = 1>
void reduce_hot(void* dst, void* dst2, const void* const* srcs, int nsrc, std::size_t n,
                const std::uint64_t*, Scale, Store store) {
  Job job = make_job(dst, dst2, srcs, nsrc, n * E::kItem * Parts, nullptr, {}, store);
  switch (nsrc) {
    case 1: return copy_one(job);
    case 2: return Loop<E, Op, 2, false>(job).run();
    case 3: return Loop<E, Op, 3, false>(job).run();
    case 4: return Loop<E, Op, 4, false>(job).run();
    default: return Loop<E, Op, 0, false>(job).run();
  }
}

template <class E, class Op, std::size_t Parts = 1>
void reduce_scaled(void* dst, void* dst2, const void* const* srcs, int nsrc, std::size_t n,
                   const std::uint64_t* scaled, Scale factor, Store store) {
  if (!scaled) return reduce_hot<E, Op, Parts>(dst, dst2, srcs, nsrc, n, nullptr, {}, store);
  Job job = make_job(dst, dst2, srcs, nsrc, n * E::kItem * Parts, scaled, factor, store);
  if (nsrc == 2) return Loop<E, Op, 2, true>(job).run();
  Loop<E, Op, 0, true>(job).run();
}

constexpr CombineFn& entry(KernelSet& set, DType dtype, RedOp op) {
  return set.combine[static_cast<int>(dtype)][static_cast<int>(op)];
}

template <class T, T Value, T One>
constexpr void add_logical(KernelSet& set, DType dtype) {
  entry(set, dtype, RedOp::Land) = reduce<Falsity<T, Value, One>, Or>;
  entry(set, dtype, RedOp::Lor) = reduce<Falsity<T, Value, One>, And>;
  entry(set, dtype, RedOp::Lxor) = reduce<Falsity<T, Value, One>, NotXor>;
}

// sum, prod and the bitwise ones are the same for signed and unsigned: both wrap.
template <class Signed, class T>
constexpr void add_integers(KernelSet& set, DType signed_type, DType unsigned_type) {
  entry(set, signed_type, RedOp::Min) = reduce<Same<Signed>, Least>;
  entry(set, signed_type, RedOp::Max) = reduce<Same<Signed>, Greatest>;
  entry(set, unsigned_type, RedOp::Min) = reduce<Same<T>, Least>;
  entry(set, unsigned_type, RedOp::Max) = reduce<Same<T>, Greatest>;
  for (DType dtype : {signed_type, unsigned_type}) {
    entry(set, dtype, RedOp::Sum) = reduce_hot<Same<T>, Add>;
    entry(set, dtype, RedOp::Avg) = reduce_hot<Same<T>, Add>;
    entry(set, dtype, RedOp::PremulSum) = reduce_scaled<Same<T>, Add>;
    using Product = std::conditional_t<sizeof(T) == 1, MultiplyBytes, Multiply>;
    entry(set, dtype, RedOp::Prod) = reduce<Same<T>, Product>;
    entry(set, dtype, RedOp::Band) = reduce<Same<std::uint8_t>, And, sizeof(T)>;
    entry(set, dtype, RedOp::Bor) = reduce<Same<std::uint8_t>, Or, sizeof(T)>;
    entry(set, dtype, RedOp::Bxor) = reduce<Same<std::uint8_t>, Xor, sizeof(T)>;
    add_logical<T, static_cast<T>(~T(0)), T(1)>(set, dtype);
  }
}

template <class E, class Sum, class Prod>
constexpr void add_sums(KernelSet& set, DType dtype) {
  for (RedOp op : {RedOp::Sum, RedOp::Avg, RedOp::PremulSum})
    entry(set, dtype, op) = reduce_scaled<E, Sum>;
  entry(set, dtype, RedOp::Prod) = reduce<E, Prod>;
}

template <class T>
constexpr void add_floats(KernelSet& set, DType dtype) {
  add_sums<Same<T>, Add, Multiply>(set, dtype);
  entry(set, dtype, RedOp::Min) = reduce<Ordered<T, false>, LeastOrdered>;
  entry(set, dtype, RedOp::Max) = reduce<Ordered<T, true>, LeastOrdered>;
}

template <class E, class Sum, class T, class Word, Word Infinity, Word Quiet>
constexpr void add_short_floats(KernelSet& set, DType dtype) {
  add_sums<E, Widened<Sum>, Widened<Multiply>>(set, dtype);
  entry(set, dtype, RedOp::Min) = reduce<OrderedShort<T, Word, Infinity, Quiet, false>, Least>;
  entry(set, dtype, RedOp::Max) =
      reduce<OrderedShort<T, Word, Infinity, Quiet, true>, Greatest>;
}

template <class E, class Sum, std::uint16_t Infinity, std::uint16_t Quiet>
constexpr void add_halves(KernelSet& set, DType dtype) {
  add_short_floats<E, Sum, std::int16_t, std::uint16_t, Infinity, Quiet>(set, dtype);
}

// Infinity: or the largest number, where there is no infinity.
template <class E, std::uint8_t Infinity, std::uint8_t Quiet>
constexpr void add_quarters(KernelSet& set, DType dtype) {
  add_short_floats<E, Add, std::int8_t, std::uint8_t, Infinity, Quiet>(set, dtype);
}

template <class T>
constexpr void add_complex(KernelSet& set, DType dtype) {
  for (RedOp op : {RedOp::Sum, RedOp::Avg, RedOp::PremulSum})
    entry(set, dtype, op) = reduce_scaled<Same<T>, Add, 2>;
  entry(set, dtype, RedOp::Prod) = reduce<Same<T>, MultiplyComplex, 2>;
}

constexpr void add_bool(KernelSet& set) {
  add_logical<std::uint8_t, 0xff, 1>(set, DType::Bool);
  CombineFn land = entry(set, DType::Bool, RedOp::Land);
  CombineFn lor = entry(set, DType::Bool, RedOp::Lor);
  for (RedOp op : {RedOp::Prod, RedOp::Min, RedOp::Band}) entry(set, DType::Bool, op) = land;
  for (RedOp op : {RedOp::Sum, RedOp::Max, RedOp::Bor}) entry(set, DType::Bool, op) = lor;
  entry(set, DType::Bool, RedOp::Bxor) = entry(set, DType::Bool, RedOp::Lxor);
}

template <class W>
constexpr void add_wire(KernelSet& set) {
  set.wire[static_cast<int>(W::kFormat)][0] = Wire<W, float>::kernels();
  set.wire[static_cast<int>(W::kFormat)][1] = Wire<W, double>::kernels();
}

constexpr KernelSet make_kernel_set(const char* name) {
  KernelSet set{};
  set.name = name;
  set.copy_streaming = copy_streaming_kernel;
  add_bool(set);
  add_integers<std::int8_t, std::uint8_t>(set, DType::I8, DType::U8);
  add_integers<std::int16_t, std::uint16_t>(set, DType::I16, DType::U16);
  add_integers<std::int32_t, std::uint32_t>(set, DType::I32, DType::U32);
  add_integers<std::int64_t, std::uint64_t>(set, DType::I64, DType::U64);
  add_halves<Float16, AddFused, 0x7c00, 0x7e00>(set, DType::F16);
  add_halves<BFloat16, Add, 0x7f80, 0x7fc0>(set, DType::BF16);
  add_quarters<Float8E4M3, 0x7e, 0x7f>(set, DType::F8E4M3);
  add_quarters<Float8E5M2, 0x7c, 0x7e>(set, DType::F8E5M2);
  add_floats<float>(set, DType::F32);
  add_floats<double>(set, DType::F64);
  add_logical<std::uint16_t, 0x7fff, 0x3c00>(set, DType::F16);
  add_logical<std::uint16_t, 0x7fff, 0x3f80>(set, DType::BF16);
  add_logical<std::uint8_t, 0x7f, 0x38>(set, DType::F8E4M3);
  add_logical<std::uint8_t, 0x7f, 0x3c>(set, DType::F8E5M2);
  add_logical<std::uint32_t, 0x7fffffff, 0x3f800000>(set, DType::F32);
  add_logical<std::uint64_t, 0x7fffffffffffffff, 0x3ff0000000000000>(set, DType::F64);
  add_complex<float>(set, DType::C64);
  add_complex<double>(set, DType::C128);
  // Both parts of a complex64 in one 64-bit element, the real part in its lower half.
  add_logical<std::uint64_t, 0x7fffffff7fffffff, 0x000000003f800000>(set, DType::C64);
  entry(set, DType::C128, RedOp::Land) = reduce<FalsityComplex, Or, 2>;
  entry(set, DType::C128, RedOp::Lor) = reduce<FalsityComplex, And, 2>;
  entry(set, DType::C128, RedOp::Lxor) = reduce<FalsityComplex, NotXor, 2>;
  add_wire<WireFloat16>(set);
  add_wire<WireBFloat16>(set);
  add_wire<WireInt8>(set);
  set.multiply_csr = make_multiply_kernels();
  set.channel_norm[0] = make_norm_kernels<float>();
  set.channel_norm[1] = make_norm_kernels<double>();
  return set;
}

}  // namespace
}  // namespace commrt
