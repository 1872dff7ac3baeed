// SPDX-License-Identifier: Apache-2.0
// Calls of a simulated device that host threads make about memory, locks and their captures.
#include "devices/sim_call.hpp"

namespace commrt::sim {

// --- host threads ---

DeviceStatus host_access(Device* device, const void* ptr, std::size_t nbytes, bool writes) {
  COMMRT_ENTER(device, "host_access");
  if (call.status != DeviceStatus::Ok) return call.status;
  Allocation* found = call.world->memory.find(reinterpret_cast<std::uint64_t>(ptr));
  // Libraries that take device memory read and write it where the device is current.
  if (found->kind == MemoryKind::Device && current_device() != device)
    return call.invalid(hex(ptr) + " is device memory, which a host thread cannot touch");
  bool known = false;
  call.status = call.world->check_operand(call.device, ptr, nbytes, &known);
  if (call.status != DeviceStatus::Ok) return call.status;
  call.world->touch(ptr, nbytes, writes,
                    Access{call.host->actor, call.host->tick,
                           writes ? "a host write" : "a host read", 0},
                    call.host->clock);
  return DeviceStatus::Ok;
}

DeviceStatus flag_load(Device* device, const std::uint32_t* flag, std::uint32_t* value) {
  COMMRT_ENTER(device, "flag_load");
  if (call.status != DeviceStatus::Ok || !call.on_device(flag, sizeof(*flag))) return call.status;
  const auto address = reinterpret_cast<std::uint64_t>(flag);
  auto& flags = call.world->memory.find(address)->flags;
  const auto found = flags.find(address);
  *value = __atomic_load_n(flag, __ATOMIC_ACQUIRE);
  const Clock* known = found == flags.end() ? nullptr : found->second.seen(*value);
  if (known) call.host->learn(*known);
  return DeviceStatus::Ok;
}

DeviceStatus flag_store(Device* device, std::uint32_t* flag, std::uint32_t value) {
  COMMRT_ENTER(device, "flag_store");
  if (call.status != DeviceStatus::Ok || !call.on_device(flag, sizeof(*flag))) return call.status;
  const auto address = reinterpret_cast<std::uint64_t>(flag);
  Clock clock = call.host->clock;
  clock.raise(call.host->actor, call.host->tick++);
  call.world->memory.find(address)->flags[address].write(value, clock);
  __atomic_store_n(flag, value, __ATOMIC_RELEASE);
  ++call.world->changes;
  return DeviceStatus::Ok;
}

DeviceStatus lock(Device* device, const void* token) {
  COMMRT_ENTER(device, "lock");
  if (call.status != DeviceStatus::Ok) return call.status;
  World& world = *call.world;
  if (world.locks.count(token) && world.locks[token] == call.host)
    return call.invalid("this thread holds the lock already");
  call.status = world.block(
      call, [&world, token] { return !world.locks.count(token); },
      [&world, token] {
        return "for a lock that host thread '" + world.locks[token]->name + "' holds";
      });
  if (call.status != DeviceStatus::Ok) return call.status;
  world.locks[token] = call.host;
  call.host->learn(world.lock_clocks[token]);
  return DeviceStatus::Ok;
}

DeviceStatus unlock(Device* device, const void* token) {
  COMMRT_ENTER(device, "unlock");
  World& world = *call.world;
  const auto held = world.locks.find(token);
  if (held == world.locks.end() || held->second != call.host)
    return call.invalid("this thread does not hold the lock");
  Clock& clock = world.lock_clocks[token];
  clock.copy(call.host->clock);
  clock.raise(call.host->actor, call.host->tick++);
  world.locks.erase(held);
  return call.status;
}

DeviceStatus exchange_capture_mode(Device* device, CaptureMode* mode) {
  COMMRT_ENTER(device, "exchange_capture_mode");
  std::swap(call.host->capture_mode, *mode);
  return call.status;
}

DeviceStatus pause(Device* device) {
  COMMRT_ENTER(device, "pause");
  if (call.status != DeviceStatus::Ok) return call.status;
  World& world = *call.world;
  Host* host = call.host;
  call.status = world.block(
      call, [&world, host] { return world.changes != host->seen; },
      [] { return std::string("in pause() until a flag or an event changes"); });
  host->seen = world.changes;
  return call.status;
}

}  // namespace commrt::sim
