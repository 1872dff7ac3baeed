// SPDX-License-Identifier: Apache-2.0
// Commands of simulated streams: when they may run, what they do, and what they order.
#include <atomic>
#include <cstring>

#include "devices/device_error.hpp"
#include "devices/sim_world.hpp"

namespace commrt::sim {

namespace {

std::uint32_t load(const void* flag) {
  return __atomic_load_n(static_cast<const std::uint32_t*>(flag), __ATOMIC_ACQUIRE);
}

// Returns the record that a wait waits for. If wait_keeps_record is off, that is the event's
// latest one.
const Record* awaited(const Command& command, bool keeps) {
  return keeps ? command.record.get() : command.event->latest.get();
}

}  // namespace

DeviceStatus World::check_operand(SimDevice* device, const void* ptr, std::size_t nbytes,
                                  bool* known) {
  const auto address = reinterpret_cast<std::uint64_t>(ptr);
  Allocation* allocation = memory.find(address);
  *known = !memory.is_pageable(allocation);
  if (!*known || !nbytes) return DeviceStatus::Ok;
  const std::string what = std::to_string(nbytes) + " bytes at " + hex(address) + " of " +
                           allocation->name();
  if (allocation->freed) return device_fails(DeviceStatus::Invalid, what + ": it was freed");
  if (nbytes > allocation->base + allocation->nbytes - address)
    return device_fails(DeviceStatus::Invalid,
                        what + " end behind it: it has " + std::to_string(allocation->nbytes) +
                            " bytes from " + hex(allocation->base));
  if (allocation->kind == MemoryKind::Device && allocation->device != device->index &&
      !allocation->mapped_by.count(device->index))
    return device_fails(DeviceStatus::Invalid, what + ": it belongs to device '" +
                                                   devices[allocation->device]->name +
                                                   "', and '" + device->name +
                                                   "' has not opened it by ipc_open()");
  return DeviceStatus::Ok;
}

DeviceStatus World::give(Entry& entry, StreamState* stream, Command command) {
  SimDevice* device = stream->device;
  if (stream->capture && stream->capture->active) {
    Capture& capture = *stream->capture;
    if (capture.invalidated)
      return device_fails(DeviceStatus::Capturing,
                          "the capture of " + actor_name(stream->actor) + " was lost");
    capture.recording->take(stream->handle, std::move(command));
    return DeviceStatus::Ok;
  }
  if (options.most_commands != 0) {
    const auto most = static_cast<std::uint64_t>(options.most_commands);
    const auto has_room = [stream, most] {
      return stream->device->failed() || stream->given - stream->done < most;
    };
    const auto text = [this, stream] {
      return "until " + actor_name(stream->actor) + " takes a command: it holds " +
             std::to_string(options.most_commands);
    };
    const DeviceStatus status = has_room() ? DeviceStatus::Ok : block(entry, has_room, text);
    if (status != DeviceStatus::Ok) return status;
  }
  if (options.legacy_stream_syncs && stream->handle == 0) {
    for (auto& [handle, other] : device->streams) {
      if (!other->blocking || handle == 0) continue;
      if (other->capture && other->capture->active) {
        other->capture->invalidated = true;
        return device_fails(DeviceStatus::Capturing,
                            "a command of the legacy stream waits for " +
                                actor_name(other->actor) +
                                ", which is captured; the capture is lost");
      }
      if (other->given) command.after.emplace_back(other, other->given);
    }
  } else if (options.legacy_stream_syncs && stream->blocking) {
    auto& legacy = device->streams[0];
    if (legacy->given) command.after.emplace_back(legacy, legacy->given);
  }
  Host* host = entry.host;
  if (!host->known) host->known = std::make_shared<Clock>(host->clock);
  command.known = host->known;
  command.host = host->actor;
  command.host_tick = host->tick++;
  command.stream = stream;
  command.number = ++commands;
  ++stream->given;
  stream->queue->commands.push_back(std::move(command));
  return DeviceStatus::Ok;
}

bool World::can_run(const Command& command) const {
  for (auto& [stream, number] : command.after)
    if (stream->done < number) return false;
  if (command.kind == Kind::WaitEvent) {
    const Record* record = awaited(command, options.wait_keeps_record);
    return !record || record->done;
  }
  if (command.kind == Kind::ForeignEnd) return command.foreign->may_end(command.foreign->argument);
  if (command.kind == Kind::Wait) {
    // One whose flag is gone runs, and is reported.
    auto& all = const_cast<Memory&>(memory);
    if (all.is_pageable(all.find(reinterpret_cast<std::uint64_t>(command.dst)))) return true;
    return flag_reached(load(command.dst), command.value);
  }
  return true;
}

std::string World::why_waiting(const Command& command) const {
  std::string text = kind_name(command.kind);
  text += " (command " + std::to_string(command.number) + ") waits ";
  for (auto& [stream, number] : command.after)
    if (stream->done < number) return text + "for " + actor_name(stream->actor);
  if (command.kind == Kind::Wait)
    return text + "until the flag at " + hex(command.dst) + " comes to " +
           std::to_string(command.value) + "; it is " + std::to_string(load(command.dst));
  if (command.kind == Kind::ForeignEnd) return text + "for what it is to meet";
  const Record* record =
      command.event ? awaited(command, options.wait_keeps_record) : nullptr;
  if (record)
    return text + "for event_record (command " + std::to_string(record->number) + ") of " +
           actor_name(record->actor);
  return text + "for nothing";
}

void World::run(Queue& queue) {
  Command command = std::move(queue.commands.front());
  queue.commands.pop_front();
  StreamState* stream = command.stream;
  SimDevice* device = stream->device;
  digest = (digest ^ command.number) * 0x100000001b3u + 7;
  if (device->fail_in && --device->fail_in == 0) {
    fail(device, "an injected error at " + std::string(kind_name(command.kind)) + " (command " +
                     std::to_string(command.number) + ") of " + actor_name(stream->actor));
    return;
  }
  stream->clock.raise(stream->actor, ++stream->tick);
  if (command.known != stream->joined) {
    stream->clock.join(*command.known);
    stream->joined = command.known;
  }
  stream->clock.raise(command.host, command.host_tick);
  for (auto& [other, number] : command.after) stream->clock.join(other->clock);
  execute(command, stream);
  ++stream->done;
  notice_end(stream);
}

// Notes an access of a running command; false where the memory is gone.
bool World::operand(Command& command, const void* ptr, std::size_t nbytes, bool writes,
                    bool known) {
  StreamState* stream = command.stream;
  const Access access{stream->actor, stream->tick, kind_name(command.kind), command.number};
  bool now_known = false;
  const DeviceStatus status = check_operand(stream->device, ptr, nbytes, &now_known);
  if (known && (status != DeviceStatus::Ok || !now_known)) {
    const std::string why = now_known ? device_error() : "freed long ago";
    report("gone: " + describe(access) + (writes ? " writes to " : " reads ") + why +
           ", after the command was given: keep memory until its commands have run");
    return false;
  }
  if (command.kind != Kind::Write && command.kind != Kind::Wait)
    touch(ptr, nbytes, writes, access, stream->clock);
  return true;
}

void World::execute(Command& command, StreamState* stream) {
  const auto reads = [&] {
    return operand(command, command.src, command.nbytes, false, command.src_known);
  };
  const auto writes = [&] {
    return operand(command, command.dst, command.nbytes, true, command.dst_known);
  };
  switch (command.kind) {
    case Kind::Copy:
    case Kind::KernelCopy:
    case Kind::Reduce:
    case Kind::ScaledSum: {
      const bool both = reads() & writes();
      if (both) pretended::run_on_host(command);
      break;
    }
    case Kind::Divide:
      if (writes()) pretended::run_on_host(command);
      break;
    case Kind::Stage:
      if (writes() && command.nbytes)
        std::memcpy(command.dst, command.staged.data(), command.nbytes);
      break;
    case Kind::Boxes: {
      struct Running {
        World* world;
        Command* command;
      } running{this, &command};
      const auto touch = [](void* context, const void* ptr, std::size_t nbytes, bool writes_it) {
        auto* now = static_cast<Running*>(context);
        return now->world->operand(*now->command, ptr, nbytes, writes_it, true);
      };
      if (const char* why = run_boxes(*command.boxes, touch, &running)) {
        const Access access{stream->actor, stream->tick, kind_name(command.kind), command.number};
        report("table: " + describe(access) + " finds no table at " +
               hex(command.boxes->table) + " (" + why +
               "): let the launch come after the copy of its table, by a stream or an event");
      }
      break;
    }
    case Kind::Record:
      command.record->clock.copy(stream->clock);
      command.record->done = true;
      ++changes;
      break;
    case Kind::WaitEvent:
      if (const Record* record = awaited(command, options.wait_keeps_record))
        stream->clock.join(record->clock);
      break;
    case Kind::Write:
      if (!writes()) break;
      memory.find(reinterpret_cast<std::uint64_t>(command.dst))
          ->flags[reinterpret_cast<std::uint64_t>(command.dst)]
          .write(command.value, stream->clock);
      __atomic_store_n(static_cast<std::uint32_t*>(command.dst), command.value,
                       __ATOMIC_RELEASE);
      ++changes;
      break;
    case Kind::Wait: {
      if (!operand(command, command.dst, command.nbytes, false, true)) break;
      auto& flags = memory.find(reinterpret_cast<std::uint64_t>(command.dst))->flags;
      const auto flag = flags.find(reinterpret_cast<std::uint64_t>(command.dst));
      if (flag == flags.end()) break;
      if (const Clock* known = flag->second.first_to_reach(command.value))
        stream->clock.join(*known);
      break;
    }
    case Kind::HostFunction:
      pretended::call_host_function(command.function, command.argument);
      break;
    case Kind::Foreign: begin_foreign(command, stream); break;
    case Kind::ForeignEnd: end_foreign(command, stream); break;
  }
}

void World::notice_end(StreamState* stream) {
  if (!stream->destroyed || stream->done < stream->given) return;
  free_actor(stream->actor, stream->tick);
  stream->device->streams.erase(stream->handle);  // ends the stream
}

void World::fail(SimDevice* device, std::string why) {
  device->failure = "device '" + device->name + "' failed: " + why;
  for (Queue& queue : device->queues) queue.commands.clear();
  ++changes;
}

}  // namespace commrt::sim
