// SPDX-License-Identifier: Apache-2.0
// Requests of calls on arrays on devices (device_request.hpp).
#include "engine/device_refusals.hpp"
#include "calls/device_request.hpp"

#include "arrays/device_view.hpp"
#include "calls/group_methods.hpp"
#include "python_callbacks.hpp"

namespace commrt {

namespace {

[[noreturn]] void raise(const nb::object& error) {
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  throw nb::python_error();
}

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

// Its name and state stay: others that are dropped with it may ask.
void DeviceRequest::clear() {
  result_ = nb::none();
  array_ = nb::none();
  error_.reset();
}

void DeviceRequest::check_process() const {
  if (Engine::forked.load(std::memory_order_relaxed)) group_.attr(group_methods::kCheckProcess)();
}

void DeviceRequest::check_runs(const char* method) const {
  if (call_.call->is_captured()) raise(callback(Callback::RequestNotRunning)(what(), method));
}

// Every time the same error.
void DeviceRequest::raise_failure() {
  const DeviceCall& call = *call_.call;
  if (!call.failed()) return;
  observed_ = true;
  if (call.kind == "refused") {
    nb::inst_ptr<Group>(group_)->comm->refusals.on_devices->has_told(call.seq);
  }
  if (!error_.is_valid()) {
    error_ = callback(Callback::RequestFailed)(nb::find(*this), call.kind, call.error);
  }
  raise(nb::borrow(error_));
}

nb::object DeviceRequest::wait(nb::handle stream, nb::handle timeout_s) {
  if (!timeout_s.is_none()) raise(callback(Callback::RequestNotBlocking)(what()));
  check_process();
  raise_failure();
  observed_ = true;
  Stream handle;
  if (stream.is_none()) {
    handle = current_stream_of(array_, device_);
  } else {
    handle = nb::cast<Stream>(callback(Callback::AsStream)(stream, device_, what()));
  }
  try {
    call_.wait_on(handle);
  } catch (nb::python_error& error) {
    const nb::object said = callback(Callback::RequestNotWaiting)(what(), error.value());
    raise(said);
  }
  call_.call->is_waited.store(true);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  raise_failure();
  return result_;
}

nb::object DeviceRequest::synchronize(nb::handle timeout_s) {
  check_process();
  observed_ = true;
  check_runs("synchronize");
  double limit = timeout_s_;
  if (!timeout_s.is_none()) {
    limit = nb::cast<double>(group_.attr(group_methods::kCheckTimeout)(what(), timeout_s));
  }
  if (!call_.ended() && !call_.synchronize(limit)) {
    raise(callback(Callback::RequestLate)(nb::find(*this), limit));
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
  return group_.attr(group_methods::kWhoIsMissing)(seq());
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

}  // namespace commrt
