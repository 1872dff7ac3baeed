// SPDX-License-Identifier: Apache-2.0
// Launches of kernels, by their addresses, for tests/support/kernels_on_cpu.py; behind the kernels.
#pragma once

extern "C" {

void launch_reduce(void (*kernel)(void*, const void*, u64), unsigned blocks, void* dst,
                   const void* src, u64 count) {
  emulated::launch(kernel, blocks, dst, src, count);
}

void launch_scaled(void (*kernel)(void*, const void*, u64, u32, Factor), unsigned blocks,
                   void* dst, const void* src, u64 count, u32 which, double real, i64 integer) {
  emulated::launch(kernel, blocks, dst, src, count, which, Factor{real, integer});
}

void launch_divide(void (*kernel)(void*, u64, i64), unsigned blocks, void* dst, u64 count,
                   i64 divisor) {
  emulated::launch(kernel, blocks, dst, count, divisor);
}

void launch_boxes(void (*kernel)(u8*, Arrays, Table), unsigned blocks, u8* buffer,
                  const Arrays* arrays, const Table* table) {
  emulated::launch(kernel, blocks, buffer, *arrays, *table);
}

void launch_combine(void (*kernel)(const u8*, Arrays, Table, u32), unsigned blocks,
                    const u8* buffer, const Arrays* arrays, const Table* table, u32 op) {
  emulated::launch(kernel, blocks, buffer, *arrays, *table, op);
}

// One thread of a launch.
void run_reduce(void (*kernel)(void*, const void*, u64), const emulated::Thread* one, void* dst,
                const void* src, u64 count) {
  emulated::run_one(kernel, *one, dst, src, count);
}

void run_boxes(void (*kernel)(u8*, Arrays, Table), const emulated::Thread* one, u8* buffer,
               const Arrays* arrays, const Table* table) {
  emulated::run_one(kernel, *one, buffer, *arrays, *table);
}

void run_combine(void (*kernel)(const u8*, Arrays, Table, u32), const emulated::Thread* one,
                 const u8* buffer, const Arrays* arrays, const Table* table, u32 op) {
  emulated::run_one(kernel, *one, buffer, *arrays, *table, op);
}

// Rounds float32s, given by their bits.
void narrow_float16(const u32* from, u16* to, u64 count) {
  for (u64 i = 0; i < count; ++i) to[i] = Float16::narrow(as_float(from[i]));
}
void narrow_bfloat16(const u32* from, u16* to, u64 count) {
  for (u64 i = 0; i < count; ++i) to[i] = BFloat16::narrow(as_float(from[i]));
}
void narrow_float8_e4m3fn(const u32* from, u8* to, u64 count) {
  for (u64 i = 0; i < count; ++i) to[i] = Float8E4M3::narrow(as_float(from[i]));
}
void narrow_float8_e5m2(const u32* from, u8* to, u64 count) {
  for (u64 i = 0; i < count; ++i) to[i] = Float8E5M2::narrow(as_float(from[i]));
}

u32 load_word(const u8* p) { return load<u32>(p); }

}  // extern "C"
