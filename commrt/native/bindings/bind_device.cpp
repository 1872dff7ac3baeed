// SPDX-License-Identifier: Apache-2.0
// Binds devices: every method is one call of the device's table, without the GIL.
#include "bindings/bind_device.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>

#include "bindings/bindings.hpp"
#include "devices/device_error.hpp"
#include "gil.hpp"

namespace commrt {

namespace {

using Address = std::uint64_t;

void* at(Address address) { return reinterpret_cast<void*>(address); }
std::uint32_t* flag_at(Address address) { return reinterpret_cast<std::uint32_t*>(address); }

// Calls an entry of the table without the GIL, and raises its errors.
template <class... Parameters, class... Arguments>
void call(const PyDevice& self, DeviceStatus (*DeviceApi::*entry)(Device*, Parameters...),
          Arguments... arguments) {
  DeviceStatus status = DeviceStatus::Ok;
  {
    ReleasedGil free;
    status = (self.device->api->*entry)(self.device, arguments...);
  }
  check_device(status);
}

// A Python function on its way to a stream; gone once it has run.
void run_python(void* argument) {
  if (!Py_IsInitialized()) return;  // the process is ending
  const TakenGil held;
  PyObject* function = static_cast<PyObject*>(argument);
  PyObject* result = PyObject_CallNoArgs(function);
  if (!result) PyErr_WriteUnraisable(function);
  Py_XDECREF(result);
  Py_DECREF(function);
}

void launch_host(const PyDevice& self, Stream stream, nb::callable function) {
  CaptureState state = CaptureState::None;
  call(self, &DeviceApi::is_capturing, stream, &state);
  if (state != CaptureState::None)
    check_device(device_fails(DeviceStatus::Capturing,
                              "launch_host() into a stream that is captured: a graph would call "
                              "the function at each launch, and it is let go after the first"));
  PyObject* held = function.inc_ref().ptr();
  try {
    call(self, &DeviceApi::launch_host, stream, &run_python, static_cast<void*>(held));
  } catch (...) {
    Py_DECREF(held);
    throw;
  }
}

void check_host_memory(const PyDevice& self, Address address) {
  PointerFacts facts;
  call(self, &DeviceApi::ptr_attributes, static_cast<const void*>(at(address)), &facts);
  if (facts.kind != MemoryKind::Device) return;
  check_device(device_fails(DeviceStatus::Invalid,
                            hex(address) + " is device memory: copy it to pinned memory first"));
}

nb::bytes read(const PyDevice& self, Address address, std::size_t nbytes) {
  check_host_memory(self, address);
  call(self, &DeviceApi::host_access, static_cast<const void*>(at(address)), nbytes, false);
  return nb::bytes(static_cast<const char*>(at(address)), nbytes);
}

void write(const PyDevice& self, Address address, nb::bytes bytes) {
  check_host_memory(self, address);
  call(self, &DeviceApi::host_access, static_cast<const void*>(at(address)), bytes.size(), true);
  std::memcpy(at(address), bytes.c_str(), bytes.size());
}

IpcHandle handle_of(const nb::bytes& bytes) {
  IpcHandle handle;
  if (bytes.size() != sizeof(handle.bytes))
    check_device(device_fails(DeviceStatus::Invalid,
                              "ipc_open() was given a handle of " + std::to_string(bytes.size()) +
                                  " bytes; expected 64, as ipc_export() returns"));
  std::memcpy(handle.bytes, bytes.c_str(), sizeof(handle.bytes));
  return handle;
}

RedOp op_of(int code) {
  if (code < 0 || code >= kNumRedOps) {
    throw nb::value_error(("reduction code " + std::to_string(code) +
                           " is unknown: expected 0 to " + std::to_string(kNumRedOps - 1) +
                           ", the value of a ReduceOp")
                              .c_str());
  }
  return static_cast<RedOp>(code);
}

DType dtype_of(int code) {
  if (code < 0 || code >= kNumDTypes) {
    throw nb::value_error(("dtype code " + std::to_string(code) + " is unknown: expected 0 to " +
                           std::to_string(kNumDTypes - 1) + ", as dtype_by_name(name).code gives")
                              .c_str());
  }
  return static_cast<DType>(code);
}

}  // namespace

void bind_device(nb::module_& m) {
  using D = PyDevice;
  using Api = DeviceApi;
  nb::class_<D> device(m, "Device", "A device: memory, streams, events; see docs/internals/devices.md.");
  device.def_prop_ro("memory_flags", [](const D& d) { return d.device->memory_flags; },
                     "Whether streams write flags and wait for them; else poll events.");
  device.def_prop_ro("kind", [](const D& d) { return d.device->api->kind; },
                      "Kind of the device.");
  device.def("alloc", [](const D& d, std::size_t nbytes) {
    void* out = nullptr;
    call(d, &Api::alloc, nbytes, &out);
    return reinterpret_cast<Address>(out);
  }, nb::arg("nbytes"), "Return the address of new device memory.");
  device.def("free", [](const D& d, Address ptr) { call(d, &Api::free, at(ptr)); },
             nb::arg("ptr"), "Free device memory.");
  device.def("pinned_alloc", [](const D& d, std::size_t nbytes) {
    void* out = nullptr;
    call(d, &Api::pinned_alloc, nbytes, &out);
    return reinterpret_cast<Address>(out);
  }, nb::arg("nbytes"), "Return the address of new host memory that the device can reach.");
  device.def("pinned_free", [](const D& d, Address ptr) { call(d, &Api::pinned_free, at(ptr)); },
             nb::arg("ptr"), "Free pinned memory.");

  device.def("stream_create", [](const D& d, int priority, bool blocking) {
    Stream out = 0;
    call(d, &Api::stream_create, priority, blocking, &out);
    return out;
  }, nb::arg("priority") = 0, nb::arg("blocking") = false,
     "Return a new stream; a blocking one takes turns with the legacy stream 0.");
  device.def("stream_destroy", [](const D& d, Stream s) { call(d, &Api::stream_destroy, s); },
             nb::arg("stream"), "Give a stream back; what it was given still runs.");
  device.def("stream_synchronize",
             [](const D& d, Stream s) { call(d, &Api::stream_synchronize, s); },
             nb::arg("stream"), "Wait until the stream has done all it was given.");
  device.def("memcpy_async", [](const D& d, Address dst, Address src, std::size_t n, Stream s) {
    call(d, &Api::memcpy_async, at(dst), static_cast<const void*>(at(src)), n, s);
  }, nb::arg("dst"), nb::arg("src"), nb::arg("nbytes"), nb::arg("stream"), "Copy bytes.");

  device.def("event_create", [](const D& d) {
    Event out = 0;
    call(d, &Api::event_create, &out);
    return out;
  }, "Return a new event.");
  device.def("event_record",
             [](const D& d, Event e, Stream s) { call(d, &Api::event_record, e, s); },
             nb::arg("event"), nb::arg("stream"), "Record what the stream was given so far.");
  device.def("event_query", [](const D& d, Event e) {
    DeviceStatus status = DeviceStatus::Ok;
    {
      ReleasedGil free;
      status = d.device->api->event_query(d.device, e);
    }
    if (status != DeviceStatus::NotReady) check_device(status);
    return status == DeviceStatus::Ok;
  }, nb::arg("event"), "Whether the latest record has happened; true if there is none.");
  device.def("event_destroy", [](const D& d, Event e) { call(d, &Api::event_destroy, e); },
             nb::arg("event"), "Give an event back.");
  device.def("stream_wait_event",
             [](const D& d, Stream s, Event e) { call(d, &Api::stream_wait_event, s, e); },
             nb::arg("stream"), nb::arg("event"), "Let a stream wait for the latest record.");
  device.def("timed_event_create", [](const D& d) {
    Event out = 0;
    call(d, &Api::timed_event_create, &out);
    return out;
  }, "Return a new event whose records know their time.");
  device.def("event_elapsed", [](const D& d, Event from, Event to) {
    double elapsed_us = 0;
    call(d, &Api::event_elapsed, from, to, &elapsed_us);
    return elapsed_us;
  }, nb::arg("start"), nb::arg("end"),
     "Microseconds between the latest records of two timed events; DeviceError with status\n"
     "not_ready before both have happened, unsupported on simulated devices.");
  device.def("write_value32", [](const D& d, Stream s, Address flag, std::uint32_t value) {
    call(d, &Api::write_value32, s, flag_at(flag), value);
  }, nb::arg("stream"), nb::arg("flag"), nb::arg("value"), "Write a flag, after all before it.");
  device.def("wait_value32_geq", [](const D& d, Stream s, Address flag, std::uint32_t value) {
    call(d, &Api::wait_value32_geq, s, flag_at(flag), value);
  }, nb::arg("stream"), nb::arg("flag"), nb::arg("value"),
     "Let a stream wait until a flag comes to the value, cyclically.");
  device.def("launch_reduce", [](const D& d, int op, int dtype, Address dst, Address src,
                                 std::size_t count, Stream s) {
    call(d, &Api::launch_reduce, op_of(op), dtype_of(dtype), at(dst),
         static_cast<const void*>(at(src)), count, s);
  }, nb::arg("op"), nb::arg("dtype"), nb::arg("dst"), nb::arg("src"), nb::arg("count"),
     nb::arg("stream"), "dst = dst op src, element by element, by a kernel.");
  device.def("launch_copy", [](const D& d, Address dst, Address src, std::size_t n, Stream s) {
    call(d, &Api::launch_copy, at(dst), static_cast<const void*>(at(src)), n, s);
  }, nb::arg("dst"), nb::arg("src"), nb::arg("nbytes"), nb::arg("stream"),
     "Copy bytes by a kernel.");
  device.def("launch_scaled_sum", [](const D& d, int dtype, Address dst, Address src,
                                     std::size_t count, unsigned which, double real,
                                     std::int64_t integer, Stream s) {
    call(d, &Api::launch_scaled_sum, dtype_of(dtype), at(dst), static_cast<const void*>(at(src)),
         count, which, Scale{real, integer}, s);
  }, nb::arg("dtype"), nb::arg("dst"), nb::arg("src"), nb::arg("count"), nb::arg("which"),
     nb::arg("real"), nb::arg("integer"), nb::arg("stream"),
     "dst = dst + src by a kernel, dst (1) or src (2) multiplied first; or (4) dst = src, scaled.");
  device.def("launch_divide", [](const D& d, int dtype, Address dst, std::size_t count,
                                 std::int64_t divisor, Stream s) {
    call(d, &Api::launch_divide, dtype_of(dtype), at(dst), count, divisor, s);
  }, nb::arg("dtype"), nb::arg("dst"), nb::arg("count"), nb::arg("divisor"), nb::arg("stream"),
     "Divide integers toward zero, by a kernel.");
  device.def("launch_boxes", [](const D& d, int kind, Address buffer, std::size_t buffer_nbytes,
                                const std::vector<Address>& arrays, Address table,
                                std::size_t table_nbytes, std::size_t terms_at,
                                std::uint32_t num_boxes, std::uint64_t units, Stream s, int op,
                                int dtype) {
    if (kind < 0 || kind >= kNumBoxKinds) {
      throw nb::value_error(("launch_boxes() was given the unknown kind " + std::to_string(kind) +
                             ": expected 0 to " + std::to_string(kNumBoxKinds - 1) +
                             ", the value of a BoxKind")
                                .c_str());
    }
    if (arrays.size() > kMostLaunchArrays) {
      throw nb::value_error(("launch_boxes() was given " + std::to_string(arrays.size()) +
                             " arrays; a launch takes at most " +
                             std::to_string(kMostLaunchArrays) + ": use several launches")
                                .c_str());
    }
    BoxLaunch launch;
    launch.kind = static_cast<BoxKind>(kind);
    launch.op = op_of(op);
    launch.dtype = dtype_of(dtype);
    launch.buffer = static_cast<unsigned char*>(at(buffer));
    launch.buffer_nbytes = buffer_nbytes;
    for (std::size_t i = 0; i < arrays.size(); ++i)
      launch.arrays[i] = static_cast<unsigned char*>(at(arrays[i]));
    launch.table = static_cast<const unsigned char*>(at(table));
    launch.table_nbytes = table_nbytes;
    launch.terms_at = terms_at;
    launch.num_boxes = num_boxes;
    launch.units = units;
    call<const BoxLaunch&, Stream>(d, &Api::launch_boxes, launch, s);
  }, nb::arg("kind"), nb::arg("buffer"), nb::arg("buffer_nbytes"), nb::arg("arrays"),
     nb::arg("table"), nb::kw_only(), nb::arg("table_nbytes"), nb::arg("terms_at"),
     nb::arg("num_boxes"), nb::arg("units"), nb::arg("stream"), nb::arg("op") = 0,
     nb::arg("dtype") = 0,
     "Pack (0), unpack (1) or combine (2) boxes of arrays by a kernel; BoxTable.launch() calls it.");
  device.def("launch_host", &launch_host, nb::arg("stream"), nb::arg("function"),
             "Call a function from a stream; conformance tests only.");
  device.def("load_kernels", [](const D& d, nb::bytes image,
                                const std::vector<std::string>& names) {
    std::vector<const char*> each;
    for (const std::string& name : names) each.push_back(name.c_str());
    call(d, &Api::load_kernels, static_cast<const void*>(image.c_str()), image.size(),
         static_cast<const char* const*>(each.data()), each.size());
  }, nb::arg("image"), nb::arg("names") = std::vector<std::string>(),
     "Add a module of kernels that launches use; those that are named are ready at once.");
  device.def("ptr_attributes", [](const D& d, Address ptr) {
    PointerFacts facts;
    call(d, &Api::ptr_attributes, static_cast<const void*>(at(ptr)), &facts);
    return std::make_tuple(static_cast<int>(facts.kind), facts.device, facts.base, facts.nbytes);
  }, nb::arg("ptr"), "Return (kind, device, base, nbytes) of the memory at an address.");
  device.def("is_capturing", [](const D& d, Stream s) {
    CaptureState out = CaptureState::None;
    call(d, &Api::is_capturing, s, &out);
    return static_cast<int>(out);
  }, nb::arg("stream"), "Return the stream's capture state: 0 none, 1 active, 2 invalidated.");
  device.def("exchange_capture_mode", [](const D& d, int mode) {
    if (mode < 0 || mode > 2) {
      throw nb::value_error(("capture mode " + std::to_string(mode) + " is unknown: expected 0 "
                             "(global), 1 (of the thread) or 2 (relaxed)")
                                .c_str());
    }
    auto both = static_cast<CaptureMode>(mode);
    call(d, &Api::exchange_capture_mode, &both);
    return static_cast<int>(both);
  }, nb::arg("mode"), "Set this thread's capture mode, and return the one before.");
  device.def("begin_capture", [](const D& d, Stream s, int mode) {
    if (mode < 0 || mode > 2) {
      throw nb::value_error(("capture mode " + std::to_string(mode) + " is unknown: expected 0 "
                             "(global), 1 (of the thread) or 2 (relaxed)")
                                .c_str());
    }
    call(d, &Api::begin_capture, s, static_cast<CaptureMode>(mode));
  }, nb::arg("stream"), nb::arg("mode") = 0, "Record a stream's commands, and run none.");
  device.def("end_capture", [](const D& d, Stream s) {
    Graph out = 0;
    call(d, &Api::end_capture, s, &out);
    return out;
  }, nb::arg("stream"), "End the capture; return a graph that can be launched.");
  device.def("capture_id", [](const D& d, Stream s) {
    std::uint64_t out = 0;
    call(d, &Api::capture_id, s, &out);
    return out;
  }, nb::arg("stream"), "Return the number of the capture that a stream is in; 0: none.");
  device.def("event_record_external",
             [](const D& d, Event e, Stream s) { call(d, &Api::event_record_external, e, s); },
             nb::arg("event"), nb::arg("stream"),
             "Let each launch of the graph record an event of outside.");
  device.def("stream_wait_external",
             [](const D& d, Stream s, Event e) { call(d, &Api::stream_wait_external, s, e); },
             nb::arg("stream"), nb::arg("event"),
             "Let each launch of the graph wait for the latest record of an event.");
  device.def("graph_launch", [](const D& d, Graph g, Stream s) { call(d, &Api::graph_launch, g, s); },
             nb::arg("graph"), nb::arg("stream"), "Give a stream what a graph holds.");
  device.def("graph_destroy", [](const D& d, Graph g) { call(d, &Api::graph_destroy, g); },
             nb::arg("graph"), "Forget a graph; what was launched still runs.");
  device.def("ipc_export", [](const D& d, Address ptr) {
    IpcHandle handle;
    std::size_t offset = 0;
    call(d, &Api::ipc_export, static_cast<const void*>(at(ptr)), &handle, &offset);
    return nb::make_tuple(
        nb::bytes(reinterpret_cast<const char*>(handle.bytes), sizeof(handle.bytes)), offset);
  }, nb::arg("ptr"), "Return a handle of the allocation for other processes, and ptr's offset.");
  device.def("ipc_open", [](const D& d, nb::bytes bytes) {
    const IpcHandle handle = handle_of(bytes);
    void* base = nullptr;
    call(d, &Api::ipc_open, &handle, &base);
    return reinterpret_cast<Address>(base);
  }, nb::arg("handle"), "Map another process's allocation; return its first address.");
  device.def("ipc_close", [](const D& d, Address base) { call(d, &Api::ipc_close, at(base)); },
             nb::arg("base"), "Unmap it.");
  device.def("last_error", [](const D& d) { return std::string(d.device->api->last_error(d.device)); },
             "Reason why the latest failed call of this thread failed.");

  device.def("read", &read, nb::arg("ptr"), nb::arg("nbytes"),
             "Return bytes of host memory, as a host thread that the device knows of.");
  device.def("write", &write, nb::arg("ptr"), nb::arg("data"), "Write bytes to host memory.");
  device.def("flag_load", [](const D& d, Address flag) {
    std::uint32_t value = 0;
    call(d, &Api::flag_load, static_cast<const std::uint32_t*>(flag_at(flag)), &value);
    return value;
  }, nb::arg("flag"), "Return a flag; what came before its write is visible then.");
  device.def("flag_store", [](const D& d, Address flag, std::uint32_t value) {
    call(d, &Api::flag_store, flag_at(flag), value);
  }, nb::arg("flag"), nb::arg("value"), "Write a flag, after all this thread did before.");
  device.def("lock", [](const D& d, Address token) {
    if (d.device->api->lock) call(d, &Api::lock, static_cast<const void*>(at(token)));
  }, nb::arg("token"), "Take a lock as the device knows of it; nothing on real hardware.");
  device.def("unlock", [](const D& d, Address token) {
    if (d.device->api->unlock) call(d, &Api::unlock, static_cast<const void*>(at(token)));
  }, nb::arg("token"), "Give it back.");
  device.def("pause", [](const D& d) { call(d, &Api::pause); },
             "Wait until a flag or an event may have changed since this thread's last pause.");
  device.def("make_current", [](const D& d, bool enter) {
    call(d, &Api::make_current, enter);
  }, nb::arg("enter"), "Make it this thread's current one for other libraries, or take it back.");
  m.def("current_device_function", [] { return reinterpret_cast<Address>(&current_device); },
        "Address of what returns the thread's current device, for pretended libraries.");
  bind_sim(m, device);
  bind_real_devices(m, device);
}

}  // namespace commrt
