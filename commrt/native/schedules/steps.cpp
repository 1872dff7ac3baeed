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

void DataDependencies::cover(std::int64_t end) {
  if (end <= static_cast<std::int64_t>(writer_.size())) return;
  if (end > kMostLocations) {
    throw std::out_of_range("a step on block " + std::to_string(end - 1) +
                            " of a rank, which is more than any schedule has");
  }
  const auto size = std::max<std::size_t>(static_cast<std::size_t>(end), 2 * writer_.size());
  writer_.resize(size, -1);
  last_reader_.resize(size, -1);
}

void DataDependencies::read(std::int32_t item, std::int64_t location, std::int32_t count,
                            std::vector<std::int32_t>& found) {
  cover(location + count);
  std::int32_t last = -1;
  for (std::int64_t at = std::max<std::int64_t>(location, 0); at < location + count; ++at) {
    const std::int32_t writer = writer_[at];
    if (writer >= 0 && writer != last) found.push_back(last = writer);
    const std::int32_t before = last_reader_[at];
    if (before >= 0 && readers_[before].item == item) continue;
    last_reader_[at] = static_cast<std::int32_t>(readers_.size());
    readers_.push_back({item, before});
  }
}

void DataDependencies::write(std::int32_t item, std::int64_t location, std::int32_t count,
                             std::vector<std::int32_t>& found) {
  cover(location + count);
  std::int32_t last = -1;
  for (std::int64_t at = std::max<std::int64_t>(location, 0); at < location + count; ++at) {
    // The readers have waited for the writer before them.
    for (std::int32_t one = last_reader_[at]; one >= 0; one = readers_[one].next)
      if (readers_[one].item != last) found.push_back(last = readers_[one].item);
    last_reader_[at] = -1;
    if (writer_[at] >= 0 && writer_[at] != last) found.push_back(last = writer_[at]);
    writer_[at] = item;
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
