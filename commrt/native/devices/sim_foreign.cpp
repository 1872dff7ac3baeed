// SPDX-License-Identifier: Apache-2.0
// Kernels of pretended libraries on simulated devices: two commands, between which one is at the
// head of its stream, and what orders their accesses.
#include "devices/sim_call.hpp"

namespace commrt::sim {

namespace {
// Far more than can be under way: what was met long ago has ended.
constexpr std::size_t kMostRemembered = 1 << 16;
}  // namespace

DeviceStatus launch_foreign(Device* device, const ForeignKernel& kernel, Stream handle) {
  COMMRT_ENTER(device, "launch_foreign");
  if (call.refused()) return call.status;
  const auto stream = call.stream(handle);
  if (!stream) return call.status;
  for (const ForeignRange& range : kernel.ranges)
    if (!call.on_device(range.at, range.nbytes)) return call.status;
  if (kernel.holds != nullptr) {
    // Threads that call the library for one device must take turns, too.
    const auto* const library = static_cast<const char*>(kernel.holds) + 1;
    call.world->touch(library, 1, true,
                      Access{call.host->actor, call.host->tick, "launch_foreign()", 0},
                      call.host->clock);
  }
  Command command;
  command.foreign = std::make_shared<const ForeignKernel>(kernel);
  for (const Kind kind : {Kind::ForeignBegin, Kind::ForeignEnd}) {
    Command one = command;
    one.kind = kind;
    call.status = call.world->give(call, stream.get(), std::move(one));
    if (call.status != DeviceStatus::Ok) break;
  }
  return call.status;
}

// Nobody else may have it meanwhile, whether or not anybody had in this run.
void World::hold(const Command& command, StreamState* stream) {
  if (command.foreign->holds == nullptr) return;
  const Access access{stream->actor, stream->tick, kind_name(command.kind), command.number};
  touch(command.foreign->holds, 1, true, access, stream->clock);
}

void World::begin_foreign(Command& command, StreamState* stream) {
  const ForeignKernel& kernel = *command.foreign;
  hold(command, stream);
  for (const ForeignRange& range : kernel.ranges)
    if (!range.writes) operand(command, range.at, range.nbytes, false, true);
  while (foreign_begun.size() > kMostRemembered) foreign_begun.erase(foreign_begun.begin());
  foreign_begun[kernel.id] = stream->clock;
  in_host_function() = true;
  kernel.begin(kernel.argument);
  in_host_function() = false;
  ++changes;
}

void World::end_foreign(Command& command, StreamState* stream) {
  const ForeignKernel& kernel = *command.foreign;
  for (const std::uint64_t id : kernel.met(kernel.argument)) {
    const auto other = foreign_begun.find(id);
    if (other != foreign_begun.end()) stream->clock.join(other->second);
  }
  hold(command, stream);
  for (const ForeignRange& range : kernel.ranges)
    if (range.writes) operand(command, range.at, range.nbytes, true, true);
  in_host_function() = true;
  kernel.end(kernel.argument);
  in_host_function() = false;
  ++changes;
}

}  // namespace commrt::sim
