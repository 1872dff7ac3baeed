// SPDX-License-Identifier: Apache-2.0
// Memory of simulated devices. It records which device may touch it, and who last touched a range.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "devices/device.hpp"
#include "devices/sim_clock.hpp"

namespace commrt::sim {

// One access to memory, for messages: `what` names a command or a call.
struct Access {
  Actor actor = 0;
  Tick tick = 0;
  const char* what = nullptr;
  std::uint64_t number = 0;  // of the command
};

// The latest accesses to a range of bytes: of reads, those that no other read came after.
struct Touched {
  std::uint64_t end = 0;
  Access write;
  std::vector<Access> reads;
};

// The value itself lies in the memory. Flags count on; of writes, the first of each value counts:
// who sees a value knows no more than that this one happened. A plain write of the memory begins
// a flag anew.
class Flag {
 public:
  void write(std::uint32_t value, const Clock& clock);
  // Returns what a reader of `value` knows; null if nobody wrote it.
  const Clock* seen(std::uint32_t value) const;
  // Returns what a waiter for `value` knows, whenever it looked: that the first write happened
  // that was enough.
  const Clock* first_to_reach(std::uint32_t value) const;

 private:
  std::deque<std::pair<std::uint32_t, Clock>> written_;
};

struct Allocation {
  std::uint64_t id = 0;
  MemoryKind kind = MemoryKind::Unknown;
  int device = kHost;
  std::uint64_t base = 0;
  std::uint64_t nbytes = 0;
  bool freed = false;
  std::set<int> mapped_by;  // devices that have it open by IPC
  std::map<std::uint64_t, Touched> touched;  // by first address
  std::unordered_map<std::uint64_t, Flag> flags;
  std::string name() const;
};

struct Conflict {
  Access earlier;
  bool earlier_writes = false;
};

class Memory {
 public:
  Memory();
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  // Null when there is no memory.
  Allocation* alloc(MemoryKind kind, int device, std::size_t nbytes, bool poison);
  // The memory stays as it is for a while, so that late users are told apart.
  void free(Allocation* allocation, bool poison);
  // The allocation, maybe freed, that holds the address; else the one of all other memory.
  Allocation* find(std::uint64_t address);
  bool is_pageable(const Allocation* allocation) const { return allocation == &pageable_; }
  std::size_t live_nbytes() const { return live_nbytes_; }
  std::size_t live_count() const { return live_count_; }
  template <class F>
  void each_live(F function) const {
    for (const auto& [base, one] : by_base_)
      if (!one->freed) function(*one);
  }

  // Notes an access, and appends those it is not ordered after.
  static void touch(Allocation* allocation, std::uint64_t address, std::size_t nbytes, bool writes,
                    const Access& access, const Clock& clock, std::vector<Conflict>* conflicts);

 private:
  void forget_oldest();

  std::map<std::uint64_t, std::unique_ptr<Allocation>> by_base_;
  std::deque<Allocation*> freed_;
  std::size_t freed_nbytes_ = 0;
  std::size_t live_nbytes_ = 0;
  std::size_t live_count_ = 0;
  std::uint64_t next_id_ = 1;
  Allocation* latest_ = nullptr;  // found
  Allocation pageable_;
};

}  // namespace commrt::sim
