// SPDX-License-Identifier: Apache-2.0
// Records of operations, and the clocks that they are told by.
#include "engine/record.hpp"

#include <time.h>

#include <algorithm>

#include "engine/comm.hpp"

namespace commrt {

namespace {

uint64_t now_ns(clockid_t clock) {
  timespec now;
  clock_gettime(clock, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1000000000u + static_cast<uint64_t>(now.tv_nsec);
}

const Moment loaded;

}  // namespace

uint64_t ticks() {
#if defined(__x86_64__)
  return __builtin_ia32_rdtsc();
#elif defined(__aarch64__)
  uint64_t value;
  asm volatile("mrs %0, cntvct_el0" : "=r"(value));
  return value;
#else
#error "commrt runs on x86-64 and arm64"
#endif
}

uint64_t steady_ns() { return now_ns(CLOCK_MONOTONIC); }
int64_t wall_ns() { return static_cast<int64_t>(now_ns(CLOCK_REALTIME)); }

Moment::Moment() : ticks_(ticks()), ns_(steady_ns()) {}

double Moment::seconds_since(uint64_t then_ticks) const {
  const uint64_t in_all = ticks_ - loaded.ticks_;
  if (ticks_ <= then_ticks || in_all == 0) return 0;
  const double ns = static_cast<double>(ns_ - loaded.ns_);
  return 1e-9 * ns * static_cast<double>(ticks_ - then_ticks) / static_cast<double>(in_all);
}

void Comm::tell_count() {
  if (told_ != nullptr) told_->started.store(next_seq, std::memory_order_relaxed);
  if (arena == nullptr) return;
  header(member_index_[rank])->started.store(next_seq, std::memory_order_relaxed);
}

// On one line, which is written with each call: so what it was costs nothing beside the count.
void Comm::show_latest(const Record& record, uint64_t mark) {
  tell_count();
  if (told_ != nullptr) {
    told_->latest_mark.store(mark, std::memory_order_relaxed);
    told_->latest_ticks.store(record.start_ticks, std::memory_order_relaxed);
  }
  if (arena == nullptr) return;
  RankHeader& mine = *header(member_index_[rank]);
  // Release: behind the count, for who compares it (differing_calls.cpp).
  mine.latest_mark.store(mark, std::memory_order_release);
  mine.latest_ticks.store(record.start_ticks, std::memory_order_relaxed);
}

void Comm::note(uint64_t seq, const Plan& plan, uint64_t stream) {
  Record& record = records[seq % kRecords];
  if (keeps_records) {
    record.seq = seq;
    record.count = std::max(plan.in_elems, plan.out_elems);
    record.start_ticks = ticks();
    record.end_ticks = 0;
    record.coll = static_cast<int16_t>(plan.coll);
    record.root = static_cast<int16_t>(plan.root);
    record.dtype = static_cast<uint8_t>(plan.dtype);
    record.redop = static_cast<uint8_t>(plan.redop);
    record.state = 0;
    record.stream = stream;
    record.device = plan.device;
    record.facts = fields_of(plan.mark);
  }
  show_latest(record, call_mark(plan.mark, seq));
}

uint64_t Comm::count_elsewhere(const Record& what) {
  const uint64_t seq = take_number();
  Record& record = records[seq % kRecords];
  record = what;
  record.seq = seq;
  record.start_ticks = ticks();
  const uint64_t mark = mark_of_plan(what.coll, static_cast<DType>(what.dtype), what.redop, what.root);
  record.facts = fields_of(mark);
  show_latest(record, call_mark(mark & ~uint64_t{1}, seq));
  return seq;
}

}  // namespace commrt
