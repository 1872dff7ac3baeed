// SPDX-License-Identifier: Apache-2.0
// Vector clocks: how much of each stream and host thread is known to have happened.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace commrt::sim {

using Actor = std::uint32_t;  // a stream or a host thread
using Tick = std::uint32_t;

class Clock {
 public:
  Tick of(Actor actor) const { return actor < ticks_.size() ? ticks_[actor] : 0; }
  void raise(Actor actor, Tick tick) {
    if (actor >= ticks_.size()) ticks_.resize(actor + 1);
    ticks_[actor] = std::max(ticks_[actor], tick);
  }
  void join(const Clock& other) {
    if (ticks_.size() < other.ticks_.size()) ticks_.resize(other.ticks_.size());
    for (std::size_t i = 0; i < other.ticks_.size(); ++i)
      ticks_[i] = std::max(ticks_[i], other.ticks_[i]);
  }
  // Keeps its memory.
  void copy(const Clock& other) { ticks_.assign(other.ticks_.begin(), other.ticks_.end()); }

 private:
  std::vector<Tick> ticks_;
};

// The same numbers for the same seed on every machine (splitmix64).
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t next() {
    std::uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  std::size_t below(std::size_t bound) { return static_cast<std::size_t>(next() % bound); }
  double unit() { return static_cast<double>(next() >> 11) * 0x1.0p-53; }
  bool chance(double p) { return unit() < p; }

 private:
  std::uint64_t state_;
};

}  // namespace commrt::sim
