// SPDX-License-Identifier: Apache-2.0
// The record of one operation: every communicator keeps those of its last ones.
#pragma once

#include <cstddef>
#include <cstdint>

#include "types.hpp"

namespace commrt {

// Codes of messages in a record, in place of a collective's code.
constexpr int16_t kSendCode = 64, kRecvCode = 65;

struct Record {
  uint64_t seq = 0;
  int64_t count = 0;
  uint64_t start_ticks = 0;  // 0: nothing has been recorded here
  uint64_t end_ticks = 0;    // 0: in flight, or run from the caller's stack
  int16_t coll = 0, root = 0;  // for a message kSendCode or kRecvCode
  uint8_t dtype = 0, redop = 0, state = 0, blocking = 0;
  uint64_t stream = 0;  // of an operation on a device
  int32_t device = kHost;
  int32_t peer = -1, tag = -1;  // of a message
  uint32_t facts = 0;  // fields of a collective's mark (call_mark.hpp); its type may be another one
};
static_assert(sizeof(Record) == 64);  // one line of memory is written for each call

uint64_t ticks();
// A moment, and how long before it something was, by the rate that ticks have had since the engine
// was loaded. Clocks of two cores may differ a little, so nothing was later.
class Moment {
 public:
  Moment();
  double seconds_since(uint64_t then_ticks) const;

 private:
  uint64_t ticks_, ns_;
};
// CLOCK_MONOTONIC and CLOCK_REALTIME in ns. Like all of this file, they may be called by a handler
// of a signal.
uint64_t steady_ns();
int64_t wall_ns();

}  // namespace commrt
