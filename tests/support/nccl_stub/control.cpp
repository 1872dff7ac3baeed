// SPDX-License-Identifier: Apache-2.0
// What tests set and ask.
#include "stub.hpp"

using namespace stub;

#define API extern "C" __attribute__((visibility("default")))

namespace {

using Lock = std::unique_lock<std::mutex>;

thread_local std::string answer;

const char* lines(const std::vector<std::string>& all) {
  answer.clear();
  for (const std::string& one : all) answer += one + "\n";
  return answer.c_str();
}

}  // namespace

// Forgets everything. Communicators stay allocated, so that a late use of one is seen as such.
API void stub_reset(int version) {
  Lock lock(world.mutex);
  world.version = version;
  world.settings.clear();
  world.failures.clear();
  world.cliques.clear();
  world.streams.clear();
  world.violations.clear();
  world.log.clear();
  world.comms.clear();
  world.counters.clear();
  world.released = false;
  world.current_device = nullptr;
  world.inside.clear();
}

// From here on communicators work in the streams of the device that `current` tells of.
API void stub_serve(commrt::Device* (*current)()) {
  Lock lock(world.mutex);
  world.current_device = current;
}

API void stub_set(const char* name, long value) {
  Lock lock(world.mutex);
  world.settings[name] = value;
}

// The call of `function` that follows `after` others returns `code`.
API void stub_fail(const char* function, int code, long after) {
  Lock lock(world.mutex);
  world.failures[function] = {code, after};
}

API void stub_async_error(Comm* comm, int code) {
  Lock lock(world.mutex);
  comm->async = code;
}

API void stub_unhang(Comm* comm) {
  Lock lock(world.mutex);
  comm->hangs = false;
}

API long stub_visits(Comm* comm) {
  Lock lock(world.mutex);
  return comm->visits;
}

API void stub_release() {
  Lock lock(world.mutex);
  world.released = true;
  world.changed.notify_all();
}

API void stub_set_device(int number) { device = number; }

API const char* stub_violations() {
  Lock lock(world.mutex);
  return lines(world.violations);
}

API const char* stub_log() {
  Lock lock(world.mutex);
  return lines(world.log);
}

API long stub_counter(const char* name) {
  Lock lock(world.mutex);
  return world.counters[name];
}

// What has not ended in any stream: empty unless something waits for what never comes.
API const char* stub_pending() {
  Lock lock(world.mutex);
  advance();
  std::vector<std::string> left;
  auto tell = [&](const Group& group, const char* where) {
    std::string text = "rank " + std::to_string(group.comm->rank) + where;
    for (const Op& op : group.ops) {
      if (!op.done) text += std::string(" ") + name_of(op.kind) + "(" + std::to_string(op.peer) + ")";
    }
    left.push_back(text);
  };
  for (auto& [key, queue] : world.streams) {
    for (const Group& group : queue) tell(group, ":");
  }
  for (Comm* comm : world.comms) {
    for (const Group& group : comm->waiting) tell(group, " not in its stream:");
  }
  return lines(left);
}
