// SPDX-License-Identifier: Apache-2.0
// The trail of the calls that a communicator's ranks gave to others, which compare nothing: to an MPI
// library, to NCCL, or to kernels that read each other's memory. Ranks whose calls differ get wrong
// results there, or wait for each other.
//
// A rank writes each such call down where the ranks of its node see it: its number, its mark, its
// length, and a sum over all calls until then. Every so many calls it leaves a mark of that sum, and
// looks at the others' marks of the same place: who comes there last compares. So no rank ever waits
// for another one, and a difference is found however long ago it was: the sums differ from then on.
// Then, and while it waits, a rank looks at the others' latest calls. It sends ranks of other nodes
// such an entry now and then.
//
// Each of a rank's two trails has its calls in their order: one those that the host runs, which are
// written down as they run, the other those that the device runs, as they are given to it.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "engine/layout.hpp"

namespace commrt {

class Comm;
struct Record;

class CallTrail {
 public:
  struct Entry {
    uint64_t seq = 0, sum = 0, mark = 0, length = 0;
  };

  CallTrail(Comm& comm, int which) : comm_(comm), which_(which) {}

  // The number of calls after which this rank compares; 0: never. Equal on all ranks.
  uint64_t every() const { return every_; }
  void set_every(uint64_t calls);

  // Writes a call down before the library gets it; `hash` is of its plan. False: the ranks' calls
  // differ, as why() says.
  bool add(uint64_t seq, uint64_t mark, uint64_t length, uint64_t hash) {
    if (trail_ == nullptr) trail_ = own();
    Trail::Slot& slot = trail_->slots[num_ % kTrail];
    sum_ = sum_ * kFactor + hash + seq;
    latest_ = seq;
    slot.seq.store(seq, std::memory_order_relaxed);
    slot.sum.store(sum_, std::memory_order_relaxed);
    slot.mark.store(mark, std::memory_order_relaxed);
    slot.length.store(length, std::memory_order_relaxed);
    trail_->num.store(++num_, std::memory_order_release);
    return --left_ != 0 || compare_now();
  }
  // Finds the call of a number; `Forgotten`: it may be one of those before the last ones.
  enum class Recall { Found, Forgotten, Never };
  Recall recall(uint64_t seq, Entry& entry);
  // Compares without a new call, while this rank waits.
  bool look_in_wait();
  const std::string& why() const { return found_; }
  // A rank of another node has sent an entry of its own.
  void hear(int source, const Entry& told);

  static uint64_t mixed(uint64_t value);
  // The hash of a call's mark, without its place in the order, and its length.
  static uint64_t hash_of(uint64_t mark, uint64_t length) { return mixed(mark ^ mixed(length)); }
  // In an entry's length: it is a hash of counts.
  static constexpr uint64_t kOfCounts = uint64_t{1} << 63;

 private:
  struct Peer {
    bool is_known = false;
    uint64_t equal_until = 0;  // the last of its calls that was compared
  };

  static constexpr uint64_t kFactor = 0x9e3779b97f4a7c15u;

  Trail* of(int member) const;
  Trail* own();
  bool compare_now();
  bool marks_agree();
  bool look();
  static bool read(const Trail& trail, uint64_t index, Entry& entry);
  static bool find(const Trail& trail, uint64_t seq, Entry& entry);
  void tell_other_node();
  std::string compare(int peer);
  std::string differ(int peer, const Entry& mine, const Entry& theirs, const Trail* trail);
  bool is_refused(const Trail* trail);

  Comm& comm_;
  const int which_;
  uint64_t every_ = 0, comparisons_ = 0;
  uint64_t left_ = ~uint64_t{0};  // calls until the next comparison
  uint64_t sum_ = 0, num_ = 0, latest_ = 0;
  uint64_t num_told_ = 0;  // calls when this rank has told another node last
  Trail* trail_ = nullptr;
  std::vector<Trail> private_;  // one, where no rank shares memory with this one
  std::vector<Peer> peers_;
  std::deque<std::pair<int, Entry>> told_;  // by ranks that are ahead of this one
  std::string found_;
};

class CallTrails {
 public:
  explicit CallTrails(Comm& comm) : by_host(comm, 0), by_device(comm, 1) {}

  CallTrail by_host, by_device;

  CallTrail& of(int which) { return which == 0 ? by_host : by_device; }
  uint64_t every() const { return by_host.every(); }
  void set_every(uint64_t calls) {
    by_host.set_every(calls);
    by_device.set_every(calls);
  }
  // Compares without a new call, while this rank waits. Returns what differs; empty: nothing.
  std::string look_in_wait() {
    for (CallTrail* const one : {&by_host, &by_device}) {
      if (!one->look_in_wait()) return one->why();
    }
    return {};
  }
};

}  // namespace commrt
