// SPDX-License-Identifier: Apache-2.0
// Runs calls on device memory whose work is a program on the host: sparse sums and compression
// (device_calls/host_work.py). Arrays go to pinned memory, the host works there for as many rounds
// of messages as it takes, and the results go back:
//
//   d2h:  after the caller's stream; copy what is read; copied event; start flag = s
//   h2d:  after that event; wait until go flag >= g; copy back; end event; end flag = e
//
// The call enqueues all of it, for the reasons in staging.hpp. It enqueues h2d's part once the host
// has its own: the caller may be blocked in the driver behind it until that is done. Here the host's
// part is no engine operation: a host thread calls has_come() until the copies are there, works, and
// calls done() or fail(). Calls end in the order in which they started. A call that writes to no
// array, as its result's length is not known, ends with its copies.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "device_calls/staged_work.hpp"
#include "planted_bugs.hpp"
#include "staging/pinned_pool.hpp"

namespace commrt {

// Bugs that tests plant in the protocol, to see that they are found.
enum class PlantedHostWork : int {
  None = 0,
  Ungated,         // the host works before the copies to it
  NoReady,         // the copies do not wait for the caller's stream
  StartEarly,      // the start flag is written before the copies
  ValuesAgain,     // the start flag does not count on from call to call
  NoGo,            // the copy back does not wait for the host
  GoEarly,         // the go flag is stored before the host is done
  GoAhead,         // and that of the next call with it
  EndEarly,        // the end event is recorded before the copy back
  EndOfCopies,     // wait() waits for the copies to the host
  NoEndWait,       // wait() waits for nothing
  EndFlagEarly,    // the end flag is written before the copy back
  EarlyRecycling,  // memory is used again when the host is done, not when it is back
  ReadRecycling,   // memory is used again while the host reads it
  LateCopy,        // the copy back is given late, and the caller's stream waits for a flag
  NotCopied,       // nothing but flags orders the copy back after the copy to the host
  FlagsKept,       // a failure does not release the streams
  BlockLost,       // pinned memory does not come back
  ReferencesKept,  // nor do references to arrays
  Count,
};
std::vector<std::string> names_of(PlantedHostWork);

// An array of a call, and its place in the call's block.
struct HostArray {
  unsigned char* at;
  std::size_t nbytes;
  bool reads, writes;
  std::size_t pinned = 0;
};

struct HostCall : StagedCall {
  ~HostCall() override;
  Event asked() const override;

  std::vector<HostArray> arrays;
  PinnedPool::Block block;
  bool writes = false;      // to any of them
  bool asked_for = true;    // somebody will ask what became of it
  Event copied = 0;         // what is read is on the host
  std::uint32_t start_value = 0, go_value = 0;
  bool is_gated = false;    // its copies back are given early, and wait for the host
  // Guarded by polling_.
  bool come = false;        // the host knows that
  bool host_done = false;   // the host has ended its part, or will not begin it
  bool at_work = false;     // the host has begun it
};

// One communicator's calls of this kind on one device.
class HostWork : public StagedWork {
 public:
  // Throws DeviceFailure. `keeps` is alive as long as the device is needed.
  HostWork(Comm& comm, Engine& engine, Device* device, std::shared_ptr<void> keeps,
             const StagerOptions& options);

  // Gives the device the copies to the host. `keep` are references that become the call's own.
  // Throws DeviceFailure; then the references are still the caller's.
  CallPtr start(std::vector<HostArray> arrays, Stream stream, bool asked_for, void* const* keep,
                double timeout_s);
  // Gives the device the copies back, which wait there for the host: somebody who needs nothing of
  // the driver has the host's part, or has done it. Throws DeviceFailure; then all has failed.
  void give_back(const CallPtr& call);
  // True if the copies to the host are there, or the call has failed. The host may begin then.
  bool has_come(const CallPtr& call);
  // The same once it is so, or after that time.
  bool wait_until_come(const CallPtr& call, double limit_s);
  // The host has written what goes back.
  void done(const CallPtr& call);
  // The host's part has failed; one that came too late fails with its communicator.
  void fail_call(const CallPtr& call, const std::string& kind, const std::string& why);
  // The place of an array of the call in pinned memory.
  std::vector<std::uint64_t> places(const CallPtr& call) const;

  PlantedBug<PlantedHostWork> planted;

 private:
  using HostCallPtr = std::shared_ptr<HostCall>;

  static HostCallPtr as_host_call(const CallPtr& call) {
    return std::static_pointer_cast<HostCall>(call);
  }
  bool has(PlantedHostWork bug) const { return planted.is(bug); }
  PinnedPool::Block take_block(std::size_t nbytes, double timeout_s);
  void copy_to_host(HostCall& made, Stream stream);
  void give_copies(const HostCallPtr& made);
  void copy_back(HostCall& made);
  void touch(const HostCall& made, bool reads, bool writes);
  void order_after(const StagedPtr& call, Stream stream) override;
  bool open_gates() override;
  bool let_go() override;
  bool give_finished(const HostCallPtr& made);
  void give_memory_back(StagedCall& call) override;
  std::size_t memory_nbytes() const override { return pool_.total(); }
  void free_all() override;
  Rest host_is_done() override;
  void let_all_go(const std::string& kind, const std::string& why) override;
  CallPtr oldest() const override;

  std::uint32_t starts_, ends_;  // the latest values of flags; by issue_
  std::atomic<std::uint32_t> gos_;
  std::uint64_t number_ = 0;     // of calls; by issue_
  std::deque<HostCallPtr> owed_;  // whose copies back are to be given, in their order; by issue_

  // Guarded by polling_.
  PinnedPool pool_;
  std::deque<HostCallPtr> calls_;  // whose host's part is not over, in their order
  std::size_t come_ = 0;         // of these, the first so many have come
  std::vector<HostCallPtr> failed_at_work_;
};

}  // namespace commrt
