// SPDX-License-Identifier: Apache-2.0
// Adds calls to buckets, and sends these.
#include "calls/fusion.hpp"
#include "calls/group_methods.hpp"
#include "engine/user_reduction.hpp"
#include "gil.hpp"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <sched.h>

#include <algorithm>
#include <new>
#include <utility>

namespace commrt {

namespace {

PyObject* name_of_allreduce() {
  static PyObject* const name = PyUnicode_InternFromString("allreduce");
  return name;
}

uint64_t mix(uint64_t h, uint64_t value) {
  h = (h ^ value) * 0x9E3779B97F4A7C15ull;
  return h ^ (h >> 32);
}

// Returns the error that `body` raises; null if it raises none.
template <typename Body>
nb::object raised_by(Body body) {
  try {
    body();
    return {};
  } catch (nb::python_error& error) {
    return nb::borrow(error.value());
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  nb::python_error error;
  return nb::borrow(error.value());
}

// Returns the plan of a bucket; null if no rank may send the bucket, which has then failed.
PlanPtr plan_of(Group& group, Bucket& bucket) {
  const int dtype = static_cast<int>(bucket.dtype), redop = static_cast<int>(bucket.redop);
  const int64_t count = bucket.parts->elems();
  const PlanKey key{count, PlanKey::pack(0, bucket.dtype, redop, kHost), 0};
  if (const PlanPtr* found = group.plans.find(key)) return *found;
  if (const PlanPtr* made = group.plans.make(key, *group.comm)) return *made;
  const nb::object service = bucket.group.attr(group_methods::kFusion);
  nb::object made = service.attr(fusion_methods::kPlanBucket)(count, dtype, redop);
  if (!PyExceptionInstance_Check(made.ptr())) return nb::cast<PlanPtr>(made);
  bucket.fail(made);
  return nullptr;
}

// Starts the operation. Throws what a call of its own would raise; and where something else is
// interrupted meanwhile: then the bucket is sent nonetheless.
void send(Bucket& bucket) {
  Group& group = *nb::inst_ptr<Group>(bucket.group);
  if (group.comm->broken.load(std::memory_order_relaxed) ||
      Engine::forked.load(std::memory_order_relaxed)) {
    bucket.group.attr(group_methods::kCheckUsable)();
  }
  if (!bucket.refused.empty()) {
    const nb::object service = bucket.group.attr(group_methods::kFusion);
    bucket.fail(service.attr(fusion_methods::kRefuseBucket)(bucket.refused.front().why));
    return;
  }
  if (bucket.away.is_valid()) {
    const nb::object interrupt = bucket.away.attr("send")(bucket.arrays);
    bucket.left = true;
    bucket.arrays.reset();
    if (!interrupt.is_none()) {
      PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(interrupt.ptr())), interrupt.ptr());
      throw nb::python_error();
    }
    return;
  }
  const PlanPtr plan = plan_of(group, bucket);
  if (plan == nullptr) return;
  Engine& engine = *group.engine;
  // Nothing may fail between the start and the request that keeps the outputs until the end.
  nb::object request = nb::inst_alloc(nb::type<Request>());
  std::shared_ptr<Op> op;
  PyObject* const arrays = nb::object(bucket.arrays).release().ptr();  // the operation's
  try {
    ReleasedGil release;
    const std::lock_guard<std::mutex> lock(engine.mutex);
    // Makes a pass, as test() does, so that many short calls move as much as they would one by
    // one.
    group.comm->progress(kSliceBytes);
    op = group.comm->start_bucket(plan, std::move(bucket.parts), arrays, kSliceBytes,
                                    bucket.facts);
  } catch (...) {  // nothing has started
    Py_DECREF(arrays);
    throw;
  }
  const bool has_more = Engine::may_have_more(*op);
  make_request_in(request, bucket.group, std::move(op), nb::none(),
                  nb::handle(name_of_allreduce()), group.timeout_s);
  bucket.request = std::move(request);
  bucket.sent = nb::inst_ptr<Request>(bucket.request);
  bucket.sent->be_quiet();
  if (engine.goes_on_alone()) engine.wake(has_more);
  if (engine.has_ended()) drop_ended(engine);
  if (wants_gil(engine) && !run_wanted(engine)) throw nb::python_error();
}

nb::object slice(const nb::object& list, size_t low, size_t high) {
  PyObject* const part = PyList_GetSlice(list.ptr(), static_cast<Py_ssize_t>(low),
                                         static_cast<Py_ssize_t>(high));
  if (part == nullptr) throw nb::python_error();
  return nb::steal(part);
}

// The calls from number `at` on, in a bucket of their own, which is to come behind.
Bucket* copy_from(const Bucket& bucket, size_t at) {
  std::unique_ptr<Bucket, void (*)(Bucket*)> rest(
      new Bucket(bucket.group, bucket.dtype, bucket.redop, bucket.away),
      [](Bucket* b) { b->let_go(); });
  rest->parts = bucket.parts->tail(at);
  rest->calls.assign(bucket.calls.begin() + static_cast<std::ptrdiff_t>(at), bucket.calls.end());
  for (const Bucket::Refused& each : bucket.refused) {
    if (each.call >= rest->calls.front()) rest->refused.push_back(each);
  }
  // A bucket of the host takes over all arrays: it is not recorded which array belongs to which
  // call.
  const size_t first = bucket.away.is_valid() ? at : 0;
  const auto num = static_cast<size_t>(PyList_GET_SIZE(bucket.arrays.ptr()));
  rest->arrays = slice(bucket.arrays, first, num);
  return rest.release();
}

// Tells the waiting ranks first, because the communicator's own method in Python may fail.
void give_up(const nb::object& group_object, const char* why) {
  Group& group = *nb::inst_ptr<Group>(group_object);
  {
    const std::lock_guard<std::mutex> lock(group.engine->mutex);
    group.comm->break_down(why);
    group.comm->tell_failure(group.comm->next_seq);
  }
  group_object.attr("give_up")(why);
}

}  // namespace

Fusion::~Fusion() {
  for (Bucket* bucket : open_) bucket->let_go();
  for (Bucket* bucket : queued_) bucket->let_go();
}

// Dropping Python objects, or the method `fail`, may run anything and change which buckets are
// open.
void Bucket::fail(const nb::object& why) {
  error = why;
  const nb::object requests = std::move(arrays);
  parts.reset();
  if (away.is_valid()) raised_by([&] { away.attr("fail")(requests, why); });
}

Bucket* Fusion::bucket_for(nb::handle group, nb::handle away, const FusedCall& call) {
  for (Bucket* bucket : open_) {
    if (bucket->dtype == call.dtype && bucket->redop == call.redop && bucket->away.is(away)) {
      return bucket;
    }
  }
  auto bucket = std::unique_ptr<Bucket, void (*)(Bucket*)>(
      new Bucket(nb::borrow(group), call.dtype, call.redop, nb::borrow(away)),
      [](Bucket* b) { b->let_go(); });
  open_.push_back(bucket.get());
  return bucket.release();
}

bool Fusion::make_room(nb::handle group, uint64_t nbytes) {
  return open_nbytes_ + nbytes <= full_nbytes_ || !is_open() || fill(group);
}

PyObject* Fusion::add(nb::handle group, const FusedCall& call) {
  known_[static_cast<int>(call.dtype)] |= 1u << static_cast<int>(call.redop);
  if (!make_room(group, call.nbytes())) return nullptr;
  Bucket* const bucket = bucket_for(group, nb::handle(), call);
  PyObject* const request = make_fused_request(bucket, num_calls_, call.result, call.timeout_s);
  if (request == nullptr) return nullptr;
  PyObject* const arrays = bucket->arrays.ptr();
  if ((call.keep_x != nullptr && PyList_Append(arrays, call.keep_x) != 0) ||
      (call.keep_out != nullptr && PyList_Append(arrays, call.keep_out) != 0)) {
    drop_fused_request(request);
    return nullptr;
  }
  if (!count(group, *bucket, call)) {
    drop_fused_request(request);
    return nullptr;
  }
  return request;
}

uint64_t Fusion::add_away(nb::handle group, nb::handle away, const FusedCall& call) {
  if (!make_room(group, call.nbytes())) throw nb::python_error();
  Bucket* const bucket = bucket_for(group, away, call);
  if (PyList_Append(bucket->arrays.ptr(), call.keep_x) != 0) throw nb::python_error();
  const uint64_t number = num_calls_;
  if (!count(group, *bucket, call)) throw nb::python_error();
  return number;
}

// The call is in the bucket. False with Python's error set where sending was interrupted.
bool Fusion::count(nb::handle group, Bucket& bucket, const FusedCall& call) {
  // Arrays of the host that lie one behind the other become one part, if nothing cuts between
  // them.
  const bool merges = !agrees_ && !bucket.away.is_valid();
  bucket.parts->add(call.in, call.out, call.count, merges ? item_size(call.dtype) : 0);
  const double now = agrees_ ? now_s() : 0;
  const uint64_t place = bucket.away.is_valid() ? uint64_t{1} << 63 : 0;
  const uint64_t kind = place | static_cast<uint64_t>(static_cast<int>(call.dtype)) << 32 |
                        static_cast<uint64_t>(static_cast<int>(call.redop));
  digest_ = mix(mix(digest_, kind), static_cast<uint64_t>(call.count));
  if (agrees_) {
    if (!is_open()) set_due(now);
    bucket.calls.push_back(num_calls_);
    digests_.push_back(digest_);
  }
  ++num_calls_;
  open_nbytes_ += call.nbytes();
  return !(open_nbytes_ >= full_nbytes_ || (agrees_ && is_due(now))) || fill(group);
}

bool Fusion::add_refused(nb::handle group, nb::handle away, const FusedCall& call,
                         const std::string& why) {
  if (!make_room(group, call.nbytes())) return false;
  Bucket* const bucket = bucket_for(group, away, call);
  if (away.is_valid() && PyList_Append(bucket->arrays.ptr(), Py_None) != 0) return false;
  bucket->refused.push_back({num_calls_, why});
  return count(group, *bucket, call);
}

void Fusion::lose(const nb::object& error) {
  if (is_lost()) return;
  lost_ = error;
  fail_open(error);
}

bool Fusion::make_way(nb::handle group) {
  return cut(group) && (!is_lost() || ask(group, fusion_methods::kRaiseLost));
}

bool Fusion::is_due(double now) {
  if (!is_open() || now < due_s_) return false;
  set_due(now);
  return true;
}

void Fusion::set_due(double now) {
  due_s_ = now + limit_s_;
  if (due_s_ < engine_.timed_due_s.load(std::memory_order_relaxed)) {
    engine_.timed_due_s.store(due_s_, std::memory_order_relaxed);
    engine_.ring();  // a thread that sleeps would look too late
  }
}

bool Fusion::ask(nb::handle group, const char* method) {
  PyObject* const service = PyObject_GetAttrString(group.ptr(), group_methods::kFusion);
  if (service == nullptr) return false;
  PyObject* const done = PyObject_CallMethod(service, method, nullptr);
  Py_DECREF(service);
  Py_XDECREF(done);
  return done != nullptr;
}

namespace {

// Communicators whose open buckets have a time limit, of all engines. Guarded by the GIL.
std::vector<Group*>& all_timed() {
  static auto* const all = new std::vector<Group*>;
  return *all;
}

}  // namespace

void add_timed(Group& group) { all_timed().push_back(&group); }

void forget_timed(Group& group) {
  auto& all = all_timed();
  all.erase(std::remove(all.begin(), all.end(), &group), all.end());
}

bool look_at_timed(Engine& engine) {
  const double now = now_s();
  const std::vector<Group*> groups = all_timed();  // what is called may change it
  for (Group* group : groups) {
    const auto& all = all_timed();
    if (std::find(all.begin(), all.end(), group) == all.end()) continue;
    if (group->engine.get() != &engine) continue;
    if (!group->fusion->is_due(now)) continue;
    const nb::object object = nb::find(*group);
    if (Fusion::ask(object, fusion_methods::kBucketFull)) continue;
    if (PyErr_ExceptionMatches(PyExc_Exception)) {
      PyErr_Clear();  // the requests tell
    } else {
      return false;
    }
  }
  double due = kNever;
  for (const Group* group : all_timed()) {
    if (group->engine.get() == &engine) due = std::min(due, group->fusion->due_s());
  }
  engine.timed_due_s.store(due, std::memory_order_relaxed);
  return true;
}

// There is enough to send. While other ranks are late, this rank goes on adding.
bool Fusion::fill(nb::handle group) {
  if (is_lost()) {
    fail_open(lost_);
    return true;
  }
  if (!agrees_) return send_before(num_calls_);
  full_nbytes_ = open_nbytes_ + most_nbytes_ / 8;
  return ask(group, fusion_methods::kBucketFull);
}

bool Fusion::cut(nb::handle group) {
  // The thread that sends a bucket makes calls of its own, which are that bucket.
  if (is_sending_ && sender_ == std::this_thread::get_id()) return true;
  if (is_lost()) fail_open(lost_);
  if (is_open() &&
      !(agrees_ ? ask(group, fusion_methods::kCutBucket) : send_before(num_calls_))) {
    return false;
  }
  // Later calls must not overtake buckets that another thread is sending.
  while (is_sending_) {
    if (PyErr_CheckSignals() != 0) return false;
    ReleasedGil release;
    sched_yield();
  }
  return true;
}

bool Fusion::send_before(uint64_t call) {
  std::vector<Bucket*> now, later;
  struct Cut {
    Bucket* bucket;
    size_t at;
    Bucket* rest;
    nb::object requests;  // of those on a device, what stays
  };
  std::vector<Cut> cuts;
  // First what needs memory: where there is none, all calls stay open.
  try {
    now.reserve(open_.size());
    later.reserve(open_.size());
    cuts.reserve(open_.size());
    for (Bucket* bucket : open_) {
      const auto& calls = bucket->calls;
      if (agrees_ && calls.front() >= call) {
        later.push_back(bucket);
        continue;
      }
      now.push_back(bucket);
      if (!agrees_ || calls.back() < call) continue;
      const auto at = std::lower_bound(calls.begin(), calls.end(), call) - calls.begin();
      cuts.push_back({bucket, static_cast<size_t>(at), nullptr, {}});
      cuts.back().rest = copy_from(*bucket, static_cast<size_t>(at));
      later.push_back(cuts.back().rest);
      if (bucket->away.is_valid()) {
        cuts.back().requests = slice(bucket->arrays, 0, static_cast<size_t>(at));
      }
    }
    const uint64_t until = agrees_ ? digest(call) : digest_;
    for (Bucket* bucket : now) {
      bucket->facts = static_cast<uint16_t>(until ^ until >> 16 ^ until >> 32 ^ until >> 48);
    }
    queued_.insert(queued_.end(), now.begin(), now.end());
  } catch (...) {
    for (const Cut& cut : cuts) if (cut.rest != nullptr) cut.rest->let_go();
    throw;
  }
  for (const Cut& cut : cuts) {
    cut.bucket->parts->cut(cut.at);
    auto& refused = cut.bucket->refused;
    refused.resize(refused.size() - cut.rest->refused.size());
    cut.bucket->calls.resize(cut.at);
    if (cut.requests.is_valid()) cut.bucket->arrays = cut.requests;
    cut.bucket->end = call;
    cut.bucket->next = cut.rest;
    cut.rest->hold();  // by the bucket, and by the one who has the open ones
  }
  // Sort by the first calls: a rank that was told late has had them open for longer.
  if (agrees_) {
    std::sort(later.begin(), later.end(), [](const Bucket* a, const Bucket* b) {
      return a->calls.front() < b->calls.front();
    });
  }
  open_ = std::move(later);
  if (agrees_) {
    digests_.erase(digests_.begin(),
                   digests_.begin() + static_cast<std::ptrdiff_t>(call - num_sent_));
    set_due(now_s());
    full_nbytes_ = most_nbytes_;
  }
  num_sent_ = call;
  open_nbytes_ = 0;
  for (const Bucket* bucket : open_) {
    open_nbytes_ += static_cast<uint64_t>(bucket->parts->elems()) * item_size(bucket->dtype);
  }
  return send_queued();
}

void Fusion::fail_open(const nb::object& error) {
  std::vector<Bucket*> failing;
  failing.swap(open_);
  num_sent_ = num_calls_;
  digest_ = 0;
  digests_.assign(1, 0);
  open_nbytes_ = 0;
  for (Bucket* bucket : failing) {
    bucket->fail(error);
    bucket->let_go();
  }
}

void Fusion::close(const nb::object& group) {
  if (is_lost()) fail_open(lost_);
  if (!is_open()) return;
  const char* const why = "a call was made while the context was left: it was not sent; let "
                          "no thread make calls that others do not wait for before they leave";
  raised_by([&] { give_up(group, why); });
  fail_open(group.attr(group_methods::kOperationError)("fused()", why, "revoked"));
}

// One thread sends, in order; another one that comes meanwhile leaves its buckets to it.
bool Fusion::send_queued() {
  if (is_sending_) return true;
  struct Turn {
    bool& is_on;
    explicit Turn(bool& mine) : is_on(mine) { is_on = true; }
    ~Turn() { is_on = false; }
  } turn(is_sending_);
  sender_ = std::this_thread::get_id();
  nb::object interrupt;
  auto note = [&](const nb::object& raised) {
    if (raised.is_valid() && !PyErr_GivenExceptionMatches(raised.ptr(), PyExc_Exception)) {
      interrupt = raised;
    }
  };
  while (!queued_.empty()) {
    Bucket* const bucket = queued_.front();
    queued_.pop_front();
    const nb::object raised = raised_by([&] { send(*bucket); });
    note(raised);
    if (!bucket->is_settled()) {
      bucket->fail(raised);
      // The other ranks count on the operation.
      note(raised_by([&] { give_up(bucket->group, "a bucket of fused() could not be sent"); }));
    }
    bucket->let_go();
  }
  if (!interrupt.is_valid()) return true;
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(interrupt.ptr())), interrupt.ptr());
  return false;
}

}  // namespace commrt
