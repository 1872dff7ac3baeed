// SPDX-License-Identifier: Apache-2.0
// Runs a communicator's operations on device memory by NCCL, in stream order and with deadlines.
//
//   nonblocking:  the device's stream for NCCL waits for the caller's, by an event
//   blocking:     in the caller's own stream
//   then, there:  after the end of the operation before (nccl_order.hpp); begun flag = v; NCCL's
//                 kernels; ended flag = v; end event
//
// A capture records the operation without flags, whose values would come twice. The host does not
// watch it, and keeps its references until the communicator is closed (nccl_order.hpp says how
// graphs keep the order).
//
// The call enqueues all of that, and nothing later. So streams may share a hardware queue, and may
// hold commands that wait for other engines' flags. A rank that gives up aborts NCCL's
// communicator, which releases its streams.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "device_calls/staged_plan.hpp"
#include "device_calls/watched_work.hpp"
#include "library_calls/nccl_order.hpp"
#include "planted_bugs.hpp"
#include "types.hpp"

namespace commrt {

// Bugs that tests plant, to see that they are found.
enum class NcclPlanted : int {
  None = 0,
  NoReady,         // a nonblocking call does not wait for the caller's stream
  ReadyLate,       // it waits after NCCL's work
  NoEndWait,       // wait() does not wait for the end event
  EndEarly,        // the end event is recorded before NCCL's work
  EndOtherStream,  // the end event is recorded in the stream that NCCL did not work in
  EndFlagEarly,    // the ended flag is written before NCCL's work
  NoChain,         // an operation does not wait for the one before
  ChainSelf,       // it waits for the one before of its own communicator only
  Unlocked,        // operations are given without the device's lock
  WrongStream,     // a blocking call's work is in the device's stream, ordered by nothing
  CopyOtherStream, // the copy of an input is given to the other stream
  NoCopy,          // an exchange in place reads what it writes
  Kept,            // a failure does not abort the communicator
  GraphNoWait,     // a graph does not wait for what was given before its launch
  GraphNoRecord,   // what is given after a launch is not told of it
  GraphNoChain,    // an operation of a capture does not wait for the one before
  GraphNoSeed,     // the first graph is not told of what was given before the capture
  GraphSeedAlone,  // it is told of NCCL's operations only, not of MPI's
  GraphEagerNoWait,    // a call outside does not wait for graphs
  GraphEagerNoRecord,  // a call outside is not seen by graphs
  GraphOwnStream,  // a capture takes the device's stream, which others use meanwhile
  GraphFlags,      // flags are written in a graph
  GraphDrops,      // references go as if the operation had run
  PackLate,        // boxes are packed once the messages have left
  UnpackEarly,     // what is to come is unpacked before the messages
  UnpackOther,     // it is unpacked in a stream that the messages are not in
  Count,
};
std::vector<std::string> names_of(NcclPlanted);

// Messages among neighbours: parts of the call's arrays, by the arrays' numbers.
struct NcclPart {
  bool is_send = false;
  int array = 0;
  std::size_t at = 0, nbytes = 0;
  int peer = 0;
};

// The k-th message to a rank meets the k-th one there. Before them what is sent may be packed, and
// behind them what came be unpacked, each by launches; what stays here is copied.
struct NcclPhase {
  struct Copy {
    int from = 0;
    std::size_t from_at = 0;
    int to = 0;
    std::size_t to_at = 0, nbytes = 0;
  };
  std::vector<StagedLaunch> packs, unpacks;
  std::vector<Copy> copies;
  std::vector<NcclPart> messages;
  int num_arrays = 0;  // that it speaks of
};

// The plan of a call: it depends on the arguments alone.
struct NcclPlan : WatchedPlan, std::enable_shared_from_this<NcclPlan> {
  std::string operation;  // for messages
  NcclColl coll = NcclColl::Allreduce;
  bool is_barrier = false;
  bool is_counted = false;     // by counts, else by count
  bool needs_copy = false;     // of the input, where it is the output, too
  std::size_t count = 0;       // as NCCL counts for the collective
  std::vector<int64_t> send_counts, recv_counts;
  std::size_t itemsize = 1;
  int dtype = kNcclUint8, op = 0;
  std::string factor;          // of premul_sum, in the format of the type; empty: none
  // Messages among neighbours, instead of a function of NCCL.
  std::vector<NcclPhase> phases;

  // Bytes of memory that it takes.
  std::size_t memory_nbytes() const;
};

struct NcclCall : WatchedCall {
  bool is_captured() const override { return capture != 0; }

  std::shared_ptr<const NcclPlan> plan;
  std::uint64_t capture = 0;  // that it was recorded in
};

class NcclWork : public WatchedWork {
 public:
  NcclWork(Comm& comm, Engine& engine, std::shared_ptr<NcclOrder> order,
           std::shared_ptr<NcclComm> native);

  // Gives the device all that there is to do; with `orders`, in the caller's stream. The input is
  // the first array, the output the second. `keep` are references that become the call's own.
  // Throws DeviceFailure or CallFailure; then the references are still the caller's.
  CallPtr start(const std::shared_ptr<const NcclPlan>& plan, std::vector<unsigned char*> arrays,
                Stream stream, bool orders, void* const* keep, double timeout_s);
  void wait_on(const CallPtr& call, Stream stream) override;
  // In a call of NCCL that blocks, which connects to peers.
  bool may_stick() const override { return native_->blocks(); }
  void free_who_sticks() override;
  // Leaves the communicator to be ended by the order, where nothing is under way. Idempotent.
  void close() override;

  std::uint64_t comm_pointer() const { return reinterpret_cast<std::uint64_t>(native_->slot->comm); }
  PlantedBug<NcclPlanted> planted;

 private:
  using NcclPtr = std::shared_ptr<NcclCall>;

  bool has(NcclPlanted bug) const { return planted.is(bug); }
  bool issue_behind_others(const NcclPtr& made, std::vector<unsigned char*>& arrays, Stream stream,
                           bool orders, void* const* keep);
  void issue(const NcclPtr& made, std::vector<unsigned char*>& arrays, Stream stream, bool orders,
             void* const* keep);
  std::uint64_t capture_of(Stream stream);
  void wait_for_others(const NcclCall& made, Stream on);
  void tell_others(const NcclCall& made, Stream on);
  void begin_graphs();
  void order_before(NcclCall& made, Stream on, Stream stream, bool orders);
  void order_after(NcclCall& made, Stream on, Stream other);
  int run(const NcclPlan& plan, const std::vector<unsigned char*>& arrays, void* scratch,
          Stream on, Stream other, double timeout_s);
  // nccl_phases.cpp
  int run_phases(const NcclPlan& plan, const std::vector<unsigned char*>& arrays, Stream on,
                 Stream other, double timeout_s);
  void launch(const StagedLaunch& what, const std::vector<unsigned char*>& arrays, Stream on);
  void see_end(const WatchedCall& call) override;
  bool look_further() override;
  void let_streams_go() override;
  const char* too_late() const override { return "an operation by NCCL came too late"; }
  std::string kind_of(int code) const;
  std::string text_of(int code, double timeout_s) const;

  const std::shared_ptr<NcclOrder> order_;
  const std::shared_ptr<NcclComm> native_;
  std::vector<void*> captured_;   // references of captured calls; guarded by polling_
  bool is_aborted_ = false;       // likewise
  std::uint32_t last_value_ = 0;  // of this communicator; guarded by the order's lock
  std::atomic<double> stuck_timeout_s_{0};  // of the call that is given, or was last
};

}  // namespace commrt
