// SPDX-License-Identifier: Apache-2.0
// Runs a stream's program whose messages are read where the peer has them: each rank has exchange
// memory that all others have opened (CUDA IPC), and flags that streams write and wait for.
//
// A message is published: its sender puts it into its own exchange memory and writes the
// receiver's flag; the receiver's stream waits for its flag, and its kernel reads the peer's
// memory. All commands are given at the call, on a stream of the communicator's own; the caller's
// stream is ordered by events. Who makes progress is the device alone: no host takes part.
//
// Flags count on and are waited for cyclically, so none is reset. The one of a pair counts its
// messages; published memory is read again by halves: a program's parts use them in turn, and a
// half is free once its readers have released the part before the last.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "stream_program.hpp"

namespace commrt {

// Bugs that tests plant, to see that they are found.
enum class PlantedInExchange : int {
  None = 0,
  NoReady,       // the first command does not wait for the caller's stream
  NoEnd,         // the caller's stream does not wait for the end
  EndEarly,      // the end is recorded before the program
  NoAwait,       // a kernel reads before the peer has published
  AwaitOneLess,  // it waits for the message before
  PublishEarly,  // flags are written before what they tell of
  NoBegin,       // memory is written again before it was read
  BeginOneLess,  // it waits for the readers of an earlier use
  ReleaseEarly,  // memory is released before it was read
  OneHalf,       // both halves are the same memory
  ValuesAgain,   // flags do not count on from call to call
  UserStream,    // the program runs in a stream of its own for each call, unordered
};
constexpr int kNumPlantedInExchange = 13;
extern const char* const kPlantedInExchangeNames[kNumPlantedInExchange];

class PeerExchange {
 public:
  // What each rank's memory begins with: a line for each flag.
  static constexpr std::size_t kLineNbytes = 64;
  static std::size_t flags_nbytes(int size) {
    return 2 * static_cast<std::size_t>(size) * kLineNbytes;
  }

  // `memory` is where each rank's exchange memory is mapped here, the own one included: flags,
  // which are 0, and two halves. Check what the device says by `status`.
  PeerExchange(Device* device, std::shared_ptr<void> keeps, int rank,
               std::vector<unsigned char*> memory, std::size_t half_nbytes,
               DeviceStatus* status);

  // Gives the device a program. `orders`: the caller's stream waits for its end. Otherwise `end`
  // becomes an event of the end, which is the caller's to give back.
  DeviceStatus run(const StreamProgram& program, unsigned char* in, unsigned char* out,
                   unsigned char* scratch, Stream stream, bool orders, Event* end);
  void give_event(Event event);
  // Lets own streams go that wait for peers; nothing can be run after it.
  DeviceStatus give_up();
  // All flags hold this value already; for tests of their wrapping, before the first run.
  void count_from(std::uint32_t value);
  DeviceStatus close();  // once all ranks are done; the memory is the caller's
  bool lost() const { return lost_; }

  Device* const device;
  const int rank, size;
  const std::size_t half_nbytes;
  PlantedInExchange planted = PlantedInExchange::None;

 private:
  bool has(PlantedInExchange bug) const { return planted == bug; }
  DeviceStatus give(const StreamProgram& program, unsigned char** bases);
  DeviceStatus begin(const StreamProgram& program, std::size_t at, unsigned char** bases);
  DeviceStatus publish(const StreamCommand& one);
  DeviceStatus await(const StreamCommand& one);
  DeviceStatus release(const StreamCommand& one);
  DeviceStatus take_event(Event* out);
  // Flags in the memory of `owner`, about `other`.
  std::uint32_t* ready_flag(int owner, int other) const;
  std::uint32_t* read_flag(int owner, int other) const;

  const std::shared_ptr<void> keeps_;
  const std::vector<unsigned char*> memory_;
  std::mutex mutex_;  // the order of commands is that of calls
  Stream stream_ = 0, release_stream_ = 0;
  Event ready_ = 0;
  std::uint32_t part_ = 0;  // parts so far, equal on all ranks
  std::vector<std::uint32_t> sent_, received_;  // messages so far, to and from each rank
  std::vector<std::uint32_t> readers_[2];  // the last part in which a rank read this half
  std::vector<bool> has_read_[2];
  std::vector<Event> events_;
  bool lost_ = false, closed_ = false;
};

}  // namespace commrt
