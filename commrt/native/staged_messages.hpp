// SPDX-License-Identifier: Apache-2.0
// Messages to and from device memory, through pinned memory and the host's messages.
//
// What leaves is copied to the host at once, and the caller's stream waits for no more than that
// copy. What comes is given to the device only when somebody waits for it: a wait for a flag that
// were given at the call would stop, where streams share a hardware queue, what this rank sends
// next, and with it the peer that answers. A program that waits for its receives as it would with
// host arrays is as free of deadlock as with these:
//
//   d2h:  after the caller's stream; copy what leaves, and what is received into; start flag = s
//   h2d:  at wait(): after these copies; wait until go flag >= g; copy back; end event; end flag
//
// A message may be shorter than its receive, and the rest of the array stays as it is. So the
// array goes to the host first, the message is put over its beginning there, and all goes back.
//
// Messages have their place among others of the same peer and tag at the call; gates (comm.hpp)
// keep their memory from being touched before it holds what it shall. Receives end in any order.
#pragma once

#include <deque>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "device_work.hpp"
#include "p2p.hpp"
#include "staging.hpp"

namespace commrt {

// Bugs that tests plant in the protocol, to see that they are found.
enum class PlantedMessage : int {
  None = 0,
  Ungated,         // the host sends before the copy to it
  RestUngated,     // a message is received before the array has come to the host
  NoGo,            // the copy back does not wait for the message
  GoEarly,         // the go flag is stored before the message is there
  NoReady,         // the copy does not wait for the caller's stream
  SentEarly,       // the end of a send is recorded before the copy
  EndEarly,        // the end of a receive is recorded before the copy back
  NoEndWait,       // wait() does not wait for the end event
  NotCopied,       // nothing but flags orders the copy back after the copy to the host
  EarlyRecycling,  // memory is used again when the message is there, not when it is back
  SentRecycling,   // memory of a send is used again before the message has left
  GivenAtOnce,     // the copy back is given at the call
  RestLost,        // the array does not go to the host first
  FlagsKept,       // a failure does not release the streams
};
constexpr int kNumPlantedMessages = 15;
extern const char* const kPlantedMessageNames[kNumPlantedMessages];

// One communicator's messages on one device.
class MessageStager : public DeviceWork {
 public:
  // Throws DeviceFailure. `keeps` is alive as long as the device is needed.
  MessageStager(Comm& comm, Engine& engine, Device* device, std::shared_ptr<void> keeps,
                const StagerOptions& options);

  // Starts all of the lists, which are of device memory, as one operation. As Stager::start.
  std::shared_ptr<StagedCall> start(const MessageLists& lists, Stream stream, bool orders,
                                    void* const* keep, double timeout_s);
  void wait_on(const std::shared_ptr<StagedCall>& call, Stream stream) override;
  void advance(const std::shared_ptr<StagedCall>& call) override;
  void let_be(const std::shared_ptr<StagedCall>& call) override { give(call); }
  bool progress() override;
  void close() override;

  std::size_t pinned_nbytes();
  // Calls whose copy to the host is not seen.
  std::size_t num_leaving();
  PlantedMessage planted = PlantedMessage::None;

 private:
  using CallPtr = std::shared_ptr<StagedCall>;

  bool has(PlantedMessage bug) const { return planted == bug; }
  void lay_out(StagedCall& made, const MessageLists& lists, MessageLists& on_host) const;
  PinnedPool::Block take_memory(std::size_t nbytes, double timeout_s);
  void copy_to_host(StagedCall& made, Stream stream);
  void give(const CallPtr& made);
  bool give_finished(const CallPtr& made);
  void copy_back(StagedCall& made);
  void touch(const StagedCall& made, const std::vector<StagedCopy>& copies, bool writes);
  bool open_gates();
  bool settle();
  bool let_go();
  bool take_ended();
  void look_after(const CallPtr& made);
  void finish(const CallPtr& made);
  void fail_one(StagedCall& made);
  void let_all_go(const std::string& kind, const std::string& why) override;
  CallPtr oldest() const override;

  const StagerOptions options_;
  Stream d2h_ = 0, h2d_ = 0;
  Event ready_ = 0;
  std::uint32_t starts_, ends_;        // the latest values of flags; by issue_
  std::atomic<std::uint32_t> gos_;
  std::uint32_t *start_ = nullptr, *go_ = nullptr, *end_ = nullptr;

  // Guarded by polling_.
  PinnedPool pool_;
  std::deque<CallPtr> leaving_;  // whose copy to the host is not seen
  std::list<CallPtr> open_;      // that the host works on, and nobody waits for on the device
  std::deque<CallPtr> given_;    // whose copy back waits for the host, in that order
  std::deque<CallPtr> ending_;   // whose copy back is on its way

  std::atomic<std::uint32_t> opened_;  // gates up to this value are open; the engine reads it
};

}  // namespace commrt
