// SPDX-License-Identifier: Apache-2.0
// The scheduler of simulated devices: which command or host thread goes on.
#include "devices/sim_world.hpp"

#include "devices/device_error.hpp"

namespace commrt::sim {
namespace {

// The world with host threads that this thread is in, and the host that it is there.
struct Self {
  World* world = nullptr;
  Host* host = nullptr;
};
thread_local Self self;

constexpr std::size_t kMostViolations = 64;

}  // namespace

Entry::Entry(World* in) : world(in), lock(in->mutex) {
  host = self.world == world ? self.host : &world->main_;
}

World::World(const Options& given) : options(given), random_(given.seed), current_(&main_) {
  // Seeds differ in how eager devices are: from hardly ever, to whenever they can.
  const double drawn[] = {0.05, 0.3, 0.5, 0.7, 0.95};
  const double by_seed = drawn[random_.below(5)];
  preempt_ = options.preempt < 0 ? by_seed : options.preempt;
  main_.name = "main";
  main_.actor = new_actor("host thread 'main'", &main_.tick);
}

World::~World() = default;

Actor World::new_actor(std::string name, Tick* tick) {
  if (!free_actors_.empty()) {
    const auto [actor, last] = free_actors_.back();
    free_actors_.pop_back();
    actor_names_[actor] = std::move(name);
    *tick = last + 1;
    return actor;
  }
  actor_names_.push_back(std::move(name));
  *tick = 1;
  return static_cast<Actor>(actor_names_.size() - 1);
}

// --- host threads ---

void World::begin(const std::vector<std::string>& names) {
  Entry entry(this);
  for (auto& host : hosts_) free_actor(host->actor, host->tick);
  hosts_.clear();
  attached_ = 0;
  for (const std::string& name : names) {
    auto host = std::make_unique<Host>();
    host->name = name;
    host->actor = new_actor("host thread '" + name + "'", &host->tick);
    host->learn(main_.clock);
    host->clock.raise(main_.actor, main_.tick);
    host->seen = changes;
    hosts_.push_back(std::move(host));
  }
  ++main_.tick;
  current_ = nullptr;
}

void World::attach(int index) {
  std::unique_lock<std::mutex> lock(mutex);
  Host* host = hosts_[static_cast<std::size_t>(index)].get();
  self = {this, host};
  if (++attached_ == hosts_.size()) give_turn(hosts_[random_.below(hosts_.size())].get());
  host->turn.wait(lock, [&] { return current_ == host; });
}

void World::detach() {
  Entry entry(this);
  Host* host = entry.host;
  host->state = Host::State::Done;
  self = {};
  main_.learn(host->clock);
  main_.clock.raise(host->actor, host->tick);
  for (;;) {
    ready_.clear();
    bool all_done = true;
    for (auto& one : hosts_) {
      all_done = all_done && one->state == Host::State::Done;
      if (can_go(one.get())) ready_.push_back(one.get());
    }
    if (all_done) return give_turn(&main_);
    if (!ready_.empty()) return give_turn(ready_[random_.below(ready_.size())]);
    if (!step_device()) declare_deadlock();
  }
}

void World::give_turn(Host* host) {
  digest = (digest ^ host->actor) * 0x100000001b3u + 1;
  current_ = host;
  host->turn.notify_one();
}

bool World::can_go(Host* host) const {
  if (host->state == Host::State::Ready) return true;
  return host->state == Host::State::Blocked && (!deadlock.empty() || host->ready());
}

// --- choices ---

bool World::step_device() {
  runnable_.clear();
  for (auto& device : devices) {
    if (device->failed()) continue;
    for (Queue& queue : device->queues)
      if (!queue.commands.empty() && can_run(queue.commands.front())) runnable_.push_back(&queue);
  }
  if (runnable_.empty()) return false;
  run(*runnable_[random_.below(runnable_.size())]);
  return true;
}

bool World::run_another(Entry& entry) {
  ready_.clear();
  if (entry.host != &main_)
    for (auto& one : hosts_)
      if (one.get() != entry.host && can_go(one.get())) ready_.push_back(one.get());
  if (!ready_.empty()) {
    // A thread and a device are as likely as each other, whatever their numbers.
    if (random_.chance(0.5) && step_device()) return true;
    give_turn(ready_[random_.below(ready_.size())]);
    entry.host->turn.wait(entry.lock, [&] { return current_ == entry.host; });
    return true;
  }
  return step_device();
}

void World::preempt(Entry& entry) {
  while (random_.chance(preempt_))
    if (!run_another(entry)) return;
}

DeviceStatus World::block(Entry& entry, std::function<bool()> ready,
                          std::function<std::string()> waits_for) {
  Host* host = entry.host;
  host->ready = std::move(ready);
  host->waits_for = std::move(waits_for);
  host->state = Host::State::Blocked;
  while (deadlock.empty() && !host->ready())
    if (!run_another(entry)) declare_deadlock();
  host->state = Host::State::Ready;
  if (deadlock.empty()) return DeviceStatus::Ok;
  return device_fails(DeviceStatus::Deadlock, deadlock);
}

DeviceStatus World::sync_device(Entry& entry, SimDevice* device, const char* why) {
  std::vector<std::pair<std::shared_ptr<StreamState>, std::uint64_t>> until;
  for (auto& [handle, stream] : device->streams)
    if (stream->done < stream->given) until.emplace_back(stream, stream->given);
  const auto drained = [device, &until] {
    if (device->failed()) return true;
    for (auto& [stream, number] : until)
      if (stream->done < number) return false;
    return true;
  };
  const auto text = [device, why] {
    return std::string(why) + " until device '" + device->name + "' has done all it was given";
  };
  return block(entry, drained, text);
}

DeviceStatus World::sync_stream(Entry& entry, StreamState* stream, const char* why) {
  const std::uint64_t until = stream->given;
  const auto drained = [stream, until] {
    return stream->device->failed() || stream->done >= until;
  };
  const auto text = [this, stream, why] {
    return std::string(why) + " until " + actor_name(stream->actor) + " has done all it was given";
  };
  const DeviceStatus status = block(entry, drained, text);
  if (status == DeviceStatus::Ok) entry.host->learn(stream->clock);
  return status;
}

void World::declare_deadlock() {
  std::string text = "nothing can go on:";
  for (auto& device : devices) {
    for (Queue& queue : device->queues) {
      if (queue.commands.empty() || device->failed()) continue;
      const Command& head = queue.commands.front();
      text += "\n  " + actor_name(head.stream->actor) + ": " + why_waiting(head);
      const std::size_t behind = queue.commands.size() - 1;
      if (behind) text += "; " + std::to_string(behind) + " commands of its hardware queue behind";
    }
  }
  const auto add = [&text](const Host& host) {
    if (host.state == Host::State::Blocked)
      text += "\n  host thread '" + host.name + "' waits " + host.waits_for();
  };
  add(main_);
  for (auto& host : hosts_) add(*host);
  deadlock = text;
}

// --- what is left ---

std::vector<std::pair<const char*, std::size_t>> World::live() const {
  std::size_t streams = 0, events = 0, graphs = 0, captures = 0, flags = 0;
  for (const auto& device : devices) {
    streams += device->streams.size() - 1;  // the legacy stream is always there
    events += device->events.size();
    graphs += device->graphs.size();
    captures += device->captures.size();
  }
  std::size_t ranges = 0;
  memory.each_live([&](const Allocation& one) {
    flags += one.flags.size();
    ranges += one.touched.size();
  });
  return {{"blocks", memory.live_count()}, {"nbytes", memory.live_nbytes()},
          {"streams", streams},            {"events", events},
          {"graphs", graphs},              {"captures", captures},
          {"flags", flags},                {"ranges", ranges},
          {"actors", actor_names_.size()}, {"locks", lock_clocks.size()}};
}

// --- findings ---

void World::report(std::string text) {
  ++num_violations;
  if (violations.size() < kMostViolations) violations.push_back(std::move(text));
}

std::string World::describe(const Access& access) const {
  std::string text = access.what;
  if (access.number) text += " (command " + std::to_string(access.number) + ")";
  return text + " of " + actor_name(access.actor);
}

void World::touch(const void* ptr, std::size_t nbytes, bool writes, const Access& access,
                  const Clock& clock) {
  if (!options.check_order || !nbytes) return;
  const auto address = reinterpret_cast<std::uint64_t>(ptr);
  Allocation* allocation = memory.find(address);
  conflicts_.clear();
  Memory::touch(allocation, address, nbytes, writes, access, clock, &conflicts_);
  for (const Conflict& conflict : conflicts_) {
    std::string where = allocation->name();
    where += memory.is_pageable(allocation)
                 ? " at " + hex(address)
                 : " bytes " + std::to_string(address - allocation->base);
    report("race: " + describe(access) + (writes ? " writes " : " reads ") +
           std::to_string(nbytes) + " bytes of " + where + ", which " +
           describe(conflict.earlier) + (conflict.earlier_writes ? " wrote" : " read") +
           ", and nothing orders the two: put an event, a flag or a wait between them");
  }
}

}  // namespace commrt::sim
