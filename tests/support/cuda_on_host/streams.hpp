// SPDX-License-Identifier: Apache-2.0
// Streams, events, and the threads that run their commands.
//
// Each hardware queue is a thread that runs commands in the order in which they were given, one
// after the other. Where CUDA_DEVICE_MAX_CONNECTIONS says how many queues there are, streams share
// them: behind a command that waits, everything in its queue waits. So the documentation has it, and
// an H200 did so with one queue. Without the variable each stream has a queue: on an H200 a waiting
// stream held up none of 64 others. A real queue may run commands of different streams at the same
// time; here it does not.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "results.hpp"

namespace cuda_on_host {

struct Capture;
struct Event;
struct Queue;
struct Stream;
using StreamPtr = std::shared_ptr<Stream>;
using EventPtr = std::shared_ptr<Event>;

// Counts, for each branch of a capture, how many of its commands come before something.
using Progress = std::vector<std::size_t>;

// One record of an event; who waits for the event waits for the latest.
struct Record {
  std::atomic<bool> done{false};
  std::chrono::steady_clock::time_point at;  // written before `done`
  std::weak_ptr<Capture> capture;
  bool was_captured = false;
  Progress known;
};
using RecordPtr = std::shared_ptr<Record>;

struct Event {
  bool timed = false;
  RecordPtr latest;
};

struct Command {
  enum class What { Work, Record, Wait } what = What::Work;
  std::function<void()> run;    // null: nothing
  std::function<bool()> ready;  // null: at once
  RecordPtr record;             // that it makes or waits for
  EventPtr external;            // of a capture: the event outside with which a launch does so
};

struct Stream {
  Handle handle = nullptr;  // null: the legacy stream
  bool blocking = false;
  Queue* queue = nullptr;  // which lives as long as the process
  std::atomic<std::uint64_t> given{0}, done{0};
  std::shared_ptr<Capture> capture;
};

// Tells threads that wait that something has changed in this process. Flags change unseen, in
// memory of the host and of other processes: who waits for one looks again and again.
class Changes {
 public:
  void tell();
  void wait(const std::function<bool()>& ready);

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
};

// All that the process has of the card but memory.
class Card {
 public:
  // Held by calls that give commands, and by those that wait for the whole card. That other
  // threads' commands wait meanwhile is inferred from a hang on an H200; tests/gpu/questions.py asks.
  std::mutex giving;
  // Guards what follows; taken behind `giving`.
  std::mutex tables;
  std::map<Handle, StreamPtr> streams;
  std::map<Handle, EventPtr> events;

  Card();
  StreamPtr legacy;

  Handle fresh() { return reinterpret_cast<Handle>(next_handle_ += 64); }
  StreamPtr add_stream(bool blocking);  // with `tables` held
  void drop_stream(const StreamPtr& stream);  // what it was given still runs
  StreamPtr stream(Handle handle);      // null: none
  EventPtr event(Handle handle);

  // Gives a command, or records it where the stream is captured. Blocks while the stream is full.
  Result give(const StreamPtr& stream, Command command);
  // For callers that hold `giving`, and want no capture looked at.
  void push(const StreamPtr& stream, Command command);

  // Each queue: its streams, and what waits there; for somebody who looks at a hang.
  std::string report();

  Result wait_for(const StreamPtr& stream);
  Result wait_for_all();

  // An error that stays: nothing runs from then on, and nobody waits.
  void fail(Result result) {
    int none = kSuccess;
    failure_.compare_exchange_strong(none, result);
    changes_.tell();
  }
  Result failure() const { return failure_.load(); }

  static RecordPtr new_record() { return std::make_shared<Record>(); }
  static Command record(const RecordPtr& record);
  static Command wait(const RecordPtr& record);

 private:
  void run(Queue* queue);
  Queue* add_queue();
  std::vector<StreamPtr> every_stream();

  std::atomic<std::uint64_t> next_handle_{0x10000};
  std::vector<StreamPtr> dropped_;  // that may still have commands
  std::vector<Queue*> queues_;  // the first one is the legacy stream's
  std::atomic<int> failure_{kSuccess};
  Changes changes_;
};

// Lives as long as the process.
Card& card();

// True in a function that a stream calls.
extern thread_local bool in_host_function;

}  // namespace cuda_on_host
