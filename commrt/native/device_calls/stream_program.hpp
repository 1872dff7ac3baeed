// SPDX-License-Identifier: Apache-2.0
// A stream program: the copies, reductions and messages that a stream runs for a schedule. It is
// made once and runs often. Its addresses are offsets from bases; each run passes the bases.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "devices/device.hpp"
#include "types.hpp"

namespace commrt {

// The codes of commrt/planning/stream_programs.py; a unit test compares.
enum class StreamStep : std::int64_t {
  Copy = 0,    // dst = src
  Reduce,      // dst = dst op src
  Scale,       // dst = factor * src
  Divide,      // dst = dst / divisor
  Send,        // src to the peer, in this group
  Recv,        // from the peer to dst, in this group
  EndGroup,    // of messages
  Begin,       // a part of the program begins: its half of the exchange memory is free again
  Publish,     // what the peer reads is there: `number` of the messages to it
  Await,       // until `number` of the peer's messages are there
  Release,     // what the peer has published in this part was read
};
constexpr std::int64_t kNumStreamSteps = 11;
extern const char* const kStreamStepNames[kNumStreamSteps];

// Bases: the caller's arrays, scratch memory, and from kFirstPeerBase on what each rank publishes.
constexpr int kInBase = 0, kOutBase = 1, kScratchBase = 2, kFirstPeerBase = 3;

struct StreamCommand {
  StreamStep step;
  std::int64_t dst_base, dst_offset, src_base, src_offset;
  std::int64_t nbytes;
  std::int64_t peer;    // or the reduction
  std::int64_t number;  // of a message among those of its pair
};
constexpr int kStreamColumns = 8;

struct StreamProgram : std::enable_shared_from_this<StreamProgram> {
  std::vector<StreamCommand> commands;
  DType dtype = DType::U8;
  Scale factor;
  std::int64_t divisor = 1;
  std::size_t itemsize = 1;
  int size = 1;                      // ranks
  std::vector<std::size_t> extents;  // bytes of each base that commands touch
  std::vector<std::int64_t> sent, received;  // messages to and from each rank, in all parts
  std::int64_t parts = 0;

  // Bytes of memory that it takes.
  std::size_t memory_nbytes() const;

  // Returns what is wrong with the commands; null if nothing is.
  const char* problem();

  // Gives the stream a command that is no message and no flag.
  DeviceStatus work(Device* device, const StreamCommand& one, unsigned char* const* bases,
                    Stream stream) const;
};

}  // namespace commrt
