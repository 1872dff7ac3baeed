// SPDX-License-Identifier: Apache-2.0
// What blocks hold: which part of the operation's data, with whose contributions.
//
// Neighbouring blocks that hold neighbouring parts with the same contributions are one run, so
// memory grows with the number of slices that an algorithm uses, not with the number of blocks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "schedules/steps.hpp"

namespace commrt {

// Numbers by their hash: open addressing in a power of two of places.
class NumberTable {
 public:
  // Returns the number for which `is` holds among those of this hash, or -1.
  template <class Is>
  std::int32_t find(std::uint64_t hash, const Is& is) const {
    if (places_.empty()) return -1;
    for (std::size_t at = hash & mask();; at = (at + 1) & mask())
      if (places_[at] < 0 || is(places_[at])) return places_[at];
  }
  // Adds `number`; `hash_of` gives the hash of each number, to find them new places.
  template <class HashOf>
  void add(std::int32_t number, const HashOf& hash_of) {
    if (2 * (count_ + 1) > places_.size()) {
      std::vector<std::int32_t> old(std::max<std::size_t>(64, 4 * places_.size()), -1);
      old.swap(places_);
      for (std::int32_t one : old)
        if (one >= 0) put(one, hash_of(one));
    }
    put(number, hash_of(number));
    ++count_;
  }

 private:
  std::size_t mask() const { return places_.size() - 1; }
  void put(std::int32_t number, std::uint64_t hash) {
    std::size_t at = hash & mask();
    while (places_[at] >= 0) at = (at + 1) & mask();
    places_[at] = number;
  }

  std::vector<std::int32_t> places_;
  std::size_t count_ = 0;
};

// Sets of ranks, known by their numbers: equal sets have equal numbers.
//
// Most sets are arcs, ranks that follow one another round the ring: the number of an arc says
// which one it is. All others are kept once, and their unions are looked up.
class RankSets {
 public:
  using Number = std::int32_t;
  struct Interval {
    std::int32_t lo;
    std::int32_t hi;
  };

  explicit RankSets(std::int32_t size) : size_(size) {}

  Number range(std::int32_t lo, std::int32_t hi);
  Number unite(Number one, Number other);
  bool overlap(Number one, Number other) const;
  std::int32_t lowest(Number one) const { return intervals(one).begin()->lo; }
  std::int32_t highest(Number one) const { return (intervals(one).end() - 1)->hi - 1; }
  std::vector<std::int32_t> ranks(Number one) const;
  std::vector<std::int32_t> common(Number one, Number other) const;

 private:
  // Arcs have the numbers from here on; so many ranks have them all below 2^31.
  static constexpr Number kArcs = 1 << 30;
  static constexpr std::int32_t kMostInArcs = 1 << 15;

  struct Set {
    std::size_t begin;
    std::size_t end;
  };
  // `count` ranks from `lo` on, and on from rank 0 behind the last.
  struct Arc {
    std::int32_t lo;
    std::int32_t count;
  };
  // Rising and apart; those of an arc are made when asked for.
  class Intervals {
   public:
    Intervals(const Interval* begin, std::size_t count) : kept_(begin), count_(count) {}
    Intervals(const Arc& arc, std::int32_t size) : count_(arc.lo + arc.count > size ? 2 : 1) {
      const std::int32_t end = arc.lo + arc.count;
      if (count_ == 2) own_[0] = {0, end - size};
      own_[count_ - 1] = {arc.lo, count_ == 2 ? size : end};
    }
    const Interval* begin() const { return kept_ != nullptr ? kept_ : own_; }
    const Interval* end() const { return begin() + count_; }

   private:
    const Interval* kept_ = nullptr;
    std::size_t count_;
    Interval own_[2] = {};
  };

  static bool is_arc(Number one) { return one >= kArcs; }
  Arc arc(Number one) const { return {(one - kArcs) / size_, (one - kArcs) % size_ + 1}; }
  Number number(const Arc& arc) const {
    return kArcs + (arc.count == size_ ? 0 : arc.lo) * size_ + arc.count - 1;
  }
  // Returns the number of the arc that joins two, where one follows the other, or -1.
  Number joined(const Arc& one, const Arc& other) const;
  Intervals intervals(Number one) const;
  Number keep(const std::vector<Interval>& intervals);

  std::int32_t size_;
  std::vector<Interval> intervals_;
  std::vector<Set> sets_;
  std::vector<std::uint64_t> hashes_;  // by set
  NumberTable kept_;
  std::vector<std::uint64_t> pairs_;  // by union: the numbers of both
  std::vector<Number> unions_;
  NumberTable united_;
  std::vector<Interval> merged_;
};

// `count` blocks that hold parts `part`, `part` + 1, ... with the contributions `ranks`.
struct Run {
  std::int32_t count;
  std::int32_t part;
  RankSets::Number ranks;  // -1: the blocks hold nothing

  bool continues(const Run& before) const {
    return ranks == before.ranks && (ranks < 0 || part == before.part + before.count);
  }
  bool operator==(const Run& other) const {
    return count == other.count && part == other.part && ranks == other.ranks;
  }
};

// The content of a slice, in as few runs as there can be. Most have one, kept in place.
class Value {
 public:
  const Run* begin() const { return many_.empty() ? &one_ : many_.data(); }
  const Run* end() const { return begin() + size(); }
  std::size_t size() const { return many_.empty() ? (one_.count != 0) : many_.size(); }
  bool operator==(const Value& other) const;
  bool operator!=(const Value& other) const { return !(*this == other); }
  void add(Run run);
  void clear() {
    one_ = {0, 0, -1};
    many_.clear();
  }

 private:
  Run one_{0, 0, -1};
  std::vector<Run> many_;
};

// The content of one space: runs of blocks, or block by block once the runs are many.
class Held {
 public:
  Held(std::int32_t nblk, std::int32_t part, RankSets::Number ranks);

  // Throws ScheduleFault "nothing" with the first block that holds nothing.
  void read(std::int32_t lo, std::int32_t hi, Value& value) const;
  void write(std::int32_t lo, std::int32_t hi, const Value& value);
  std::int32_t size() const { return nblk_; }
  // Calls `see(lo, run)` for each run, in order.
  template <class See>
  void each(const See& see) const {
    for (std::size_t i = 0; i < cells_.size(); ++i)
      see(static_cast<std::int32_t>(i), Run{1, cells_[i].part, cells_[i].ranks});
    for (std::size_t i = 0; i < runs_.size(); ++i)
      see(runs_[i].lo, Run{end_of(i) - runs_[i].lo, runs_[i].part, runs_[i].ranks});
  }

 private:
  // More runs than this, and more than a block in so many begins one: then cells take over.
  static constexpr std::size_t kFewRuns = 16;
  static constexpr std::size_t kBlocksPerRun = 8;

  struct Piece {
    std::int32_t lo;
    std::int32_t part;
    RankSets::Number ranks;
  };
  struct Cell {
    std::int32_t part;
    RankSets::Number ranks;
  };

  std::int32_t end_of(std::size_t i) const {
    return i + 1 < runs_.size() ? runs_[i + 1].lo : nblk_;
  }
  std::size_t find(std::int32_t block) const;
  void write_cells(std::int32_t lo, const Value& value);
  void use_cells();

  std::int32_t nblk_;
  std::vector<Piece> runs_;  // empty where there are cells
  std::vector<Cell> cells_;
  std::vector<Piece> made_;
};

// What an operation starts from and must end with (commrt/schedule/goals.py).
struct OperationGoal {
  enum class Shape { kWhole, kOwnBlock, kBlockPerRank, kBlockPerPair };

  std::int32_t size;
  Shape shape;
  bool per_rank_input;  // the input of each rank is a part of its own
  bool idempotent;      // a contribution may arrive twice
  // Ranks whose contributions the output of each rank holds, where the shape does not say.
  std::vector<std::pair<std::int32_t, std::int32_t>> holders;
};

enum class CombineRule { kCommutative, kOrdered, kNone };

// Finds out, read by read and write by write in the order of a rank's program, whether a block
// of `in` is read after another thing was written to the block of `out` that may be its memory.
// Where none is, a program without races does in place what it does out of place.
class InputWatch {
 public:
  explicit InputWatch(const BlockSpaces& spaces) {
    if (spaces.size() > 1 && spaces[1].may_be_input)
      gone_.assign(static_cast<std::size_t>(spaces[1].nblk), 0);
  }

  // Returns the first block of what is read that is gone, or -1.
  std::int32_t read(const BlockSlice& where) const {
    if (gone_.empty() || where.space != 0) return -1;
    for (std::int32_t block = where.lo; block < where.hi; ++block)
      if (gone_[block] != 0) return block;
    return -1;
  }
  void write(const BlockSlice& where) {
    if (!gone_.empty() && where.space == 1)
      std::fill(gone_.begin() + where.lo, gone_.begin() + where.hi, std::uint8_t{1});
  }
  // A copy from `in` to the same blocks of `out` changes nothing in place.
  static bool changes_nothing(const BlockSlice& src, const BlockSlice& dst) {
    return src.space == 0 && dst.space == 1 && src.lo == dst.lo && src.hi == dst.hi;
  }

 private:
  std::vector<std::uint8_t> gone_;
};

// The contents of all ranks' spaces, `in` and `out` shared or not.
class SymbolicMemory {
 public:
  SymbolicMemory(const OperationGoal& goal, const std::vector<const BlockSpaces*>& spaces,
                 RankSets& sets, bool in_place);

  void read(std::int32_t rank, const BlockSlice& where, Value& value) const {
    held(rank, where.space).read(where.lo, where.hi, value);
  }
  void write(std::int32_t rank, const BlockSlice& where, const Value& value) {
    held_[where_[rank][where.space]].write(where.lo, where.hi, value);
  }
  // Throws "ends" unless every rank's `out` holds what it must.
  void check(const OperationGoal& goal) const;

 private:
  const Held& held(std::int32_t rank, std::int32_t space) const {
    return held_[where_[rank][space]];
  }

  RankSets& sets_;
  std::vector<std::vector<std::int32_t>> where_;
  std::vector<Held> held_;
};

// Puts first ⊕ second into `result`, or throws ScheduleFault.
void combine_values(const Value& first, const Value& second, CombineRule rule, bool idempotent,
                    RankSets& sets, Value& result);

ScheduleFault::Held named(const Run& run, const RankSets& sets);

}  // namespace commrt
