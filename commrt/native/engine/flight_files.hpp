// SPDX-License-Identifier: Apache-2.0
// Writes the last operations of this process's communicators into a file, a rank in each.
//
// The words are those of torch's flight recorder, as JSON. The writer needs no memory, no lock and
// no Python: a handler of a signal writes the same file that Python asks for. What other threads
// change meanwhile may be torn; numbers only, so the file can always be read.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

namespace commrt {

class Bells;
class Comm;
class Engine;

// Makes a communicator known to the writer, from its start to its end.
class FlightEntry {
 public:
  explicit FlightEntry(const Comm& comm);
  ~FlightEntry();
  FlightEntry(const FlightEntry&) = delete;
  FlightEntry& operator=(const FlightEntry&) = delete;

  // Which file it is written to, by the number of its world, and what the file says of it. Once.
  // `key` names it in the file; `members` are its ranks there, as in "[0, 1]".
  void describe(uint64_t world, uint64_t id, const std::string& key, const std::string& members);
  // From here on it is not written any more. Idempotent.
  void close();
  struct Facts {
    const Comm* comm;
    uint64_t world, id;
    std::string key, name, members;
  };

 private:
  const Comm& comm_;
  std::atomic<const Facts*>* slot_ = nullptr;  // null: there was none left, or it is not described
};

namespace flight {

// A file of one rank. `facts` are fields of the file's JSON, as in "\"rank\": 0, \"size\": 2".
struct File {
  uint64_t world;
  std::string path, facts;
};

// Writes it: first beside its place, then in it. False, with errno, where that cannot be done.
// `engine`: its lock is taken, unless that takes long, so that no record is torn; null: a handler
// of a signal calls.
bool write(const File& file, Engine* engine, const char* reason, const char* message);

// Files that are written when a signal comes. The latest one of a world counts.
void keep(const File& file);
void forget(uint64_t world);

// From here on, such files are written at SIGTERM, SIGUSR1 and at signals of crashes, where nobody
// else handles these: SIGUSR1 does nothing else then, and others end the process as they would have
// without. Whoever sets a handler later has it alone. Idempotent.
void write_at_signals();

// From here on a thread writes them when another rank of the node asks for it by the bells, or one
// of another node. Idempotent.
void write_when_asked(std::shared_ptr<Bells> bells);
// A rank of the job asks. Writes in a thread of its own.
void ask_here(uint32_t by);
// Waits until no file is half written, at most for a moment.
void finish();

}  // namespace flight

}  // namespace commrt
