// SPDX-License-Identifier: Apache-2.0
// The wire formats of compression: packs floats for sending, and unpacks them.
//
// A block holds consecutive elements. The last block may be short, and takes as many bytes as a
// full one. `wire` points to a part's scales (int8 only: one float32 per block, padded to a
// multiple of 64 bytes), and the blocks follow them:
//
// - float16: 64 elements, to nearest even; beyond 65520 infinite.
// - bfloat16: 64 elements, to nearest even. Word w of a block holds elements w and w + 32, so
//   that no instruction set has to move values between the places of a vector.
// - int8: 256 elements. Byte k of word w is element w + 64 k, in units of the block's scale,
//   max|x| / 127, or 2^-126 where that is less. A NaN or an infinity makes the scale NaN, and
//   so the whole block.
//
// Results do not depend on the instruction set, but for sign and payload of a NaN.
#pragma once

#include <cstddef>
#include <cstdint>

#include "types.hpp"

namespace commrt {

enum class WireFormat : std::uint8_t { F16, BF16, I8 };
constexpr int kNumWireFormats = 3;

// Each file its own: the linker must not keep the copy of one that was compiled for AVX-512.
static constexpr std::size_t wire_block(WireFormat format) {
  return format == WireFormat::I8 ? 256 : 64;
}
static constexpr std::size_t wire_block_nbytes(WireFormat format) {
  return format == WireFormat::I8 ? 256 : 128;
}
static constexpr std::size_t wire_blocks(WireFormat format, std::size_t n) {
  return (n + wire_block(format) - 1) / wire_block(format);
}
static constexpr std::size_t wire_scales_nbytes(WireFormat format, std::size_t n) {
  if (format != WireFormat::I8) return 0;
  return (wire_blocks(format, n) * sizeof(float) + 63) / 64 * 64;
}
static constexpr std::size_t wire_nbytes(WireFormat format, std::size_t n) {
  return wire_scales_nbytes(format, n) + wire_blocks(format, n) * wire_block_nbytes(format);
}

// x, residual, out and lost have the elements' type, float or double; what is on the wire was
// rounded to float first.
struct WireKernels {
  // wire = x + residual; residual may be null.
  void (*encode)(const void* x, const void* residual, std::size_t n, void* wire);
  void (*decode)(const void* wire, std::size_t n, void* out);
  // wire = sum / divisor, where the sum is that of `num` parts from left to right, in float.
  // Part `own` is x + residual as it is; what the others point to is not read there. lost, unless
  // null, gets the sum without what its wire says.
  void (*sum)(const void* const* parts, int num, int own, const void* x, const void* residual,
              std::size_t n, float divisor, void* wire, void* lost);
  // residual = x + residual - wire; 0 where that is not finite.
  void (*settle)(const void* wire, std::size_t n, const void* x, void* residual);
};

// The kernels of the instruction set in use; dtype is F32 or F64.
const WireKernels& wire_kernels(WireFormat format, DType dtype);

}  // namespace commrt
