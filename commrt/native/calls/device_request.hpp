// SPDX-License-Identifier: Apache-2.0
// The request of one started call on device arrays, as its caller holds it.
// commrt/device_calls/requests.py words its errors.
#pragma once

#include <string>
#include <utility>

#include "calls/device_call.hpp"

namespace commrt {

class DeviceRequest {
 public:
  // `group` is a Communicator; `array` says whose current stream a wait is for, and may be None.
  DeviceRequest(nb::object group, PyDeviceCall call, nb::object result, nb::object operation,
                double timeout_s, nb::object device, Stream stream, nb::object array)
      : group_(std::move(group)), call_(std::move(call)), result_(std::move(result)),
        operation_(std::move(operation)), device_(std::move(device)), array_(std::move(array)),
        timeout_s_(timeout_s), stream_(stream) {}
  ~DeviceRequest();

  nb::object wait(nb::handle stream, nb::handle timeout_s);
  nb::object synchronize(nb::handle timeout_s);
  bool test();
  bool done() const { return call_.ended(); }
  // Keeps the destructor from warning that the request was dropped.
  void be_quiet() { observed_ = true; }

  std::uint64_t seq() const { return call_.call->seq; }
  nb::object operation() const { return operation_; }
  double timeout_s() const { return timeout_s_; }
  int device() const;
  Stream stream() const { return stream_; }
  nb::object group() const { return group_; }
  const PyDeviceCall& call() const { return call_; }
  nb::str what() const;  // "allreduce #17 on world"
  nb::str repr() const;
  nb::object who_is_missing() const;

  // For the garbage collector: a raised error has a traceback, whose frames refer to this request.
  int traverse(visitproc visit, void* arg);
  void clear();

 private:
  void check_process() const;
  void check_runs(const char* method) const;
  void raise_failure();

  nb::object group_;
  PyDeviceCall call_;
  nb::object result_, operation_, device_, array_, error_;
  double timeout_s_;
  Stream stream_;
  bool observed_ = false;
};

// Does as nb::cast of a new one, with an allocation less.
nb::object make_device_request(nb::handle group, PyDeviceCall call, nb::handle result,
                               nb::handle operation, double timeout_s, nb::handle device,
                               Stream stream, nb::handle array);

}  // namespace commrt
