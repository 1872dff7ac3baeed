// SPDX-License-Identifier: Apache-2.0
// The states of ranks, as far as memory that ranks of a node share, the kernel and those of other nodes
// tell it.
//
// A rank writes its latest operation beside its count of operations, with every call: that line is
// written anyway. What it waits for it writes only while it waits for long (kTellEvery_s). So a
// rank that has not said so lately computes, or is stopped; the kernel knows which.
#pragma once

#include <cstdint>

namespace commrt {

class Comm;
class Engine;
class Op;
struct ToldAfar;

constexpr double kTellEvery_s = 0.05;

enum class RankDoes : uint8_t { Unknown, Computes, Waits, Stopped, Ended, Left };
const char* word_for(RankDoes does);

constexpr int kNoCode = -1;  // a wait that is none for an operation

// A wait of a rank, as it tells it.
struct ToldWait {
  int code = kNoCode;  // of the operation (commrt/vocabulary/operations.py), or of a message
  int peer = -1;       // of a message
  uint64_t seq = 0;
  double for_s = 0;
  static constexpr int kNameBytes = 32;
  char on[kNameBytes + 1] = {};  // the communicator's name, as much of it as there is room for
};

struct RankState {
  int rank = -1;
  RankDoes does = RankDoes::Unknown;
  uint64_t started = 0;  // collectives on the communicator
  int code = kNoCode;    // of the latest of them
  double age_s = 0;      // since that began
  bool waits = false;    // then `wait` says for what; a stopped rank may do both
  ToldWait wait;
};

// The words that ranks of other nodes are told of this one; by any thread, without the engine's lock.
RankState state_from(const ToldAfar& told, int rank);

// The name of an operation or a message, for messages; "an operation" for one that has none.
const char* name_of_operation(int code);

// Tells the ranks of the node what this one waits for, now and then, and that it does not any more
// once it is destroyed. For one wait, by one thread.
class WaitTeller {
 public:
  explicit WaitTeller(Engine* engine) : engine_(engine) {}
  ~WaitTeller();
  WaitTeller(const WaitTeller&) = delete;
  WaitTeller& operator=(const WaitTeller&) = delete;

  // To be called in a wait's rare looks at the clock. `locked`: the caller has the engine's lock.
  void tell(double now, const Comm& comm, const Op& op);
  // The same in a loop of Python, whose operation is not known here.
  void tell(double now);

 private:
  bool is_due(double now);
  Engine* const engine_;
  double since_s_ = 0, next_s_ = 0;
  bool told_ = false;
};

}  // namespace commrt
