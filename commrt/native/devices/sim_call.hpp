// SPDX-License-Identifier: Apache-2.0
// What every call of a simulated device begins with.
#pragma once

#include <memory>
#include <string>

#include "devices/device_error.hpp"
#include "devices/sim_world.hpp"

namespace commrt::sim {

inline SimDevice* sim(Device* device) { return static_cast<SimDevice*>(device); }

// A call: takes the lock, lets others go on, and refuses where nothing can be called.
struct Call : Entry {
  Call(Device* which, const char* called)
      : Entry(sim(which)->world), device(sim(which)), name(called) {
    world->preempt(*this);
    if (!world->deadlock.empty())
      status = device_fails(DeviceStatus::Deadlock, world->deadlock);
  }
  // For calls that need a device that works.
  bool refused() {
    if (status == DeviceStatus::Ok && device->failed())
      status = device_fails(DeviceStatus::Failed, std::string(name) + "(): " + device->failure);
    return status != DeviceStatus::Ok;
  }
  DeviceStatus invalid(const std::string& why) {
    return device_fails(DeviceStatus::Invalid, std::string(name) + "(): " + why);
  }
  // Whether the call would end a capture that somebody has begun.
  bool forbidden() {
    if (refused()) return true;
    if (!world->options.capture_forbids) return false;
    for (auto& capture : device->captures) {
      const bool own = capture->origin == host && capture->mode != CaptureMode::Relaxed;
      const bool others = capture->mode == CaptureMode::Global &&
                          host->capture_mode == CaptureMode::Global;
      if (host->capture_mode == CaptureMode::Relaxed || !(own || others)) continue;
      capture->invalidated = true;
      status = device_fails(DeviceStatus::Capturing,
                            std::string(name) + "() while a stream of device '" + device->name +
                                "' is captured; the capture is lost. Exchange the thread's "
                                "capture mode, or do this before");
    }
    return status != DeviceStatus::Ok;
  }
  std::shared_ptr<StreamState> stream(Stream handle) {
    const auto found = device->streams.find(handle);
    if (found != device->streams.end() && !found->second->destroyed) return found->second;
    status = invalid("device '" + device->name + "' has no stream " + std::to_string(handle));
    return nullptr;
  }
  std::shared_ptr<EventState> event(Event handle) {
    const auto found = device->events.find(handle);
    if (found != device->events.end()) return found->second;
    status = invalid("device '" + device->name + "' has no event " + std::to_string(handle));
    return nullptr;
  }
  // Memory that kernels and flags may be in.
  bool on_device(const void* ptr, std::size_t nbytes) {
    bool known = false;
    status = world->check_operand(device, ptr, nbytes, &known);
    if (status == DeviceStatus::Ok && !known && nbytes)
      status = invalid(hex(ptr) + " is pageable memory, which the device cannot reach");
    return status == DeviceStatus::Ok;
  }

  SimDevice* device;
  const char* name;
  DeviceStatus status = DeviceStatus::Ok;
};

// A host function runs under the world's lock, which is not recursive.
#define COMMRT_ENTER(which, named)                                                           \
  if (in_host_function())                                                                    \
    return device_fails(                                                                     \
        DeviceStatus::Invalid,                                                               \
        std::string(named) + "() in a host function, which must not call the device");       \
  Call call(which, named)

// --- the calls that are in sim_host.cpp ---
DeviceStatus ipc_export(Device*, const void* ptr, IpcHandle* out, std::size_t* offset);
DeviceStatus ipc_open(Device*, const IpcHandle* handle, void** base);
DeviceStatus ipc_close(Device*, void* base);
DeviceStatus host_access(Device*, const void* ptr, std::size_t nbytes, bool writes);
DeviceStatus flag_load(Device*, const std::uint32_t* flag, std::uint32_t* value);
DeviceStatus flag_store(Device*, std::uint32_t* flag, std::uint32_t value);
DeviceStatus lock(Device*, const void* token);
DeviceStatus unlock(Device*, const void* token);
DeviceStatus pause(Device*);
DeviceStatus launch_foreign(Device*, const ForeignKernel& kernel, Stream handle);
DeviceStatus is_capturing(Device*, Stream handle, CaptureState* out);
DeviceStatus exchange_capture_mode(Device*, CaptureMode* mode);
// --- and in sim_graphs.cpp ---
DeviceStatus begin_capture(Device*, Stream, CaptureMode);
DeviceStatus end_capture(Device*, Stream, Graph* out);
DeviceStatus capture_id(Device*, Stream, std::uint64_t* out);
DeviceStatus event_record_external(Device*, Event, Stream);
DeviceStatus stream_wait_external(Device*, Stream, Event);
DeviceStatus graph_launch(Device*, Graph, Stream);
DeviceStatus graph_destroy(Device*, Graph);

}  // namespace commrt::sim
