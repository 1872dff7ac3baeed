// SPDX-License-Identifier: Apache-2.0
// Looks at the connections of all relays of this process, on whichever thread waits anyway.
//
// A thread that waits looks now and then, and soon sleeps here until something comes. So what comes
// is received by who waits for it, and no other thread runs. While nobody looks, a thread of the
// poller's own sleeps until something comes, receives that, and goes on with operations that nobody
// waits for (Engine::go_on_everywhere).
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace commrt {

class TcpPoller {
 public:
  class Link {
   public:
    virtual ~Link() = default;
    // It can be read, or written again, or has ended. The caller has the poller's lock.
    virtual void see(bool readable, bool writable, bool ended) = 0;
  };
  // Keeps the poller's lock, for whoever makes or ends links: nobody looks meanwhile.
  using Held = std::unique_lock<std::mutex>;

  static TcpPoller& instance();
  // True while there are links; never in a forked child.
  static bool is_used() { return used_.load(std::memory_order_acquire); }

  // True in a forked child, which has no links.
  static bool is_in_child() { return in_child_.load(std::memory_order_relaxed); }

  Held hold();
  // From now on `link` is told of the descriptor. They need the lock, but for
  // `watch`, while the link is not removed.
  void add(int descriptor, Link* link);
  void watch(int descriptor, Link* link, bool reads, bool writes);
  void remove(int descriptor);

  // Looks at all links; false where nothing was there, or another thread looks.
  bool poll();
  // Sleeps until something comes or `count` is not `seen` any more, and looks. False, at once,
  // where another thread does that.
  bool wait(std::chrono::microseconds most, const std::atomic<uint64_t>& count, uint64_t seen);
  // Ends such a sleep.
  void interrupt();
  // The caller looks no more: the poller's own thread is to look as soon as something comes.
  // `has_more`: there is something to send, too, so it goes on at once.
  void hand_over(bool has_more);
  // How often that thread found something to do by its clock, as nobody had handed over.
  uint64_t num_late() const { return num_late_.load(std::memory_order_relaxed); }

 private:
  // From the first link to the last one.
  struct Run {
    Run();
    ~Run();
    Run(const Run&) = delete;
    Run& operator=(const Run&) = delete;

    int all = -1;    // of epoll: the links, and what interrupts
    int quiet = -1;  // of epoll: tells the poller's own thread of `all`, where it is armed
    int interrupts = -1;
    std::atomic<bool> is_over{false};
    std::atomic<bool> is_armed{false};  // with `quiet`; changed under interrupting_
  };

  TcpPoller();
  Held try_hold();
  void begin();
  void end();
  bool look();
  void take_over();
  static void arm(Run& run, bool is_armed);
  void run(const std::shared_ptr<Run>& mine);
  static void forget_in_child();

  static std::atomic<bool> used_, in_child_;
  std::mutex mutex_;  // of whoever looks
  std::shared_ptr<Run> run_;
  std::mutex interrupting_;  // the inner one; run_ stays meanwhile
  std::mutex descriptors_mutex_;
  std::vector<int> descriptors_;  // that children close
  int num_links_ = 0;
  std::atomic<bool> is_sleeping_{false};
  std::atomic<bool> is_handed_over_{false};  // and nobody has looked since
  std::atomic<bool> is_wanted_{false};  // by one who would look, while another thread does
  std::atomic<int> num_holding_{0};
  std::atomic<uint64_t> num_looks_{0}, num_late_{0};
};

}  // namespace commrt
