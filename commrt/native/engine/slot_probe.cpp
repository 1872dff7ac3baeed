// SPDX-License-Identifier: Apache-2.0
// Measures which is faster: payloads that go to the slot of the one before, or to the next slots
// of a window.
//
// A core that writes to lines which its peer has just read must first take them out of the
// peer's cache. Some processors do that at the speed of reading (Zen 5: 2.6 ns for a line written
// and read); on others it takes several times longer than to fetch them from the cache that both
// share, where they are once they have left the cores' own (Zen 4, near cores: 9.3 ns in the same
// slot, 3.6 ns through 1.5 MiB). So it is measured, once, where ranks are near each other.
#include <algorithm>
#include <chrono>
#include <vector>

#include "engine/comm.hpp"
#include "engine/engine.hpp"
#include "kernels/kernels.hpp"

namespace commrt {

namespace {

using Clock = std::chrono::steady_clock;
constexpr size_t kPayload = 32768;
constexpr int kSameRounds = 12;
constexpr int kPasses = 6;  // of the window; the first ones find pages that nobody has touched

// The two ranks of a probe meet between its steps. A word counts in its high half the probes
// of this pair, of which both make the same, so that nobody is taken for one of an earlier probe.
class Rendezvous {
 public:
  Rendezvous(std::atomic<uint64_t>& mine, const std::atomic<uint64_t>& theirs, double timeout_s)
      : mine_(mine), theirs_(theirs),
        probe_(((mine.load(std::memory_order_relaxed) >> kShift) + 1) << kShift),
        deadline_(Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                     std::chrono::duration<double>(timeout_s))) {}

  // False once either has run out of time, for both.
  bool meet() {
    const uint64_t step = probe_ + ++steps_;
    mine_.store(step, std::memory_order_release);
    uint64_t seen;
    for (unsigned spin = 0; (seen = theirs_.load(std::memory_order_acquire)) < step; ++spin) {
      if ((spin & 255) == 255 && Clock::now() > deadline_) break;
    }
    if (seen >= step && seen < probe_ + kGaveUp) return true;
    mine_.store(probe_ + kGaveUp, std::memory_order_release);
    return false;
  }

 private:
  static constexpr int kShift = 32;
  static constexpr uint64_t kGaveUp = (uint64_t{1} << kShift) - 1;
  std::atomic<uint64_t>& mine_;
  const std::atomic<uint64_t>& theirs_;
  const uint64_t probe_;
  uint64_t steps_ = 0;
  const Clock::time_point deadline_;
};

}  // namespace

SlotTimes Comm::probe_slots(int peer, size_t window, double timeout_s) {
  auto region = [this](int of) {
    return arena + static_cast<size_t>(member_index_[of]) * region_nbytes;
  };
  auto word = [&](int of, int towards) -> std::atomic<uint64_t>& {
    return reinterpret_cast<Ack*>(region(of) + layout.probes)[member_index_[towards]].consumed;
  };
  unsigned char* const mine = region(rank) + layout.lanes;
  const unsigned char* const theirs = region(peer) + layout.lanes;
  const size_t slots = std::max<size_t>(1, std::min(window, layout.lane_nbytes) / kPayload);

  // The stores that operations use: what memcpy does for such lengths differs.
  const CombineFn kernel = combine_for(DType::F32, RedOp::Sum);
  std::vector<unsigned char> own(kPayload), got(kPayload);
  auto copy_line_by_line = [&](void* to, const void* from) {
    kernel(to, nullptr, &from, 1, kPayload / sizeof(float), nullptr, Scale{}, Store::Plain);
  };
  Rendezvous rendezvous(word(rank, peer), word(peer, rank), timeout_s);
  // One payload each way; how long this rank wrote and read, in ns, or -1.
  auto exchange = [&](size_t slot) {
    const size_t at = slot * kPayload;
    if (!rendezvous.meet()) return -1.0;
    const auto begin = Clock::now();
    copy_line_by_line(mine + at, own.data());
    const auto written = Clock::now();
    if (!rendezvous.meet()) return -1.0;
    const auto seen = Clock::now();
    copy_line_by_line(got.data(), theirs + at);
    const auto took = (written - begin) + (Clock::now() - seen);
    return std::chrono::duration<double, std::nano>(took).count();
  };

  constexpr double kLinesOf = static_cast<double>(kPayload / kLineBytes);
  double same = -1;
  for (int i = 0; i < kSameRounds; ++i) {
    const double ns = exchange(0);
    if (ns < 0) return {-1, -1};
    if (i >= 2) same = same < 0 ? ns : std::min(same, ns);
  }
  double moving = -1;
  for (int pass = 0; pass < kPasses; ++pass) {
    std::vector<double> each;
    for (size_t slot = 0; slot < slots; ++slot) {
      each.push_back(exchange(slot));
      if (each.back() < 0) return {-1, -1};
    }
    // Its faster quarter: of one slot the fastest round counts.
    const size_t place = each.size() / 4;
    std::nth_element(each.begin(), each.begin() + static_cast<long>(place), each.end());
    if (pass > 1) moving = moving < 0 ? each[place] : std::min(moving, each[place]);
  }
  return {same / kLinesOf, moving / kLinesOf};
}

}  // namespace commrt
