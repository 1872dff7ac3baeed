// SPDX-License-Identifier: Apache-2.0
// Lowering: from a rank's program to the engine's instructions (commrt/schedule/lower.py).
#pragma once

#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "schedules/steps.hpp"

namespace commrt {

enum EntryKind : std::int32_t { kLocalEntry, kMessageEntry };

// kind, then space, lo, hi; or peer, k, 0.
struct InstructionEntry {
  std::int32_t kind;
  std::int32_t a;
  std::int32_t b;
  std::int32_t c;

  bool local() const { return kind == kLocalEntry; }
  BlockSlice slice() const { return {a, b, c}; }
};

struct EntryRows {
  std::vector<InstructionEntry> entries;
  std::vector<std::int32_t> starts{0};

  std::int32_t size() const { return static_cast<std::int32_t>(starts.size()) - 1; }
  const InstructionEntry* begin(std::int32_t row) const { return entries.data() + starts[row]; }
  const InstructionEntry* end(std::int32_t row) const { return entries.data() + starts[row + 1]; }
  std::int32_t count(std::int32_t row) const { return starts[row + 1] - starts[row]; }
  void close_row() { starts.push_back(static_cast<std::int32_t>(entries.size())); }
};

using PeerCounts = std::vector<std::pair<std::int32_t, std::int32_t>>;

// The engine's form of one rank's program.
struct LoweredProgram {
  std::int32_t rank = 0;
  BlockSpaces spaces;
  EntryRows inputs;
  EntryRows outputs;
  IndexRows deps;
  PeerCounts messages_in;   // per fragment from each peer
  PeerCounts messages_out;
  std::vector<std::uint8_t> used_spaces;
  std::int32_t num_publishes = 0;

  std::int32_t size() const { return deps.size(); }
};

// `fuses[peer]` says whether sends to a peer may be outputs of other instructions.
LoweredProgram lower_steps(const StepColumns& steps, const BlockSpaces& spaces, std::int32_t rank,
                           const std::vector<std::uint8_t>& fuses);

}  // namespace commrt
