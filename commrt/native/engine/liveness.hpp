// SPDX-License-Identifier: Apache-2.0
// Liveness: which ranks of a world take part in nothing any more, and how that was noticed.
//
// - The kernel is asked about a process of this node, by a descriptor of it (pidfd_open(2)). So a
//   number that another process gets later says nothing, and nobody sends anything: who waits
//   anyway asks, now and then.
// - The relay says of a rank of another node that its connection was closed, or that it has left
//   (relay.hpp).
// - MPI says which ranks have failed, where it survives that (mpi_failures.hpp).
// - Ranks of the node on which a process has ended say so to the other nodes.
//
// A process that is stopped, or does not get a core, has not ended: its connections stay open.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine/mpi_failures.hpp"

namespace commrt {

// Why an operation waits for other ranks in vain; `why` is empty where it does not.
struct GaveUp {
  std::string why;
  bool has_died = false;  // a rank has died or left
  bool is_damage = false;  // a message did not fit its checksum
  bool calls_differ = false;  // ranks made different calls; `why` says it in the words of all
  bool was_refused = false;  // a rank has refused a call that a device was given here
  bool is_any() const { return !why.empty(); }
  // The word of the failure for Python.
  const char* kind() const {
    return has_died       ? "peer"
           : is_damage    ? "integrity"
           : calls_differ ? "calls"
           : was_refused  ? "refused"
                          : "revoked";
  }
};

class Liveness : public std::enable_shared_from_this<Liveness> {
 public:
  // For each rank of the world the descriptor of its process, which this closes at its end, and
  // what messages call the process; -1: it has none to be asked about, such as this rank itself.
  // `numbers` are the processes' numbers here, 0 where they are not known.
  Liveness(std::vector<int> descriptors, std::vector<std::string> names,
           std::vector<int> numbers = {});
  ~Liveness();
  Liveness(const Liveness&) = delete;
  Liveness& operator=(const Liveness&) = delete;

  // Closes the descriptors: nobody asks any more. What is known stays.
  void let_go();
  // Asks MPI, too, from now on: `places[m]` is the rank of member m in `comm`.
  void ask_mpi(Handle comm, const std::vector<int>& places);
  // Asks the kernel, unless that was done just now; `anew`: in any case. True if any rank is gone.
  bool look(bool anew = false);
  bool any() const { return any_.load(std::memory_order_acquire); }
  // True if it has ended without a word, or cannot be reached, as far as is known.
  bool has_ended(int member) const { return fate_of(member) >= Fate::Ended; }
  // True if it has said that it leaves. Ranks of one node tell that elsewhere (layout.hpp).
  bool has_left(int member) const { return fate_of(member) == Fate::Left; }
  // What has become of it, to follow "rank 3 "; empty where it lives, as far as is known.
  std::string fate(int member) const;
  // The same without the word for it: "process 4711 on node7 has ended".
  std::string how(int member) const;
  // True if the kernel says now that the process is stopped, by a signal or a debugger. It may be
  // called by a handler of a signal.
  bool is_stopped(int member) const;
  const std::string& name(int member) const { return names_[static_cast<size_t>(member)]; }

  // What others know. The first word on a rank stays. Returns whether it was that.
  bool note_left(int member);
  // Its connection is no more; `error` says why.
  bool note_cut(int member, const std::string& error);
  // Another rank of the job has asked its kernel.
  bool note_told(int member, int by);
  // `tell` is called with each member that the kernel has said has ended, by any thread. Null:
  // none any more.
  void tell_by(std::function<void(int)> tell);

 private:
  enum class Fate : int { Lives, Left, Ended, Cut };
  static constexpr double kBetween_s = 0.01;

  Fate fate_of(int member) const {
    return fates_[static_cast<size_t>(member)].load(std::memory_order_acquire);
  }
  bool note(int member, Fate fate, const std::string& how);

  std::mutex mutex_;
  std::vector<int> descriptors_;  // -1 once it has ended
  bool has_descriptors_ = false;
  std::unique_ptr<MpiFailures> by_mpi_;
  const std::vector<std::string> names_;
  std::vector<int> numbers_;
  std::vector<std::atomic<Fate>> fates_;
  std::atomic<bool> any_{false};
  std::atomic<double> next_s_{0};
  mutable std::mutex words_mutex_;  // of what follows; nothing is called while it is held
  std::vector<std::string> hows_;
  std::mutex tell_mutex_;  // held while `tell_` runs: its owner may end
  std::function<void(int)> tell_;
};

}  // namespace commrt
