// SPDX-License-Identifier: Apache-2.0
// The kernel's word on processes.
#include "engine/liveness.hpp"

#include <poll.h>
#include <unistd.h>

#include <utility>

#include "engine/engine.hpp"

namespace commrt {

Liveness::Liveness(std::vector<int> descriptors, std::vector<std::string> names)
    : descriptors_(std::move(descriptors)), names_(std::move(names)), ended_(names_.size()) {}

Liveness::~Liveness() {
  for (const int descriptor : descriptors_) {
    if (descriptor >= 0) close(descriptor);
  }
}

bool Liveness::look(bool anew) {
  const double now = now_s();
  if (!anew && now < next_s_.load(std::memory_order_relaxed)) {
    return any_.load(std::memory_order_acquire);
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  next_s_.store(now + kBetween_s, std::memory_order_relaxed);
  std::vector<pollfd> asked(descriptors_.size());
  for (size_t i = 0; i < asked.size(); ++i) asked[i] = {descriptors_[i], POLLIN, 0};
  if (poll(asked.data(), asked.size(), 0) > 0) {
    for (size_t i = 0; i < asked.size(); ++i) {
      if (asked[i].fd < 0 || (asked[i].revents & POLLIN) == 0) continue;
      close(std::exchange(descriptors_[i], -1));
      ended_[i].store(true, std::memory_order_release);
      any_.store(true, std::memory_order_release);
    }
  }
  return any_.load(std::memory_order_acquire);
}

}  // namespace commrt
