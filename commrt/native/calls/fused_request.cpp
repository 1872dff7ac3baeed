// SPDX-License-Identifier: Apache-2.0
// The request of one call that went into a bucket.
//
// It is a plain type of Python's C interface: a call takes some 0.1 us in all, and a bound C++
// object would take half of that. Its texts and errors are those of the bucket's own request.
#include "calls/fusion.hpp"
#include "calls/group_methods.hpp"
#include "gil.hpp"

#include <structmember.h>

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <exception>

namespace commrt {

namespace {

PyTypeObject* request_type = nullptr;

struct FusedRequest {
  PyObject_HEAD
  Bucket* bucket;
  PyObject* result;
  double timeout_s;
  uint64_t call;
  bool observed;
};

// Requests that are no longer used, kept for new ones. Python's own allocator takes twice as long.
struct Spares {
  static constexpr int kMost = 2048;
  FusedRequest* list[kMost];
  int num = 0;
};
Spares spares;

FusedRequest* self_of(PyObject* object) { return reinterpret_cast<FusedRequest*>(object); }

// The bucket may have been cut in two since.
Bucket& bucket_of(FusedRequest* self) {
  while (self->call >= self->bucket->end) {
    Bucket* const next = self->bucket->next;
    next->hold();
    self->bucket->let_go();
    self->bucket = next;
  }
  return *self->bucket;
}

Group& group_of(const Bucket& bucket) { return *nb::inst_ptr<Group>(bucket.group); }

nb::str what(FusedRequest* self) {
  const Bucket& bucket = bucket_of(self);
  if (bucket.sent != nullptr) return bucket.sent->what();
  return nb::str("allreduce in an open bucket on {}").format(group_of(bucket).comm->name);
}

// Runs `body`; turns what it throws into Python's error.
template <typename Body>
PyObject* guarded(Body body) {
  try {
    return body();
  } catch (nb::python_error& error) {
    error.restore();
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

void raise(const nb::object& error) {
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  throw nb::python_error();
}

// Has the bucket sent, within `seconds`; false where that takes longer.
bool settle(FusedRequest* self, double seconds) {
  const double deadline = now_s() + seconds;
  while (!bucket_of(self).is_settled()) {
    Bucket& bucket = bucket_of(self);
    Group& group = group_of(bucket);
    if (Engine::forked.load(std::memory_order_relaxed)) {
      bucket.group.attr(group_methods::kCheckUsable)();
    }
    if (group.fusion != nullptr && !group.fusion->agrees()) {
      if (!group.fusion->cut(bucket.group)) throw nb::python_error();
    } else if (group.fusion != nullptr) {
      const nb::object service = bucket.group.attr(group_methods::kFusion);
      service.attr(fusion_methods::kAwaitCut)(self->call, std::max(0.0, deadline - now_s()));
    }
    if (bucket_of(self).is_settled()) break;
    if (now_s() >= deadline) return false;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    ReleasedGil release;  // another thread is sending it
    sched_yield();
  }
  return true;
}

PyObject* outcome(FusedRequest* self) {
  self->observed = true;
  // Nobody needs the inputs any more.
  nb::object& arrays = self->bucket->arrays;
  if (arrays.is_valid() && !self->bucket->sent->needs_buffers()) arrays.reset();
  return Py_NewRef(self->result);
}

PyObject* wait_for_it(FusedRequest* self, nb::object stream, nb::object timeout) {
  nb::object group = bucket_of(self).group;
  if (!stream.is_none()) group.attr(group_methods::kStreamOnHost)(what(self));
  double seconds = self->timeout_s;
  if (!timeout.is_none()) {
    seconds = nb::cast<double>(group.attr(group_methods::kCheckTimeout)(what(self), timeout));
  }
  const double begin = now_s();
  self->observed = true;
  if (!settle(self, seconds)) {
    group.attr(group_methods::kTimedOut)(
        what(self), group_of(*self->bucket).comm->next_seq, seconds,
        "not all ranks have made this call", nb::handle(reinterpret_cast<PyObject*>(self)));
  }
  const Bucket& bucket = bucket_of(self);
  if (bucket.error.is_valid()) raise(bucket.error);
  // The wait is in whole milliseconds, as the message about a passed limit shows it.
  const double left = std::max(1e-3, std::round((seconds - (now_s() - begin)) * 1e3) / 1e3);
  try {
    bucket.sent->wait(nb::none(), nb::float_(left));
  } catch (nb::python_error& error) {
    if (error.matches(PyExc_TimeoutError) && nb::hasattr(error.value(), "request")) {
      nb::setattr(error.value(), "request", nb::handle(reinterpret_cast<PyObject*>(self)));
    }
    throw;
  }
  return outcome(self);
}

PyObject* wait(PyObject* object, PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames) {
  FusedRequest* const self = self_of(object);
  const Bucket& bucket = bucket_of(self);
  if (nargs == 0 && kwnames == nullptr && bucket.sent != nullptr && bucket.sent->is_fine()) {
    Engine& engine = *group_of(bucket).engine;
    if (engine.has_ended() && !Engine::forked.load(std::memory_order_relaxed)) drop_ended(engine);
    return outcome(self);
  }
  nb::object stream = nb::none(), timeout = nb::none();
  const Py_ssize_t nkw = kwnames != nullptr ? PyTuple_GET_SIZE(kwnames) : 0;
  for (Py_ssize_t i = 0; i < nkw; ++i) {
    PyObject* const name = PyTuple_GET_ITEM(kwnames, i);
    if (PyUnicode_CompareWithASCIIString(name, "stream") == 0) {
      stream = nb::borrow(args[nargs + i]);
    } else if (PyUnicode_CompareWithASCIIString(name, "timeout_s") == 0) {
      timeout = nb::borrow(args[nargs + i]);
    } else {
      return PyErr_Format(PyExc_TypeError, "wait() has no argument %R", name);
    }
  }
  if (nargs != 0) {
    return PyErr_Format(PyExc_TypeError, "wait() takes keyword arguments only");
  }
  return guarded([&] { return wait_for_it(self, stream, timeout); });
}

PyObject* synchronize(PyObject* object, PyObject* const* args, Py_ssize_t nargs,
                      PyObject* kwnames) {
  if (kwnames != nullptr && PyTuple_GET_SIZE(kwnames) == 1 &&
      PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(kwnames, 0), "timeout_s") != 0) {
    return PyErr_Format(PyExc_TypeError, "synchronize() has no argument %R",
                        PyTuple_GET_ITEM(kwnames, 0));
  }
  return wait(object, args, nargs, kwnames);
}

PyObject* test(PyObject* object, PyObject*) {
  FusedRequest* const self = self_of(object);
  PyObject* const found = guarded([&]() -> PyObject* {
    settle(self, 0);
    const Bucket& bucket = bucket_of(self);
    if (!bucket.is_settled()) Py_RETURN_FALSE;
    if (bucket.error.is_valid()) raise(bucket.error);
    if (!bucket.sent->test()) Py_RETURN_FALSE;
    Py_RETURN_TRUE;
  });
  if (found != Py_False) self->observed = true;  // errors that it raises included
  return found;
}

PyObject* raise_if_late(PyObject* object, PyObject* limit) {
  FusedRequest* const self = self_of(object);
  return guarded([&]() -> PyObject* {
    const double seconds = nb::cast<double>(nb::handle(limit));
    const Bucket& bucket = bucket_of(self);
    if (!bucket.is_settled()) {
      bucket.group.attr(group_methods::kTimedOut)(what(self), group_of(bucket).comm->next_seq,
                                                  seconds, "not all ranks have made this call",
                                                  nb::handle(object));
    } else if (bucket.sent != nullptr && !bucket.sent->done()) {
      bucket.sent->outcome_after(WaitResult::TimedOut, seconds);
    }
    Py_RETURN_NONE;
  });
}

void dealloc(PyObject* object) {
  FusedRequest* const self = self_of(object);
  if (!self->observed && !Engine::forked.load(std::memory_order_relaxed)) {
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    try {
      if (PyErr_ResourceWarning(nullptr, 1, "%U was dropped without wait(): its buffers stay "
                                "alive until it ends, and its errors are lost",
                                what(self).ptr()) != 0) {
        PyErr_WriteUnraisable(self->result);
      }
    } catch (nb::python_error& error) {
      error.discard_as_unraisable("a fused request");
    }
    PyErr_Restore(type, value, traceback);
  }
  Bucket& bucket = bucket_of(self);
  // The engine may still write to it.
  const bool needed = bucket.sent != nullptr ? bucket.sent->needs_buffers()
                                             : !bucket.error.is_valid();
  if (needed && PyList_Append(bucket.arrays.ptr(), self->result) != 0) {
    PyErr_Clear();
    Py_INCREF(self->result);  // for ever: there is no memory for anything better
  }
  bucket.let_go();
  Py_DECREF(self->result);
  if (spares.num < Spares::kMost) {
    spares.list[spares.num++] = self;
  } else {
    PyObject_Free(object);
  }
}

PyObject* repr(PyObject* object) {
  return guarded([&]() -> PyObject* {
    FusedRequest* const self = self_of(object);
    const Bucket& bucket = bucket_of(self);
    const bool failed = bucket.error.is_valid() || (bucket.sent && bucket.sent->is_failed());
    const char* state = failed ? "failed" : bucket.sent && bucket.sent->done() ? "done" : "pending";
    return nb::str("<commrt.Request {}: {}>").format(what(self), state).release().ptr();
  });
}

int truth(PyObject* object) {
  PyObject* const text = repr(object);
  if (text == nullptr) return -1;
  PyErr_Format(PyExc_TypeError,
               "the truth of a request is not its completion: call test() or wait() on %U", text);
  Py_DECREF(text);
  return -1;
}

PyObject* get_done(PyObject* object, void*) {
  const Bucket& bucket = bucket_of(self_of(object));
  return PyBool_FromLong(bucket.error.is_valid() || (bucket.sent && bucket.sent->done()));
}

PyObject* get_seq(PyObject* object, void*) {
  const Bucket& bucket = bucket_of(self_of(object));
  if (bucket.sent == nullptr) return PyLong_FromLong(-1);
  return PyLong_FromUnsignedLongLong(bucket.sent->seq());
}

PyObject* get_operation(PyObject*, void*) { return PyUnicode_InternFromString("allreduce"); }
PyObject* get_nothing(PyObject*, void*) { return PyLong_FromLong(-1); }
PyObject* get_none(PyObject*, void*) { Py_RETURN_NONE; }
PyObject* get_timeout(PyObject* object, void*) {
  return PyFloat_FromDouble(self_of(object)->timeout_s);
}

PyMethodDef methods[] = {
    {"wait", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(wait)),
     METH_FASTCALL | METH_KEYWORDS,
     "Return the operation's output once it is complete; sends the open buckets. Otherwise as "
     "Request.wait."},
    {"synchronize", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(synchronize)),
     METH_FASTCALL | METH_KEYWORDS,
     "Block the host until the operation is complete; for host arrays the same as wait()."},
    {"test", test, METH_NOARGS,
     "Run a little progress, and send the open buckets; True once complete."},
    {"raise_if_late", raise_if_late, METH_O,
     "Raise what a wait that began so long ago would raise, unless it has ended."},
    {nullptr, nullptr, 0, nullptr}};

PyGetSetDef properties[] = {
    {"done", get_done, nullptr, "Whether the operation has ended, without progress.", nullptr},
    {"seq", get_seq, nullptr,
     "Sequence number of its bucket on its communicator; -1 while the bucket is open.", nullptr},
    {"operation", get_operation, nullptr, "Name of the operation.", nullptr},
    {"received_nbytes", get_nothing, nullptr, "-1: it is not a receive.", nullptr},
    {"source", get_nothing, nullptr, "-1: it is not a receive.", nullptr},
    {"timeout_s", get_timeout, nullptr, "Default limit of its waits, in seconds.", nullptr},
    {"device", get_none, nullptr, "None: host memory.", nullptr},
    {"stream", get_none, nullptr, "None: host memory.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

}  // namespace

PyObject* make_fused_request(Bucket* bucket, uint64_t call, PyObject* result, double timeout_s) {
  FusedRequest* self;
  if (spares.num > 0) {
    self = spares.list[--spares.num];
  } else {
    self = static_cast<FusedRequest*>(PyObject_Malloc(sizeof(FusedRequest)));
    if (self == nullptr) return static_cast<PyObject*>(PyErr_NoMemory());
  }
  // The type is never freed, so its references need not be counted.
  Py_SET_TYPE(reinterpret_cast<PyObject*>(self), request_type);
  Py_SET_REFCNT(reinterpret_cast<PyObject*>(self), 1);
  bucket->hold();
  self->bucket = bucket;
  self->result = Py_NewRef(result);
  self->timeout_s = timeout_s;
  self->call = call;
  self->observed = false;
  return reinterpret_cast<PyObject*>(self);
}

// Waits for fused requests alone. Their outputs, up to the first one that failed, and its error;
// asked again, it might wait as long once more.
nb::object wait_fused(nb::list requests) {
  PyObject* const list = requests.ptr();
  nb::list outputs;
  nb::object error = nb::none();
  auto is_fused = [](PyObject* item) { return Py_TYPE(item) == request_type; };
  bool all_fused = true;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) {
    all_fused = all_fused && is_fused(PyList_GET_ITEM(list, i));
  }
  for (Py_ssize_t i = 0; all_fused && i < PyList_GET_SIZE(list); ++i) {
    // Another thread may change the list while this one waits.
    const nb::object request = nb::borrow(PyList_GET_ITEM(list, i));
    if (!is_fused(request.ptr())) break;
    PyObject* const output = wait(request.ptr(), nullptr, 0, nullptr);
    if (output == nullptr) {
      nb::python_error raised;
      if (!raised.matches(PyExc_Exception)) throw raised;
      error = nb::borrow(raised.value());
      break;
    }
    const int appended = PyList_Append(outputs.ptr(), output);
    Py_DECREF(output);
    if (appended != 0) throw nb::python_error();
  }
  return nb::make_tuple(outputs, error);
}

void drop_fused_request(PyObject* request) {
  self_of(request)->observed = true;
  Py_DECREF(request);
}

void bind_fusion(nb::module_& m) {
  PyType_Slot slots[] = {
      {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
      {Py_tp_repr, reinterpret_cast<void*>(repr)},
      {Py_nb_bool, reinterpret_cast<void*>(truth)},
      {Py_tp_methods, methods},
      {Py_tp_getset, properties},
      {Py_tp_doc, const_cast<char*>("One call within comm.fused(); has the methods of Request.")},
      {0, nullptr}};
  PyType_Spec spec = {"commrt._native.FusedRequest", sizeof(FusedRequest), 0, 
                      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
  request_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  if (request_type == nullptr) throw nb::python_error();
  m.attr("FusedRequest") = nb::borrow(reinterpret_cast<PyObject*>(request_type));

  m.def("wait_fused", &wait_fused, nb::arg("requests"),
        "Wait for a list of fused requests, and return their outputs up to one that failed, and "
        "its error or None; no outputs where the list has others, too.");
  m.def("open_fusion", [](Group& g, uint64_t nbytes, double limit_s) {
    g.fusion = std::make_unique<Fusion>(g, nbytes, limit_s);
    if (g.fusion->agrees()) add_timed(g);
  }, nb::arg("group"), nb::arg("nbytes"), nb::arg("limit_s"),
     "Put short nonblocking allreduces into buckets from now on.");
  m.def("close_fusion", [](Group& g) {
    while (g.fusion != nullptr && g.fusion->is_sending()) {  // by another thread
      ReleasedGil release;
      sched_yield();
    }
    if (g.fusion == nullptr) return;
    g.fusion->close(nb::borrow(nb::find(g)));
    forget_timed(g);
    const bool is_lost = g.fusion->is_lost();
    g.fusion.reset();
    if (is_lost) return;  // regain_context_end() follows
    const std::lock_guard<std::mutex> lock(g.engine->mutex);
    g.comm->refusals.context_ends.note();
  }, nb::arg("group"));
  m.def("fuse", [](nb::handle group, uint64_t in, uint64_t out, int64_t count, int dtype,
                   int redop, nb::handle keep_x, nb::handle keep_out, nb::handle result,
                   double timeout_s) -> nb::object {
    Group& g = *nb::inst_ptr<Group>(group);
    const FusedCall call{static_cast<DType>(dtype), static_cast<RedOp>(redop), count,
                         reinterpret_cast<const void*>(in), reinterpret_cast<void*>(out),
                         keep_x.ptr(), keep_out.ptr(), result.ptr(), timeout_s};
    if (g.fusion == nullptr || !g.fusion->takes(call.nbytes())) return nb::none();
    PyObject* const request = g.fusion->add(group, call);
    if (request == nullptr) throw nb::python_error();
    return nb::steal(request);
  }, nb::arg("group"), nb::arg("data_in"), nb::arg("data_out"), nb::arg("count"),
     nb::arg("dtype"), nb::arg("redop"), nb::arg("keep_x"), nb::arg("keep_out"),
     nb::arg("result"), nb::arg("timeout_s"),
     "Add an allreduce to a bucket; None where it is too long for that.");
  m.def("fuse_away", [](nb::handle group, nb::handle away, nb::handle request, int64_t count,
                        int dtype, int redop) -> nb::object {
    Group& g = *nb::inst_ptr<Group>(group);
    const FusedCall call{static_cast<DType>(dtype), static_cast<RedOp>(redop), count,
                         nullptr, nullptr, request.ptr(), nullptr, nullptr, 0};
    if (g.fusion == nullptr || !g.fusion->takes(call.nbytes())) return nb::none();
    return nb::int_(g.fusion->add_away(group, away, call));
  }, nb::arg("group"), nb::arg("away"), nb::arg("request"), nb::arg("count"), nb::arg("dtype"),
     nb::arg("redop"),
     "Add an allreduce on a device to the bucket that `away` sends: `away.send(requests)`, or\n"
     "`away.fail(requests, error)`. The number of the call; None where it is too long.");
  m.def("cut_fusion", [](nb::handle group) {
    Group& g = *nb::inst_ptr<Group>(group);
    if (g.fusion != nullptr && !g.fusion->cut(group)) throw nb::python_error();
  }, nb::arg("group"), "Send the open buckets.");
  m.def("make_way_in_fusion", [](nb::handle group) {
    Group& g = *nb::inst_ptr<Group>(group);
    if (g.fusion != nullptr && !g.fusion->make_way(group)) throw nb::python_error();
  }, nb::arg("group"),
     "Send the open buckets before a call that is in none. Raises what `raise_lost` of the service\n"
     "raises where this rank has lost count of them.");
  m.def("fuse_refused", [](nb::handle group, nb::handle away, int64_t count, int dtype, int redop,
                           const std::string& why) {
    Group& g = *nb::inst_ptr<Group>(group);
    const FusedCall call{static_cast<DType>(dtype), static_cast<RedOp>(redop), count,
                         nullptr, nullptr, nullptr, nullptr, nullptr, 0};
    if (g.fusion == nullptr || !g.fusion->takes(call.nbytes())) return false;
    const nb::handle of_device = away.is_none() ? nb::handle() : away;
    if (!g.fusion->add_refused(group, of_device, call, why)) throw nb::python_error();
    return true;
  }, nb::arg("group"), nb::arg("away").none(), nb::arg("count"), nb::arg("dtype"), nb::arg("redop"), nb::arg("why"),
     "Give a call that was refused here its place in a bucket, which `comm.fusion` is to refuse. "
     "False: such a call goes into none.");
  m.def("lose_count_in_fusion", [](Group& g, nb::object error) {
    if (g.fusion != nullptr) g.fusion->lose(error);
  }, nb::arg("group"), nb::arg("error"),
     "A call was refused of which nobody knows in which bucket others have it: the error ends the\n"
     "open calls, and later ones of the context.");
  m.def("fused_calls", [](const Group& g) {
    if (g.fusion == nullptr) return nb::make_tuple(0, 0);
    return nb::make_tuple(g.fusion->num_calls(), g.fusion->num_sent());
  }, nb::arg("group"), "Calls that went into buckets, and those of them that are sent.");
  m.def("digest_fused", [](const Group& g, uint64_t call) {
    return g.fusion == nullptr ? 0 : g.fusion->digest(call);
  },
        nb::arg("group"), nb::arg("call"),
        "Digest of the calls before `call`; equal on all ranks.");
  m.def("send_fused", [](Group& g, uint64_t call) {
    if (g.fusion != nullptr && !g.fusion->send_before(call)) throw nb::python_error();
  }, nb::arg("group"), nb::arg("call"), "Send the buckets of the calls before `call`.");
  m.def("fail_fused", [](Group& g, nb::object error) {
    if (g.fusion != nullptr) g.fusion->fail_open(error);
  },
        nb::arg("group"), nb::arg("error"), "End the open calls with this error.");
}

}  // namespace commrt
