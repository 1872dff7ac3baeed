// SPDX-License-Identifier: Apache-2.0
// Simulated devices, and the host threads that use them, under one seeded scheduler.
//
// A command runs only when the scheduler picks it. One host thread runs at a time, and lets others
// run in its calls. So the seed fixes the whole run. Vector clocks follow what orders accesses to
// memory. A pair of accesses that nothing orders is reported, in whatever order the two happened.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "devices/device.hpp"
#include "devices/pretended_commands.hpp"
#include "devices/sim_clock.hpp"
#include "devices/sim_memory.hpp"

namespace commrt::sim {

class World;
struct SimDevice;
struct StreamState;

struct Options {
  std::uint64_t seed = 0;
  int queues = 8;       // hardware queues of a device; 0: one for each stream
  double preempt = -1;  // how likely a call gives way, again and again; negative: by the seed
  bool check_order = true;
  bool poison = true;
  // Each of these behaves as CUDA does, or may do. docs/internals/devices.md explains each.
  bool alloc_syncs = true;
  bool free_syncs = true;
  bool pinned_alloc_syncs = true;
  bool first_launch_syncs = true;
  bool legacy_stream_syncs = true;
  bool pageable_copies_block = true;
  bool host_copies_block = true;
  int most_commands = pretended::kMostCommands;  // of a stream; 0: any number
  bool unrecorded_wait_passes = true;
  bool wait_keeps_record = true;
  bool capture_forbids = true;
  bool ipc_checks = true;
  bool memory_flags = true;
};

using pretended::Kind;
using pretended::kind_name;
using pretended::in_host_function;

struct Command;

// One event_record().
struct Record : pretended::CapturedRecord<Command> {
  bool done = false;
  Clock clock;
  Actor actor = 0;
  std::uint64_t number = 0;
};

using EventState = pretended::LatestRecord<Record>;

struct Command : pretended::Ordered<StreamState, Record, EventState> {
  StreamState* stream = nullptr;
  std::uint64_t number = 0;
  bool dst_known = false, src_known = false;  // in memory of ours
  std::vector<char> staged;  // what a pageable copy took from the host
  // The clock of the thread that gave the command, as it was then.
  std::shared_ptr<const Clock> known;
  Actor host = 0;
  Tick host_tick = 0;
};

using Capture = commrt::Capture<Command>;
using GraphState = CapturedGraph<Command, Record>;

struct Queue {
  std::deque<Command> commands;
};

struct StreamState {
  SimDevice* device = nullptr;
  Stream handle = 0;
  Actor actor = 0;
  Tick tick = 0;
  Clock clock;
  std::shared_ptr<const Clock> joined;  // of the latest command
  bool blocking = false;
  bool destroyed = false;
  Queue* queue = nullptr;
  std::uint64_t given = 0, done = 0;  // commands
  std::shared_ptr<Capture> capture;
};

struct SimDevice : Device {
  World* world = nullptr;
  int index = 0;  // in the world
  int ordinal = 0;
  std::string name;
  std::deque<Queue> queues;  // what they hold stays where it is
  std::map<Stream, std::shared_ptr<StreamState>> streams;  // 0: the legacy stream
  std::map<Event, std::shared_ptr<EventState>> events;
  std::map<Graph, GraphState> graphs;
  std::set<std::pair<int, int>> launched;  // kernels that are loaded: (reduction, type)
  bool kernels_loaded = false;
  std::vector<std::shared_ptr<Capture>> captures;  // active ones
  std::uint64_t fail_in = 0;                       // commands until it fails; 0: never
  std::string failure;
  bool failed() const { return !failure.empty(); }
  Stream next_stream = 1;
  Event next_event = 1;
  Graph next_graph = 1;
  int next_queue = 0;
};

struct Host {
  enum class State { Ready, Blocked, Done };
  std::string name;
  Actor actor = 0;
  Tick tick = 1;
  Clock clock;
  std::shared_ptr<const Clock> known;  // a copy of the clock for commands; null: out of date
  State state = State::Ready;
  std::function<bool()> ready;
  std::function<std::string()> waits_for;
  std::condition_variable turn;
  std::uint64_t seen = 0;  // changes of memory, when it last paused
  CaptureMode capture_mode = CaptureMode::Global;

  void learn(const Clock& from) {
    clock.join(from);
    known = nullptr;
  }
};

// A call from a host thread: holds the world's lock, and its turn.
struct Entry {
  explicit Entry(World* world);
  World* world;
  std::unique_lock<std::mutex> lock;
  Host* host;
};

class World {
 public:
  explicit World(const Options& options);
  ~World();

  SimDevice* add_device(std::string name, int ordinal);
  const Options options;

  // --- host threads: begin() by who then starts them, attach() and detach() by each ---
  void begin(const std::vector<std::string>& names);
  void attach(int index);
  void detach();

  // --- the scheduler; for callers that hold the lock ---
  bool step_device();         // one command, if any can run
  void preempt(Entry& entry);  // others go on, for as long as the seed says
  // Others go on until `ready`; Deadlock if nobody can.
  DeviceStatus block(Entry& entry, std::function<bool()> ready,
                     std::function<std::string()> waits_for);
  DeviceStatus sync_device(Entry& entry, SimDevice* device, const char* why);
  DeviceStatus sync_stream(Entry& entry, StreamState* stream, const char* why);

  // --- commands (sim_commands.cpp) ---
  DeviceStatus give(Entry& entry, StreamState* stream, Command command);
  void fail(SimDevice* device, std::string why);
  void notice_end(StreamState* stream);  // of a stream that was destroyed

  // Checks that [ptr, ptr + nbytes) may be touched from the device. `known`: it is memory of ours.
  DeviceStatus check_operand(SimDevice* device, const void* ptr, std::size_t nbytes, bool* known);
  void touch(const void* ptr, std::size_t nbytes, bool writes, const Access& access,
             const Clock& clock);
  void report(std::string text);
  // The numbers of things that calls made and did not give back, and of those that the simulation
  // itself keeps.
  std::vector<std::pair<const char*, std::size_t>> live() const;
  std::string describe(const Access& access) const;
  std::string actor_name(Actor actor) const { return actor_names_[actor]; }
  Actor new_actor(std::string name, Tick* tick);
  void free_actor(Actor actor, Tick tick) { free_actors_.emplace_back(actor, tick); }

  std::mutex mutex;
  Memory memory;
  std::vector<std::string> violations;
  std::uint64_t num_violations = 0;
  std::uint64_t changes = 0;  // of what a host thread may look at
  std::uint64_t commands = 0;
  std::uint64_t digest = 0;  // of all that the scheduler chose
  std::string deadlock;      // not empty: nothing could go on
  std::map<const void*, Host*> locks;
  std::map<const void*, Clock> lock_clocks;
  std::map<std::uint64_t, Clock> foreign_begun;  // by kernel: what came before it
  std::deque<std::unique_ptr<SimDevice>> devices;

 private:
  friend struct Entry;
  bool can_run(const Command& command) const;
  void run(Queue& queue);
  void execute(Command& command, StreamState* stream);
  bool operand(Command& command, const void* ptr, std::size_t nbytes, bool writes, bool known);
  void hold(const Command& command, StreamState* stream);
  void begin_foreign(Command& command, StreamState* stream);  // sim_foreign.cpp
  void end_foreign(Command& command, StreamState* stream);
  std::string why_waiting(const Command& command) const;
  bool can_go(Host* host) const;
  // Runs a command or lets another host thread go on; false if there is nothing to choose.
  bool run_another(Entry& entry);
  void give_turn(Host* host);
  void declare_deadlock();

  Random random_;
  double preempt_;
  Host main_;
  std::deque<std::unique_ptr<Host>> hosts_;
  std::size_t attached_ = 0;
  Host* current_;
  std::vector<std::string> actor_names_;
  std::vector<std::pair<Actor, Tick>> free_actors_;
  std::vector<Queue*> runnable_;  // scratch
  std::vector<Host*> ready_;      // scratch
  std::vector<Conflict> conflicts_;  // scratch
};

Stream add_stream(SimDevice* device, Stream handle, bool blocking);

}  // namespace commrt::sim
