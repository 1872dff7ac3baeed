// SPDX-License-Identifier: Apache-2.0
// Fusion: sends several short nonblocking allreduces as one operation on all their arrays.
#pragma once

#include <cmath>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "calls/group.hpp"
#include "engine/parts.hpp"

namespace commrt {

// Calls that go as one. Open while calls are added; then sent, or failed. Guarded by the GIL,
// its references, too.
//
// For arrays on a device, a bucket only settles their place among the others. `away` sends the
// bucket (fusion/device_buckets.py), `arrays` are the calls' requests, and `parts` have lengths
// alone.
struct Bucket {
  Bucket(nb::object group_, DType dtype_, RedOp redop_, nb::object away_)
      : group(std::move(group_)), away(std::move(away_)), dtype(dtype_), redop(redop_),
        parts(new BucketParts), arrays(nb::steal(PyList_New(0))) {}

  nb::object group;
  nb::object away;  // invalid: the engine runs it
  DType dtype;
  RedOp redop;
  std::unique_ptr<BucketParts> parts;  // until it is sent
  // A list of what owns their memory, but for results that a request has. The operation has a
  // reference of its own.
  nb::object arrays;
  std::vector<uint64_t> calls;   // numbers of the calls, one for each part
  nb::object request;            // once it is sent
  Request* sent = nullptr;       // the same
  bool left = false;             // `away` has sent it
  uint16_t facts = 0;  // once it is on its way: a digest of all calls of the context until then
  // Calls that were refused here and have a place in it, with the reasons: it is refused as well.
  struct Refused {
    uint64_t call;
    std::string why;
  };
  std::vector<Refused> refused;
  nb::object error;              // why it was not sent
  uint64_t end = ~uint64_t{0};   // calls from this one on went over into `next`
  Bucket* next = nullptr;

  bool is_settled() const { return sent != nullptr || left || error.is_valid(); }
  // Ends a bucket that is not sent; nobody works on the arrays.
  void fail(const nb::object& why);
  void hold() { ++references_; }
  void let_go() {
    if (--references_ != 0) return;
    if (next != nullptr) next->let_go();
    delete this;
  }

 private:
  ~Bucket() = default;
  int references_ = 1;
};

// The part of a call that goes into a bucket. The call's arguments are checked.
struct FusedCall {
  DType dtype;
  RedOp redop;
  int64_t count;
  const void* in;
  void* out;
  PyObject *keep_x, *keep_out;  // null: `result` owns the memory
  PyObject* result;
  double timeout_s;
  uint64_t nbytes() const { return static_cast<uint64_t>(count) * item_size(dtype); }
};

// The buckets of an open context. All of them are sent together, in the order of their first
// calls: where that happens is called a cut.
class Fusion {
 public:
  // With a time limit, the ranks agree where to cut (fusion/agreement.py), because their clocks
  // differ. Without one, `limit_s` is infinite, and cuts follow from the calls alone.
  Fusion(Group& group, uint64_t most_nbytes, double limit_s)
      : engine_(*group.engine), known_(group.fused_kinds), most_nbytes_(most_nbytes),
        limit_s_(limit_s), agrees_(std::isfinite(limit_s)) {}
  ~Fusion();

  // True if calls of this kind have been found right before, in any context. The other checks of a
  // call do not depend on its kind.
  bool knows(DType dtype, int redop) const {
    return known_[static_cast<int>(dtype)] >> redop & 1;
  }
  bool takes(uint64_t nbytes) const { return nbytes < most_nbytes_; }
  // Returns the call's request; null with Python's error set.
  PyObject* add(nb::handle group, const FusedCall& call);
  // Adds a call on a device, `keep_x` being its request, to the bucket that `away` sends. Returns
  // the call's number. Throws Python's error where it was interrupted: the call is made, or not.
  uint64_t add_away(nb::handle group, nb::handle away, const FusedCall& call);
  // Sends what was called so far. False with Python's error set where it was interrupted;
  // whatever else goes wrong, the requests tell.
  bool cut(nb::handle group);
  // A call was refused here that other ranks put into a bucket, as far as its arguments say. It
  // gets a place in this rank's, which is refused in turn: so all ranks cut at the same calls. Where
  // what is wrong made it another one, later buckets' digests differ.
  // False with Python's error set where sending was interrupted.
  bool add_refused(nb::handle group, nb::handle away, const FusedCall& call, const std::string& why);
  // A call was refused here of which nobody knows in which bucket others have it. No bucket is sent
  // here any more: `error` ends the open calls, and those that come until the context ends.
  void lose(const nb::object& error);
  bool is_lost() const { return lost_.is_valid(); }
  // Sends what was called so far, before a call that is in no bucket. Raises an error where that one
  // would not have the place in the order of operations that it has on other ranks.
  bool make_way(nb::handle group);
  // Sends the calls before `call`; the others stay.
  bool send_before(uint64_t call);
  uint64_t num_calls() const { return num_calls_; }
  uint64_t num_sent() const { return num_sent_; }
  // The digest of all calls before `call`, of what must be equal on all ranks. `call` is not below
  // num_sent().
  uint64_t digest(uint64_t call) const { return digests_[call - num_sent_]; }
  bool agrees() const { return agrees_; }
  bool is_open() const { return num_sent_ != num_calls_; }
  bool is_sending() const { return is_sending_; }
  // Calls a method of the group's service, comm.fusion. False with Python's error set.
  static bool ask(nb::handle group, const char* method);
  // True if the time has come to look at the open buckets. Returns true again a limit later.
  bool is_due(double now);
  double due_s() const { return is_open() ? due_s_ : kNever; }
  // Ends all open calls with this error.
  void fail_open(const nb::object& error);
  // At the end, when nobody is left who would send what is open: it fails, if there is any.
  void close(const nb::object& group);

 private:
  Bucket* bucket_for(nb::handle group, nb::handle away, const FusedCall& call);
  bool make_room(nb::handle group, uint64_t nbytes);
  bool count(nb::handle group, Bucket& bucket, const FusedCall& call);
  bool fill(nb::handle group);
  bool send_queued();

  void set_due(double now);

  Engine& engine_;
  uint32_t* const known_;  // the group's: finding out takes longer than a thousand calls
  const uint64_t most_nbytes_;
  const double limit_s_;
  const bool agrees_;
  std::vector<Bucket*> open_;
  std::deque<Bucket*> queued_;  // on their way out
  bool is_sending_ = false;
  std::thread::id sender_;
  uint64_t open_nbytes_ = 0, num_calls_ = 0, num_sent_ = 0;
  nb::object lost_;       // the error of calls once this rank has lost count of buckets
  uint64_t digest_ = 0;  // of all calls
  // Used if the ranks agree where to cut.
  std::vector<uint64_t> digests_{0};
  uint64_t full_nbytes_ = most_nbytes_;  // when to ask again; more where others are late
  double due_s_ = 0;
};

// A request of one call in a bucket: a plain Python object, as a call has no time for more.
PyObject* make_fused_request(Bucket* bucket, uint64_t call, PyObject* result, double timeout_s);
// Drops a request that its caller never gets, so that nobody is warned that it was dropped.
void drop_fused_request(PyObject* request);

// Looks at the open buckets whose time has come. False with Python's error set where it was
// interrupted; needs the GIL.
bool look_at_timed(Engine& engine);
// The communicator's open buckets are looked at from now on, and until it is forgotten.
void add_timed(Group& group);
void forget_timed(Group& group);

}  // namespace commrt
