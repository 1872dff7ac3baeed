// SPDX-License-Identifier: Apache-2.0
// Walks over the rows of one rank's stream and tells its fragments apart.
#include "schedules/stream_rows.hpp"

#include <algorithm>
#include <cstring>

namespace commrt {

namespace {

// The rows of each fragment in their order, but messages of one round in an order of their own.
class RowsByFragment {
 public:
  RowsByFragment(const RowsView& rows, std::int32_t fragments)
      : rows_(static_cast<std::size_t>(fragments)), open_(rows_.size(), kNone),
        round_(rows_.size(), -1) {
    for (std::int64_t at = 0; at < rows.count;) {
      const StreamRow& row = rows.rows[at++];
      if (row.kind != StreamRowKind::kGroup) {
        close(row.fragment);
        add(row);
        continue;
      }
      for (const std::int64_t end = at + row.k; at < end; ++at) {
        open(rows.rows[at].fragment, row.fragment);
        add(rows.rows[at]);
      }
    }
    for (std::int32_t fragment = 0; fragment < fragments; ++fragment) close(fragment);
  }

  const std::vector<StreamRow>& of(std::int32_t fragment) const { return rows_[fragment]; }

 private:
  static constexpr std::size_t kNone = SIZE_MAX;

  void add(const StreamRow& row) {
    rows_[row.fragment].push_back(row);
    rows_[row.fragment].back().fragment = 0;
  }

  // Begins the messages of a round, unless they have begun.
  void open(std::int32_t fragment, std::int32_t round) {
    if (open_[fragment] != kNone && round_[fragment] == round) return;
    close(fragment);
    rows_[fragment].push_back({StreamRowKind::kGroup, 0, 0, 0, {}, {}});
    open_[fragment] = rows_[fragment].size();
    round_[fragment] = round;
  }

  void close(std::int32_t fragment) {
    if (open_[fragment] == kNone) return;
    const auto begin = rows_[fragment].begin() + static_cast<std::ptrdiff_t>(open_[fragment]);
    std::sort(begin, rows_[fragment].end(), [](const StreamRow& x, const StreamRow& y) {
      return std::memcmp(&x, &y, sizeof(StreamRow)) < 0;
    });
    open_[fragment] = kNone;
  }

  std::vector<std::vector<StreamRow>> rows_;
  std::vector<std::size_t> open_;    // where the messages of the round that is open begin
  std::vector<std::int32_t> round_;  // the round that was opened last
};

bool same(const std::vector<StreamRow>& one, const std::vector<StreamRow>& other) {
  return one.size() == other.size() &&
         std::memcmp(one.data(), other.data(), one.size() * sizeof(StreamRow)) == 0;
}

}  // namespace

DisturbedReceives::DisturbedReceives(const RankRounds& own, std::int32_t fragments)
    : own_(own), blocks_(num_locations(own.spaces)), stride_(blocks_ + own.num_slots),
      taken_(static_cast<std::size_t>(stride_) * static_cast<std::size_t>(fragments), 0) {}

DisturbedReceives::Found DisturbedReceives::find(const RowsView& rows, Unit unit) {
  RowCursor cursor{rows};
  for (cursor.skip_work(); !cursor.ended(); cursor.skip_work()) {
    ++turn_;
    const StreamRow* first = &cursor.row();
    do {
      cursor.pass_group();
    } while (unit == Unit::kRound && cursor.at_group() && cursor.row().fragment == first->fragment);
    const StreamRow* end = rows.rows + cursor.at;
    for (const StreamRow* row = first; row != end; ++row)
      if (row->kind == StreamRowKind::kSend) take(*row);
    for (const StreamRow* row = first; row != end; ++row)
      if (row->kind == StreamRowKind::kRecv && take(*row)) return {first, row};
  }
  return {nullptr, nullptr};
}

// Takes the memory of a message; returns whether some was taken already.
bool DisturbedReceives::take(const StreamRow& row) {
  const RoundPlace& place = row.place;
  std::int64_t at = stride_ * row.fragment;
  std::int32_t count = 1;
  if (place.slot >= 0) {
    at += blocks_ + place.slot;
  } else {
    at += own_.spaces[place.slice.space].first + place.slice.lo;
    count = place.slice.count();
  }
  bool found = false;
  for (std::int64_t one = at; one < at + count; ++one) {
    found = found || taken_[one] == turn_;
    taken_[one] = turn_;
  }
  return found;
}

bool stream_loses_input(const RankRounds& own, const RowsView& rows, std::int32_t fragments) {
  std::vector<InputWatch> inputs(static_cast<std::size_t>(fragments), InputWatch(own.spaces));
  const auto lost = [&inputs](const StreamRow& row, const RoundPlace& place) {
    return place.slot < 0 && inputs[row.fragment].read(place.slice) >= 0;
  };
  const auto write = [&inputs](const StreamRow& row) {
    if (row.place.slot < 0) inputs[row.fragment].write(row.place.slice);
  };
  for (std::int64_t at = 0; at < rows.count;) {
    const StreamRow& row = rows.rows[at++];
    if (row.kind == StreamRowKind::kGroup) {
      // All is sent before anything is received.
      const StreamRow *begin = rows.rows + at, *end = begin + row.k;
      at += row.k;
      for (const StreamRow* each = begin; each != end; ++each)
        if (each->kind == StreamRowKind::kSend && lost(*each, each->place)) return true;
      for (const StreamRow* each = begin; each != end; ++each)
        if (each->kind == StreamRowKind::kRecv) write(*each);
      continue;
    }
    const bool reduces = row.kind == StreamRowKind::kReduce;
    if (lost(row, row.source) || (reduces && lost(row, row.place))) return true;
    const bool straight = row.place.slot < 0 && row.source.slot < 0;
    if (reduces || !straight ||
        !InputWatch::changes_nothing(row.source.slice, row.place.slice))
      write(row);
  }
  return false;
}

bool repeats(const RankRounds& own, const RowsView& rows, std::int32_t fragments,
             const RowsView& once) {
  DisturbedReceives disturbed(own, 1);
  if (disturbed.find(once, DisturbedReceives::Unit::kRound).receive != nullptr) return false;
  const RowsByFragment known(once, 1), all(rows, fragments);
  for (std::int32_t fragment = 0; fragment < fragments; ++fragment)
    if (!same(all.of(fragment), known.of(0))) return false;
  return true;
}

}  // namespace commrt
