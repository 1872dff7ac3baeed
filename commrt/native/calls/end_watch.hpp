// SPDX-License-Identifier: Apache-2.0
// How a thread waits for the first of many operations that ends (commrt/torch/futures.py).
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <vector>

#include "engine/backoff.hpp"
#include "engine/comm.hpp"
#include "engine/engine.hpp"

namespace commrt {

class EndWatch {
 public:
  // With `has_core` the thread has a core to itself, and yields before it sleeps. Without one it
  // sleeps at once.
  EndWatch(std::shared_ptr<Engine> engine, bool has_core);
  EndWatch(const EndWatch&) = delete;
  EndWatch& operator=(const EndWatch&) = delete;

  struct Watched {
    std::shared_ptr<Op> op;
    Comm* comm;
  };
  // Makes progress, or sleeps until there is some to make. Returns the indices of those that have
  // ended, in their order. There are none if time is up, somebody has called wake(), or there is
  // something to do that needs Python. So it is, too, after anything has moved, and before and
  // after each sleep, if `is_curious`: then the caller waits for things that are not in the list.
  // Called without the GIL, by one thread.
  std::vector<size_t> wait(const std::vector<Watched>& watched, bool is_curious, double limit_s);
  // Ends this wait, or the next one. For any thread.
  void wake();

 private:
  Backoff& backoff(const std::vector<Watched>& watched);
  std::vector<size_t> ended(const std::vector<Watched>& watched) const;
  void fail_after_peers(const std::vector<Watched>& watched);
  // Something needs the GIL that a call of test() does.
  bool wants_python() const;

  std::shared_ptr<Engine> engine_;
  const bool has_core_;
  std::atomic<bool> is_woken_{false};
  std::unique_ptr<Backoff> backoff_;  // of a wait that goes on
};

}  // namespace commrt
