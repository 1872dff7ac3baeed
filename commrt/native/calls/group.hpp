// SPDX-License-Identifier: Apache-2.0
// The Python side of a communicator: the plan cache, waiting, requests.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "arrays/view.hpp"
#include "calls/named_families.hpp"
#include "calls/plan_cache.hpp"
#include "engine/comm.hpp"
#include "engine/engine.hpp"
#include "engine/p2p.hpp"

namespace commrt {

class CallCheck;
class DeviceCallCache;

namespace nb = nanobind;

class Fusion;
class RecordRing;

// Base class of commrt.comm.Communicator.
class Group {
 public:
  Group(std::shared_ptr<Engine> engine, int rank, int size, const std::string& name);
  ~Group();

  std::shared_ptr<Engine> engine;
  std::unique_ptr<Comm> comm;
  double timeout_s = 600;
  bool nan_check = false;  // refuses calls whose arrays have NaN or infinity
  bool slow = false;  // a closed communicator: every call goes through Python
  std::shared_ptr<CallCheck> check;  // compares calls across ranks; null outside check mode
  std::unique_ptr<Fusion> fusion;  // of an open comm.fused(), else null
  uint32_t fused_kinds[kNumDTypes] = {};  // by type, the reductions that buckets may have

  PlanCache plans;
  NamedFamilies named;

  std::vector<std::shared_ptr<class DeviceWork>> device_work;  // of each kind, on each device
  std::unique_ptr<DeviceCallCache> device_call_cache;  // on arrays on devices

  VectorKey asked;  // of the call that is being looked at: its memory is used again
};

// One started operation as Python sees it.
class Request {
 public:
  Request(nb::object group, std::shared_ptr<Op> op, nb::object result, nb::object operation,
          double timeout_s)
      : group_(std::move(group)), op_(std::move(op)), result_(std::move(result)),
        operation_(std::move(operation)), timeout_s_(timeout_s) {}
  ~Request();

  nb::object wait(nb::object stream, nb::object timeout_s);
  void note_site();  // of the program's line that makes the call
  bool test();
  bool peers_gave_up();
  bool done() const { return op_->finished(); }
  bool is_fine() const {
    return op_->state.load(std::memory_order_acquire) == static_cast<int>(OpState::Done);
  }
  // True if the engine, or MPI, may still use the operation's buffers.
  bool needs_buffers() const { return !op_->finished() || op_->held; }
  // Keeps the destructor from warning that the request was dropped.
  void be_quiet() { observed_ = true; }
  // Ends a message that is not matched, on this rank alone.
  void take_back(const std::string& why);
  bool is_failed() const {
    return op_->state.load(std::memory_order_acquire) == static_cast<int>(OpState::Failed);
  }
  uint64_t seq() const { return op_->seq; }
  nb::object operation() const { return operation_; }
  const std::shared_ptr<Op>& op() const { return op_; }
  Comm* comm() const { return nb::cast<Group&>(group_).comm.get(); }
  nb::str what() const;  // "allreduce #17 on world"
  int64_t received_nbytes() const;
  nb::list each_received_nbytes() const;
  int source() const;
  double timeout_s() const { return timeout_s_; }
  nb::object device() const;
  nb::object stream() const;
  nb::str repr() const;
  nb::object outcome_after(WaitResult ended, double seconds);
  // Lets records of a log have their end where the program sees it.
  void record_in(std::shared_ptr<RecordRing> ring, uint64_t first, uint32_t num) {
    ring_ = std::move(ring);
    first_record_ = first;
    num_records_ = num;
  }

 private:
  nb::object outcome();
  nb::object group_;
  std::shared_ptr<Op> op_;
  nb::object result_;
  nb::object operation_;
  double timeout_s_;
  nb::object error_;
  nb::object site_;  // the line of the call, where its array is guarded
  bool observed_ = false;
  std::shared_ptr<RecordRing> ring_;  // null where nobody records it, or its end was seen
  uint64_t first_record_ = 0;
  uint32_t num_records_ = 0;
};

// Runs progress until the operation ends, the deadline passes or a signal handler raises
// (then a Python error is set). Holds the GIL on entry and exit, and for at most 2 us of
// spinning in between; with `spun` the caller has spun as long.
WaitResult wait_for(Group& group, const std::shared_ptr<Op>& op, double timeout_s,
                    bool spun = false);

// Drops the Python objects of ended operations, and leaves arrays that go with them. Needs the GIL.
void drop_ended(Engine& engine);
// True if this thread leaves arrays of devices to others. Freeing one may wait for the device, and
// the device may wait for what this thread is to do.
extern thread_local bool leaves_arrays;

// Lets this thread leave them while it lives.
class LeavingArrays {
 public:
  LeavingArrays() : before_(std::exchange(leaves_arrays, true)) {}
  ~LeavingArrays() { leaves_arrays = before_; }
  LeavingArrays(const LeavingArrays&) = delete;
  LeavingArrays& operator=(const LeavingArrays&) = delete;

 private:
  const bool before_;
};

void keep_alive(Op& op, PyObject* first, PyObject* second);

// Starts an operation and, unless nonblocking, waits for its end: the result, or a Request.
// `keep_x` and `keep_out` own the memory behind `in` and `out`. Throws on failure.
nb::object run_plan(nb::handle group, const PlanPtr& plan, const void* in, void* out,
                    nb::handle keep_x, nb::handle keep_out, nb::handle result,
                    nb::handle operation, bool nonblocking, double timeout_s);
// The same for an operation that is already in the communicator's hands. With `spun` the
// caller has waited as long as the GIL may be held.
nb::object finish_call(nb::handle group, std::shared_ptr<Op> op, nb::handle keep_x,
                       nb::handle keep_out, nb::handle result, nb::handle operation,
                       bool nonblocking, double timeout_s, bool spun = false);

nb::object make_request(nb::handle group, std::shared_ptr<Op> op, nb::handle result,
                        nb::handle operation, double timeout_s);
// The same in memory that is there, of nb::inst_alloc(): throws nothing.
void make_request_in(nb::handle memory, nb::handle group, std::shared_ptr<Op> op,
                     nb::handle result, nb::handle operation, double timeout_s);

// A message to or from another rank, with everything checked. `keep` owns the memory.
struct Side {
  Message message;
  nb::handle keep;
};
nb::object run_send(nb::handle group, const Side& x, nb::handle operation, bool nonblocking,
                    double timeout_s);
nb::object run_recv(nb::handle group, const Side& out, nb::handle result, nb::handle operation,
                    bool nonblocking, double timeout_s);
// `keep_sends` and `keep_recvs` own the memory; the latter's receives go to `result`.
nb::object run_multi(nb::handle group, const MessageLists& lists, nb::handle keep_sends,
                     nb::handle keep_recvs, nb::handle result, nb::handle operation,
                     bool nonblocking, double timeout_s);
nb::object run_sendrecv(nb::handle group, const Side& x, const Side& out, nb::handle result,
                        nb::handle operation, bool nonblocking, double timeout_s);

void bind_fusion(nb::module_& m);
void bind_operation(nb::module_& m);
void bind_p2p_operation(nb::module_& m);

}  // namespace commrt
