// SPDX-License-Identifier: Apache-2.0
// What the parts of the pretended libnccl share: ranks of one process, host memory, one lock.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "calls.hpp"
#include "devices/device.hpp"
#include "values.hpp"

namespace stub {

struct Comm;

// A group in a stream of a device (kernels.cpp).
struct Kernel {
  uint64_t id = 0;
  std::atomic<bool> done{false};
  std::vector<uint64_t> met;  // complete once it is done
};

// The calls of one group: a kernel in a stream. Its messages move at the same time.
struct Group {
  Comm* comm;
  void* stream;
  std::vector<Op> ops;
  std::shared_ptr<Kernel> kernel;  // null where streams are only pretended
};

struct Split {
  std::map<int, std::vector<std::pair<int, int>>> colors;  // color to (key, rank)
  int arrived = 0;
};

struct Clique {
  int size = 0;
  std::map<int, Comm*> members;
  int finalized = 0;
  std::vector<Split> splits;
};

struct RedOp {
  int dtype;
  double factor;
  bool alive;
};

enum class Life { Joining, Ready, Finalizing, Finalized, Destroyed, Aborted };

struct Comm {
  uint64_t magic = 0x5ca1ab1e;
  Clique* clique;
  int rank, size, device;
  commrt::Device* gpu = nullptr;  // whose streams it works in; null: they are only pretended
  bool blocking;
  Life life = Life::Joining;
  int async = Success;        // sticky
  int polls_left = 0;         // InProgress for so many polls
  bool hangs = false;         // InProgress until aborted
  std::vector<Group> waiting; // issued, and not yet in the stream
  uint64_t seq = 0;
  uint64_t run = 0;  // collectives that have begun, where streams are a device's
  int graphs = 0;    // kernels that graphs hold
  std::map<int, RedOp> redops;
  int next_redop = 5;
  std::thread::id inside, grouped;
  int visits = 0;
  // a split under way
  Comm* child = nullptr;
  Comm** child_to = nullptr;
  size_t num_splits = 0;
};

struct World {
  std::mutex mutex;
  std::condition_variable changed;
  int version = 22809;
  std::map<std::string, long> settings;
  struct Failure { int code; long after; };
  std::map<std::string, Failure> failures;
  std::map<std::string, Clique*> cliques;
  // By device and stream. A kernel on a device is at the head of one of its own once it runs.
  std::map<std::pair<int, void*>, std::deque<Group>> streams;
  commrt::Device* (*current_device)() = nullptr;
  std::map<commrt::Device*, std::thread::id> inside;  // whose call is going on there
  std::vector<std::string> violations, log;
  std::set<Comm*> comms;
  std::map<std::string, long> counters;
  uint64_t next_id = 1;
  bool released = false;
};

extern World& world;  // for ever: a thread may wait in it until the process has ended
extern thread_local int device;

void violation(const std::string& text);
// Lets every stream run as far as it can.
void advance();
// Runs groups in the streams of devices once the caller has left the world's lock: devices call
// back. At the end of its scope; declare it before whatever holds the lock.
class Launches {
 public:
  Launches() = default;
  ~Launches();
};
void launch_on_device(Group group);
// Notes that the device is used, and by whom, to the end of the scope; holds the world's lock then.
class OnDevice {
 public:
  ~OnDevice();
  void enter(Comm* comm, const char* function);

 private:
  commrt::Device* gpu_ = nullptr;
};
// Executes a collective whose ranks have all come, in rank order.
void execute(Clique* clique, const std::vector<std::pair<Comm*, Op*>>& ranks);

}  // namespace stub
