// SPDX-License-Identifier: Apache-2.0
// Kernels of pretended libraries on simulated devices: two commands, between which one is at the
// head of its stream, and what orders their accesses.
#include "devices/sim_call.hpp"

namespace commrt::sim {

namespace {
// Far more than can be under way: what was met long ago has ended.
constexpr std::size_t kMostRemembered = 1 << 16;
}  // namespace

DeviceStatus Call::give_foreign(const std::shared_ptr<StreamState>& to,
                                std::shared_ptr<const ForeignKernel> kernel) {
  if (kernel->holds != nullptr) {
    // Threads that call the library for one device must take turns, too.
    const auto* const library = static_cast<const char*>(kernel->holds) + 1;
    world->touch(library, 1, true, Access{host->actor, host->tick, "launch_foreign()", 0},
                 host->clock);
  }
  for (const Kind kind : {Kind::Foreign, Kind::ForeignEnd}) {
    Command command;
    command.kind = kind;
    command.foreign = kernel;
    status = give(to, std::move(command));
    if (status != DeviceStatus::Ok) break;
  }
  return status;
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
  pretended::call_host_function(kernel.begin, kernel.argument);
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
  pretended::call_host_function(kernel.end, kernel.argument);
  ++changes;
}

}  // namespace commrt::sim
