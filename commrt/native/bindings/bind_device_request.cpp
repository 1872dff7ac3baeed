// SPDX-License-Identifier: Apache-2.0
// Requests of calls on arrays on devices (device_request.hpp), and their bindings.
#include "device_calls/device_request.hpp"

#include "calls/device_view.hpp"

namespace commrt {

namespace {

nb::object words_for(const char* function) {
  return nb::module_::import_("commrt.device_calls.requests").attr(function);
}

[[noreturn]] void raise(const nb::object& error) {
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  throw nb::python_error();
}

int traverse_request(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (!nb::inst_ready(self)) return 0;
  return nb::inst_ptr<DeviceRequest>(self)->traverse(visit, arg);
}

int clear_request(PyObject* self) {
  if (nb::inst_ready(self)) nb::inst_ptr<DeviceRequest>(self)->clear();
  return 0;
}

PyType_Slot collected[] = {{Py_tp_traverse, reinterpret_cast<void*>(traverse_request)},
                           {Py_tp_clear, reinterpret_cast<void*>(clear_request)},
                           {0, nullptr}};

}  // namespace

DeviceRequest::~DeviceRequest() {
  if (observed_ || Engine::forked.load(std::memory_order_relaxed)) return;
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  try {
    if (PyErr_ResourceWarning(nullptr, 1, "%U was dropped without wait(): no stream waits for it, "
                              "its arrays stay alive until it ends, and its errors are lost",
                              what().ptr()) != 0) {
      PyErr_WriteUnraisable(operation_.ptr());
    }
  } catch (nb::python_error& error) {
    error.discard_as_unraisable(operation_);
  }
  PyErr_Restore(type, value, traceback);
}

int DeviceRequest::traverse(visitproc visit, void* arg) {
  for (const nb::object* held : {&group_, &result_, &operation_, &device_, &array_, &error_}) {
    Py_VISIT(held->ptr());
  }
  return 0;
}

// What it says of itself stays: others that are dropped with it may ask.
void DeviceRequest::clear() {
  result_ = nb::none();
  array_ = nb::none();
  error_.reset();
}

void DeviceRequest::check_process() const {
  if (Engine::forked.load(std::memory_order_relaxed)) group_.attr("_check_process")();
}

void DeviceRequest::check_runs(const char* method) const {
  if (call_.call->is_captured()) raise(words_for("not_running")(what(), method));
}

// Every time the same error.
void DeviceRequest::raise_failure() {
  const DeviceCall& call = *call_.call;
  if (!call.failed()) return;
  observed_ = true;
  if (!error_.is_valid()) error_ = words_for("failed")(nb::find(*this), call.kind, call.error);
  raise(nb::borrow(error_));
}

nb::object DeviceRequest::wait(nb::handle stream, nb::handle timeout_s) {
  if (!timeout_s.is_none()) raise(words_for("not_blocking")(what()));
  check_process();
  raise_failure();
  observed_ = true;
  Stream handle;
  if (stream.is_none()) {
    handle = current_stream_of(array_, device_);
  } else {
    const nb::object as_stream = nb::module_::import_("commrt.arrays.device").attr("as_stream");
    handle = nb::cast<Stream>(as_stream(stream, device_, what()));
  }
  try {
    call_.wait_on(handle);
  } catch (nb::python_error& error) {
    const nb::object said = words_for("not_waiting")(what(), error.value());
    raise(said);
  }
  raise_failure();
  return result_;
}

nb::object DeviceRequest::synchronize(nb::handle timeout_s) {
  check_process();
  observed_ = true;
  check_runs("synchronize");
  double limit = timeout_s_;
  if (!timeout_s.is_none()) {
    limit = nb::cast<double>(group_.attr("_check_timeout")(what(), timeout_s));
  }
  if (!call_.ended() && !call_.synchronize(limit)) {
    raise(words_for("late")(nb::find(*this), limit));
  }
  raise_failure();
  return result_;
}

bool DeviceRequest::test() {
  check_process();
  check_runs("test");
  if (!call_.test()) return false;
  observed_ = true;
  raise_failure();
  return true;
}

int DeviceRequest::device() const {
  return nb::cast<int>(nb::int_(nb::getattr(device_, "ordinal", nb::int_(0))));
}

nb::str DeviceRequest::what() const {
  const Group& group = *nb::inst_ptr<Group>(group_);
  return nb::str("{} #{} on {}").format(operation_, seq(), group.comm->name);
}

nb::str DeviceRequest::repr() const {
  const char* state = call_.call->is_captured() ? "captured" : "pending";
  if (done()) state = call_.call->failed() ? "failed" : "done";
  return nb::str("<commrt.DeviceRequest {}: {}>").format(what(), state);
}

nb::object DeviceRequest::who_is_missing() const {
  return group_.attr("who_is_missing")(seq());
}

nb::object make_device_request(nb::handle group, PyDeviceCall call, nb::handle result,
                               nb::handle operation, double timeout_s, nb::handle device,
                               Stream stream, nb::handle array) {
  nb::object request = nb::inst_alloc(nb::type<DeviceRequest>());
  new (nb::inst_ptr<DeviceRequest>(request))
      DeviceRequest(nb::borrow(group), std::move(call), nb::borrow(result), nb::borrow(operation),
                    timeout_s, nb::borrow(device), stream, nb::borrow(array));
  nb::inst_mark_ready(request);
  return request;
}

void bind_device_request(nb::module_& m) {
  using R = DeviceRequest;
  nb::class_<R>(m, "DeviceRequest", nb::type_slots(collected), nb::is_weak_referenceable(),
                "One started call on arrays on a device; has the methods of Request.")
      .def("__init__",
           [](R* self, nb::object comm, const PyDeviceCall& call, nb::object result,
              nb::str operation, double timeout_s, nb::object device, std::uint64_t stream,
              nb::object array) {
             nb::cast<Group&>(comm);  // or it is a TypeError
             new (self) R(std::move(comm), call, std::move(result), std::move(operation),
                          timeout_s, std::move(device), stream, std::move(array));
           },
           nb::arg("comm"), nb::arg("call"), nb::arg("result").none(), nb::arg("operation"),
           nb::arg("timeout_s"), nb::arg("device"), nb::arg("stream"), nb::arg("array").none())
      .def("wait", &R::wait, nb::kw_only(), nb::arg("stream") = nb::none(),
           nb::arg("timeout_s") = nb::none(),
           "Let a stream wait for the end, and return the output at once. `stream` is the current "
           "one of the array's library by itself. The host is not blocked: what is given to that "
           "stream from now on comes after the operation. Idempotent; raises the operation's "
           "error if it has failed by now.")
      .def("synchronize", &R::synchronize, nb::kw_only(), nb::arg("timeout_s") = nb::none(),
           "Block the host until the operation is complete; return the output.")
      .def("test", &R::test,
           "Run a little progress; True once complete. Raises the operation's error.")
      .def("be_quiet", &R::be_quiet, "Do not warn where it is dropped.")
      .def_prop_ro("done", &R::done,
                   "Whether the host has seen the end, without progress. Never of what was "
                   "captured into a graph: nobody looks at its launches.")
      .def_prop_ro("seq", &R::seq, "Sequence number of its first piece on the communicator.")
      .def_prop_ro("operation", &R::operation, "Name of the operation.")
      .def_prop_ro("received_nbytes", [](const R&) { return -1; },
                   "Bytes that messages brought; -1 for other operations.")
      .def_prop_ro("source", [](const R&) { return -1; },
                   "The rank that a message came from; -1 for other operations.")
      .def_prop_ro("timeout_s", &R::timeout_s, "Default limit of synchronize, in seconds.")
      .def_prop_ro("device", &R::device, "Number of the device of its arrays.")
      .def_prop_ro("stream", &R::stream, "Stream that it was ordered after, as an integer.")
      .def_prop_ro("_comm", &R::group)
      .def_prop_ro("_call", [](const R& self) { return self.call(); })
      .def_prop_ro("_what", &R::what, "Its name in messages.")
      .def("_waits_for", &R::who_is_missing, "Return who keeps it waiting, in words.")
      .def("__repr__", &R::repr)
      .def("__bool__", [](const R& self) -> bool {
        throw nb::type_error(("the truth of a request is not its completion: call test() or "
                              "wait() on " + std::string(self.repr().c_str())).c_str());
      });
}

}  // namespace commrt
