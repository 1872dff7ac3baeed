// SPDX-License-Identifier: Apache-2.0
// A set of numbers that were added in rising order, kept as ranges.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <iterator>

namespace commrt {

class NumberRanges {
 public:
  // `most`: so many ranges are kept. What was forgotten counts as in the set.
  explicit NumberRanges(std::size_t most = 1024) : most_(most) {}

  void add(uint64_t number) {
    if (!ranges_.empty() && ranges_.back().end == number) {
      ++ranges_.back().end;
      return;
    }
    ranges_.push_back({number, number + 1});
    if (ranges_.size() <= most_) return;
    forgotten_until_ = ranges_.front().end;
    ranges_.pop_front();
  }

  bool has(uint64_t number) const {
    if (number < forgotten_until_) return true;
    const auto next = std::upper_bound(ranges_.begin(), ranges_.end(), number,
                                       [](uint64_t n, const Range& one) { return n < one.begin; });
    return next != ranges_.begin() && number < std::prev(next)->end;
  }

 private:
  struct Range {
    uint64_t begin, end;
  };

  std::size_t most_;
  uint64_t forgotten_until_ = 0;
  std::deque<Range> ranges_;
};

}  // namespace commrt
