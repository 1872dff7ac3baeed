// SPDX-License-Identifier: Apache-2.0
// The table of a simulated device: memory, streams, events, commands.
#include <algorithm>

#include "devices/sim_call.hpp"
#include "kernels/kernels.hpp"

namespace commrt::sim {

Stream add_stream(SimDevice* device, Stream handle, bool blocking) {
  auto stream = std::make_shared<StreamState>();
  stream->device = device;
  stream->handle = handle;
  stream->blocking = blocking;
  stream->actor = device->world->new_actor(
      (handle ? "stream " + std::to_string(handle) : std::string("the legacy stream")) +
          " of device '" + device->name + "'",
      &stream->tick);
  // As streams get work queues: in turn, whatever is in them.
  const auto number = static_cast<std::size_t>(device->next_queue++);
  const auto most = static_cast<std::size_t>(device->world->options.queues);
  if (device->queues.size() < most || !most) device->queues.emplace_back();
  stream->queue = &device->queues[most ? number % most : number];
  device->streams[handle] = std::move(stream);
  return handle;
}

namespace {

DeviceStatus alloc_any(Device* device, const char* name, MemoryKind kind, bool syncs,
                       std::size_t nbytes, void** out) {
  COMMRT_ENTER(device, name);
  if (call.forbidden()) return call.status;
  if (syncs) {
    call.status = call.world->sync_device(call, call.device, name);
    if (call.refused()) return call.status;
  }
  World& world = *call.world;
  Allocation* made = world.memory.alloc(kind, call.device->index, nbytes, world.options.poison);
  if (!made)
    return device_fails(DeviceStatus::OutOfMemory,
                        std::string(name) + "(): no memory for " + std::to_string(nbytes) +
                            " bytes");
  *out = reinterpret_cast<void*>(made->base);
  return DeviceStatus::Ok;
}

DeviceStatus free_any(Device* device, const char* name, MemoryKind kind, bool syncs, void* ptr) {
  COMMRT_ENTER(device, name);
  if (call.forbidden()) return call.status;
  if (!ptr) return DeviceStatus::Ok;
  World& world = *call.world;
  const auto address = reinterpret_cast<std::uint64_t>(ptr);
  const auto ours = [&]() -> Allocation* {
    Allocation* found = world.memory.find(address);
    const bool is = !world.memory.is_pageable(found) && !found->freed && found->kind == kind &&
                    found->base == address && found->device == call.device->index;
    return is ? found : nullptr;
  };
  if (!ours())
    return call.invalid(hex(ptr) + " is not what device '" + call.device->name +
                        "' allocated by its counterpart, or was freed before");
  if (syncs) {
    call.status = world.sync_device(call, call.device, name);
    if (call.refused()) return call.status;
  }
  Allocation* allocation = ours();  // others may have had their turns
  if (!allocation) return call.invalid(hex(ptr) + " was freed by another thread meanwhile");
  if (world.options.ipc_checks)
    for (int by : allocation->mapped_by)
      world.report("ipc: device '" + call.device->name + "' frees " + allocation->name() +
                   ", which device '" + world.devices[by]->name +
                   "' still has open: ipc_close() comes first");
  if (!syncs)  // else all that used it has run
    world.touch(ptr, allocation->nbytes, true, Access{call.host->actor, call.host->tick, name, 0},
                call.host->clock);
  world.memory.free(allocation, world.options.poison);
  return DeviceStatus::Ok;
}

const Options& options(Device* device) { return sim(device)->world->options; }

DeviceStatus alloc(Device* device, std::size_t nbytes, void** out) {
  return alloc_any(device, "alloc", MemoryKind::Device, options(device).alloc_syncs, nbytes, out);
}

DeviceStatus free_(Device* device, void* ptr) {
  return free_any(device, "free", MemoryKind::Device, options(device).free_syncs, ptr);
}

DeviceStatus pinned_alloc(Device* device, std::size_t nbytes, void** out) {
  return alloc_any(device, "pinned_alloc", MemoryKind::Pinned,
                   options(device).pinned_alloc_syncs, nbytes, out);
}

DeviceStatus pinned_free(Device* device, void* ptr) {
  return free_any(device, "pinned_free", MemoryKind::Pinned, options(device).pinned_alloc_syncs,
                  ptr);
}

DeviceStatus stream_create(Device* device, int, bool blocking, Stream* out) {
  COMMRT_ENTER(device, "stream_create");
  if (call.refused()) return call.status;
  *out = add_stream(call.device, call.device->next_stream++, blocking);
  return DeviceStatus::Ok;
}

DeviceStatus stream_destroy(Device* device, Stream handle) {
  COMMRT_ENTER(device, "stream_destroy");
  if (call.refused()) return call.status;
  const auto stream = call.stream(handle);
  if (!stream) return call.status;
  if (handle == 0) return call.invalid("the legacy stream cannot be destroyed");
  stream->destroyed = true;
  call.world->notice_end(stream.get());
  return DeviceStatus::Ok;
}

DeviceStatus stream_synchronize(Device* device, Stream handle) {
  COMMRT_ENTER(device, "stream_synchronize");
  const auto stream = call.stream(handle);
  if (!stream) return call.status;
  if (stream->capture && stream->capture->active) {
    stream->capture->invalidated = true;
    return device_fails(DeviceStatus::Capturing,
                        "stream_synchronize() of a stream that is captured; the capture is lost");
  }
  if (call.forbidden()) return call.status;
  call.status = call.world->sync_stream(call, stream.get(), "in stream_synchronize()");
  call.refused();
  return call.status;
}

DeviceStatus memcpy_async(Device* device, void* dst, const void* src, std::size_t nbytes,
                          Stream handle) {
  COMMRT_ENTER(device, "memcpy_async");
  if (call.refused()) return call.status;
  const auto stream = call.stream(handle);
  if (!stream) return call.status;
  World& world = *call.world;
  Command command;
  command.dst = dst;
  command.src = src;
  command.nbytes = nbytes;
  for (const bool first : {true, false}) {
    bool* known = first ? &command.dst_known : &command.src_known;
    call.status = world.check_operand(call.device, first ? dst : src, nbytes, known);
    if (call.status != DeviceStatus::Ok) return call.status;
  }
  const bool pageable = nbytes && !(command.dst_known && command.src_known);
  if (!pageable || !world.options.pageable_copies_block || (stream->capture && stream->capture->active))
    return world.give(call, stream.get(), std::move(command));
  const Access access{call.host->actor, call.host->tick, "memcpy_async", 0};
  if (command.dst_known) {
    // From pageable memory: waits for the stream, takes a copy, and that is copied later.
    call.status = world.sync_stream(call, stream.get(), "in a pageable memcpy_async()");
    if (call.refused()) return call.status;
    world.touch(src, nbytes, false, access, call.host->clock);
    const char* bytes = static_cast<const char*>(src);
    command.staged.assign(bytes, bytes + nbytes);
    command.kind = Kind::Stage;
    command.src_known = false;
    return world.give(call, stream.get(), std::move(command));
  }
  call.status = world.give(call, stream.get(), std::move(command));
  if (call.status != DeviceStatus::Ok) return call.status;
  call.status = world.sync_stream(call, stream.get(), "in a pageable memcpy_async()");
  call.refused();
  return call.status;
}

DeviceStatus event_create(Device* device, Event* out) {
  COMMRT_ENTER(device, "event_create");
  if (call.refused()) return call.status;
  *out = call.device->next_event++;
  call.device->events[*out] = std::make_shared<EventState>();
  return DeviceStatus::Ok;
}

// Orders as any other; its time is asked for in vain.
DeviceStatus timed_event_create(Device* device, Event* out) { return event_create(device, out); }

DeviceStatus event_elapsed(Device* device, Event from, Event to, double*) {
  COMMRT_ENTER(device, "event_elapsed");
  if (call.refused() || !call.event(from) || !call.event(to)) return call.status;
  return device_fails(DeviceStatus::Unsupported,
                      "event_elapsed(): commands of a simulated device take no time");
}

DeviceStatus event_record(Device* device, Event handle, Stream on) {
  COMMRT_ENTER(device, "event_record");
  if (call.refused()) return call.status;
  const auto event = call.event(handle);
  const auto stream = event ? call.stream(on) : nullptr;
  if (!stream) return call.status;
  auto record = std::make_shared<Record>();
  record->actor = stream->actor;
  record->number = call.world->commands + 1;
  if (stream->capture && stream->capture->active) {
    record->captured = true;
    record->capture = stream->capture;
  }
  Command command;
  command.kind = Kind::Record;
  command.record = record;
  command.event = event;
  call.status = call.world->give(call, stream.get(), std::move(command));
  if (call.status == DeviceStatus::Ok) event->latest = std::move(record);
  return call.status;
}

DeviceStatus event_query(Device* device, Event handle) {
  COMMRT_ENTER(device, "event_query");
  const auto event = call.event(handle);
  if (!event) return call.status;
  const auto record = event->latest;
  const auto capture = record ? record->capture.lock() : nullptr;
  if (capture && capture->active && call.world->options.capture_forbids) {
    capture->invalidated = true;
    return device_fails(DeviceStatus::Capturing,
                        "event_query() of an event that was recorded in a stream that is "
                        "captured; the capture is lost");
  }
  if (call.forbidden()) return call.status;
  if (!record) return DeviceStatus::Ok;
  if (!record->done) return DeviceStatus::NotReady;
  call.host->learn(record->clock);
  return DeviceStatus::Ok;
}

DeviceStatus event_destroy(Device* device, Event handle) {
  COMMRT_ENTER(device, "event_destroy");
  if (call.refused() || !call.event(handle)) return call.status;
  call.device->events.erase(handle);
  return DeviceStatus::Ok;
}

DeviceStatus stream_wait_event(Device* device, Stream waits, Event handle) {
  COMMRT_ENTER(device, "stream_wait_event");
  if (call.refused()) return call.status;
  const auto event = call.event(handle);
  const auto stream = event ? call.stream(waits) : nullptr;
  if (!stream) return call.status;
  const auto& record = event->latest;
  if (!record && !call.world->options.unrecorded_wait_passes)
    return call.invalid("event " + std::to_string(handle) +
                        " was never recorded: CUDA would wait for nothing, silently");
  const bool captured = stream->capture && stream->capture->active;
  const auto origin = record ? record->capture.lock() : nullptr;
  const bool from_capture = origin && origin->active;
  if (from_capture && !captured) stream->capture = origin;
  const bool isolated = from_capture && stream->capture == origin;
  if (captured && record && !isolated) {
    stream->capture->invalidated = true;
    return device_fails(DeviceStatus::Capturing,
                        "stream_wait_event() of a stream that is captured for an event that is "
                        "not of the capture; the capture is lost");
  }
  if (!record) return DeviceStatus::Ok;
  if (!from_capture && record->captured)
    return call.invalid("event " + std::to_string(handle) +
                        " was recorded in a capture that has ended: it happens in no stream");
  Command command;
  command.kind = Kind::WaitEvent;
  command.record = record;
  command.event = event;
  return call.world->give(call, stream.get(), std::move(command));
}

DeviceStatus flag_command(Device* device, const char* name, Kind kind, Stream handle,
                          std::uint32_t* flag, std::uint32_t value) {
  COMMRT_ENTER(device, name);
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
  command.dst_known = true;
  command.nbytes = sizeof(*flag);
  command.value = value;
  return call.world->give(call, stream.get(), std::move(command));
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
  COMMRT_ENTER(device, name);
  if (call.refused()) return call.status;
  const auto stream = call.stream(handle);
  if (!stream) return call.status;
  if (!call.on_device(command.dst, command.nbytes) || !call.on_device(command.src, command.nbytes))
    return call.status;
  if (command.boxes && !call.on_device(command.boxes->table, command.boxes->table_nbytes))
    return call.status;
  if (call.world->options.first_launch_syncs && !call.device->kernels_loaded) {
    auto kernel = std::make_pair(int(command.op), int(command.dtype));
    if (command.kind == Kind::KernelCopy) kernel = {-1, -1};
    if (command.kind == Kind::ScaledSum) kernel.first = -100;
    if (command.kind == Kind::Divide) kernel.first = -101;
    if (command.boxes)
      kernel = {-2 - static_cast<int>(command.boxes->kind), int(command.boxes->dtype)};
    if (call.device->launched.insert(kernel).second) {
      call.status = call.world->sync_device(call, call.device,
                                            "in the first launch of a kernel, which loads it,");
      if (call.refused()) return call.status;
    }
  }
  command.dst_known = command.src_known = true;
  return call.world->give(call, stream.get(), std::move(command));
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
  command.kind = Kind::KernelCopy;
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

DeviceStatus launch_host(Device* device, Stream handle, HostFunction function, void* argument) {
  COMMRT_ENTER(device, "launch_host");
  if (call.refused()) return call.status;
  const auto stream = call.stream(handle);
  if (!stream) return call.status;
  Command command;
  command.kind = Kind::HostFunction;
  command.function = function;
  command.argument = argument;
  return call.world->give(call, stream.get(), std::move(command));
}

DeviceStatus load_kernels(Device* device, const void*, std::size_t, const char* const*,
                          std::size_t) {
  COMMRT_ENTER(device, "load_kernels");
  if (call.forbidden()) return call.status;
  if (call.world->options.first_launch_syncs) {
    call.status = call.world->sync_device(call, call.device, "in load_kernels()");
    if (call.refused()) return call.status;
  }
  call.device->kernels_loaded = true;
  return DeviceStatus::Ok;
}

DeviceStatus ptr_attributes(Device* device, const void* ptr, PointerFacts* out) {
  COMMRT_ENTER(device, "ptr_attributes");
  Allocation* found = call.world->memory.find(reinterpret_cast<std::uint64_t>(ptr));
  *out = {};
  if (call.world->memory.is_pageable(found) || found->freed) return call.status;
  out->kind = found->kind;
  out->device = call.world->devices[found->device]->ordinal;
  out->base = found->base;
  out->nbytes = found->nbytes;
  return call.status;
}

}  // namespace

const DeviceApi kSimApi = {
    "simulated",   alloc,          free_,         pinned_alloc,       pinned_free,
    stream_create, stream_destroy, stream_synchronize, memcpy_async,  event_create,
    event_record,  event_query,    event_destroy, stream_wait_event,  timed_event_create,
    event_elapsed, write_value32,
    wait_value32_geq, launch_reduce, launch_copy, launch_scaled_sum, launch_divide,
    launch_boxes,  launch_host,    load_kernels,  ptr_attributes,     is_capturing,
    exchange_capture_mode, begin_capture, end_capture, capture_id,    event_record_external,
    stream_wait_external, graph_launch, graph_destroy, ipc_export,    ipc_open,
    ipc_close,     last_device_error, host_access, flag_load,         flag_store,
    lock,          unlock,         pause,         launch_foreign,     make_current_here,
};

SimDevice* World::add_device(std::string name, int ordinal) {
  std::lock_guard<std::mutex> guard(mutex);
  auto made = std::make_unique<SimDevice>();
  SimDevice* device = made.get();
  device->api = &kSimApi;
  device->world = this;
  device->index = static_cast<int>(devices.size());
  device->ordinal = ordinal < 0 ? device->index : ordinal;
  device->name = std::move(name);
  device->memory_flags = options.memory_flags;
  devices.push_back(std::move(made));
  add_stream(device, 0, true);
  return device;
}

}  // namespace commrt::sim
