// SPDX-License-Identifier: Apache-2.0
// How a thread waits until a relay of this process has something for it.
#include <chrono>
#include <condition_variable>
#include <mutex>

#include "engine/engine.hpp"
#include "engine/relay.hpp"
#include "engine/tcp_poller.hpp"

namespace commrt {

namespace {

// Threads that wait for messages sleep here, but for the one that waits in the poller.
struct Changes {
  std::mutex mutex;
  std::condition_variable changed;
  std::atomic<uint64_t> count{1};
  std::atomic<int> sleepers{0};
};

Changes& changes() {
  static Changes* const all = new Changes;  // threads may wait until the process has ended
  return *all;
}

}  // namespace

std::atomic<int> Relay::Request::num_open{0};

bool Relay::is_awaited() { return Request::num_open.load(std::memory_order_relaxed) > 0; }

void Relay::tell() {
  Changes& all = changes();
  // The order is one with that of a sleeper's two steps: the sleeper is counted, or sees the new
  // count.
  all.count.fetch_add(1, std::memory_order_seq_cst);
  Engine::ring_all();  // those who have waited for longer
  if (TcpPoller::is_used()) TcpPoller::instance().interrupt();
  if (all.sleepers.load(std::memory_order_seq_cst) == 0) return;
  // The mutex is not held while others are woken, as they would only wait for it.
  { const std::lock_guard<std::mutex> lock(all.mutex); }
  all.changed.notify_all();
}

void Relay::wait_for_change(uint64_t& seen) {
  // A thread that wakes for nothing is the last to get the core when there is something to do.
  constexpr std::chrono::microseconds kForNeighbors(50), kOtherwise(1000);
  const auto most = expects_neighbors() ? kForNeighbors : kOtherwise;
  Changes& all = changes();
  if (!TcpPoller::is_used() || !TcpPoller::instance().wait(most, all.count, seen)) {
    all.sleepers.fetch_add(1, std::memory_order_seq_cst);
    {
      std::unique_lock<std::mutex> lock(all.mutex);
      all.changed.wait_for(lock, most, [&] {
        return all.count.load(std::memory_order_seq_cst) != seen;
      });
    }
    all.sleepers.fetch_sub(1, std::memory_order_relaxed);
  }
  seen = all.count.load(std::memory_order_acquire);
}

}  // namespace commrt
