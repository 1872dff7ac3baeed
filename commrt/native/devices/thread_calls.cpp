// SPDX-License-Identifier: Apache-2.0
// The table of a device of threads, and its own calls: memory, waits of the host, copies.
#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "devices/thread_call.hpp"

namespace commrt::threaded {
namespace {

std::uint32_t load(const void* flag) {
  return __atomic_load_n(static_cast<const std::uint32_t*>(flag), __ATOMIC_SEQ_CST);
}

DeviceStatus alloc_any(Device* device, const char* name, MemoryKind kind, std::size_t nbytes,
                       void** out) {
  Call call(device, name);
  if (call.refused()) return call.status;
  void* memory = std::malloc(nbytes ? nbytes : 1);
  if (!memory)
    return device_fails(DeviceStatus::OutOfMemory,
                        std::string(name) + "(): no memory for " + std::to_string(nbytes) +
                            " bytes on a device of threads: free other memory first, or ask "
                            "for less");
  std::memset(memory, 0xff, nbytes);
  std::lock_guard<std::mutex> guard(blocks().mutex);
  blocks().by_base[reinterpret_cast<std::uint64_t>(memory)] =
      Block{nbytes, kind, call.device, {}};
  *out = memory;
  return DeviceStatus::Ok;
}

// Waits for all that the device was given, as CUDA does.
DeviceStatus free_any(Device* device, const char* name, MemoryKind kind, void* ptr) {
  Call call(device, name);
  if (call.refused()) return call.status;
  if (!ptr) return DeviceStatus::Ok;
  call.synchronize_all();
  if (call.refused()) return call.status;
  {
    std::lock_guard<std::mutex> guard(blocks().mutex);
    const auto found = blocks().by_base.find(reinterpret_cast<std::uint64_t>(ptr));
    if (found == blocks().by_base.end() || found->second.kind != kind ||
        found->second.owner != call.device)
      return call.invalid(hex(ptr) + " was freed before, or is not what the device allocated by "
                                     "its counterpart: free each pointer once, by the call that "
                                     "belongs to its alloc");
    blocks().by_base.erase(found);
  }
  std::free(ptr);
  return DeviceStatus::Ok;
}

DeviceStatus alloc(Device* device, std::size_t nbytes, void** out) {
  return alloc_any(device, "alloc", MemoryKind::Device, nbytes, out);
}
DeviceStatus free_(Device* device, void* ptr) {
  return free_any(device, "free", MemoryKind::Device, ptr);
}
DeviceStatus pinned_alloc(Device* device, std::size_t nbytes, void** out) {
  return alloc_any(device, "pinned_alloc", MemoryKind::Pinned, nbytes, out);
}
DeviceStatus pinned_free(Device* device, void* ptr) {
  return free_any(device, "pinned_free", MemoryKind::Pinned, ptr);
}

DeviceStatus stream_synchronize(Device* device, Stream handle) {
  Call call(device, "stream_synchronize");
  if (call.refused()) return call.status;
  const auto stream = call.stream(handle);
  if (!stream || call.breaks(stream->capture, "of a stream that is captured")) return call.status;
  call.synchronize({{stream, stream->given}});
  call.refused();
  return call.status;
}

DeviceStatus memcpy_async(Device* device, void* dst, const void* src, std::size_t nbytes,
                          Stream handle) {
  Call call(device, "memcpy_async");
  if (call.refused()) return call.status;
  const auto stream = call.stream(handle);
  bool dst_known = false, src_known = false;
  if (!stream || !call.operand(dst, nbytes, &dst_known) || !call.operand(src, nbytes, &src_known))
    return call.status;
  Command command;
  command.dst = dst;
  command.src = src;
  command.nbytes = nbytes;
  call.give(stream, std::move(command));
  const bool captured = stream->capture && stream->capture->active;
  const bool between_hosts = !call.is_device_memory(dst) && !call.is_device_memory(src);
  if (nbytes && (between_hosts || !(dst_known && src_known)) && !captured) {
    call.synchronize({{stream, stream->given}});
    call.refused();
  }
  return call.status;
}

DeviceStatus event_query(Device* device, Event handle) {
  Call call(device, "event_query");
  if (call.refused()) return call.status;
  const auto event = call.event(handle);
  if (!event) return call.status;
  const auto record = event->latest;
  if (!record) return DeviceStatus::Ok;
  if (call.breaks(record->capture.lock(), "of an event that was recorded in a stream that is captured"))
    return call.status;
  return record->done.load() ? DeviceStatus::Ok : DeviceStatus::NotReady;
}

DeviceStatus event_elapsed(Device* device, Event from, Event to, double* elapsed_us) {
  Call call(device, "event_elapsed");
  if (call.refused()) return call.status;
  const Record* records[2] = {};
  const Event handles[2] = {from, to};
  for (int i = 0; i < 2; ++i) {
    const auto event = call.event(handles[i]);
    if (!event) return call.status;
    if (!event->is_timed || !event->latest)
      return call.invalid("event " + std::to_string(handles[i]) +
                          (event->is_timed ? " was never recorded"
                                           : " has no time: make it by timed_event_create()"));
    records[i] = event->latest.get();
  }
  if (!records[0]->done.load() || !records[1]->done.load())
    return device_fails(DeviceStatus::NotReady,
                        "event_elapsed(): an event has not happened yet");
  *elapsed_us = std::chrono::duration<double, std::micro>(records[1]->at - records[0]->at).count();
  return DeviceStatus::Ok;
}

DeviceStatus load_kernels(Device* device, const void*, std::size_t, const char* const*,
                          std::size_t) {
  Call call(device, "load_kernels");
  call.refused();
  return call.status;
}

DeviceStatus ptr_attributes(Device* device, const void* ptr, PointerFacts* out) {
  Call call(device, "ptr_attributes");
  *out = {};
  std::lock_guard<std::mutex> guard(blocks().mutex);
  if (const auto* found = blocks().find(ptr)) {
    const auto& [base, block] = *found;
    *out = {block.kind, block.owner->ordinal, base, block.nbytes};
  }
  return call.status;
}

DeviceStatus exchange_capture_mode(Device*, CaptureMode* mode) {
  thread_local CaptureMode own = CaptureMode::Global;
  std::swap(own, *mode);
  return DeviceStatus::Ok;
}

// --- host threads: they are real ones ---

DeviceStatus host_access(Device* device, const void* ptr, std::size_t, bool) {
  std::lock_guard<std::mutex> guard(blocks().mutex);
  const auto* found = blocks().find(ptr);
  if (!found || found->second.kind != MemoryKind::Device) return DeviceStatus::Ok;
  (void)device;
  return device_fails(DeviceStatus::Invalid, "host_access(): " + hex(ptr) +
                                                 " is device memory, which a host thread cannot "
                                                 "touch");
}

DeviceStatus flag_load(Device*, const std::uint32_t* flag, std::uint32_t* value) {
  *value = load(flag);
  return DeviceStatus::Ok;
}

DeviceStatus flag_store(Device*, std::uint32_t* flag, std::uint32_t value) {
  __atomic_store_n(flag, value, __ATOMIC_SEQ_CST);
  signal().changed();
  return DeviceStatus::Ok;
}

DeviceStatus pause(Device* device) {
  thread_local std::uint64_t seen = 0;
  ThreadDevice* self = threads(device);
  signal().wait_a_little([self] {
    return signal().version() != seen || self->stopping.load() || self->failed.load();
  });
  seen = signal().version();
  return DeviceStatus::Ok;
}

constexpr DeviceApi make_table() {
  DeviceApi api{};
  api.kind = "threads";
  pretended::Calls<Side>::put_into(api);
  api.alloc = alloc;
  api.free = free_;
  api.pinned_alloc = pinned_alloc;
  api.pinned_free = pinned_free;
  api.stream_synchronize = stream_synchronize;
  api.memcpy_async = memcpy_async;
  api.event_query = event_query;
  api.event_elapsed = event_elapsed;
  api.load_kernels = load_kernels;
  api.ptr_attributes = ptr_attributes;
  api.exchange_capture_mode = exchange_capture_mode;
  api.host_access = host_access;
  api.flag_load = flag_load;
  api.flag_store = flag_store;
  api.pause = pause;
  return api;
}

constexpr DeviceApi kTable = make_table();

}  // namespace

const DeviceApi& table() { return kTable; }

}  // namespace commrt::threaded
