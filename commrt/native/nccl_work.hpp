// SPDX-License-Identifier: Apache-2.0
// A communicator's operations on device memory by NCCL: stream-ordered, watched, given up in time.
//
//   nonblocking:  the device's stream for NCCL waits for the caller's, by an event
//   blocking:     in the caller's own stream
//   then, there:  after the end of the operation before (nccl_order.hpp); begun flag = v; NCCL's
//                 kernels; ended flag = v; end event
//
// In a capture the operation is recorded, without flags, whose values would come twice; nobody
// watches it, and what it holds on to is kept until the communicator is closed (nccl_order.hpp says
// how graphs keep the order).
//
// All of that is given in the call: nothing is enqueued later, so streams may share a hardware
// queue, and may hold what waits for other engines' flags. Whoever makes progress looks at the two
// flags, without the driver: references go at the end, and an operation that has begun and does
// not end within its time is given up with its communicator, which lets its streams go.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "nccl_order.hpp"
#include "staged_plan.hpp"
#include "stream_program.hpp"
#include "types.hpp"
#include "watched.hpp"

namespace commrt {

class Backoff;
class Comm;
class Engine;
class NcclWork;

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
  GraphEagerNoWait,    // a call outside does not wait for graphs
  GraphEagerNoRecord,  // a call outside is not seen by graphs
  GraphOwnStream,  // a capture takes the device's stream, which others use meanwhile
  GraphFlags,      // flags are written in a graph
  GraphDrops,      // references go as if the operation had run
  PackLate,        // boxes are packed once the messages have left
  UnpackEarly,     // what is to come is unpacked before the messages
  UnpackOther,     // it is unpacked in a stream that the messages are not in
};
constexpr int kNumNcclPlanted = 26;
extern const char* const kNcclPlantedNames[kNumNcclPlanted];

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

// What of a call follows from its arguments alone.
struct NcclPlan {
  std::string operation;  // for messages
  NcclColl coll = NcclColl::Allreduce;
  bool is_barrier = false;
  bool is_counted = false;     // by counts, else by count
  bool needs_copy = false;     // of the input, where it is the output, too
  std::size_t count = 0;       // as NCCL counts for the collective
  std::vector<int64_t> send_counts, recv_counts;
  std::size_t itemsize = 1;
  int dtype = kNcclUint8, op = 0, root = 0;
  std::string factor;          // of premul_sum, in the format of the type; empty: none
  std::size_t in_nbytes = 0;
  // Messages among neighbours, instead of a function of NCCL.
  std::vector<NcclPhase> phases;
  // A schedule's rounds, likewise; its scratch memory; whether it works in
  // place, and what it writes: else an input that lies there is copied first.
  std::shared_ptr<const StreamProgram> program;
  std::size_t scratch_nbytes = 0, out_nbytes = 0;
  bool in_place = false;
  int64_t elements = 0;        // for the record
  int code = 0, element_type = 0, reduction = 0;
};

struct NcclCall {
  enum class State : int { Running = 0, Done, Failed };

  ~NcclCall();
  bool ended() const { return state.load(std::memory_order_acquire) != 0; }
  bool failed() const {
    return state.load(std::memory_order_acquire) == static_cast<int>(State::Failed);
  }

  std::shared_ptr<NcclWork> work;
  std::shared_ptr<const NcclPlan> plan;
  std::atomic<int> state{0};
  std::atomic<double> begun_s{0};  // when the host saw that it had begun; 0: not yet
  std::uint64_t seq = 0;
  std::uint32_t value = 0;
  std::uint64_t capture = 0;  // that it was recorded in; then the state does not change
  Event begun = 0;  // where streams write no flags
  Event end = 0;
  double timeout_s = 0;
  std::string kind, error;  // of a failure; written before the state
  void* keep[2] = {nullptr, nullptr};  // PyObject*: the caller's arrays, until the end
};

// NCCL refused a call, or the communicator was lost in it.
struct NcclFailure : std::runtime_error {
  NcclFailure(std::string kind_, const std::string& text)
      : std::runtime_error(text), kind(std::move(kind_)) {}
  std::string kind;
};

class NcclWork : public Watched, public std::enable_shared_from_this<NcclWork> {
 public:
  NcclWork(Comm& comm, Engine& engine, std::shared_ptr<NcclOrder> order,
           std::shared_ptr<NcclComm> native);
  ~NcclWork() override;

  // Gives the device all that there is to do. With `orders`, in the caller's stream. `keep` are
  // references that become the call's own. Throws DeviceFailure or NcclFailure; then the
  // references are still the caller's.
  std::shared_ptr<NcclCall> start(const std::shared_ptr<const NcclPlan>& plan, const void* in,
                                  void* out, Stream stream, bool orders, void* const* keep,
                                  double timeout_s) {
    return start(plan, {static_cast<unsigned char*>(const_cast<void*>(in)),
                        static_cast<unsigned char*>(out)},
                 stream, orders, keep, timeout_s);
  }
  // The same of any number of arrays; the input is the first one, the output the second.
  std::shared_ptr<NcclCall> start(const std::shared_ptr<const NcclPlan>& plan,
                                  std::vector<unsigned char*> arrays, Stream stream, bool orders,
                                  void* const* keep, double timeout_s);
  // Lets a stream wait for the end of a call. Throws DeviceFailure where one of the two is in a
  // capture and the other one is not in the same; the capture goes on.
  void wait_on(const NcclCall& call, Stream stream);
  bool look() override;
  // Gives the communicator up where a call has begun, and has been waited for as long as it may
  // take.
  void give_up_late(const std::shared_ptr<NcclCall>& call, double waited_s);
  // What a thread asks that waits for a call: whether the device still works.
  void ask_device(const std::shared_ptr<NcclCall>& call);
  // Fails all that is under way, and lets the streams go.
  // `seq` is the operation that cannot be done; without it, the first one under way.
  void give_up(const std::string& kind, const std::string& why,
               std::optional<std::uint64_t> seq = std::nullopt);
  // Leaves the communicator to be ended by the order, where nothing is under way. Idempotent.
  void close();
  void abandon() override;
  void pause(Backoff& backoff);
  // A simulated device learns that this thread has seen what another one saw of a call.
  void see();
  // A simulated device learns that the engine did something.
  void announce();

  bool failed() const { return failed_.load(std::memory_order_acquire); }
  std::uint64_t comm_pointer() const { return reinterpret_cast<std::uint64_t>(native_->slot->comm); }
  NcclOrder& order() const { return *order_; }
  bool simulated() const { return device_->api->lock != nullptr; }
  int outstanding() const override { return outstanding_.load(std::memory_order_acquire); }
  NcclPlanted planted = NcclPlanted::None;

 private:
  using State = NcclCall::State;
  bool has(NcclPlanted bug) const { return planted == bug; }
  void check(DeviceStatus status) const;
  template <class... Parameters, class... Arguments>
  void call(DeviceStatus (*DeviceApi::*entry)(Device*, Parameters...), Arguments... arguments) {
    check((device_->api->*entry)(device_, arguments...));
  }
  void issue(const std::shared_ptr<NcclCall>& made, std::vector<unsigned char*>& arrays,
             Stream stream, bool orders, void* const* keep);
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
  bool look_at_flags();
  bool look_at_events();
  bool look_after();
  void finish(const std::shared_ptr<NcclCall>& call);
  void fail(const std::string& kind, const std::string& why, bool device_is_gone,
            std::optional<std::uint64_t> seq = std::nullopt);
  std::string kind_of(int code) const;
  std::string text_of(int code, double timeout_s) const;

  Comm* comm_;  // guarded by looking_; null once it is gone
  Engine& engine_;
  const std::shared_ptr<NcclOrder> order_;
  Device* const device_;
  const std::shared_ptr<NcclComm> native_;
  std::vector<void*> captured_;   // references of captured calls; guarded by looking_
  std::uint32_t last_value_ = 0;  // of this communicator; guarded by the order's lock

  std::mutex looking_;  // guards what follows; nobody waits for a peer or the device with it
  std::deque<std::shared_ptr<NcclCall>> calls_;  // under way, in the device's order
  std::size_t seen_begun_ = 0;                   // the first so many of them have begun
  unsigned idle_ = 0;
  bool device_gone_ = false;
  std::atomic<bool> failed_{false}, closed_{false};
  std::string failure_kind_, failure_;
  std::atomic<int> outstanding_{0};
  std::atomic<std::uint32_t> activities_{0};
};

}  // namespace commrt
