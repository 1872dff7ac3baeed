// SPDX-License-Identifier: Apache-2.0
// Runs collectives of an MPI library that takes device memory (backends/mpi/attached.py). MPI knows
// no streams, so each call is a staged call (staging.hpp) without its copies:
//
//   d2h:  after the caller's stream, and after NCCL's latest work on the device: start flag = v
//   h2d:  wait until start flag >= v, then until go flag >= v. Then the end event, end flag = v
//
// The host's engine has an operation behind a gate that opens at v. It passes the addresses on the
// device to MPI. The thread that makes progress tests it, and sets the go flag when MPI is done.
//
// If MPI wants something elsewhere (an exchange in place, a root's input beside its output), it is
// copied on the device first, in d2h. MPI's calls may call the driver under the engine's lock,
// with the device current (Engine::share_with_mpi), which nothing else of progress does. So a
// command that holds a stream may stand before the work that MPI gives the device. Where that is
// so (one hardware queue, MPI's copies in a stream that takes turns with a held one), calls are
// made without flags, as on devices that have none. Their end is then given once MPI is done, and
// a thread that waits for the end blocks until then. For the same reason, the legacy stream and a
// thread's default stream are never held.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "device_calls/staged_work.hpp"
#include "library_calls/nccl_order.hpp"
#include "planted_bugs.hpp"

namespace commrt {

// Bugs that tests plant in the protocol, to see that they are found.
enum class PlantedInMpi : int {
  None = 0,
  Ungated,           // MPI is called before the start flag
  NoGo,              // the end does not wait for MPI
  GoEarly,           // the go flag is stored before MPI is done
  GoOffByOne,        // the end waits for the call before
  NoReady,           // the start does not wait for the caller's stream
  ReadyAfter,        // d2h waits for an event that is recorded later
  StartOtherStream,  // the start flag is written by the stream that waits for it
  EndEarly,          // the end event is recorded before the go flag is waited for
  EndOtherStream,    // the end event is recorded in the stream of the start
  NoEndWait,         // wait() does not wait for the end event
  ValuesAgain,       // flags do not count on from call to call
  CopyLate,          // what MPI wants elsewhere is copied behind the start flag
  CopyOtherStream,   // it is copied in the stream of the end
  NoCopy,            // it is not copied
  CopyEarly,         // it is copied over what MPI still reads for the call before
  NotBehindNccl,     // the start does not wait for NCCL's latest work
  NotBeforeNccl,     // NCCL's next work does not learn of the call
  FlagsKept,         // a failure does not release the streams
  NotStarted,        // nothing but the go flag orders the end behind the start
  NotBehindGraphs,   // the start does not wait for NCCL's work in graphs that were launched
  NotBeforeGraphs,   // graphs that are launched later do not wait for the call
  Count,
};
std::vector<std::string> names_of(PlantedInMpi);

// The plan of a call: it depends on the arguments alone.
struct MpiDevicePlan : std::enable_shared_from_this<MpiDevicePlan> {
  std::shared_ptr<const Plan> runs;  // the library's own collective
  std::size_t in_nbytes = 0, out_nbytes = 0;
  bool in_place = false;    // MPI reads what it writes
  bool sends_out = false;   // what a root sends is to lie in its output
  std::shared_ptr<const std::string> words;  // how another rank makes it (device_refusals.hpp)

  // Bytes of memory that it takes.
  std::size_t memory_nbytes() const {
    return sizeof *this + (runs == nullptr ? 0 : runs->nbytes());
  }
};

struct MpiCall : StagedCall {
  ~MpiCall() override;

  // True once MPI is done and the streams of the call may go on.
  std::atomic<bool> released{false};
  std::shared_ptr<const MpiDevicePlan> plan;
  const unsigned char* in = nullptr;  // as MPI is given them
  unsigned char* out = nullptr;
  std::shared_ptr<Op> op;
  std::uint32_t value = 0;   // of all flags
  Event started = 0;         // where there are no flags
  double opened_s = 0;
};

class MpiWork : public StagedWork {
 public:
  // With `order`, MPI is never at work beside NCCL on the device. Throws DeviceFailure, which is
  // Invalid if MPI has another device of this process.
  MpiWork(Comm& comm, Engine& engine, Device* device, std::shared_ptr<void> keeps,
          std::shared_ptr<NcclOrder> order, const StagerOptions& options);

  // Gives the device and the engine all that there is to do. With `orders`, the caller's stream
  // goes on only when it is done. `keep` are references that become the call's own. Throws
  // DeviceFailure; then the references are still the caller's.
  CallPtr start(const std::shared_ptr<const MpiDevicePlan>& plan, unsigned char* in,
                unsigned char* out, Stream stream, bool orders, void* const* keep,
                double timeout_s);
  void close() override;

  PlantedBug<PlantedInMpi> planted;

 private:
  using MpiPtr = std::shared_ptr<MpiCall>;

  bool has(PlantedInMpi bug) const { return planted.is(bug); }
  void issue(const MpiPtr& made, Stream stream, void* const* keep);
  void bind(MpiCall& made, unsigned char** copy_to, std::size_t* copy_nbytes);
  void make_known(const MpiPtr& made, void* const* keep);
  void finish_giving(const MpiPtr& made);
  void enqueue_start(MpiCall& made, Stream stream, unsigned char* copy_to,
                     std::size_t copy_nbytes);
  void enqueue_end(MpiCall& made);
  void come_after_nccl();
  void stay_before_nccl(const MpiPtr& made);
  void submit(MpiCall& made, Stream stream);
  void touch(const MpiCall& made);
  bool look_after(MpiCall& made);
  void give_end(MpiCall& made);
  void record_end(const MpiCall& made);
  void tell_graphs(const MpiCall& made);

  void order_after(const StagedPtr& call, Stream stream) override;
  bool open_gates() override;
  bool let_go() override;
  void give_memory_back(StagedCall& call) override;
  std::size_t memory_nbytes() const override { return 0; }
  void free_all() override;
  Rest host_is_done() override;
  void let_all_go(const std::string& kind, const std::string& why) override;
  CallPtr oldest() const override;
  const char* why_no_graph() const override;
  const char* too_late() const override {
    return "an operation of MPI on device memory came too late";
  }

  const std::shared_ptr<NcclOrder> order_;
  bool shares_ = false;           // counted among the engine's works that share with MPI
  std::atomic<std::uint32_t> issued_;
  Scratch scratch_;               // of copies; guarded by issue_
  MpiPtr scratch_user_;           // the latest call that has some; guarded by issue_

  // Guarded by polling_.
  std::deque<MpiPtr> calls_;  // that MPI has not done
  std::size_t open_ = 0;      // of these, the first so many have open gates
  std::vector<std::shared_ptr<Op>> failed_ops_;
};

}  // namespace commrt
