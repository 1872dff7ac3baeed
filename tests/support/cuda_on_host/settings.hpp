// SPDX-License-Identifier: Apache-2.0
// Settings of the card that is the CPU, from the environment, read once.
#pragma once

#include <cstddef>
#include <cstdint>

namespace cuda_on_host {

struct Settings {
  int capability = 90;         // CUDA_ON_HOST_CAPABILITY: 90 is 9.0
  int version = 12080;         // CUDA_ON_HOST_VERSION: of CUDA, 12080 is 12.8
  std::size_t memory_mib = 16384;  // CUDA_ON_HOST_MEMORY_MIB: what the card has
  // CUDA_DEVICE_MAX_CONNECTIONS, 1 to 32, as the real driver has it; 0: one for each stream.
  int queues = 0;
  int max_delay_us = 0;        // CUDA_ON_HOST_MAX_DELAY_US: drawn before each command
  std::uint64_t seed = 0;      // CUDA_ON_HOST_SEED: of these delays
  // CUDA_ON_HOST_GUARD=1: host threads that touch device memory die, as they do with a card.
  bool guard = false;
};

const Settings& settings();

}  // namespace cuda_on_host
