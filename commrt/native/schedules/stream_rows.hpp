// SPDX-License-Identifier: Apache-2.0
// The work of the rows of a rank's stream, fragment by fragment.
#pragma once

#include <cstdint>
#include <vector>

#include "schedules/rounds.hpp"

namespace commrt {

// Walks over a rank's rows, group by group.
struct RowCursor {
  RowsView rows;
  std::int64_t at = 0;

  bool ended() const { return at >= rows.count; }
  const StreamRow& row() const { return rows.rows[at]; }
  bool at_group() const { return !ended() && row().kind == StreamRowKind::kGroup; }
  void skip_work() {
    while (!ended() && !at_group()) ++at;
  }
  const StreamRow* messages() const { return rows.rows + at + 1; }
  std::int32_t num_messages() const { return row().k; }
  void pass_group() { at += 1 + row().k; }
};

// Finds receives that disturb what moves at the same time.
class DisturbedReceives {
 public:
  enum class Unit { kGroup, kRound };  // what moves at the same time

  DisturbedReceives(const RankRounds& own, std::int32_t fragments);

  struct Found {
    const StreamRow* group;
    const StreamRow* receive;  // null: none
  };
  // Returns the first receive where something else of its unit is sent from or received.
  Found find(const RowsView& rows, Unit unit);

 private:
  bool take(const StreamRow& row);

  const RankRounds& own_;
  std::int32_t blocks_;
  std::int64_t stride_;
  std::vector<std::int32_t> taken_;  // the unit that took it last
  std::int32_t turn_ = 0;
};

// Returns whether, in some fragment, a block of input is read after its place was overwritten.
bool stream_loses_input(const RankRounds& own, const RowsView& rows, std::int32_t fragments);

// Returns whether each fragment of `rows` does what the one of `once` does: round by round the
// same messages between the same places, and the same work behind them. Then the fragments, which
// share no memory, end as that one does, if also no receive disturbs another message of its round:
// a round may be cut elsewhere.
bool repeats(const RankRounds& own, const RowsView& rows, std::int32_t fragments,
             const RowsView& once);

}  // namespace commrt
