// SPDX-License-Identifier: Apache-2.0
// The beginning of every call of a simulated device: lock, let others run, check the device.
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "devices/device_error.hpp"
#include "devices/pretended_calls.hpp"
#include "devices/sim_world.hpp"

namespace commrt::sim {

inline SimDevice* sim(Device* device) { return static_cast<SimDevice*>(device); }

// A call: takes the lock, lets others go on, and refuses where nothing can be called.
struct Call : Entry, pretended::CallBase<Call, SimDevice> {
  Call(Device* which, const char* called) : Entry(sim(which)->world), CallBase(sim(which), called) {
    world->preempt(*this);
    if (!world->deadlock.empty())
      status = device_fails(DeviceStatus::Deadlock, world->deadlock);
  }
  // Refuses the call if the device has failed. For calls that need a device that works.
  bool refused() {
    if (status == DeviceStatus::Ok && device->failed())
      status = device_fails(DeviceStatus::Failed, std::string(name) + "(): " + device->failure);
    return status != DeviceStatus::Ok;
  }
  // True if the device has failed, or if the call would end a capture that somebody has begun.
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
  bool operand(const void* ptr, std::size_t nbytes, bool* known) {
    status = world->check_operand(device, ptr, nbytes, known);
    return status == DeviceStatus::Ok;
  }
  std::string words_for_device() const { return "device '" + device->name + "'"; }

  // --- for the calls in pretended_calls.hpp ---
  DeviceStatus give(const std::shared_ptr<StreamState>& to, Command command) {
    if (command.kind == Kind::Record && command.record) {
      command.record->actor = to->actor;
      command.record->number = world->commands + 1;
    }
    return world->give(*this, to.get(), std::move(command));
  }
  DeviceStatus give_foreign(const std::shared_ptr<StreamState>& to,
                            std::shared_ptr<const ForeignKernel> kernel);  // sim_foreign.cpp
  bool made_ready(const Command& command);                                // sim_device.cpp
  static void knows_operands(Command& command) { command.dst_known = command.src_known = true; }
  bool waits_for_unrecorded() const { return world->options.unrecorded_wait_passes; }
  void begun(const std::shared_ptr<Capture>& capture, CaptureMode mode) {
    capture->origin = host;
    capture->mode = mode;
    device->captures.push_back(capture);
  }
  void ended(const std::shared_ptr<Capture>& capture) {
    auto& all = device->captures;
    all.erase(std::remove(all.begin(), all.end(), capture), all.end());
  }
  void end_stream(const std::shared_ptr<StreamState>& stream) {
    stream->destroyed = true;
    world->notice_end(stream.get());
  }
  static bool has_ended(const StreamState& stream) { return stream.destroyed; }
  bool refuses_sharing() { return forbidden(); }
  static int guard_memory() { return 0; }  // the world's lock is enough
  pretended::Exported exported(std::uint64_t address) const {
    const Allocation* found = world->memory.find(address);
    if (world->memory.is_pageable(found) || found->freed) return {};
    return {found->kind, found->base, found->id, found->device == device->index};
  }
  bool open(std::uint64_t base) const {
    return world->memory.find(base)->mapped_by.insert(device->index).second;
  }
  bool close(std::uint64_t base) const {
    return world->memory.find(base)->mapped_by.erase(device->index) != 0;
  }
};

// A host function runs under the world's lock, which is not recursive.
#define COMMRT_ENTER(which, named)                                                           \
  if (in_host_function())                                                                    \
    return device_fails(                                                                     \
        DeviceStatus::Invalid,                                                               \
        std::string(named) + "() in a host function, which must not call the device");       \
  Call call(which, named)

// Types of a simulated device, and how its calls begin, for pretended_calls.hpp.
struct Side {
  static constexpr std::uint64_t kTicket = 0x636f6d6d72742d31u;
  using Command = sim::Command;
  using Record = sim::Record;
  using EventState = sim::EventState;
  using StreamState = sim::StreamState;

  template <class Body>
  static DeviceStatus enter(Device* device, const char* name, Body body) {
    COMMRT_ENTER(device, name);
    return body(call);
  }
  static std::shared_ptr<Record> new_record(const EventState&) {
    return std::make_shared<Record>();
  }
};

// --- the calls that are in sim_host.cpp ---
DeviceStatus host_access(Device*, const void* ptr, std::size_t nbytes, bool writes);
DeviceStatus flag_load(Device*, const std::uint32_t* flag, std::uint32_t* value);
DeviceStatus flag_store(Device*, std::uint32_t* flag, std::uint32_t value);
DeviceStatus lock(Device*, const void* token);
DeviceStatus unlock(Device*, const void* token);
DeviceStatus pause(Device*);
DeviceStatus exchange_capture_mode(Device*, CaptureMode* mode);

}  // namespace commrt::sim
