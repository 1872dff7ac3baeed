// SPDX-License-Identifier: Apache-2.0
// Faults that are injected on purpose (COMMRT_CHAOS), so that programs can be tried against them.
//
// Every operation of every backend takes its number from its communicator (comm.cpp, p2p_calls.cpp),
// so that is where a rule picks it. A communicator without rules runs as if this file were not there.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace commrt {

// In the order of commrt/vocabulary/chaos.py.
enum class FaultKind : uint8_t { None, Fail, Delay, Drop, Duplicate, Corrupt, Kill, Stop };

// What happens to an operation.
struct Fault {
  FaultKind kind = FaultKind::None;
  double seconds = 0;    // of a delay
  uint64_t drawn = 0;    // says which bit of a message is flipped
  std::string rule, what;  // what picked it, and the operation in words
  bool done = false;     // a message has been damaged, or sent twice
  std::unique_ptr<unsigned char[]> copy;  // of what is sent, damaged
};

struct FaultRule {
  FaultKind kind = FaultKind::None;
  double seconds = 0;
  std::vector<int> codes;  // of operations; empty: all of them
  // It picks the operation of this number among those that it is for, or every so many, or each
  // with this chance; 0 where that is not asked. And no more than `most` in all; 0: any number.
  uint64_t number = 0, every = 0, most = 0;
  double chance = 0;
  std::string text;  // as the program wrote it
};

// What messages call an operation of this code, or a message.
std::string called(int code);

// The rules of one rank. All is guarded by the engine's lock.
class Chaos : public std::enable_shared_from_this<Chaos> {
 public:
  Chaos(uint64_t seed, int rank, std::vector<FaultRule> rules);

  // Counts an operation of this code; returns what happens to it. `what` says it in words.
  std::shared_ptr<Fault> next(int code, const std::string& what);
  // Writes to stderr that a fault was injected, or why it was not.
  void log(const Fault& fault, const std::string& more = "") const;
  // An operation that was to send a faulty message is over.
  void settle(const Fault& fault) const;
  // Why an operation fails.
  static std::string why(const Fault& fault);
  // What ends or stops the process does so here; true if there is something else to do.
  bool strike_process(const Fault& fault) const;

  uint64_t num_injected() const { return num_injected_; }

 private:
  struct Counted {
    FaultRule rule;
    uint64_t seen = 0, fired = 0;
  };
  bool picks(Counted& counted, size_t index) const;

  uint64_t seed_;
  int rank_;
  std::vector<Counted> rules_;
  uint64_t num_injected_ = 0;
};

}  // namespace commrt
