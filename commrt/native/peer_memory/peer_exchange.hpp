// SPDX-License-Identifier: Apache-2.0
// Runs stream programs that read messages from the peer's own memory. Each rank has exchange
// memory that all others have opened (CUDA IPC), and flags that streams write and wait for.
//
// A sender publishes a message: it puts it into its own exchange memory and writes the receiver's
// flag. The receiver's stream waits for its flag, and its kernel reads the peer's memory. The call
// enqueues all commands, on a stream of the communicator's own (peer_work.hpp). The devices make
// all progress: no host takes part.
//
// Flags count on and are waited for cyclically, so none is reset. The one of a pair counts its
// messages; published memory is read again by halves: a program's parts use them in turn, and a
// half is free once its readers have released the part before the last.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "device_calls/stream_program.hpp"
#include "planted_bugs.hpp"

namespace commrt {

// Bugs that tests plant, here and in peer_work.cpp, to see that they are found.
enum class PlantedInExchange : int {
  None = 0,
  NoReady,         // the first command does not wait for the caller's stream
  ReadyLate,       // it waits behind the program
  NoEnd,           // the caller's stream does not wait for the end
  NoEndWait,       // nor does the one that wait() is told of
  EndEarly,        // the end is recorded before the program
  EndOtherStream,  // the end is recorded in the caller's stream
  EndFlagEarly,    // the host is told of the end before the program
  NoCopy,          // an input that the program writes over is not put away first
  CopyOtherStream, // it is, in the caller's stream
  NoAwait,         // a kernel reads before the peer has published
  AwaitOneLess,    // it waits for the message before
  PublishEarly,    // flags are written before what they tell of
  NoBegin,         // memory is written again before it was read
  BeginOneLess,    // it waits for the readers of an earlier use
  ReleaseEarly,    // memory is released before it was read
  OneHalf,         // both halves are the same memory
  ValuesAgain,     // flags do not count on from call to call
  UserStream,      // the program runs in a stream of its own for each call, unordered
  Kept,            // a failure does not let streams go
  KeptBehind,      // it lets streams go that wait already, not those that wait next
  ToldLate,        // peers are told of calls under way, not of those they may still read
  Unasked,         // nobody asks whether a peer gave up: what it published is taken for good
  Count,
};
std::vector<std::string> names_of(PlantedInExchange);

// It can share itself, as the plans of calls can. The thread that makes progress may be the last
// one to let go of the work that has it, and must not need Python for that.
class PeerExchange : public std::enable_shared_from_this<PeerExchange> {
 public:
  // The beginning of each rank's memory: a line for each flag.
  static constexpr std::size_t kLineNbytes = 64;
  static std::size_t flags_nbytes(int size) {
    return 2 * static_cast<std::size_t>(size) * kLineNbytes;
  }

  // `memory` is where each rank's exchange memory is mapped here, the own one included: flags,
  // which are 0, and two halves. Check what the device says by `status`.
  PeerExchange(Device* device, std::shared_ptr<void> keeps, int rank,
               std::vector<unsigned char*> memory, std::size_t half_nbytes,
               DeviceStatus* status);

  // Gives `on` a program. Programs come from one thread at a time, and run one behind the other.
  // A program that fails half-way leaves peers waiting: no other may follow it.
  DeviceStatus give(const StreamProgram& program, unsigned char* in, unsigned char* out,
                    unsigned char* scratch, Stream on);
  // Lets streams go that wait for peers, and those that are given a wait later: it writes the
  // flags far ahead, in a stream of its own. Called by one thread at a time, also while a program
  // is given. A peer that is still at work may write a flag again, so it is called again. It does
  // nothing until the release before has arrived.
  DeviceStatus release();
  // Finds out, without waiting, whether all that `stream` was given has run. Nothing may be given
  // after it.
  DeviceStatus has_run(bool* all);
  // Then gives streams and events back; the memory is the caller's.
  DeviceStatus end();
  // All flags hold this value already. Called before the first program.
  void count_from(std::uint32_t value);

  Device* const device;
  const int rank, size;
  const std::size_t half_nbytes;
  Stream stream = 0;  // of the communicator's own
  PlantedBug<PlantedInExchange> planted;
  bool has(PlantedInExchange bug) const { return planted.is(bug); }

 private:
  DeviceStatus begin(const StreamProgram& program, std::size_t at, unsigned char** bases,
                     Stream on);
  DeviceStatus publish(const StreamCommand& one, Stream on);
  DeviceStatus await(const StreamCommand& one, Stream on);
  DeviceStatus release_peer(const StreamCommand& one, Stream on);
  // Flags in the memory of `owner`, about `other`.
  std::uint32_t* ready_flag(int owner, int other) const;
  std::uint32_t* read_flag(int owner, int other) const;

  const std::shared_ptr<void> keeps_;
  const std::vector<unsigned char*> memory_;
  Stream release_stream_ = 0;
  Event released_ = 0, drained_ = 0;
  bool is_releasing_ = false, is_draining_ = false;
  // Parts so far, equal on all ranks, and messages from each rank: a release reads them.
  std::atomic<std::uint32_t> part_{0};
  std::vector<std::atomic<std::uint32_t>> received_;
  std::vector<std::uint32_t> sent_;
  std::vector<std::uint32_t> readers_[2];  // the last part in which a rank read this half
  std::vector<bool> has_read_[2];
};

}  // namespace commrt
