// SPDX-License-Identifier: Apache-2.0
// A rank's part of a schedule as its author wrote it: spaces of blocks, and steps on them.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace commrt {

// Blocks [lo, hi) of one space; a space of -1 stands for nothing.
struct BlockSlice {
  std::int32_t space = -1;
  std::int32_t lo = 0;
  std::int32_t hi = 0;

  bool given() const { return space >= 0; }
  std::int32_t count() const { return hi - lo; }
  bool operator==(const BlockSlice& other) const {
    return space == other.space && lo == other.lo && hi == other.hi;
  }
  bool operator!=(const BlockSlice& other) const { return !(*this == other); }
};

// The kinds of steps, with the numbers of the serial form (commrt/schedule/ir.py).
enum StepOp : std::int32_t { kSendStep, kRecvStep, kRredStep, kRedStep, kCopyStep };

struct ScheduleStep {
  std::int32_t op;
  std::int32_t peer;  // -1: none
  BlockSlice src;
  BlockSlice dst;
};

enum class BlockSpaceKind : std::uint8_t { kIn, kOut, kTmp };

// One buffer of one rank. Block i counts as block `first + i` of the rank; spaces that may be
// the same memory share their numbers.
struct BlockSpace {
  BlockSpaceKind kind;
  std::int32_t nblk;
  std::int32_t first;
  bool may_be_input;  // in place it is the memory of `in`
  // Length of a block, in parts of the vector; a denominator of 0: not all are alike.
  std::int64_t numerator;
  std::int64_t denominator;
  std::int32_t split;                 // how unlike blocks are cut
  std::vector<std::int64_t> lengths;  // of unlike blocks that have one
};
using BlockSpaces = std::vector<BlockSpace>;

// Numbers of a rank's blocks, aliases counted once.
std::int32_t num_locations(const BlockSpaces& spaces);

// Columns of indices, row by row.
struct IndexRows {
  std::vector<std::int32_t> values;
  std::vector<std::int32_t> starts{0};

  std::int32_t size() const { return static_cast<std::int32_t>(starts.size()) - 1; }
  const std::int32_t* begin(std::int32_t row) const { return values.data() + starts[row]; }
  const std::int32_t* end(std::int32_t row) const { return values.data() + starts[row + 1]; }
  std::int32_t count(std::int32_t row) const { return starts[row + 1] - starts[row]; }
  void close_row() { starts.push_back(static_cast<std::int32_t>(values.size())); }
};

// Dependencies from data: who must wait for whom because they touch the same block.
//
// Neighbouring blocks that were always touched together are one cell, so a step on half of many
// blocks costs no more than one on few. Once the cells are many, each block has its own.
class DataDependencies {
 public:
  // Appends to `found`, sorted and each once, what `item` must wait for.
  template <class Reads, class Writes, class Locate>
  void access(std::int32_t item, const Reads& reads, const Writes& writes, const Locate& first,
              std::vector<std::int32_t>& found) {
    const std::size_t before = found.size();
    for (const BlockSlice& where : reads) read(item, first(where) + where.lo, where.count(), found);
    for (const BlockSlice& where : writes)
      write(item, first(where) + where.lo, where.count(), found);
    finish(item, before, found);
  }

 private:
  // More cells than this, and more than a block in so many begins one: then each block has one.
  static constexpr std::size_t kFewCells = 64;
  static constexpr std::size_t kBlocksPerCell = 8;

  struct Cell {
    std::int32_t writer = -1;
    std::int32_t last_reader = -1;  // place in readers_, or -1
  };
  struct Reader {
    std::int32_t item;
    std::int32_t next;
  };
  struct Span {
    std::size_t begin;
    std::size_t end;
  };

  void read(std::int32_t item, std::int64_t location, std::int32_t count,
            std::vector<std::int32_t>& found);
  void write(std::int32_t item, std::int64_t location, std::int32_t count,
             std::vector<std::int32_t>& found);
  static void finish(std::int32_t item, std::size_t before, std::vector<std::int32_t>& found);
  // Returns the cells of these blocks and no others.
  Span cells(std::int64_t location, std::int32_t count);
  std::size_t cut(std::int32_t block);
  void use_blocks();

  std::vector<Cell> cells_{Cell{}};
  std::vector<std::int32_t> starts_{0};  // first block of each cell; empty: each block has one
  std::vector<Reader> readers_;
};

// The steps of a rank, in order.
class StepColumns {
 public:
  std::int32_t size() const { return static_cast<std::int32_t>(rows_.size()); }
  const std::vector<ScheduleStep>& rows() const { return rows_; }
  const ScheduleStep& row(std::int32_t index) const { return rows_[index]; }
  const IndexRows& deps() const { return deps_; }
  // The part of the dependencies that the author asked for, or null.
  const std::vector<std::int32_t>* after(std::int32_t index) const;

  // Adds a step as it is; returns its index.
  std::int32_t append(const ScheduleStep& step, const std::vector<std::int32_t>& deps,
                      std::vector<std::int32_t> after);
  // Adds a step with the dependencies that its data demands; one on empty blocks is left out, and
  // has no index: -1. Throws "sizes" where its ends differ.
  std::int32_t record(const ScheduleStep& step);
  // The next step that is recorded waits for these, too.
  void next_waits_for(const std::vector<std::int32_t>& steps) {
    next_after_.insert(next_after_.end(), steps.begin(), steps.end());
  }
  // Says where the blocks of each space are numbered from; spaces known before keep theirs.
  void place(std::vector<std::int32_t> first) { first_ = std::move(first); }
  // Takes one more space, as above.
  void place_next(std::int32_t first) { first_.push_back(first); }
  std::vector<std::int32_t> peers() const;

 private:
  std::vector<ScheduleStep> rows_;
  IndexRows deps_;
  std::unordered_map<std::int32_t, std::vector<std::int32_t>> after_;
  std::vector<std::int32_t> first_;
  std::vector<std::int32_t> next_after_;
  DataDependencies tracker_;
};

// What is wrong with a schedule, where, and with which contents; Python words it.
struct ScheduleFault : std::runtime_error {
  struct Held {
    std::int32_t part = -1;           // -1: nothing
    std::vector<std::int32_t> ranks;  // whose contributions
  };

  ScheduleFault(const char* kind, std::vector<std::int64_t> numbers, std::vector<Held> contents = {})
      : std::runtime_error(kind), numbers(std::move(numbers)), contents(std::move(contents)) {}

  std::vector<std::int64_t> numbers;
  std::vector<Held> contents;
};

}  // namespace commrt
