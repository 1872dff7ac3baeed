// SPDX-License-Identifier: Apache-2.0
// Bells: how ranks of a node wake one that sleeps.
//
// Each rank has a word in memory that the node's ranks share. Its lowest bit says that somebody of
// the rank sleeps, or is about to; the rest counts how often the bell was rung. A rank that waits
// sets the bit, looks once more, and sleeps in the kernel (a futex) until the word changes. A rank
// that has written something for it clears the bit, counts, and wakes it.
//
// Who writes must not pay for that. It looks at one word of the node, the number of ranks whose bit
// is set: in its own cache, as long as nobody goes to sleep or wakes up. There is no fence between
// what it writes and this look. So a processor may do the look first, while what was written is
// still on its way out of the core: that takes nanoseconds. Hence a rank that goes to sleep naps
// for kNap_s between setting its bit and its last look. Whoever has missed the bit has written long
// before that look. And no sleep is longer than kLongest_s.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "engine/layout.hpp"

namespace commrt {

class Bells : public std::enable_shared_from_this<Bells> {
 public:
  static constexpr double kNap_s = 50e-6, kLongest_s = 0.05;

  // The bells of `members` ranks, in zeroed memory with a region for each. It is unmapped at the
  // end. `name` is no other memory's.
  Bells(std::string name, void* base, size_t region_nbytes, int members, int own);
  // The same for ranks that are threads of this process.
  static std::shared_ptr<Bells> of_threads(const std::string& name, int members, int own);
  ~Bells();
  Bells(const Bells&) = delete;
  Bells& operator=(const Bells&) = delete;

  const std::string name;
  const int own;  // this rank's index among the members

  // The number of ranks that sleep, or are about to.
  const std::atomic<uint32_t>& asleep() const { return *asleep_; }
  // Wakes a member, if it sleeps.
  void ring(int member);
  bool is_asleep(int member) const { return (word(member).load(std::memory_order_relaxed) & 1) != 0; }

  // Sets this rank's bit. The result is the word as it stays until somebody rings.
  uint32_t lie_down();
  bool is_rung(uint32_t since) const { return word(own).load(std::memory_order_acquire) != since; }
  enum class Woken { ByBell, BySignal, ByTime };
  Woken sleep(uint32_t since, double seconds);

  // Another thread of each rank sleeps until somebody asks it for something beside: 1 + who asks.
  // `told` is the latest question that it knows of, and becomes the next one.
  void ask_beside(int member, uint32_t by);
  uint32_t wait_for_question(uint32_t& told);
  // It has done what this question asked for.
  void answer_beside(uint32_t told);
  // Waits until a member has done what it was asked for, at most so long.
  bool is_answered(int member, double seconds);

 private:
  struct Memory;
  Bells(std::string name, std::shared_ptr<Memory> memory, int own);
  std::atomic<uint32_t>& word(int member) const;
  std::atomic<uint32_t>& beside(int member, size_t which) const;

  std::shared_ptr<Memory> memory_;
  std::atomic<uint32_t>* asleep_;
};

void nap(double seconds);

}  // namespace commrt
