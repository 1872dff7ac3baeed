// SPDX-License-Identifier: Apache-2.0
// Counts of the packets that this process has given to MPI, and of those that it has taken from it.
//
// Some packets are advice, which a rank may never need: the call in which another one waits, or an
// entry of its trail. Ranks take the last ones before MPI ends, and the counts say how many these are
// (commrt/job/last_messages.py).
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

namespace commrt {

// Of all communicators of the process: their packets share one MPI communicator.
class FarPackets {
 public:
  static FarPackets& of_process();

  void count_sent(int mpi_rank);
  void count_taken();
  // By the receiver's rank in the MPI communicator, of the first `size` of them.
  std::vector<uint64_t> sent(size_t size);
  uint64_t taken();

 private:
  std::mutex mutex_;
  std::vector<uint64_t> sent_;
  uint64_t taken_ = 0;
};

}  // namespace commrt
