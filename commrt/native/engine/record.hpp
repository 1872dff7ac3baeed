// SPDX-License-Identifier: Apache-2.0
// A finished operation, kept for messages and dumps.
#pragma once

#include <cstdint>

#include "types.hpp"

namespace commrt {

struct Record {
  uint64_t seq = 0;
  int64_t count = 0;
  uint64_t start_ticks = 0;
  uint64_t end_ticks = 0;  // 0: in flight, or run from the caller's stack
  int16_t coll = 0, root = 0;  // for a message kSendCode or kRecvCode
  uint8_t dtype = 0, redop = 0, state = 0, blocking = 0;
  uint64_t stream = 0;  // of an operation on a device
  int32_t device = kHost;
  int32_t peer = -1, tag = -1;  // of a message
};

}  // namespace commrt
