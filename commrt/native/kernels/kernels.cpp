// SPDX-License-Identifier: Apache-2.0
// Chooses the kernels of this machine; integer division.
#include "kernels/kernels.hpp"

#include <atomic>
#include <cstring>

#include "kernels/kernels_set.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace commrt {
namespace {

#if defined(__x86_64__)
bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

// __builtin_cpu_supports also asks whether the operating system saves the wide registers.
bool has_avx2() { return __builtin_cpu_supports("avx2") && has_f16c(); }

bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("bmi2") && has_avx2();
}
#endif

struct Available {
  const KernelSet* sets[3];
  int count = 0;

  Available() {
    sets[count++] = &kernels_base;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (has_avx2()) sets[count++] = &kernels_avx2;
    if (has_avx512()) sets[count++] = &kernels_avx512;
#endif
  }
};

const Available& available() {
  static const Available found;
  return found;
}

// Relaxed: the tables are constants, only the pointer to one of them changes.
std::atomic<const KernelSet*>& current() {
  static std::atomic<const KernelSet*> set{available().sets[available().count - 1]};
  return set;
}

const KernelSet& kernels() { return *current().load(std::memory_order_relaxed); }

// Divides in 64 bits: a divisor may lie outside the type. Int8, for example, has no 128, which
// still divides its least value.
template <class T, class Wide>
void divide(void* x, std::size_t n, std::int64_t divisor) {
  auto* bytes = static_cast<unsigned char*>(x);
  for (std::size_t at = 0; at < n * sizeof(T); at += sizeof(T)) {
    T value;
    std::memcpy(&value, bytes + at, sizeof(T));
    value = static_cast<T>(static_cast<Wide>(value) / static_cast<Wide>(divisor));
    std::memcpy(bytes + at, &value, sizeof(T));
  }
}

}  // namespace

CombineFn combine_for(DType dtype, RedOp op) {
  return kernels().combine[static_cast<int>(dtype)][static_cast<int>(op)];
}

const WireKernels& wire_kernels(WireFormat format, DType dtype) {
  return kernels().wire[static_cast<int>(format)][dtype == DType::F64];
}

void csr::multiply(int index_nbytes, DType dtype, const Product& product) {
  if (product.first >= product.last || product.width == 0) return;
  kernels().multiply_csr.of[dtype == DType::F64][index_nbytes == 8](product);
}

const channel_norm::Kernels& channel_norm::kernels_of(DType dtype) {
  return kernels().channel_norm[dtype == DType::F64];
}

void copy_streaming(void* dst, const void* src, std::size_t nbytes) {
  kernels().copy_streaming(dst, src, nbytes);
}

void divide_inplace(DType dtype, void* x, std::size_t n, std::int64_t divisor) {
  switch (dtype) {
    case DType::I8: return divide<std::int8_t, std::int64_t>(x, n, divisor);
    case DType::I16: return divide<std::int16_t, std::int64_t>(x, n, divisor);
    case DType::I32: return divide<std::int32_t, std::int64_t>(x, n, divisor);
    case DType::I64: return divide<std::int64_t, std::int64_t>(x, n, divisor);
    case DType::U8: return divide<std::uint8_t, std::uint64_t>(x, n, divisor);
    case DType::U16: return divide<std::uint16_t, std::uint64_t>(x, n, divisor);
    case DType::U32: return divide<std::uint32_t, std::uint64_t>(x, n, divisor);
    case DType::U64: return divide<std::uint64_t, std::uint64_t>(x, n, divisor);
    default: return;  // floats scale their inputs; bool has no average
  }
}

const char* isa() { return kernels().name; }

int num_isas() { return available().count; }

const char* isa_name(int index) { return available().sets[index]->name; }

bool use_isa(const char* name) {
  for (int i = 0; i < available().count; ++i) {
    if (std::strcmp(name, isa_name(i)) == 0) {
      current().store(available().sets[i], std::memory_order_relaxed);
      return true;
    }
  }
  return false;
}

}  // namespace commrt
