// SPDX-License-Identifier: Apache-2.0
// The table of a simulated device, and its own calls: memory, waits of the host, copies.
#include <algorithm>

#include "devices/sim_call.hpp"

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
  // Streams get work queues in turn, whatever is in them.
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
                            " bytes on device '" + call.device->name +
                            "': free other memory first, or ask for less");
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
    return call.invalid(hex(ptr) + " was freed before, or is not what device '" +
                        call.device->name + "' allocated by its counterpart: free each pointer "
                        "once, by the call that belongs to its alloc");
  if (syncs) {
    call.status = world.sync_device(call, call.device, name);
    if (call.refused()) return call.status;
  }
  Allocation* allocation = ours();  // others may have had their turns
  if (!allocation)
    return call.invalid(hex(ptr) + " was freed by another thread meanwhile: let one thread free it");
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

DeviceStatus stream_synchronize(Device* device, Stream handle) {
  COMMRT_ENTER(device, "stream_synchronize");
  const auto stream = call.stream(handle);
  if (!stream) return call.status;
  if (call.breaks(stream->capture, "of a stream that is captured")) return call.status;
  if (call.forbidden()) return call.status;
  call.status = call.world->sync_stream(call, stream.get(), "in stream_synchronize()");
  call.refused();
  return call.status;
}

bool is_host_memory(World& world, const void* ptr) {
  const Allocation* const found = world.memory.find(reinterpret_cast<std::uint64_t>(ptr));
  return world.memory.is_pageable(found) || found->kind == MemoryKind::Pinned;
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
  const bool captured = stream->capture && stream->capture->active;
  const bool between_hosts = nbytes && is_host_memory(world, dst) && is_host_memory(world, src);
  if (between_hosts && world.options.host_copies_block && !captured) {
    call.status = world.give(call, stream.get(), std::move(command));
    if (call.status != DeviceStatus::Ok) return call.status;
    call.status = world.sync_stream(call, stream.get(),
                                    pageable ? "in a pageable memcpy_async()"
                                             : "in memcpy_async() between host memory");
    call.refused();
    return call.status;
  }
  if (!pageable || !world.options.pageable_copies_block || captured)
    return world.give(call, stream.get(), std::move(command));
  const Access access{call.host->actor, call.host->tick, "memcpy_async", 0};
  if (command.dst_known) {
    // A copy from pageable memory waits for the stream and takes a copy of the values, which is
    // copied later.
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

// A timed event orders as any other does; its time is asked for in vain.
DeviceStatus event_elapsed(Device* device, Event from, Event to, double*) {
  COMMRT_ENTER(device, "event_elapsed");
  if (call.refused() || !call.event(from) || !call.event(to)) return call.status;
  return device_fails(DeviceStatus::Unsupported,
                      "event_elapsed(): commands of a simulated device take no time");
}

DeviceStatus event_query(Device* device, Event handle) {
  COMMRT_ENTER(device, "event_query");
  const auto event = call.event(handle);
  if (!event) return call.status;
  const auto record = event->latest;
  const auto capture = record ? record->capture.lock() : nullptr;
  if (call.world->options.capture_forbids &&
      call.breaks(capture, "of an event that was recorded in a stream that is captured"))
    return call.status;
  if (call.forbidden()) return call.status;
  if (!record) return DeviceStatus::Ok;
  if (!record->done) return DeviceStatus::NotReady;
  call.host->learn(record->clock);
  return DeviceStatus::Ok;
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

constexpr DeviceApi make_table() {
  DeviceApi api{};
  api.kind = "simulated";
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
  api.lock = lock;
  api.unlock = unlock;
  api.pause = pause;
  return api;
}

constexpr DeviceApi kTable = make_table();

}  // namespace

// Waits for the device where a kernel is launched for the first time: that loads it.
bool Call::made_ready(const Command& command) {
  if (!world->options.first_launch_syncs || device->kernels_loaded) return true;
  auto kernel = std::make_pair(int(command.op), int(command.dtype));
  if (command.kind == Kind::KernelCopy) kernel = {-1, -1};
  if (command.kind == Kind::ScaledSum) kernel.first = -100;
  if (command.kind == Kind::Divide) kernel.first = -101;
  if (command.boxes)
    kernel = {-2 - static_cast<int>(command.boxes->kind), int(command.boxes->dtype)};
  if (!device->launched.insert(kernel).second) return true;
  status = world->sync_device(*this, device, "in the first launch of a kernel, which loads it,");
  return !refused();
}

SimDevice* World::add_device(std::string name, int ordinal) {
  std::lock_guard<std::mutex> guard(mutex);
  auto made = std::make_unique<SimDevice>();
  SimDevice* device = made.get();
  device->api = &kTable;
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
