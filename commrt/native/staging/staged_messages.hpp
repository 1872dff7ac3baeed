// SPDX-License-Identifier: Apache-2.0
// Sends and receives device memory through pinned memory and the host's messages.
//
// A send is copied to the host at once, and the caller's stream waits for that copy only. A receive
// is enqueued only when the program waits for it. If the call enqueued the wait for its flag,
// streams that share a hardware queue would hold back this rank's next send, and so the peer that
// answers it. A program that waits for its receives as with host arrays is as free of deadlock as
// with host arrays:
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

#include <atomic>
#include <deque>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "device_calls/staged_work.hpp"
#include "engine/p2p.hpp"
#include "planted_bugs.hpp"
#include "staging/pinned_pool.hpp"

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
  IssuedAtOnce,     // the copy back is given at the call
  RestLost,        // the array does not go to the host first
  FlagsKept,       // a failure does not release the streams
  BlockLost,       // pinned memory does not come back
  Count,
};
std::vector<std::string> names_of(PlantedMessage);

// Messages that are one operation.
struct MessagesCall : StagedCall {
  ~MessagesCall() override;
  Event asked() const override;
  const Op* messages() const override { return op.get(); }

  std::shared_ptr<Op> op;              // the host's
  std::vector<unsigned char*> arrays;  // on the device, by their numbers
  std::vector<StagedCopy> in, out;     // of `arrays` and the block
  PinnedPool::Block block;
  Event copied = 0;                    // all that leaves is on the host
  std::uint32_t start_value = 0, go_value = 0;
  double opened_s = 0;
  bool asked_for = true;               // somebody will ask what became of it
  bool given = false;                  // what comes back is the device's, or being given to it
};

// One communicator's messages on one device.
class MessageStager : public StagedWork {
 public:
  // Throws DeviceFailure. `keeps` is alive as long as the device is needed.
  MessageStager(Comm& comm, Engine& engine, Device* device, std::shared_ptr<void> keeps,
                const StagerOptions& options);

  // Starts all messages of the lists, which lie in device memory, as one operation. The other
  // arguments are those of Stager::start.
  CallPtr start(const MessageLists& lists, Stream stream, bool orders, void* const* keep,
                double timeout_s);
  void advance(const CallPtr& call) override;
  void let_be(const CallPtr& call) override { give(as_messages(call)); }

  // Calls whose copy to the host is not seen.
  std::size_t num_leaving();
  PlantedBug<PlantedMessage> planted;

 private:
  const Comm* const of_;  // never looked into: it may be gone
  using MessagesPtr = std::shared_ptr<MessagesCall>;

  static MessagesPtr as_messages(const CallPtr& call) {
    return std::static_pointer_cast<MessagesCall>(call);
  }
  bool has(PlantedMessage bug) const { return planted.is(bug); }
  void lay_out(MessagesCall& made, const MessageLists& lists, MessageLists& on_host) const;
  PinnedPool::Block take_block(std::size_t nbytes, double timeout_s);
  void copy_to_host(MessagesCall& made, Stream stream);
  void give(const MessagesPtr& made);
  bool begin_giving(const MessagesPtr& made);
  bool give_finished(const MessagesPtr& made);
  void copy_back(MessagesCall& made);
  void touch(const MessagesCall& made, const std::vector<StagedCopy>& copies, bool writes);
  bool settle();
  void look_after(const MessagesPtr& made);
  void fail_one(MessagesCall& made);
  void order_after(const StagedPtr& call, Stream stream) override;
  bool open_gates() override;
  bool let_go() override;
  void give_memory_back(StagedCall& call) override;
  std::size_t memory_nbytes() const override { return pool_.total(); }
  void free_all() override;
  Rest host_is_done() override;
  void let_all_go(const std::string& kind, const std::string& why) override;
  CallPtr oldest() const override;

  std::uint32_t starts_, ends_;        // the latest values of flags; by issue_
  std::atomic<std::uint32_t> gos_;

  // Guarded by polling_.
  PinnedPool pool_;
  std::deque<MessagesPtr> leaving_;  // whose copy to the host is not seen
  std::list<MessagesPtr> open_;      // that the host works on, and nobody waits for on the device
  std::deque<MessagesPtr> given_;    // whose copy back waits for the host, in that order
  std::vector<std::shared_ptr<Op>> failed_ops_;  // some of which may still come
};

}  // namespace commrt
