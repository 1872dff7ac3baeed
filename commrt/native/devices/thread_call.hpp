// SPDX-License-Identifier: Apache-2.0
// The beginning of every call of a device of threads.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "devices/device_error.hpp"
#include "devices/pretended_calls.hpp"
#include "devices/thread_device.hpp"

namespace commrt::threaded {

inline ThreadDevice* threads(Device* device) { return static_cast<ThreadDevice*>(device); }

struct Call : pretended::CallBase<Call, ThreadDevice> {
  Call(Device* which, const char* called) : CallBase(threads(which), called) {
    if (in_host_function()) {
      status = invalid("was called in a host function, which must not call the device");
      return;
    }
    lock = std::unique_lock<std::mutex>(device->mutex);
    if (device->closed) status = invalid("the device is closed: make a new one");
  }
  bool refused() {
    if (status == DeviceStatus::Ok && device->failed.load())
      status = device_fails(DeviceStatus::Failed,
                            std::string(name) + "(): the device failed earlier, at an injected "
                                                "error, and takes no more calls: make a new one");
    return status != DeviceStatus::Ok;
  }
  // True if the memory may be touched. `known`: a device of this kind gave it.
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
  static bool is_device_memory(const void* ptr) {
    std::lock_guard<std::mutex> guard(blocks().mutex);
    const auto* found = blocks().find(ptr);
    return found && found->second.kind == MemoryKind::Device;
  }
  static std::string words_for_device() { return "the device"; }

  // --- for the calls in pretended_calls.hpp ---
  DeviceStatus give(const std::shared_ptr<StreamState>& to, Command command) {
    if (pretended::is_captured(*to)) {
      if (to->capture->invalidated)
        status = device_fails(DeviceStatus::Capturing, std::string(name) + "(): the capture of "
                                                       "the stream was lost");
      else
        to->capture->recording->take(to->handle, std::move(command));
      return status;
    }
    wait_for_room(to);
    if (status != DeviceStatus::Ok) return status;
    // An event that was never recorded is not waited for.
    if (command.kind == Kind::WaitEvent && !command.record) return status;
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
    return status;
  }
  DeviceStatus give_foreign(const std::shared_ptr<StreamState>& to,
                            std::shared_ptr<const ForeignKernel> kernel) {
    Command command;
    command.kind = Kind::Foreign;
    command.foreign = std::move(kernel);
    return give(to, std::move(command));
  }
  static bool made_ready(const Command&) { return true; }
  static void knows_operands(const Command&) {}
  static bool waits_for_unrecorded() { return true; }
  static void begun(const std::shared_ptr<Capture>&, CaptureMode) {}
  static void ended(const std::shared_ptr<Capture>&) {}
  void end_stream(const std::shared_ptr<StreamState>& stream) {
    close_stream(stream);
    device->destroyed.push_back(stream);
    device->streams.erase(stream->handle);
    join_ended(device);
  }
  static bool has_ended(const StreamState&) { return false; }
  bool refuses_sharing() { return refused(); }
  static std::unique_lock<std::mutex> guard_memory() {
    return std::unique_lock<std::mutex>(blocks().mutex);
  }
  pretended::Exported exported(std::uint64_t address) const {
    const auto* found = blocks().find(reinterpret_cast<const void*>(address));
    if (!found) return {};
    return {found->second.kind, found->first, 0, found->second.owner == device};
  }
  bool open(std::uint64_t base) const {
    return blocks().by_base.at(base).opened_by.insert(device).second;
  }
  bool close(std::uint64_t base) const {
    auto* found = blocks().find(reinterpret_cast<const void*>(base));
    return found && found->second.opened_by.erase(device) != 0;
  }

  // A stream holds so many commands; then who gives it one more waits.
  void wait_for_room(const std::shared_ptr<StreamState>& to) {
    const std::uint64_t most = pretended::kMostCommands;
    while (status == DeviceStatus::Ok && to->given - to->done.load() >= most &&
           !device->failed.load()) {
      synchronize({{to, to->given - most + 1}});
    }
  }
  // Lets other threads call meanwhile.
  void synchronize(const std::vector<std::pair<std::shared_ptr<StreamState>, std::uint64_t>>& all) {
    lock.unlock();
    for (auto& [stream, number] : all)
      signal().wait([this, many = number, of = stream.get()] {
        return of->done.load() >= many || device->stopping.load() || device->failed.load();
      });
    lock.lock();
    if (device->closed)
      status = invalid("the device was closed while this call waited: close it when no call is "
                       "under way");
  }
  void synchronize_all() {
    std::vector<std::pair<std::shared_ptr<StreamState>, std::uint64_t>> all;
    for (auto& [handle, stream] : device->streams) all.emplace_back(stream, stream->given);
    for (auto& stream : device->destroyed) all.emplace_back(stream, stream->given);
    synchronize(all);
  }

  std::unique_lock<std::mutex> lock;
};

// Types of a device of threads, and how its calls begin, for pretended_calls.hpp.
struct Side {
  static constexpr std::uint64_t kTicket = 0x636f6d6d72742d32u;
  using Command = threaded::Command;
  using Record = threaded::Record;
  using EventState = threaded::EventState;
  using StreamState = threaded::StreamState;

  template <class Body>
  static DeviceStatus enter(Device* device, const char* name, Body body) {
    Call call(device, name);
    return body(call);
  }
  static std::shared_ptr<Record> new_record(const EventState& event) {
    auto made = std::make_shared<Record>();
    made->is_timed = event.is_timed;
    return made;
  }
};

}  // namespace commrt::threaded
