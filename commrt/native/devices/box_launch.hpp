// SPDX-License-Identifier: Apache-2.0
// Describes one kernel launch that moves boxes of arrays; commrt/kernels/boxes.py makes its tables.
// The kernel is in commrt/kernels/text/boxes.cuh. Devices without hardware run the same code here.
#pragma once

#include <cstddef>
#include <cstdint>

#include "types.hpp"

namespace commrt {

constexpr int kMostLaunchDims = 8, kMostLaunchArrays = 16;

enum class BoxKind : int { Pack = 0, Unpack, Combine };
constexpr int kNumBoxKinds = 3;
const char* box_kind_name(BoxKind kind);

struct BoxLaunch {
  BoxKind kind = BoxKind::Pack;
  RedOp op = RedOp::Sum;      // of Combine,
  DType dtype = DType::U8;    // whose units are items of this type
  unsigned char* buffer = nullptr;
  std::size_t buffer_nbytes = 0;
  unsigned char* arrays[kMostLaunchArrays] = {};
  // Lies in memory that the device reaches: boxes, and their terms from `terms_at` on.
  const unsigned char* table = nullptr;
  std::size_t table_nbytes = 0, terms_at = 0;
  std::uint32_t num_boxes = 0;
  std::uint64_t units = 0;
};

// Returns why it cannot be launched; null if it can.
const char* why_no_launch(const BoxLaunch& launch);

// Called before some bytes are touched; false: leave them alone.
using BoxTouch = bool (*)(void* context, const void* ptr, std::size_t nbytes, bool writes);

// Does what the kernel does, on this thread. Null, or what is wrong with the table: its copy may not
// be there yet, and what lies there instead would lead anywhere. Then nothing was moved.
const char* run_boxes(const BoxLaunch& launch, BoxTouch touch = nullptr, void* context = nullptr);

}  // namespace commrt
