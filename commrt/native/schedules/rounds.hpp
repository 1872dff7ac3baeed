// SPDX-License-Identifier: Apache-2.0
// Closed rounds of messages, with local work between them (commrt/schedule/rounds.py).
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "schedules/contents.hpp"
#include "schedules/lowering.hpp"

namespace commrt {

// A slice of the rank's spaces; or a slot of scratch, as long as that slice.
struct RoundPlace {
  std::int32_t slot = -1;
  BlockSlice slice;

  bool operator==(const RoundPlace& other) const {
    return slot == other.slot && slice == other.slice;
  }
};

struct RoundMessage {
  std::int32_t peer;
  std::int32_t k;
  RoundPlace place;
};

struct RoundWork {
  bool reduces;
  RoundPlace dst;
  RoundPlace src;
};

struct OneRound {
  std::vector<RoundMessage> sends;
  std::vector<RoundMessage> recvs;
  std::vector<RoundWork> work;
};

// One rank's part. The last round holds what the rank does before the first.
struct RankRounds {
  std::int32_t rank;
  BlockSpaces spaces;
  std::vector<OneRound> rounds;
  std::int32_t num_slots;

  std::int32_t num_rounds() const { return static_cast<std::int32_t>(rounds.size()) - 1; }
  const OneRound& before() const { return rounds.back(); }
};

// Lowered programs whose sends are instructions of their own. Throws "not received": rank, k,
// peer; "no rounds": rank, instruction; or "sends and works": rank, instruction.
std::vector<RankRounds> rounds_of(const std::vector<LoweredProgram>& programs);

struct GroupLimits {
  std::int32_t distances;
  std::int32_t messages;
};

// What a stream runs, row by row: a group's row is followed by those of its messages.
enum class StreamRowKind : std::int32_t { kGroup, kSend, kRecv, kCopy, kReduce };

struct StreamRow {
  StreamRowKind kind;
  std::int32_t fragment;  // of a group: its round
  std::int32_t peer;      // of a group: its part
  std::int32_t k;         // of a group: how many messages follow
  RoundPlace place;       // of work: its destination
  RoundPlace source;      // of work
};
constexpr int kStreamRowColumns = 12;
static_assert(sizeof(StreamRow) == kStreamRowColumns * sizeof(std::int32_t));

using StreamRows = std::vector<StreamRow>;

// A rank's program: fragment f is the whole program on a part of every block, `f * lag` rounds
// later. Groups larger than the limits are cut, at both ends alike.
StreamRows sequence_rounds(const RankRounds& own, std::int32_t size, std::int32_t fragments,
                           std::int32_t lag, const GroupLimits& limits);

struct RowsView {
  const StreamRow* rows;
  std::int64_t count;
};

// Checks what all ranks run, knowing nothing of how it was made. Returns the number of sends and
// receives of the largest group, or throws ScheduleFault. `once` are rows of one fragment that
// were checked before, or nothing: if each fragment does the same, their contents are known.
std::int32_t check_stream_rows(const std::vector<RankRounds>& rounds,
                               const std::vector<RowsView>& rows, const GroupLimits& limits,
                               const OperationGoal& goal, CombineRule rule,
                               const std::vector<RowsView>& once);

}  // namespace commrt
