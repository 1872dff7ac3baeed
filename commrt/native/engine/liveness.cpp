// SPDX-License-Identifier: Apache-2.0
// The kernel's word on processes.
#include "engine/liveness.hpp"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <cstring>
#include <utility>

#include "engine/engine.hpp"

namespace commrt {

Liveness::Liveness(std::vector<int> descriptors, std::vector<std::string> names,
                   std::vector<int> numbers)
    : descriptors_(std::move(descriptors)), names_(std::move(names)), numbers_(std::move(numbers)),
      ended_(names_.size()) {}

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

bool Liveness::is_stopped(int member) const {
  const int number = numbers_[static_cast<size_t>(member)];
  if (number <= 0 || has_ended(member)) return false;
  char path[32] = "/proc/", digits[12];
  size_t at = std::strlen(path), count = 0;
  for (int rest = number; rest != 0; rest /= 10) digits[count++] = static_cast<char>('0' + rest % 10);
  while (count != 0) path[at++] = digits[--count];
  std::strcpy(path + at, "/stat");
  const int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return false;
  char text[128];
  const ssize_t nbytes = read(file, text, sizeof text - 1);
  close(file);
  if (nbytes <= 0) return false;
  text[nbytes] = 0;
  // The state follows the name, which is in parentheses and may hold some itself.
  const char* const name_end = std::strrchr(text, ')');
  if (name_end == nullptr || name_end[1] != ' ') return false;
  return name_end[2] == 'T' || name_end[2] == 't';
}

}  // namespace commrt
