// SPDX-License-Identifier: Apache-2.0
// Sets of ranks, the contents of blocks, and what an operation makes of them.
#include "schedules/contents.hpp"

#include <algorithm>

namespace commrt {

namespace {

std::uint64_t pair_of(std::int32_t one, std::int32_t other) {
  return static_cast<std::uint64_t>(static_cast<std::uint32_t>(one)) << 32 |
         static_cast<std::uint32_t>(other);
}

std::uint64_t mixed(std::uint64_t value) {
  value *= 0x9E3779B97F4A7C15ull;
  return value ^ value >> 29;
}

}  // namespace

RankSets::Number RankSets::range(std::int32_t lo, std::int32_t hi) {
  merged_.assign(1, {lo, hi});
  return keep(merged_);
}

RankSets::Intervals RankSets::intervals(Number one) const {
  if (is_arc(one)) return {arc(one), size_};
  const Set& set = sets_[one];
  return {intervals_.data() + set.begin, set.end - set.begin};
}

RankSets::Number RankSets::joined(const Arc& one, const Arc& other) const {
  const std::int32_t count = one.count + other.count;
  if (count > size_) return -1;
  const auto follows = [this](const Arc& first, const Arc& second) {
    const std::int32_t end = first.lo + first.count;
    return (end >= size_ ? end - size_ : end) == second.lo;
  };
  if (follows(one, other)) return number({one.lo, count});
  if (follows(other, one)) return number({other.lo, count});
  return -1;
}

RankSets::Number RankSets::keep(const std::vector<Interval>& intervals) {
  if (size_ <= kMostInArcs) {
    const Interval &first = intervals.front(), &last = intervals.back();
    if (intervals.size() == 1) return number({first.lo, first.hi - first.lo});
    if (intervals.size() == 2 && first.lo == 0 && last.hi == size_)
      return number({last.lo, first.hi + size_ - last.lo});
  }
  std::uint64_t hash = 0xCBF29CE484222325ull;
  for (const Interval& one : intervals)
    hash = mixed(hash ^ pair_of(one.lo, one.hi));
  const auto is_same = [&](Number number) {
    const Set& set = sets_[number];
    return hashes_[number] == hash && set.end - set.begin == intervals.size() &&
           std::equal(intervals.begin(), intervals.end(),
                      intervals_.begin() + static_cast<std::ptrdiff_t>(set.begin),
                      [](const Interval& x, const Interval& y) {
                        return x.lo == y.lo && x.hi == y.hi;
                      });
  };
  const Number known = kept_.find(hash, is_same);
  if (known >= 0) return known;
  const auto number = static_cast<Number>(sets_.size());
  sets_.push_back({intervals_.size(), intervals_.size() + intervals.size()});
  hashes_.push_back(hash);
  intervals_.insert(intervals_.end(), intervals.begin(), intervals.end());
  kept_.add(number, [this](Number each) { return hashes_[each]; });
  return number;
}

RankSets::Number RankSets::unite(Number one, Number other) {
  if (is_arc(one) && is_arc(other)) {
    const Number arc_of_both = joined(arc(one), arc(other));
    if (arc_of_both >= 0) return arc_of_both;
  }
  const auto [low, high] = std::minmax(one, other);
  const std::uint64_t key = pair_of(low, high);
  const Number known =
      united_.find(mixed(key), [this, key](Number each) { return pairs_[each] == key; });
  if (known >= 0) return unions_[known];
  merged_.clear();
  const Intervals of_one = intervals(one), of_other = intervals(other);
  const Interval *a = of_one.begin(), *b = of_other.begin();
  while (a != of_one.end() || b != of_other.end()) {
    const bool take_a = b == of_other.end() || (a != of_one.end() && a->lo <= b->lo);
    const Interval next = take_a ? *a++ : *b++;
    if (!merged_.empty() && merged_.back().hi >= next.lo) {
      merged_.back().hi = std::max(merged_.back().hi, next.hi);
    } else {
      merged_.push_back(next);
    }
  }
  const Number made = keep(merged_);
  pairs_.push_back(key);
  unions_.push_back(made);
  united_.add(static_cast<Number>(pairs_.size()) - 1,
              [this](Number each) { return mixed(pairs_[each]); });
  return made;
}

bool RankSets::overlap(Number one, Number other) const {
  const Intervals of_one = intervals(one), of_other = intervals(other);
  const Interval *a = of_one.begin(), *b = of_other.begin();
  while (a != of_one.end() && b != of_other.end()) {
    if (a->hi <= b->lo) {
      ++a;
    } else if (b->hi <= a->lo) {
      ++b;
    } else {
      return true;
    }
  }
  return false;
}

std::vector<std::int32_t> RankSets::ranks(Number one) const {
  std::vector<std::int32_t> found;
  for (const Interval& each : intervals(one))
    for (std::int32_t rank = each.lo; rank < each.hi; ++rank) found.push_back(rank);
  return found;
}

std::vector<std::int32_t> RankSets::common(Number one, Number other) const {
  const std::vector<std::int32_t> a = ranks(one), b = ranks(other);
  std::vector<std::int32_t> found;
  std::set_intersection(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(found));
  return found;
}

bool Value::operator==(const Value& other) const {
  return size() == other.size() && std::equal(begin(), end(), other.begin());
}

void Value::add(Run run) {
  if (run.count == 0) return;
  Run* last = many_.empty() ? &one_ : &many_.back();
  if (last->count == 0) {
    *last = run;
  } else if (run.continues(*last)) {
    last->count += run.count;
  } else {
    if (many_.empty()) many_.push_back(one_);
    many_.push_back(run);
  }
}

Held::Held(std::int32_t nblk, std::int32_t part, RankSets::Number ranks) : nblk_(nblk) {
  if (nblk > 0) runs_.push_back({0, part, ranks});
}

std::size_t Held::find(std::int32_t block) const {
  const auto after = std::upper_bound(runs_.begin(), runs_.end(), block,
                                      [](std::int32_t b, const Piece& p) { return b < p.lo; });
  return static_cast<std::size_t>(after - runs_.begin()) - 1;
}

void Held::read(std::int32_t lo, std::int32_t hi, Value& value) const {
  value.clear();
  if (!cells_.empty()) {
    for (std::int32_t block = lo; block < hi; ++block) {
      if (cells_[block].ranks < 0) throw ScheduleFault("nothing", {block});
      value.add({1, cells_[block].part, cells_[block].ranks});
    }
    return;
  }
  for (std::size_t i = find(lo); i < runs_.size() && runs_[i].lo < hi; ++i) {
    const std::int32_t from = std::max(lo, runs_[i].lo), to = std::min(hi, end_of(i));
    if (runs_[i].ranks < 0) throw ScheduleFault("nothing", {from});
    value.add({to - from, runs_[i].part + from - runs_[i].lo, runs_[i].ranks});
  }
}

void Held::write_cells(std::int32_t lo, const Value& value) {
  for (const Run& run : value)
    for (std::int32_t i = 0; i < run.count; ++i) cells_[lo++] = {run.part + i, run.ranks};
}

void Held::use_cells() {
  std::vector<Cell> cells;
  cells.reserve(static_cast<std::size_t>(nblk_));
  each([&cells](std::int32_t, const Run& run) {
    for (std::int32_t i = 0; i < run.count; ++i) cells.push_back({run.part + i, run.ranks});
  });
  cells_ = std::move(cells);
  runs_ = {};
  made_ = {};
}

void Held::write(std::int32_t lo, std::int32_t hi, const Value& value) {
  if (!cells_.empty()) return write_cells(lo, value);
  const std::size_t from = find(lo);
  if (value.size() == 1 && runs_[from].lo == lo && end_of(from) == hi) {
    const Run& run = *value.begin();
    const bool joins_before =
        from > 0 && runs_[from - 1].ranks == run.ranks &&
        runs_[from - 1].part + lo - runs_[from - 1].lo == run.part;
    const bool joins_after = from + 1 < runs_.size() && runs_[from + 1].ranks == run.ranks &&
                             run.part + run.count == runs_[from + 1].part;
    if (!joins_before && !joins_after) {
      runs_[from] = {lo, run.part, run.ranks};
      return;
    }
  }
  // The run before, what is left of the first and last one, and the run behind may join.
  const std::size_t last = find(hi - 1);
  const std::size_t begin = from > 0 ? from - 1 : from;
  const std::size_t end = std::min(last + 2, runs_.size());
  made_.clear();
  std::int32_t at = runs_[begin].lo;
  const auto add = [this, &at](const Run& run) {
    if (run.count == 0) return;
    const bool joins = !made_.empty() && made_.back().ranks == run.ranks &&
                       (run.ranks < 0 || made_.back().part + at - made_.back().lo == run.part);
    if (!joins) made_.push_back({at, run.part, run.ranks});
    at += run.count;
  };
  if (begin < from) add({runs_[from].lo - runs_[begin].lo, runs_[begin].part, runs_[begin].ranks});
  add({lo - runs_[from].lo, runs_[from].part, runs_[from].ranks});
  for (const Run& run : value) add(run);
  add({end_of(last) - hi, runs_[last].part + hi - runs_[last].lo, runs_[last].ranks});
  if (last + 1 < end)
    add({end_of(last + 1) - runs_[last + 1].lo, runs_[last + 1].part, runs_[last + 1].ranks});
  const std::size_t old = end - begin, now = made_.size();
  const auto place = runs_.begin() + static_cast<std::ptrdiff_t>(begin);
  if (now > old) {
    runs_.insert(place + static_cast<std::ptrdiff_t>(old), now - old, Piece{});
  } else if (now < old) {
    runs_.erase(place + static_cast<std::ptrdiff_t>(now), place + static_cast<std::ptrdiff_t>(old));
  }
  std::copy(made_.begin(), made_.end(), runs_.begin() + static_cast<std::ptrdiff_t>(begin));
  if (runs_.size() > kFewRuns && runs_.size() * kBlocksPerRun > static_cast<std::size_t>(nblk_))
    use_cells();
}

SymbolicMemory::SymbolicMemory(const OperationGoal& goal,
                               const std::vector<const BlockSpaces*>& spaces, RankSets& sets,
                               bool in_place)
    : sets_(sets) {
  for (std::size_t rank = 0; rank < spaces.size(); ++rank) {
    const auto own = static_cast<std::int32_t>(rank);
    std::vector<std::int32_t> where;
    for (const BlockSpace& space : *spaces[rank]) {
      if (in_place && space.may_be_input && !where.empty()) {
        where.push_back(where.front());
        continue;
      }
      const bool input = where.empty();
      where.push_back(static_cast<std::int32_t>(held_.size()));
      held_.emplace_back(space.nblk, input && goal.per_rank_input ? own * space.nblk : 0,
                         input ? sets.range(own, own + 1) : -1);
    }
    where_.push_back(std::move(where));
  }
}

void SymbolicMemory::check(const OperationGoal& goal) const {
  for (std::size_t at = 0; at < where_.size(); ++at) {
    const auto rank = static_cast<std::int32_t>(at);
    const std::int32_t nblk = held(rank, 1).size();
    const std::int32_t share = std::max(1, nblk / goal.size);
    const auto check_run = [&](std::int32_t lo, Run found, Run wanted) {
      // Both are runs over the same blocks: if the first agrees, all do.
      if (found.ranks == wanted.ranks && found.part == wanted.part) return;
      throw ScheduleFault("ends", {rank, lo}, {named(found, sets_), named(wanted, sets_)});
    };
    held(rank, 1).each([&](std::int32_t lo, const Run& run) {
      for (std::int32_t block = lo; block < lo + run.count;) {
        std::int32_t until = lo + run.count;
        Run wanted{0, block, -1};
        switch (goal.shape) {
          case OperationGoal::Shape::kBlockPerPair:
          case OperationGoal::Shape::kBlockPerRank: {
            const std::int32_t src = block / share;
            until = std::min(until, (src + 1) * share);
            wanted.ranks = sets_.range(src, src + 1);
            if (goal.shape == OperationGoal::Shape::kBlockPerPair)
              wanted.part = src * nblk + rank * share + block - src * share;
            break;
          }
          case OperationGoal::Shape::kOwnBlock:
            wanted.part = rank * nblk + block;
            [[fallthrough]];
          case OperationGoal::Shape::kWhole:
            wanted.ranks = sets_.range(goal.holders[at].first, goal.holders[at].second);
        }
        wanted.count = until - block;
        check_run(block, {until - block, run.part + block - lo, run.ranks}, wanted);
        block = until;
      }
    });
  }
}

void combine_values(const Value& first, const Value& second, CombineRule rule, bool idempotent,
                    RankSets& sets, Value& result) {
  result.clear();
  const Run *a = first.begin(), *b = second.begin();
  std::int32_t done_a = 0, done_b = 0;
  while (a != first.end() && b != second.end()) {
    const std::int32_t count = std::min(a->count - done_a, b->count - done_b);
    const Run one{count, a->part + done_a, a->ranks}, other{count, b->part + done_b, b->ranks};
    if (one.part != other.part)
      throw ScheduleFault("parts", {}, {named(one, sets), named(other, sets)});
    if (rule == CombineRule::kNone && !idempotent) throw ScheduleFault("no reduction", {});
    if (!idempotent && sets.overlap(one.ranks, other.ranks))
      throw ScheduleFault("twice", {}, {{one.part, sets.common(one.ranks, other.ranks)}});
    if (rule == CombineRule::kOrdered && sets.highest(one.ranks) + 1 != sets.lowest(other.ranks))
      throw ScheduleFault("order", {}, {named(one, sets), named(other, sets)});
    result.add({count, one.part, sets.unite(one.ranks, other.ranks)});
    if ((done_a += count) == a->count) ++a, done_a = 0;
    if ((done_b += count) == b->count) ++b, done_b = 0;
  }
}

ScheduleFault::Held named(const Run& run, const RankSets& sets) {
  if (run.ranks < 0) return {-1, {}};
  return {run.part, sets.ranks(run.ranks)};
}

}  // namespace commrt
