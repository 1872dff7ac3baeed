// SPDX-License-Identifier: Apache-2.0
// What every call of a device of threads begins with.
#pragma once

#include <string>

#include "devices/device_error.hpp"
#include "devices/thread_device.hpp"

namespace commrt::threaded {

inline ThreadDevice* threads(Device* device) { return static_cast<ThreadDevice*>(device); }

// What every call begins with.
struct Call {
  Call(Device* which, const char* called) : device(threads(which)), name(called) {
    if (in_host_function()) {
      status = invalid("in a host function, which must not call the device");
      return;
    }
    lock = std::unique_lock<std::mutex>(device->mutex);
    if (device->closed) status = invalid("the device is closed");
  }
  DeviceStatus invalid(const std::string& why) {
    return device_fails(DeviceStatus::Invalid, std::string(name) + "(): " + why);
  }
  bool refused() {
    if (status == DeviceStatus::Ok && device->failed.load())
      status = device_fails(DeviceStatus::Failed,
                            std::string(name) + "(): the device failed earlier, at an injected "
                                                "error");
    return status != DeviceStatus::Ok;
  }
  std::shared_ptr<StreamState> stream(Stream handle) {
    const auto found = device->streams.find(handle);
    if (found != device->streams.end()) return found->second;
    status = invalid("the device has no stream " + std::to_string(handle));
    return nullptr;
  }
  std::shared_ptr<EventState> event(Event handle) {
    const auto found = device->events.find(handle);
    if (found != device->events.end()) return found->second;
    status = invalid("the device has no event " + std::to_string(handle));
    return nullptr;
  }
  // Where a stream is captured, what the host waits for would never come.
  bool breaks(const std::shared_ptr<Capture>& capture, const std::string& what) {
    if (!capture || !capture->active) return false;
    capture->invalidated = true;
    status = device_fails(DeviceStatus::Capturing,
                          std::string(name) + "() " + what + "; the capture is lost");
    return true;
  }
  // Whether the memory may be touched, and is it of a device.
  bool operand(const void* ptr, std::size_t nbytes, bool* known) {
    std::lock_guard<std::mutex> guard(blocks().mutex);
    const auto* found = blocks().find(ptr);
    *known = found != nullptr;
    if (!found || !nbytes) return true;
    const auto& [base, block] = *found;
    if (nbytes > base + block.nbytes - reinterpret_cast<std::uint64_t>(ptr))
      status = invalid(std::to_string(nbytes) + " bytes at " + hex(ptr) + " end behind the " +
                       std::to_string(block.nbytes) + " bytes from " + hex(base));
    else if (block.kind == MemoryKind::Device && block.owner != device &&
             !block.opened_by.count(device))
      status = invalid(hex(ptr) + " belongs to another device, and was not opened by ipc_open()");
    return status == DeviceStatus::Ok;
  }
  bool on_device(const void* ptr, std::size_t nbytes) {
    bool known = false;
    if (operand(ptr, nbytes, &known) && !known && nbytes)
      status = invalid(hex(ptr) + " is pageable memory, which the device cannot reach");
    return status == DeviceStatus::Ok;
  }
  void give(const std::shared_ptr<StreamState>& to, Command command) {
    if (to->capture && to->capture->active) {
      if (to->capture->invalidated)
        status = device_fails(DeviceStatus::Capturing, std::string(name) + "(): the capture of "
                                                       "the stream was lost");
      else
        to->capture->recording->take(to->handle, std::move(command));
      return;
    }
    const auto legacy = device->streams[0];
    if (to == legacy) {
      for (auto& [handle, other] : device->streams)
        if (handle && other->blocking && other->given)
          command.after.emplace_back(other, other->given);
    } else if (to->blocking && legacy->given) {
      command.after.emplace_back(legacy, legacy->given);
    }
    ++to->given;
    {
      std::lock_guard<std::mutex> guard(to->mutex);
      to->commands.push_back(std::move(command));
    }
    to->arrived.notify_one();
  }
  // Lets other threads call meanwhile.
  void synchronize(const std::vector<std::pair<std::shared_ptr<StreamState>, std::uint64_t>>& all) {
    lock.unlock();
    for (auto& [stream, number] : all)
      signal().wait([this, many = number, of = stream.get()] {
        return of->done.load() >= many || device->stopping.load() || device->failed.load();
      });
    lock.lock();
    if (device->closed) status = invalid("the device was closed meanwhile");
  }
  void synchronize_all() {
    std::vector<std::pair<std::shared_ptr<StreamState>, std::uint64_t>> all;
    for (auto& [handle, stream] : device->streams) all.emplace_back(stream, stream->given);
    for (auto& stream : device->destroyed) all.emplace_back(stream, stream->given);
    synchronize(all);
  }

  ThreadDevice* device;
  const char* name;
  std::unique_lock<std::mutex> lock;
  DeviceStatus status = DeviceStatus::Ok;
};

// --- the calls that are in thread_graphs.cpp ---
DeviceStatus is_capturing(Device*, Stream, CaptureState* out);
DeviceStatus begin_capture(Device*, Stream, CaptureMode);
DeviceStatus end_capture(Device*, Stream, Graph* out);
DeviceStatus capture_id(Device*, Stream, std::uint64_t* out);
DeviceStatus event_record_external(Device*, Event, Stream);
DeviceStatus stream_wait_external(Device*, Stream, Event);
DeviceStatus graph_launch(Device*, Graph, Stream);
DeviceStatus graph_destroy(Device*, Graph);

}  // namespace commrt::threaded
