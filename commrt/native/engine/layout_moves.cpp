// SPDX-License-Identifier: Apache-2.0
// Works out the runs that two ranks have in common in each dimension, and the boxes of them all.
#include "engine/layout_moves.hpp"

#include <algorithm>
#include <numeric>

namespace commrt {

namespace {

constexpr int kMostAxes = kMostDims / 2;  // each may be two dimensions of a box

// Of numbers from 0: the largest there is, where the result does not fit.
int64_t times(int64_t one, int64_t other) {
  int64_t product;
  return __builtin_mul_overflow(one, other, &product) ? INT64_MAX : product;
}

int64_t plus(int64_t one, int64_t other) {
  int64_t sum;
  return __builtin_add_overflow(one, other, &sum) ? INT64_MAX : sum;
}

// The elements of one place in a dimension: [low, high), or every n-th block of them.
struct Place {
  int64_t low = 0, high = 0;
  int64_t block = 0;  // 0: all of them
  int64_t place = 0, places = 1;

  int64_t period() const { return block != 0 ? times(block, places) : 1; }
  int64_t own_step(int64_t period) const { return block != 0 ? period / places : period; }

  // Calls with (low, high, own position of low) of each piece of it within [from, to).
  template <class Each>
  void each_piece(int64_t from, int64_t to, Each each) const {
    from = std::max(from, low);
    to = std::min(to, high);
    if (block == 0) {
      if (from < to) each(from, to, from - low);
      return;
    }
    const int64_t step = period();
    for (int64_t turn = from / step;; ++turn) {
      const int64_t begin = plus(times(turn, step), times(place, block));
      if (begin >= to) return;
      const int64_t first = std::max(from, begin), last = std::min(to, plus(begin, block));
      if (first < last) each(first, last, turn * block + first - begin);
    }
  }
};

// Elements of a dimension that two ranks have in common: equal runs, evenly apart. Positions
// count in either rank's own part.
struct Runs {
  int64_t source, target, length;
  int64_t count = 1;
  int64_t source_step = 1, target_step = 1;
};

void append(std::vector<Runs>& found, const Runs& run) {
  if (!found.empty()) {
    Runs& before = found.back();
    if (before.count == 1 && run.count == 1 && before.source + before.length == run.source &&
        before.target + before.length == run.target) {
      before.length += run.length;
      return;
    }
  }
  found.push_back(run);
}

// The single runs within [low, high), as long as can be.
template <class Take>
void each_run(const Place& source, const Place& target, int64_t low, int64_t high, Take take) {
  source.each_piece(low, high, [&](int64_t begin, int64_t end, int64_t at) {
    target.each_piece(begin, end, [&](int64_t first, int64_t last, int64_t there) {
      take(Runs{at + first - begin, there, last - first});
    });
  });
}

void find_common(const Place& source, const Place& target, std::vector<Runs>& found,
                 std::vector<Runs>& of_a_period) {
  found.clear();
  const int64_t low = std::max(source.low, target.low), high = std::min(source.high, target.high);
  if (source.block == 0 && target.block == 0) {
    if (low < high) found.push_back({low - source.low, low - target.low, high - low});
    return;
  }
  const int64_t one = source.period(), other = target.period();
  const int64_t period = times(one / std::gcd(one, other), other);
  // Whole periods are all alike; before and behind them are parts of one.
  const int64_t first = low / period + (low % period != 0), last = high / period;
  const auto take = [&](const Runs& run) { append(found, run); };
  if (last - first < 2) {
    each_run(source, target, low, high, take);
    return;
  }
  each_run(source, target, low, first * period, take);
  of_a_period.clear();
  each_run(source, target, first * period, (first + 1) * period,
           [&](const Runs& run) { append(of_a_period, run); });
  const int64_t source_step = source.own_step(period), target_step = target.own_step(period);
  for (const Runs& run : of_a_period) {
    if (source_step == run.length && target_step == run.length) {  // nothing lies between them
      take({run.source, run.target, run.length * (last - first)});
    } else {
      take({run.source, run.target, run.length, last - first, source_step, target_step});
    }
  }
  each_run(source, target, last * period, high, take);
}

// Layouts with the lengths of one call.
struct Lengths {
  const LayoutKind& kind;
  const int64_t* numbers;  // the array's lengths, then those of pieces

  // A rank's places in all dimensions.
  void places_of(int rank, Place* places) const {
    const int64_t* sizes = numbers + kind.axes.size();
    for (size_t axis = 0; axis < kind.axes.size(); ++axis) {
      const LayoutKind::Axis& how = kind.axes[axis];
      const int64_t extent = numbers[axis];
      Place& place = places[axis];
      place = Place{0, extent};
      if (how.grid_dims.empty()) continue;
      const int64_t all = kind.num_places(how), own = kind.place(rank, how);
      const int64_t* const pieces = sizes;
      if (how.has_sizes) sizes += all;
      if (all == 1) continue;
      if (how.block != 0) {
        // A longer block holds no more than the array has.
        place.block = std::min(how.block, std::max<int64_t>(extent, 1));
        place.place = own;
        place.places = all;
      } else if (how.has_sizes) {
        place.low = std::accumulate(pieces, pieces + own, int64_t{0});
        place.high = place.low + pieces[own];
      } else {
        const auto part = [&](int64_t at) {
          int64_t product;
          if (!__builtin_mul_overflow(extent, at, &product)) return product / all;
          return static_cast<int64_t>(static_cast<__int128>(extent) * at / all);
        };
        place.low = part(own);
        place.high = part(own + 1);
      }
    }
  }
};

// Puts runs in one dimension into a box: which run, then where in it.
void add_dimension(BoxEnd& box, const Runs& run, int64_t begin, int64_t step, int64_t stride) {
  if (run.count > 1) {
    box.start[box.ndim] = 0;
    box.stop[box.ndim] = run.count;
    box.strides[box.ndim++] = stride * step;
  }
  box.start[box.ndim] = begin;
  box.stop[box.ndim] = begin + run.length;
  box.strides[box.ndim++] = stride;
}

}  // namespace

int64_t LayoutKind::num_ranks() const {
  int64_t product = 1;
  for (const int64_t extent : grid) product *= extent;
  return product;
}

size_t LayoutKind::num_numbers() const {
  size_t sum = axes.size();
  for (const Axis& axis : axes) {
    if (axis.has_sizes) sum += static_cast<size_t>(num_places(axis));
  }
  return sum;
}

int64_t LayoutKind::coordinate(int rank, size_t dim) const {
  int64_t rest = rank;
  for (size_t other = grid.size(); --other > dim;) rest /= grid[other];
  return rest % grid[dim];
}

int64_t LayoutKind::num_places(const Axis& axis) const {
  int64_t product = 1;
  for (const int dim : axis.grid_dims) product *= grid[static_cast<size_t>(dim)];
  return product;
}

int64_t LayoutKind::place(int rank, const Axis& axis) const {
  int64_t found = 0;
  for (const int dim : axis.grid_dims) {
    const auto at = static_cast<size_t>(dim);
    found = found * grid[at] + coordinate(rank, at);
  }
  return found;
}

bool LayoutKind::is_holder(int rank, int of) const {
  for (size_t dim = 0; dim < grid.size(); ++dim) {
    const bool is_used = std::any_of(axes.begin(), axes.end(), [dim](const Axis& axis) {
      return std::count(axis.grid_dims.begin(), axis.grid_dims.end(), static_cast<int>(dim)) > 0;
    });
    if (!is_used && coordinate(rank, dim) != coordinate(of, dim)) return false;
  }
  return true;
}

void LayoutPair::add_moves(const int64_t* numbers, const int64_t* strides, int rank,
                           std::vector<BoxMove>& moves) const {
  const size_t ndim = source.axes.size();
  const Lengths before{source, numbers}, behind{target, numbers + source.num_numbers()};
  const int64_t* const strides_behind = strides + ndim;
  std::vector<Runs> runs[kMostAxes], of_a_period;
  Place own_before[kMostAxes], own_behind[kMostAxes], others[kMostAxes];
  before.places_of(rank, own_before);
  behind.places_of(rank, own_behind);

  // The moves between two ranks are all combinations of runs, those of the last dimension first.
  const auto add = [&](const Place* from, const Place* to, int peer, bool leaves, bool arrives) {
    for (size_t axis = 0; axis < ndim; ++axis) {
      find_common(from[axis], to[axis], runs[axis], of_a_period);
      if (runs[axis].empty()) return;
    }
    size_t at[kMostAxes] = {};
    for (int64_t number = 0;; ++number) {
      BoxMove& move = moves.emplace_back();
      move.number = number;
      move.peer = peer;
      move.leaves = leaves;
      move.arrives = arrives;
      if (leaves) move.source.array = 0;
      if (arrives) move.target.array = 1;
      for (size_t axis = 0; axis < ndim; ++axis) {
        const Runs& run = runs[axis][at[axis]];
        if (leaves) {
          add_dimension(move.source, run, run.source, run.source_step, strides[axis]);
        }
        if (arrives) {
          add_dimension(move.target, run, run.target, run.target_step, strides_behind[axis]);
        }
      }
      size_t axis = ndim;
      while (axis > 0 && ++at[axis - 1] == runs[axis - 1].size()) at[--axis] = 0;
      if (axis == 0) return;
    }
  };

  const auto size = static_cast<int>(source.num_ranks());
  for (int peer = 0; peer < size; ++peer) {
    if (source.is_holder(peer, rank)) {
      if (peer == rank) {
        add(own_before, own_behind, -1, true, true);
      } else {
        behind.places_of(peer, others);
        add(own_before, others, peer, true, false);
      }
    }
    if (peer != rank && source.is_holder(rank, peer)) {
      before.places_of(peer, others);
      add(others, own_behind, peer, false, true);
    }
  }
}

size_t LayoutPair::nbytes() const {
  const auto of = [](const LayoutKind& kind) {
    size_t sum = kind.grid.capacity() * sizeof kind.grid[0];
    for (const LayoutKind::Axis& axis : kind.axes) {
      sum += sizeof axis + axis.grid_dims.capacity() * sizeof axis.grid_dims[0];
    }
    return sum;
  };
  return sizeof *this + of(source) + of(target);
}

}  // namespace commrt
