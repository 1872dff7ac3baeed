// SPDX-License-Identifier: Apache-2.0
// The words of the kernel, of connections and of other ranks on who is gone.
#include "engine/liveness.hpp"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "engine/engine.hpp"

namespace commrt {

namespace {

// gloo's words for a connection that the other side's kernel has closed.
bool was_closed(const std::string& error) {
  for (const char* said : {"onnection closed", "reset by peer", "roken pipe"}) {
    if (error.find(said) != std::string::npos) return true;
  }
  return false;
}

}  // namespace

Liveness::Liveness(std::vector<int> descriptors, std::vector<std::string> names,
                   std::vector<int> numbers)
    : descriptors_(std::move(descriptors)),
      names_(std::move(names)),
      numbers_(std::move(numbers)),
      fates_(names_.size()),
      hows_(names_.size()) {
  descriptors_.resize(names_.size(), -1);
  numbers_.resize(names_.size(), 0);
  has_descriptors_ = std::any_of(descriptors_.begin(), descriptors_.end(),
                                 [](int descriptor) { return descriptor >= 0; });
}

Liveness::~Liveness() { let_go(); }

void Liveness::let_go() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (int& descriptor : descriptors_) {
    if (descriptor >= 0) close(std::exchange(descriptor, -1));
  }
}

void Liveness::ask_mpi(Handle comm, const std::vector<int>& places) {
  const std::lock_guard<std::mutex> lock(mutex_);
  by_mpi_ = std::make_unique<MpiFailures>(comm, places);
}

bool Liveness::look(bool anew) {
  if (!has_descriptors_ && by_mpi_ == nullptr) return any();
  const double now = now_s();
  if (!anew && now < next_s_.load(std::memory_order_relaxed)) return any();
  std::vector<int> found;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    next_s_.store(now + kBetween_s, std::memory_order_relaxed);
    std::vector<pollfd> asked(descriptors_.size());
    for (size_t i = 0; i < asked.size(); ++i) asked[i] = {descriptors_[i], POLLIN, 0};
    if (poll(asked.data(), asked.size(), 0) > 0) {
      for (size_t i = 0; i < asked.size(); ++i) {
        if (asked[i].fd < 0 || (asked[i].revents & POLLIN) == 0) continue;
        close(std::exchange(descriptors_[i], -1));
        const int member = static_cast<int>(i);
        if (note(member, Fate::Ended, names_[i] + " has ended")) found.push_back(member);
      }
    }
    for (const int member : by_mpi_ == nullptr ? std::vector<int>() : by_mpi_->ask()) {
      note(member, Fate::Ended, "MPI says that " + name(member) + " has failed");
    }
  }
  if (!found.empty()) {
    const std::lock_guard<std::mutex> lock(tell_mutex_);
    for (const int member : found) {
      if (tell_) tell_(member);
    }
  }
  return any();
}

bool Liveness::note(int member, Fate fate, const std::string& how) {
  const std::lock_guard<std::mutex> lock(words_mutex_);
  const size_t at = static_cast<size_t>(member);
  if (fates_[at].load(std::memory_order_relaxed) != Fate::Lives) return false;
  hows_[at] = how;
  fates_[at].store(fate, std::memory_order_release);
  any_.store(true, std::memory_order_release);
  return true;
}

bool Liveness::note_left(int member) {
  return note(member, Fate::Left, name(member) + " has left");
}

bool Liveness::note_cut(int member, const std::string& error) {
  if (was_closed(error)) {
    return note(member, Fate::Ended, name(member) + " has ended, or has closed its connection");
  }
  return note(member, Fate::Cut, "the connection to " + name(member) + " failed: " + error);
}

bool Liveness::note_told(int member, int by) {
  return note(member, Fate::Ended,
              name(member) + " has ended, as rank " + std::to_string(by) + " of the job says");
}

void Liveness::tell_by(std::function<void(int)> tell) {
  const std::lock_guard<std::mutex> lock(tell_mutex_);
  tell_ = std::move(tell);
}

std::string Liveness::how(int member) const {
  const std::lock_guard<std::mutex> lock(words_mutex_);
  return hows_[static_cast<size_t>(member)];
}

std::string Liveness::fate(int member) const {
  const Fate found = fate_of(member);
  if (found == Fate::Lives) return {};
  const char* const word = found == Fate::Left    ? "has left: "
                           : found == Fate::Ended ? "has died: "
                                                  : "cannot be reached: ";
  return word + how(member);
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
