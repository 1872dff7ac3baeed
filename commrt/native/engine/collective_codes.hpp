// SPDX-License-Identifier: Apache-2.0
// Numbers of operations for code that calls a library's collectives, as in
// commrt/vocabulary/operations.py.
#pragma once

namespace commrt {

// An operation that no library offers has no number: only schedules run it.
enum CollectiveCode : int {
  kAllreduce = 0,
  kReduce = 1,
  kBcast = 2,
  kAllgather = 3,
  kReduceScatter = 4,
  kAlltoall = 5,
  kGather = 6,
  kScatter = 7,
  kBarrier = 8,
  kScan = 9,
  kExscan = 10,
  kAllgatherv = 11,
  kAlltoallv = 12,
  kGatherv = 13,
  kScatterv = 14,
  kReduceScatterv = 15,
};

}  // namespace commrt
