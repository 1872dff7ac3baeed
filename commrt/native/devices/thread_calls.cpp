// SPDX-License-Identifier: Apache-2.0
// The table of a device of threads.
#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "devices/thread_call.hpp"
#include "kernels/kernels.hpp"

namespace commrt::threaded {
namespace {

using Kind = Command::Kind;

std::uint32_t load(const void* flag) {
  return __atomic_load_n(static_cast<const std::uint32_t*>(flag), __ATOMIC_SEQ_CST);
}

DeviceStatus alloc_any(Device* device, const char* name, MemoryKind kind, std::size_t nbytes,
                       void** out) {
  Call call(device, name);
  if (call.refused()) return call.status;
  void* memory = std::malloc(nbytes ? nbytes : 1);
  if (!memory)
    return device_fails(DeviceStatus::OutOfMemory, std::string(name) + "(): no memory for " +
                                                       std::to_string(nbytes) + " bytes");
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
      return call.invalid(hex(ptr) + " is not what the device allocated by its counterpart, or "
                                     "was freed before");
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

DeviceStatus stream_create(Device* device, int, bool blocking, Stream* out) {
  Call call(device, "stream_create");
  if (call.refused()) return call.status;
  join_ended(call.device);
  *out = add_stream(call.device, call.device->next_stream++, blocking);
  return DeviceStatus::Ok;
}

DeviceStatus stream_destroy(Device* device, Stream handle) {
  Call call(device, "stream_destroy");
  if (call.refused()) return call.status;
  const auto stream = call.stream(handle);
  if (!stream) return call.status;
  if (handle == 0) return call.invalid("the legacy stream cannot be destroyed");
  close_stream(stream);
  call.device->destroyed.push_back(stream);
  call.device->streams.erase(handle);
  join_ended(call.device);
  return DeviceStatus::Ok;
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
  if (nbytes && !(dst_known && src_known) && !captured) {  // pageable memory
    call.synchronize({{stream, stream->given}});
    call.refused();
  }
  return call.status;
}

DeviceStatus event_create(Device* device, Event* out) {
  Call call(device, "event_create");
  if (call.refused()) return call.status;
  *out = call.device->next_event++;
  call.device->events[*out] = std::make_shared<EventState>();
  return DeviceStatus::Ok;
}

DeviceStatus timed_event_create(Device* device, Event* out) {
  Call call(device, "timed_event_create");
  if (call.refused()) return call.status;
  *out = call.device->next_event++;
  const auto event = std::make_shared<EventState>();
  event->is_timed = true;
  call.device->events[*out] = event;
  return DeviceStatus::Ok;
}

DeviceStatus event_record(Device* device, Event handle, Stream on) {
  Call call(device, "event_record");
  if (call.refused()) return call.status;
  const auto event = call.event(handle);
  const auto stream = event ? call.stream(on) : nullptr;
  if (!stream) return call.status;
  auto record = std::make_shared<Record>();
  record->is_timed = event->is_timed;
  if (stream->capture && stream->capture->active) {
    record->captured = true;
    record->capture = stream->capture;
  }
  event->latest = record;
  Command command;
  command.kind = Kind::Record;
  command.record = std::move(record);
  call.give(stream, std::move(command));
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

DeviceStatus event_destroy(Device* device, Event handle) {
  Call call(device, "event_destroy");
  if (call.refused()) return call.status;
  if (call.event(handle)) call.device->events.erase(handle);
  return call.status;
}

DeviceStatus stream_wait_event(Device* device, Stream waits, Event handle) {
  Call call(device, "stream_wait_event");
  if (call.refused()) return call.status;
  const auto event = call.event(handle);
  const auto stream = event ? call.stream(waits) : nullptr;
  if (!stream || !event->latest) return call.status;
  const auto origin = event->latest->capture.lock();
  const bool from_capture = origin && origin->active;
  if (from_capture && (!stream->capture || !stream->capture->active)) stream->capture = origin;
  if (!(from_capture && stream->capture == origin) &&
      call.breaks(stream->capture, "of a stream that is captured for an event that is not of the "
                                   "capture"))
    return call.status;
  if (!from_capture && event->latest->captured)
    return call.invalid("event " + std::to_string(handle) +
                        " was recorded in a capture that has ended: it happens in no stream");
  Command command;
  command.kind = Kind::WaitEvent;
  command.record = event->latest;
  call.give(stream, std::move(command));
  return call.status;
}

DeviceStatus flag_command(Device* device, const char* name, Kind kind, Stream handle,
                          std::uint32_t* flag, std::uint32_t value) {
  Call call(device, name);
  if (call.refused()) return call.status;
  if (!device->memory_flags) return device_fails(DeviceStatus::Unsupported, kNoFlags);
  const auto stream = call.stream(handle);
  if (!stream) return call.status;
  if (reinterpret_cast<std::uint64_t>(flag) % sizeof(*flag))
    return call.invalid("the flag at " + hex(flag) + " is not aligned to 4 bytes");
  if (!call.on_device(flag, sizeof(*flag))) return call.status;
  Command command;
  command.kind = kind;
  command.dst = flag;
  command.value = value;
  call.give(stream, std::move(command));
  return call.status;
}

DeviceStatus write_value32(Device* device, Stream stream, std::uint32_t* flag,
                           std::uint32_t value) {
  return flag_command(device, "write_value32", Kind::Write, stream, flag, value);
}
DeviceStatus wait_value32_geq(Device* device, Stream stream, std::uint32_t* flag,
                              std::uint32_t value) {
  return flag_command(device, "wait_value32_geq", Kind::Wait, stream, flag, value);
}

DeviceStatus launch(Device* device, const char* name, Command command, Stream handle) {
  Call call(device, name);
  if (call.refused()) return call.status;
  const auto stream = call.stream(handle);
  if (!stream || !call.on_device(command.dst, command.nbytes) ||
      !call.on_device(command.src, command.nbytes))
    return call.status;
  if (command.boxes && !call.on_device(command.boxes->table, command.boxes->table_nbytes))
    return call.status;
  call.give(stream, std::move(command));
  return call.status;
}

DeviceStatus launch_reduce(Device* device, RedOp op, DType dtype, void* dst, const void* src,
                           std::size_t count, Stream stream) {
  if (!combine_for(dtype, op))
    return device_fails(DeviceStatus::Unsupported,
                        "launch_reduce(): the reduction is not defined for the type");
  Command command;
  command.kind = Kind::Reduce;
  command.op = op;
  command.dtype = dtype;
  command.dst = dst;
  command.src = src;
  command.nbytes = count * item_size(dtype);
  return launch(device, "launch_reduce", std::move(command), stream);
}

DeviceStatus launch_copy(Device* device, void* dst, const void* src, std::size_t nbytes,
                         Stream stream) {
  Command command;
  command.dst = dst;
  command.src = src;
  command.nbytes = nbytes;
  return launch(device, "launch_copy", std::move(command), stream);
}

DeviceStatus launch_scaled_sum(Device* device, DType dtype, void* dst, const void* src,
                               std::size_t count, unsigned which, Scale factor, Stream stream) {
  if (const char* why = why_no_scaled_sum(dtype, which))
    return device_fails(DeviceStatus::Unsupported, why);
  Command command;
  command.kind = Kind::ScaledSum;
  command.dtype = dtype;
  command.dst = dst;
  command.src = src;
  command.nbytes = count * item_size(dtype);
  command.value = which;
  command.factor = factor;
  return launch(device, "launch_scaled_sum", std::move(command), stream);
}

DeviceStatus launch_divide(Device* device, DType dtype, void* dst, std::size_t count,
                           std::int64_t divisor, Stream stream) {
  if (const char* why = why_no_divide(dtype, divisor))
    return device_fails(DeviceStatus::Unsupported, why);
  Command command;
  command.kind = Kind::Divide;
  command.dtype = dtype;
  command.dst = dst;
  command.src = dst;
  command.nbytes = count * item_size(dtype);
  command.factor.integer = divisor;
  return launch(device, "launch_divide", std::move(command), stream);
}

DeviceStatus launch_boxes(Device* device, const BoxLaunch& boxes, Stream stream) {
  if (const char* why = why_no_launch(boxes))
    return device_fails(DeviceStatus::Unsupported, std::string("launch_boxes(): ") + why);
  Command command;
  command.kind = Kind::Boxes;
  command.dst = boxes.buffer;
  command.src = boxes.buffer;
  command.nbytes = boxes.buffer_nbytes;
  command.boxes = std::make_shared<const BoxLaunch>(boxes);
  return launch(device, "launch_boxes", std::move(command), stream);
}

DeviceStatus launch_host(Device* device, Stream stream, HostFunction function, void* argument) {
  Command command;
  command.kind = Kind::HostFunction;
  command.function = function;
  command.argument = argument;
  return launch(device, "launch_host", std::move(command), stream);
}

DeviceStatus launch_foreign(Device* device, const ForeignKernel& kernel, Stream handle) {
  Call call(device, "launch_foreign");
  if (call.refused()) return call.status;
  const auto stream = call.stream(handle);
  if (!stream) return call.status;
  for (const ForeignRange& range : kernel.ranges)
    if (!call.on_device(range.at, range.nbytes)) return call.status;
  Command command;
  command.kind = Kind::Foreign;
  command.foreign = std::make_shared<const ForeignKernel>(kernel);
  call.give(stream, std::move(command));
  return call.status;
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

struct Ticket {
  std::uint64_t magic, base;
};
constexpr std::uint64_t kMagic = 0x636f6d6d72742d32u;

DeviceStatus ipc_export(Device* device, const void* ptr, IpcHandle* out, std::size_t* offset) {
  Call call(device, "ipc_export");
  if (call.refused()) return call.status;
  std::lock_guard<std::mutex> guard(blocks().mutex);
  const auto* found = blocks().find(ptr);
  if (!found || found->second.kind != MemoryKind::Device || found->second.owner != call.device)
    return call.invalid(hex(ptr) + " is not memory that the device allocated by alloc()");
  const Ticket ticket{kMagic, found->first};
  *out = {};
  std::memcpy(out->bytes, &ticket, sizeof(ticket));
  *offset = reinterpret_cast<std::uint64_t>(ptr) - found->first;
  return DeviceStatus::Ok;
}

DeviceStatus ipc_open(Device* device, const IpcHandle* handle, void** base) {
  Call call(device, "ipc_open");
  if (call.refused()) return call.status;
  Ticket ticket;
  std::memcpy(&ticket, handle->bytes, sizeof(ticket));
  if (ticket.magic != kMagic) return call.invalid("the handle is not one of ipc_export()");
  std::lock_guard<std::mutex> guard(blocks().mutex);
  const auto found = blocks().by_base.find(ticket.base);
  if (found == blocks().by_base.end() || found->second.kind != MemoryKind::Device)
    return call.invalid("the memory of the handle was freed");
  if (found->second.owner == call.device)
    return call.invalid("the handle is of this process itself");
  if (!found->second.opened_by.insert(call.device).second)
    return call.invalid("the handle is open already: a process opens it once");
  *base = reinterpret_cast<void*>(ticket.base);
  return DeviceStatus::Ok;
}

DeviceStatus ipc_close(Device* device, void* base) {
  Call call(device, "ipc_close");
  if (call.refused()) return call.status;
  std::lock_guard<std::mutex> guard(blocks().mutex);
  auto* found = blocks().find(base);
  if (!found || !found->second.opened_by.erase(call.device))
    return call.invalid(hex(base) + " is not open");
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

const DeviceApi kTable = {
    "threads",     alloc,          free_,         pinned_alloc,       pinned_free,
    stream_create, stream_destroy, stream_synchronize, memcpy_async,  event_create,
    event_record,  event_query,    event_destroy, stream_wait_event,  timed_event_create,
    event_elapsed, write_value32,
    wait_value32_geq, launch_reduce, launch_copy, launch_scaled_sum, launch_divide,
    launch_boxes,  launch_host,    load_kernels,  ptr_attributes,     is_capturing,
    exchange_capture_mode, begin_capture, end_capture, capture_id,    event_record_external,
    stream_wait_external, graph_launch, graph_destroy, ipc_export,    ipc_open,
    ipc_close,     last_device_error, host_access, flag_load,         flag_store,
    nullptr,       nullptr,        pause,         launch_foreign,     make_current_here,
};

}  // namespace

const DeviceApi& table() { return kTable; }

}  // namespace commrt::threaded
