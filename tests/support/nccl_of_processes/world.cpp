// SPDX-License-Identifier: Apache-2.0
// What the environment and tests set and ask.
#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>

#include "library.hpp"

#define API extern "C" __attribute__((visibility("default")))

namespace stub {

namespace {

long number_of(const char* name, long otherwise) {
  const char* text = getenv(name);
  return text == nullptr ? otherwise : atol(text);
}

}  // namespace

World& world = *new World;

World::World() : version(static_cast<int>(number_of("NCCL_STUB_VERSION", 22809))) {
  settings["polls"] = number_of("NCCL_STUB_POLLS", 1);
}

void complain(const std::string& text) {
  const char* path = getenv("NCCL_STUB_COMPLAINTS");
  const int file = path == nullptr ? dup(STDERR_FILENO)
                                   : open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  const std::string line = "libnccl of processes: " + text + "\n";
  if (write(file, line.data(), line.size()) < 0) abort();
  close(file);
}

}  // namespace stub

using namespace stub;

// Communicators that do not block are in progress for so many polls.
API void stub_set(const char* name, long value) {
  std::lock_guard<std::mutex> lock(world.mutex);
  world.settings[name] = value;
}

// The call of `function` that follows `after` others returns `code`.
API void stub_fail(const char* function, int code, long after) {
  std::lock_guard<std::mutex> lock(world.mutex);
  world.failures[function] = {code, after};
}

// The process's communicators fail in the background.
API void stub_async_error(int code) {
  std::lock_guard<std::mutex> lock(world.mutex);
  for (Comm* comm : world.comms) comm->async = code;
}

API long stub_counter(const char* name) {
  std::lock_guard<std::mutex> lock(world.mutex);
  return world.counters[name];
}
