// SPDX-License-Identifier: Apache-2.0
// A pretended device that runs each stream on a real thread, with delays by a seed.
//
// Tests use it for what a simulation cannot try: threads at the same time, sanitizers, real MPI.
// All its flags and memory belong to one process. It finds no deadlock; deadlines of tests do.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "devices/device.hpp"
#include "devices/pretended_commands.hpp"
#include "devices/sim_clock.hpp"

namespace commrt::threaded {

// Tells waiting threads that something changed. What they wait for is atomic and sequentially
// consistent, so that the mutex is taken only when somebody waits. If it were taken at every
// command, it would order everything, and hide from ThreadSanitizer what nothing else orders.
class Signal {
 public:
  template <class Ready>
  void wait(Ready ready) {
    if (ready()) return;
    waiters_.fetch_add(1);
    {
      std::unique_lock<std::mutex> lock(mutex_);
      condition_.wait(lock, ready);
    }
    waiters_.fetch_sub(1);
  }
  // Waits until `ready`, or for a little while.
  template <class Ready>
  void wait_a_little(Ready ready) {
    waiters_.fetch_add(1);
    {
      std::unique_lock<std::mutex> lock(mutex_);
      condition_.wait_for(lock, std::chrono::milliseconds(10), ready);
    }
    waiters_.fetch_sub(1);
  }
  void changed() {
    version_.fetch_add(1, std::memory_order_relaxed);
    if (!waiters_.load()) return;
    { std::lock_guard<std::mutex> lock(mutex_); }
    condition_.notify_all();
  }
  std::uint64_t version() const { return version_.load(std::memory_order_relaxed); }

 private:
  std::mutex mutex_;
  std::condition_variable condition_;
  std::atomic<int> waiters_{0};
  std::atomic<std::uint64_t> version_{0};
};

// Shared by all devices of the process: one may wait for a flag that another one writes.
Signal& signal();

using pretended::in_host_function;
using pretended::Kind;

struct Command;
struct StreamState;
struct ThreadDevice;

struct Record : pretended::CapturedRecord<Command> {
  std::atomic<bool> done{false};
  // When a timed event happened, written before `done`.
  bool is_timed = false;
  std::chrono::steady_clock::time_point at;
};

using EventState = pretended::LatestRecord<Record>;

struct Command : pretended::Ordered<StreamState, Record, EventState> {};

using Capture = commrt::Capture<Command>;
using GraphState = CapturedGraph<Command, Record>;

struct StreamState {
  Stream handle = 0;
  ThreadDevice* device = nullptr;
  bool blocking = false;
  std::mutex mutex;  // guards commands and closing
  std::condition_variable arrived;
  std::deque<Command> commands;
  bool closing = false;
  std::uint64_t given = 0;  // guarded by the device's mutex
  std::shared_ptr<Capture> capture;  // likewise
  std::atomic<std::uint64_t> done{0};
  std::atomic<bool> ended{false};
  sim::Random random{0};
  std::thread thread;
};

struct ThreadDevice : Device {
  ThreadDevice(std::uint64_t seed, int max_delay_us, int ordinal);
  ~ThreadDevice();
  // Ends all threads, also those that wait; idempotent. Every call fails from then on.
  void close();
  void free_all();  // of the destructor: memory lives as long as who uses the device
  void fail_after(std::uint64_t commands) { fail_in = commands; }

  const std::uint64_t seed;
  const int max_delay_us;
  const int ordinal;
  std::mutex mutex;  // of what follows, and of the order of commands
  std::map<Stream, std::shared_ptr<StreamState>> streams;
  std::vector<std::shared_ptr<StreamState>> destroyed;  // not joined yet
  std::map<Event, std::shared_ptr<EventState>> events;
  std::map<Graph, GraphState> graphs;
  Stream next_stream = 1;
  Event next_event = 1;
  Graph next_graph = 1;
  bool closed = false;
  std::atomic<std::uint64_t> fail_in{0};
  std::atomic<bool> failed{false};
  std::atomic<bool> stopping{false};
};

// Memory of all devices of the process.
struct Block {
  std::size_t nbytes = 0;
  MemoryKind kind = MemoryKind::Unknown;
  ThreadDevice* owner = nullptr;
  std::set<ThreadDevice*> opened_by;
};

struct Blocks {
  std::mutex mutex;
  std::map<std::uint64_t, Block> by_base;

  // Null for other memory. The caller holds the mutex.
  std::pair<const std::uint64_t, Block>* find(const void* ptr) {
    const auto address = reinterpret_cast<std::uint64_t>(ptr);
    auto next = by_base.upper_bound(address);
    if (next == by_base.begin()) return nullptr;
    auto& found = *std::prev(next);
    const bool holds = address - found.first < std::max<std::size_t>(found.second.nbytes, 1);
    return holds ? &found : nullptr;
  }
};

Blocks& blocks();

// For callers that hold the device's mutex.
Stream add_stream(ThreadDevice* device, Stream handle, bool blocking);
void close_stream(const std::shared_ptr<StreamState>& stream);
void join_ended(ThreadDevice* device);
const DeviceApi& table();

}  // namespace commrt::threaded
