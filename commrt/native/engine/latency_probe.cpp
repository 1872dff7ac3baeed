// SPDX-License-Identifier: Apache-2.0
// Measures how long a word takes to a peer of this node, while the peer does the same.
#include <chrono>

#include "engine/comm.hpp"

namespace commrt {

double Comm::probe_latency(int peer, int rounds, double timeout_s) {
  using clock = std::chrono::steady_clock;
  const auto deadline = clock::now() + std::chrono::duration<double>(timeout_s);
  auto probe_word = [this](int of, int towards) -> std::atomic<uint64_t>& {
    unsigned char* region = arena + static_cast<size_t>(member_index_[of]) * region_nbytes;
    return reinterpret_cast<Ack*>(region + layout.probes)[member_index_[towards]].consumed;
  };
  std::atomic<uint64_t>& mine = probe_word(rank, peer);
  const std::atomic<uint64_t>& theirs = probe_word(peer, rank);
  // A word holds the number of the probe above and its round below. Both ranks make the
  // same probes, so one that ran out of time is told from the next; its last round says so.
  constexpr int kShift = 32;
  constexpr uint64_t kGaveUp = (uint64_t{1} << kShift) - 1;
  const uint64_t probe = ((mine.load(std::memory_order_relaxed) >> kShift) + 1) << kShift;
  const bool first = rank < peer;
  double best_ns = -1;
  for (int i = 1; i <= rounds; ++i) {
    const auto begin = clock::now();
    const uint64_t value = probe + static_cast<uint64_t>(i);
    if (first) mine.store(value, std::memory_order_release);
    uint64_t seen;
    for (unsigned spin = 0; (seen = theirs.load(std::memory_order_acquire)) < value; ++spin) {
      if ((spin & 255) == 255 && clock::now() > deadline) {
        seen = probe + kGaveUp;
        break;
      }
    }
    if (seen >= probe + kGaveUp) {  // out of time, here or there
      mine.store(probe + kGaveUp, std::memory_order_release);
      return -1;
    }
    if (!first) mine.store(value, std::memory_order_release);
    const double ns = std::chrono::duration<double, std::nano>(clock::now() - begin).count() / 2;
    if (i > rounds / 4 && (best_ns < 0 || ns < best_ns)) best_ns = ns;
  }
  return best_ns;
}

}  // namespace commrt
