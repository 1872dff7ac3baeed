// SPDX-License-Identifier: Apache-2.0
#include "settings.hpp"

#include <algorithm>
#include <cstdlib>

namespace cuda_on_host {
namespace {

long number(const char* name, long otherwise) {
  const char* text = std::getenv(name);
  return text && *text ? std::atol(text) : otherwise;
}

Settings read() {
  Settings made;
  made.capability = static_cast<int>(number("CUDA_ON_HOST_CAPABILITY", made.capability));
  made.version = static_cast<int>(number("CUDA_ON_HOST_VERSION", made.version));
  made.memory_mib = static_cast<std::size_t>(
      number("CUDA_ON_HOST_MEMORY_MIB", static_cast<long>(made.memory_mib)));
  made.queues = static_cast<int>(std::clamp(number("CUDA_DEVICE_MAX_CONNECTIONS", 0), 0L, 32L));
  made.max_delay_us = static_cast<int>(number("CUDA_ON_HOST_MAX_DELAY_US", 0));
  made.seed = static_cast<std::uint64_t>(number("CUDA_ON_HOST_SEED", 0));
  made.guard = number("CUDA_ON_HOST_GUARD", 0) != 0;
  return made;
}

}  // namespace

const Settings& settings() {
  static const Settings read_once = read();
  return read_once;
}

}  // namespace cuda_on_host
