// SPDX-License-Identifier: Apache-2.0
// Gives NCCL's work on a device one order, for all communicators of the process.
//
// NCCL must not be called for two communicators of a device from two threads at once, and kernels
// of two communicators that run at the same time may each hold what the other one's peers need.
// So operations are given to the device one at a time, under one lock, and run one after the
// other: each waits for the end of the one before it, whatever streams they are in. Since all
// ranks make the same calls in the same order, none waits for what a peer has put behind another.
//
// They end in that order, so one flag that counts up tells the host of all of them.
//
// Graphs run when somebody launches them, which nobody here sees. So once there was a capture, one
// event holds the order together. Every operation on the device waits for the event's latest
// record, and then records it. A graph does both at each launch, by an external wait and external
// records. NCCL orders the graphs and calls of one communicator in the same way; this is for all
// of a device. Within a capture an operation waits for the one before it there.
//
// An MPI library that is given device memory must not be at work there while NCCL is: a rank that
// waits in NCCL's kernel may hold what the other library needs. Its calls (mpi_work.hpp) wait for
// NCCL's latest operation, and NCCL's next one waits for them; they do not wait for each other.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "devices/device_stores.hpp"
#include "nccl/nccl_comm.hpp"

namespace commrt {

struct NcclCall;
struct StagedCall;

// It can share itself, because work that has it may go in any thread.
class NcclOrder : public DeviceUser, public std::enable_shared_from_this<NcclOrder> {
 public:
  // Throws DeviceFailure. `keeps` is alive as long as the device is needed.
  NcclOrder(Device* device, std::shared_ptr<void> keeps, std::uint32_t first_value);

  // A communicator that nobody uses any more: it is finalised with those of the other ranks, and
  // then destroyed, in later calls of sweep().
  void retire(std::shared_ptr<NcclComm> comm);
  // Goes on with these, without waiting; how many are left.
  std::size_t sweep();
  // Aborts those that are left, and gives streams, events and memory back.
  void close(double abort_timeout_s);

  // Does what sweep() does, for callers that hold `issue`.
  void sweep_locked();

  // Calls whose end no communicator has seen yet, of which the flags tell.
  std::atomic<int> under_way{0};
  EventPool events;
  const bool flags;  // whether streams write them; else events are polled
  std::mutex issue;  // held to give the device an operation, until NCCL has taken it
  // It guards the members below.
  Stream stream = 0;  // of nonblocking calls
  Event ready = 0;
  std::uint32_t issued;            // the value of the latest operation
  std::shared_ptr<NcclCall> last;  // that operation
  bool last_is_own = false;        // whether it is in `stream`
  // Since then, of each work that must not run beside NCCL's, the latest call.
  std::map<const void*, std::shared_ptr<StagedCall>> beside;
  // One of these whose end the device is not given yet; null: all are.
  std::shared_ptr<StagedCall> unended() const;
  void wait_for_last(Stream on);
  void wait_for_beside(Stream on);
  // The latest operation, in a launch of a graph too; recorded since the first capture.
  Event serial = 0;
  bool has_captured = false;
  // The latest operation of a capture; null where it is the first one there. Throws DeviceFailure
  // for a capture that is no longer remembered.
  Event* tip(std::uint64_t capture);
  void set_tip(std::uint64_t capture, Event event);
  // A stream for nonblocking calls in a capture: `stream` must not become a part of it.
  Stream fork(std::uint64_t capture);
  Scratch scratch;    // that operations use one after the other
  FlagLines lines;  // begun and ended, which hold values of operations, and activity

 private:
  const std::shared_ptr<void> keeps_;
  std::vector<std::shared_ptr<NcclComm>> retired_;
  std::map<std::uint64_t, Event> tips_;
  std::uint64_t forgotten_ = 0;  // captures up to this one are not remembered
  std::vector<Stream> forks_;
  bool closed_ = false;
};

}  // namespace commrt
