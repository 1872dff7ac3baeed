// SPDX-License-Identifier: Apache-2.0
// Liveness: which processes of this node's ranks have ended.
//
// Each process is known by a descriptor of it (pidfd_open(2)). So a number that another process
// gets later says nothing, and nobody sends anything: the kernel is asked, now and then, by who
// waits anyway. A process that is stopped, or does not get a core, has not ended.
#pragma once

#include <atomic>
#include <mutex>
#include <string>
#include <vector>

namespace commrt {

// Why an operation waits for other ranks of this node in vain; `why` is empty where it does not.
struct GaveUp {
  std::string why;
  bool has_died = false;  // a process has ended
  bool is_damage = false;  // a message did not fit its checksum
  bool is_any() const { return !why.empty(); }
  // The word of the failure for Python.
  const char* kind() const { return has_died ? "peer" : is_damage ? "integrity" : "revoked"; }
};

class Liveness {
 public:
  // For each rank of this node the descriptor of its process, which this closes at its end, and
  // what messages call the process; -1: it has none to be watched, such as this rank itself.
  Liveness(std::vector<int> descriptors, std::vector<std::string> names);
  ~Liveness();
  Liveness(const Liveness&) = delete;
  Liveness& operator=(const Liveness&) = delete;

  // Asks the kernel, unless that was done just now; `anew`: in any case. True if any has ended.
  bool look(bool anew = false);
  // True if the last look has found it ended.
  bool has_ended(int member) const {
    return ended_[static_cast<size_t>(member)].load(std::memory_order_acquire);
  }
  const std::string& name(int member) const { return names_[static_cast<size_t>(member)]; }

 private:
  static constexpr double kBetween_s = 0.01;

  std::mutex mutex_;
  std::vector<int> descriptors_;  // -1 once it has ended
  const std::vector<std::string> names_;
  std::vector<std::atomic<bool>> ended_;
  std::atomic<bool> any_{false};
  std::atomic<double> next_s_{0};
};

}  // namespace commrt
