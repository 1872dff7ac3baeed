// SPDX-License-Identifier: Apache-2.0
// What the parts of the libnccl for ranks that are processes share.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "calls.hpp"
#include "place.hpp"
#include "values.hpp"

namespace stub {

struct Comm;

// The calls of one group: a host function in a stream. Its messages move at the same time.
struct Group {
  Comm* comm;
  void* stream;
  std::vector<Op> ops;
  bool is_captured = false;  // a graph runs it, any number of times
  uint64_t ticket = 0;       // among those that are not
};

enum class Life { Joining, Ready, Finalizing, Finalized, Destroyed, Aborted };

// Communicators stay allocated, so that a late use of one is seen as such.
struct Comm {
  int rank = 0, size = 0, ordinal = 0;
  void* context = nullptr;
  uint64_t bus = 0;
  bool blocking = true;

  // Guarded by the lock of all.
  Life life = Life::Joining;
  int async = Success;         // sticky
  int polls_left = 0;          // InProgress for so many polls
  bool has_told_end = false;   // that it finalizes
  std::vector<Group*> waiting; // issued, and not yet in the stream
  struct Reduction { int dtype; double factor; bool alive; };
  std::map<int, Reduction> reductions;
  int next_reduction = 5;
  std::thread::id inside, grouped;
  struct { uint64_t number = 0; int color = 0, key = 0; } split;
  Comm* child = nullptr;
  Comm** child_to = nullptr;   // of the split under way

  // Guarded by its own lock, which host functions take, too.
  std::mutex mutex;
  std::condition_variable changed;
  std::shared_ptr<Place> place;  // until its end
  bool is_running = false;
  uint64_t next_ticket = 0, turn = 0;
  std::atomic<bool> has_ended{false};

  // Groups of the process's calls that have not ended.
  uint64_t outstanding() {
    std::lock_guard<std::mutex> own(mutex);
    return next_ticket - turn;
  }
};

// The process's own part, of one GPU. It is never destroyed: streams may work until the process ends.
struct World {
  std::mutex mutex;
  int version;
  std::map<std::string, long> settings;
  struct Failure { int code; long after; };
  std::map<std::string, Failure> failures;
  std::set<Comm*> comms;
  std::set<Comm*> running;  // whose host functions are at work
  std::map<std::string, long> counters;
  std::string last_error;
  std::thread::id calling;  // who gives the device work

  World();
};
extern World& world;

// Writes down what the real library would not like. Takes no lock.
void complain(const std::string& text);

// --- streams.cpp ---

struct Card {
  int ordinal = 0;
  uint64_t bus = 0;
  void* context = nullptr;
};
// The thread's current device; the result says whether there is one.
int current_card(Card* card);
// Gives groups to their streams; the locks are not held. CudaError where a stream refused one.
int launch(const std::vector<Group*>& groups);
// Where a thread that stands for the card finds memory; null if it is not allocated.
void* found_by_card(const void* at, size_t nbytes);

// --- moving.cpp ---

// Runs a group, and returns once its part of all its operations is done, or it was aborted.
void run_group(void* group);

}  // namespace stub
