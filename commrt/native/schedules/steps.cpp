// SPDX-License-Identifier: Apache-2.0
// Keeps the steps of a rank, and finds out what must wait for what.
#include "schedules/steps.hpp"

#include <algorithm>

namespace commrt {

namespace {

constexpr std::int64_t kMostLocations = std::int64_t{1} << 30;

}  // namespace

std::int32_t num_locations(const BlockSpaces& spaces) {
  std::int32_t most = 0;
  for (const BlockSpace& space : spaces) most = std::max(most, space.first + space.nblk);
  return most;
}

DataDependencies::Span DataDependencies::cells(std::int64_t location, std::int32_t count) {
  const std::int64_t end = location + count;
  if (end > kMostLocations) {
    throw std::out_of_range("a step on block " + std::to_string(end - 1) +
                            " of a rank, which is more than any schedule has");
  }
  const auto lo = static_cast<std::int32_t>(std::max<std::int64_t>(location, 0));
  if (end <= lo) return {0, 0};
  const auto hi = static_cast<std::int32_t>(end);
  if (!starts_.empty()) {
    const std::size_t begin = cut(lo), stop = cut(hi);
    const std::size_t many = starts_.size();
    if (many <= kFewCells || many * kBlocksPerCell <= static_cast<std::size_t>(starts_.back()))
      return {begin, stop};
    use_blocks();
  }
  if (cells_.size() < static_cast<std::size_t>(hi))
    cells_.resize(std::max<std::size_t>(static_cast<std::size_t>(hi), 2 * cells_.size()));
  return {static_cast<std::size_t>(lo), static_cast<std::size_t>(hi)};
}

// Lets a cell begin at `block`; returns its place.
std::size_t DataDependencies::cut(std::int32_t block) {
  const auto after = std::upper_bound(starts_.begin(), starts_.end(), block);
  const auto at = static_cast<std::size_t>(after - starts_.begin());
  if (starts_[at - 1] == block) return at - 1;
  const Cell same = cells_[at - 1];
  starts_.insert(after, block);
  cells_.insert(cells_.begin() + static_cast<std::ptrdiff_t>(at), same);
  return at;
}

void DataDependencies::use_blocks() {
  // Nothing has touched the last cell, which has no end.
  std::vector<Cell> blocks(static_cast<std::size_t>(starts_.back()));
  for (std::size_t i = 0; i + 1 < starts_.size(); ++i)
    std::fill(blocks.begin() + starts_[i], blocks.begin() + starts_[i + 1], cells_[i]);
  cells_ = std::move(blocks);
  starts_.clear();
}

void DataDependencies::read(std::int32_t item, std::int64_t location, std::int32_t count,
                            std::vector<std::int32_t>& found) {
  const Span span = cells(location, count);
  std::int32_t last = -1;
  for (std::size_t at = span.begin; at < span.end; ++at) {
    Cell& cell = cells_[at];
    if (cell.writer >= 0 && cell.writer != last) found.push_back(last = cell.writer);
    const std::int32_t before = cell.last_reader;
    if (before >= 0 && readers_[before].item == item) continue;
    cell.last_reader = static_cast<std::int32_t>(readers_.size());
    readers_.push_back({item, before});
  }
}

void DataDependencies::write(std::int32_t item, std::int64_t location, std::int32_t count,
                             std::vector<std::int32_t>& found) {
  const Span span = cells(location, count);
  std::int32_t last = -1;
  for (std::size_t at = span.begin; at < span.end; ++at) {
    Cell& cell = cells_[at];
    // The readers have waited for the writer before them.
    for (std::int32_t one = cell.last_reader; one >= 0; one = readers_[one].next)
      if (readers_[one].item != last) found.push_back(last = readers_[one].item);
    if (cell.writer >= 0 && cell.writer != last) found.push_back(last = cell.writer);
    cell = {item, -1};
  }
}

void DataDependencies::finish(std::int32_t item, std::size_t before,
                              std::vector<std::int32_t>& found) {
  const auto begin = found.begin() + static_cast<std::ptrdiff_t>(before);
  found.erase(std::remove(begin, found.end(), item), found.end());
  const auto first = found.begin() + static_cast<std::ptrdiff_t>(before);
  std::sort(first, found.end());
  found.erase(std::unique(first, found.end()), found.end());
}

const std::vector<std::int32_t>* StepColumns::after(std::int32_t index) const {
  const auto found = after_.find(index);
  return found == after_.end() ? nullptr : &found->second;
}

std::int32_t StepColumns::append(const ScheduleStep& step, const std::vector<std::int32_t>& deps,
                                 std::vector<std::int32_t> after) {
  const std::int32_t index = size();
  rows_.push_back(step);
  deps_.values.insert(deps_.values.end(), deps.begin(), deps.end());
  deps_.close_row();
  if (!after.empty()) after_.emplace(index, std::move(after));
  return index;
}

std::int32_t StepColumns::record(const ScheduleStep& step) {
  std::vector<std::int32_t> after;
  after.swap(next_after_);
  if (step.src.given() && step.dst.given() && step.src.count() != step.dst.count())
    throw ScheduleFault("sizes", {step.src.count(), step.dst.count()});
  for (const BlockSlice* end : {&step.src, &step.dst})
    if (end->given() && end->count() == 0) return -1;
  const std::int32_t index = size();
  BlockSlice reads[2], writes[1];
  int num_reads = 0, num_writes = 0;
  if (step.src.given()) reads[num_reads++] = step.src;
  if (step.op == kRedStep && step.dst.given()) reads[num_reads++] = step.dst;
  if (step.dst.given()) writes[num_writes++] = step.dst;
  for (const BlockSlice* end : {&step.src, &step.dst}) {
    if (end->space >= static_cast<std::int32_t>(first_.size()))
      throw std::out_of_range("a step on space " + std::to_string(end->space) + " of " +
                              std::to_string(first_.size()));
  }
  struct Few {
    const BlockSlice* from;
    int count;
    const BlockSlice* begin() const { return from; }
    const BlockSlice* end() const { return from + count; }
  };
  const std::size_t before = deps_.values.size();
  tracker_.access(index, Few{reads, num_reads}, Few{writes, num_writes},
                  [this](const BlockSlice& where) { return std::int64_t{first_[where.space]}; },
                  deps_.values);
  if (!after.empty()) {
    std::sort(after.begin(), after.end());
    after.erase(std::unique(after.begin(), after.end()), after.end());
    auto& values = deps_.values;
    values.insert(values.end(), after.begin(), after.end());
    const auto first = values.begin() + static_cast<std::ptrdiff_t>(before);
    std::sort(first, values.end());
    values.erase(std::unique(first, values.end()), values.end());
    after_.emplace(index, std::move(after));
  }
  deps_.close_row();
  rows_.push_back(step);
  return index;
}

std::vector<std::int32_t> StepColumns::peers() const {
  std::vector<std::int32_t> found;
  for (const ScheduleStep& step : rows_)
    if (step.peer >= 0) found.push_back(step.peer);
  std::sort(found.begin(), found.end());
  found.erase(std::unique(found.begin(), found.end()), found.end());
  return found;
}

}  // namespace commrt
